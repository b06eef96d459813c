"""A producer's batch, from its arrival at this node to its replica.

Owns the way to the append: the look-up of the partition, the batches that it waits behind, and a second look at
refusals that this node cannot be sure of. If the topic has its records looked at first, they are converted to a codec,
or judged by time, off the loop, under a bound on batches and bytes; while a batch of a partition is under way there,
later ones of it wait behind it, so none overtakes.

One object follows each batch, and nothing of it refers to itself: a finished request must not wait for the garbage
collector, which counts objects and knows nothing of their megabytes. It must never append or judge who leads: the
replica does, and also gives the errors of a batch that is not right in itself. Only the node uses it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from smq.raft_state.config_keys import INT64_MAX
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Epoch, LogIndex, Offset, PartitionId, PartitionIndex, TopicId, partition_id
from smq.raft_state.state import ClusterState, PartitionState
from smq.raft_state.topic_config import BatchRules, batch_rules
from smq.records import BatchHeader, is_same_batch, parse_header
from smq.replication.api import Acks, DoneFn, Fetched, Produced, ProduceRequest
from smq.replication.commands.coalescing import Barriers
from smq.replication.host import Host
from smq.replication.log.decoding import bounded_spans, converted, decode_bounded
from smq.replication.partition.admission import (
    JUDGED_BY_THE_LOG,
    NotYetKnown,
    PreparedBatch,
    check_writer,
    comes_again,
    leader_error,
    validated,
    with_bad_records,
)
from smq.replication.partition.by_name import (
    Lookup,
    check_has_records,
    clipped,
    partition_in,
    unknown_partition,
    unknown_topic,
    unknown_topic_id,
)
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.transaction_joins import TransactionJoins
from smq.replication.ports import Buffer, Compute

# Of this many batches, one is timed, from its arrival to its answer, which takes several microseconds. A prime number:
# clients send 8 or 10 or 100 at a time, and the samples would always be the same ones of them.
BATCHES_PER_SAMPLE: Final = 127
BATCHES_MAX: Final = 1_000  # that wait on this node: at 1 ms each, a second of one thread
BYTES_MAX: Final = 64 << 20  # of them as they were sent, and again of results: as much as may wait for the disk
RUNNING_MAX: Final = 4  # jobs: twice the threads, so that none waits for the loop
RETRY_MS: Final = 50


@dataclass(slots=True, eq=False)
class _Arrival:
    use: Callable[[PartitionState], None]
    fail: DoneFn[Any]


class Arrivals:
    """The batches for a partition which this node does not know yet: they keep their order.

    A batch whose topic was created through another node waits for a read barrier. One that comes later, when this node
    has applied the topic, must not overtake it: producers without sequences rely on the order of their connection. So
    the first arrival that finds the partition lets in everything that waits for it, in the order of arrival, and then
    itself. Nothing waits longer for that.
    """

    def __init__(self, state: Callable[[], ClusterState], lookup: Lookup) -> None:
        self._state = state
        self._lookup = lookup
        # By topic, as its request names it, and partition. Bounded as the barriers are, and by what connections may
        # have in flight.
        self._waiting: dict[tuple[str | TopicId, int], list[_Arrival]] = {}

    def with_partition(
        self,
        topic: str | TopicId,
        index: int,
        timeout_ms: int,
        fail: DoneFn[Any],
        use: Callable[[PartitionState], None],
    ) -> None:
        """Calls `use` with the partition, after the earlier arrivals for it; or `fail` with why there is none, or why
        it cannot be known in time. `use` must not raise."""
        part = self._lookup.known_partition(topic, index)
        if part is not None:  # the hot path
            if self._waiting:
                self._let_in(part)
            use(part)
            return
        arrival = _Arrival(use, fail)
        self._waiting.setdefault((topic, index), []).append(arrival)
        done = partial(self._on_found, topic, index, arrival)
        self._lookup.find(lambda state: partition_in(state, topic, index), timeout_ms, done)

    def _on_found(
        self, topic: str | TopicId, index: int, arrival: _Arrival, found: PartitionState | SmqError | None
    ) -> None:
        waiting = self._waiting.get((topic, index), [])
        if arrival not in waiting:
            return  # a later one has let it in
        if isinstance(found, PartitionState):
            self._let_in(found)
            return
        waiting.remove(arrival)
        if not waiting:
            del self._waiting[topic, index]
        arrival.fail(found if found is not None else unknown_partition(self._state(), topic, index))

    def _let_in(self, part: PartitionState) -> None:
        for topic in (self._state().topic_names[part.topic_id], part.topic_id):
            for arrival in self._waiting.pop((topic, part.index), ()):
                arrival.use(part)


class Producing:
    """What all batches of this node share."""

    def __init__(
        self,
        host: Host,
        replicas: Replicas,
        barriers: Barriers,
        lookup: Lookup,
        compute: Compute,
        joins: TransactionJoins,
        fetch: Callable[..., object],
    ) -> None:
        """`fetch`: as NodeApi's."""
        self.host = host
        self.fetch = fetch
        self.replicas = replicas
        self.barriers = barriers
        self.compute = compute
        self.preparation = Preparation(compute)
        self.joins = joins
        self.now_ns = host.clock.monotonic_ns
        self._latency = {acks: host.measures.produce.series(acks.name.lower()) for acks in Acks}
        self._until_timed = BATCHES_PER_SAMPLE  # batches
        self._arrivals = Arrivals(lambda: host.state, lookup)

    def produce(self, request: ProduceRequest) -> None:
        began_ns = 0 if request.trace is None else self.now_ns()
        self._until_timed -= 1
        if not self._until_timed:
            self._until_timed = BATCHES_PER_SAMPLE
            began_ns = self.now_ns()
            done = partial(self._on_timed, began_ns, request.acks, request.done)
            request = replace(request, done=done, trace=request.trace or self.host.measures.stage)
        if request.timeout_ms != (timeout_ms := clipped(request.timeout_ms)):
            request = replace(request, timeout_ms=timeout_ms)
        arriving = _Arriving(self, request, began_ns)
        self._arrivals.with_partition(request.topic, request.partition, request.timeout_ms, arriving.fail, arriving.use)

    def _on_timed(self, began_ns: int, acks: Acks, done: DoneFn[Produced], result: Produced | SmqError) -> None:
        if not isinstance(result, SmqError):
            self._latency[acks].observe(self.now_ns() - began_ns)
        done(result)

    def expect_again(self, topic: str | TopicId, partition: int, batch: Buffer) -> None:
        """The batch was not appended: its producer sends it again."""
        order = self.replicas.send_order
        if partition < 0:
            return  # there is none: nothing of it comes again
        if (part := partition_in(self.host.state, topic, partition)) is not None:
            order.expect(part.pid, batch)
        elif isinstance(topic, str):
            order.expect_by_name(topic, partition, batch)
        else:
            order.expect(partition_id(topic, PartitionIndex(partition)), batch)


_OF_RECORDS: Final = frozenset({ErrorCode.INVALID_BATCH, ErrorCode.INVALID_TIMESTAMP})


class _Arriving:
    """One batch."""

    __slots__ = ("_began_ns", "_node", "_request")

    def __init__(self, node: Producing, request: ProduceRequest, began_ns: int) -> None:
        """`began_ns`: of a batch that is timed."""
        self._node = node
        self._request = request
        self._began_ns = began_ns

    def use(self, part: PartitionState, prepared: PreparedBatch | None = None) -> None:
        """In its turn among the batches of its partition."""
        try:
            self._append(part, prepared)
        except SmqError as e:
            # Without its traceback: that leads to this frame, and so to the request, which only the garbage
            # collector would find again. It counts objects, and a request may have megabytes.
            error = e.with_traceback(None)
            if error.code is ErrorCode.OFFSET_TAKEN:
                self._compare(part, error)
            elif error.code in JUDGED_BY_THE_LOG:
                self._confirm(part, error)
            elif isinstance(error, NotYetKnown):
                self._make_certain(part.pid, prepared)
            else:
                self.fail(error)

    def fail(self, error: SmqError) -> None:
        node, request = self._node, self._request
        if request.names_bad_records and error.code in _OF_RECORDS:
            part = partition_in(node.host.state, request.topic, request.partition)
            if part is not None:
                rules = batch_rules(node.host.state.topics[node.host.state.topic_names[part.topic_id]].config)
                now_ms = node.host.clock.wall_ns() // 1_000_000
                node.compute.run(partial(with_bad_records, error, request.batch, rules, now_ms), self._fail)
                return
        self._fail(error)

    def _fail(self, error: SmqError) -> None:
        request = self._request
        if request.acks is not Acks.NONE and not request.is_mirrored and comes_again(error.code):
            self._node.expect_again(request.topic, request.partition, request.batch)
        self._node.host.measures.produced.add(1, error.code.name)
        self._node.host.deliver(partial(request.done, error))

    def _append(self, part: PartitionState, prepared: PreparedBatch | None) -> None:
        node, request, pid = self._node, self._request, part.pid
        is_held = node.joins.behind and not request.is_mirrored
        if is_held and node.joins.hold(pid, request.batch, partial(self._on_prepared, pid, prepared)):
            return
        state, topic = node.host.state, request.topic
        name = topic if isinstance(topic, str) else state.topic_names[part.topic_id]
        node.replicas.send_order.place(name, request.partition, pid)
        if (replica := node.replicas.get(pid)) is None:
            check_has_records(part, name)
            raise leader_error(node.host.node_id, state, part)
        config = state.topics[name].config
        check_writer(config, is_mirror=request.is_mirrored)  # each time: it may have changed while the batch waited
        if prepared is None:
            prepared = PreparedBatch(request.batch, batch_rules(config))
            if node.preparation.concerns(pid, prepared.rules):
                if replica.leading is None:
                    raise replica.not_leader()
                node.preparation.start(pid, prepared, partial(self._on_prepared, pid))
                return
        if (trace := request.trace) is None:
            replica.produce(request, prepared)
            return
        queued_ns = node.now_ns()
        trace.observe(queued_ns - self._began_ns, "queue")
        replica.produce(request, prepared)
        trace.observe(node.now_ns() - queued_ns, "append")

    def _on_prepared(self, pid: PartitionId, prepared: PreparedBatch | SmqError | None) -> None:
        now = self._node.host.state.partition(pid)
        if isinstance(prepared, SmqError):
            self.fail(prepared)
        elif now is None:
            self.fail(self._unknown())
        else:
            self.use(now, prepared)

    def _unknown(self) -> SmqError:
        topic = self._request.topic
        return unknown_topic_id(topic) if isinstance(topic, bytes) else unknown_topic(topic)

    def _make_certain(self, pid: PartitionId, prepared: PreparedBatch | None) -> None:
        """Appends again when this node's state says for certain whether the batch has a transaction here. The later
        batches of its producer wait meanwhile."""
        node, request, again = self._node, self._request, partial(self._append_again, prepared)
        if request.is_joining:
            node.joins.start(pid, parse_header(request.batch), request.timeout_ms, again)
        else:
            node.replicas.send_order.expect(pid, request.batch)
            node.barriers.wait(request.timeout_ms, again)

    def _append_again(self, prepared: PreparedBatch | None, result: LogIndex | SmqError | None) -> None:
        """The transaction may have begun through another node, and was not applied here, or the partition had yet to
        join it. Now the state is as of after the batch's arrival, and what it does not have there is not."""
        part = partition_in(self._node.host.state, self._request.topic, self._request.partition)
        if isinstance(result, SmqError):
            self.fail(result)
        elif part is None:
            self.fail(self._unknown())
        else:
            try:
                self._append(part, prepared)
            except SmqError as e:
                self.fail(e.with_traceback(None))

    def _compare(self, part: PartitionState, error: SmqError) -> None:
        """There is something at the offset of a mirrored batch. Once it is committed, it counts as this batch if it has
        its bytes. Where compaction has been, records may be missing, and nothing is left to compare: but all that the
        batch holds must be there."""
        node, request = self._node, self._request
        header = parse_header(request.batch)
        base = header.base_offset

        def on_fetched(result: Fetched | SmqError) -> None:
            if isinstance(result, SmqError):
                self.fail(result)
                return
            found = result.batches[0] if result.batches else None
            if found is None:
                self.fail(SmqError(ErrorCode.TIMED_OUT, f"what is at offset {base} has not been committed in time"))
            elif header.end <= part.compacted_end or is_same_batch(found.data, memoryview(request.batch)):
                epoch, last = Epoch(parse_header(found.data).epoch), Offset(header.last_offset)
                result_of_first = Produced(Offset(base), last, found.ts_ns, epoch, True)
                node.host.measures.produced.add(1, "duplicate")
                node.host.deliver(partial(request.done, result_of_first))
            else:
                self.fail(error)

        node.fetch(part.topic_id, part.index, base, max_bytes=1, max_wait_ms=request.timeout_ms, done=on_fetched)

    def _confirm(self, part: PartitionState, error: SmqError) -> None:
        """A leader that has been deposed without knowing it misses what its successor has stored: a batch before this
        one, or this one itself. Its producers would give their sessions up, so only a leader that leads after a barrier
        refuses a batch for what its log does not have."""
        on_confirmed = partial(self._on_confirmed, part.pid, part.epoch, error)
        self._node.barriers.wait(self._request.timeout_ms, on_confirmed)

    def _on_confirmed(self, pid: PartitionId, epoch: int, error: SmqError, result: LogIndex | SmqError) -> None:
        now, replica = self._node.host.state.partition(pid), self._node.replicas.get(pid)
        if isinstance(result, SmqError):
            self.fail(result)
        elif now is None or replica is None:
            self.fail(self._unknown())
        elif replica.leading == now.epoch == epoch:
            self.fail(error)
        else:
            self.fail(replica.not_leader())


# ------------------------------------------------------------------------------------------- records looked at
@dataclass(slots=True, eq=False)
class _Entry:
    pid: PartitionId
    batch: PreparedBatch
    use: Callable[[PreparedBatch | SmqError], None]
    is_ready: bool
    size: int  # as it was sent
    held: int = 0  # of a result that waits for its turn


class Preparation:
    """The batches of a node whose topics have the records looked at before the append."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._waiting: dict[PartitionId, deque[_Entry]] = {}  # in order of arrival; the first may be under way
        self._jobs: deque[_Entry] = deque()  # not begun
        self._running = self._count = self._bytes = self._held = 0
        self._closed: SmqError | None = None

    def concerns(self, pid: PartitionId, rules: BatchRules) -> bool:
        """False for a batch that can go to the replica as it is, now."""
        return _is_opened(rules) or pid in self._waiting

    def start(self, pid: PartitionId, batch: PreparedBatch, use: Callable[[PreparedBatch | SmqError], None]) -> None:
        """Calls `use` once, later, in the order of these calls for each partition: with the batch, or with why there
        is none. OVERLOADED if too much is under way. `use` must not raise."""
        if self._closed is not None:
            raise self._closed
        if self._count >= BATCHES_MAX or self._bytes >= BYTES_MAX:
            details = ErrorDetails(retry_after_ms=RETRY_MS)
            raise SmqError(ErrorCode.OVERLOADED, "too many batches wait to be converted", details)
        entry = _Entry(pid, batch, use, is_ready=not _is_opened(batch.rules), size=len(batch.data))
        self._waiting.setdefault(pid, deque()).append(entry)
        self._count += 1
        self._bytes += entry.size
        if not entry.is_ready:
            self._jobs.append(entry)
            self._begin_jobs()

    def _begin_jobs(self) -> None:
        """Jobs begin in the order of arrival. So a result that waits for its turn waits for a job that has begun, and
        too many results hold back only jobs that none of them waits for."""
        while self._jobs and self._running < RUNNING_MAX and self._held < BYTES_MAX:
            entry = self._jobs.popleft()
            self._running += 1
            self._compute.run(partial(prepared, entry.batch), partial(self._on_prepared, entry))

    def _on_prepared(self, entry: _Entry, batch: PreparedBatch) -> None:
        self._running -= 1
        if self._closed is not None:
            return
        entry.batch, entry.is_ready, entry.held = batch, True, len(batch.data)
        self._held += entry.held
        entries = self._waiting.get(entry.pid)
        while entries and entries[0].is_ready:
            first = entries.popleft()
            self._count -= 1
            self._bytes -= first.size
            self._held -= first.held
            if not entries:
                del self._waiting[entry.pid]  # before `use`, which may start another one
            first.use(first.batch)
        self._begin_jobs()

    def close(self, error: SmqError) -> None:
        """None of them has been appended."""
        self._closed = error
        self._jobs.clear()
        waiting, self._waiting = self._waiting, {}
        for entries in waiting.values():
            for entry in entries:
                entry.use(error)


def _is_opened(rules: BatchRules) -> bool:
    """Whether the topic has its batches looked into."""
    return rules.codec is not None or rules.has_time_limits or rules.needs_keys


def prepared(arrived: PreparedBatch) -> PreparedBatch:
    """The batch with its records looked at. Pure: it runs on any thread. A batch that is not right in itself comes
    back as it is, and is refused like any other."""
    batch, rules = arrived.data, arrived.rules
    try:
        header = validated(arrived)
    except SmqError:
        return arrived
    try:
        times = _times(batch, header) if rules.has_time_limits else None
        if rules.needs_keys:
            _check_keys(batch, header)
        if rules.codec is not None and rules.codec != header.codec:
            batch = converted(batch, header, rules.codec, rules.level)
            if len(batch) > rules.bytes_max:
                raise SmqError(
                    ErrorCode.BATCH_TOO_LARGE,
                    f"the batch has {len(batch)} bytes in the topic's compression.type, the limit is {rules.bytes_max}",
                )
    except SmqError as e:
        return arrived._replace(refusal=_for_producers(e))
    except Exception as e:  # noqa: BLE001 - the bytes are a producer's: whatever a codec raises, the batch is to blame
        message = f"the records of the batch do not decode: {e}"
        return arrived._replace(refusal=SmqError(ErrorCode.INVALID_BATCH, message))
    return arrived._replace(data=batch, times=times)


def _check_keys(batch: Buffer, header: BatchHeader) -> None:
    """INVALID_BATCH unless every record has a key: a compacted topic keeps the last record of each."""
    first = next((span.offset_delta for span in bounded_spans(batch, header) if span.key is None), None)
    if first is not None:
        message = f"record {first} of the batch has no key: a compacted topic keeps the last record of each key"
        raise SmqError(ErrorCode.INVALID_BATCH, message)


def _for_producers(error: SmqError) -> SmqError:
    """The bounds on decoding speak to readers."""
    if error.code is not ErrorCode.LIMIT_EXCEEDED:
        return error
    return SmqError(ErrorCode.BATCH_TOO_LARGE, f"{error.message.partition(';')[0]}: send smaller ones")


def _times(batch: Buffer, header: BatchHeader) -> tuple[int, int] | None:
    """The oldest and the newest timestamp; None if no record has one. What the header says counts, too: retention goes
    by it."""
    count, oldest, newest = 0, INT64_MAX, header.max_timestamp
    for record in decode_bounded(memoryview(batch)):
        count += 1
        if record.timestamp_ms >= 0:
            oldest, newest = min(oldest, record.timestamp_ms), max(newest, record.timestamp_ms)
    if count != header.count:
        raise ValueError(f"there are {count}, and the header says {header.count}")
    return (min(oldest, newest), newest) if newest >= 0 else None
