"""The requests of services to a node: producing, fetching, looking up, offsets.

Owns what a request needs before and after the part that does the work: the look-up of its partition, the bounds of its
timeout, the errors for a node that holds no replica. An answer is never given from inside the call that asked for it.
The node offers these methods as its own (`NodeApi`, where they are described).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from smq.raft_state.commands import AdvanceLogStart, Assignment, Command, ExternalAdvance
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import LogIndex, NodeId, Offset, PartitionId, PartitionIndex, RequestId, TopicId, partition_id
from smq.raft_state.limits import REQUEST_ID_BYTES
from smq.raft_state.replies import OffsetsAssigned, Reply
from smq.raft_state.state import CommittedOffset, PartitionState
from smq.raft_state.topic_config import batch_rules
from smq.records import parse_header
from smq.replication.api import (
    Acks,
    Backlog,
    Cancel,
    DoneFn,
    Fetched,
    PartitionRange,
    Produced,
    SizedRun,
    TimeKind,
    TimeOffset,
)
from smq.replication.arrivals import Arrivals
from smq.replication.host import Host
from smq.replication.joins import Joins
from smq.replication.lookup import Lookup, clipped, partition_in, unknown_topic, unknown_topic_id
from smq.replication.measures import StageSink
from smq.replication.membership.balancer import request_transfer
from smq.replication.membership.liveness import Liveness
from smq.replication.membership.registration import REGISTER_MS_MAX
from smq.replication.partition.admission import JUDGED_BY_THE_LOG, Offer, leader_error
from smq.replication.partition.external_offsets import ExternalOffsets
from smq.replication.partition.reads import Poll
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.send_order import comes_again
from smq.replication.partition.transactional import NotYetKnown
from smq.replication.ports import Buffer
from smq.replication.preparation import Preparation
from smq.replication.proposer import Barriers
from smq.replication.ranges import RangesRequest

_STORED: Final = ("stored",)
_DUPLICATE: Final = ("duplicate",)
BATCHES_PER_SAMPLE: Final = (
    8  # of this many batches, one is timed from its arrival to its append: timing costs a microsecond
)


def check_has_records(part: PartitionState, topic: str) -> None:
    if part.is_external:
        raise SmqError(ErrorCode.WRONG_STORAGE, f"topic {topic!r} keeps its records elsewhere (storage=external)")


def _nothing() -> None:
    """Withdraws a request that has ended."""


class Requests:
    def __init__(
        self,
        host: Host,
        replicas: Replicas,
        liveness: Liveness,
        barriers: Barriers,
        external: ExternalOffsets,
        refusal: Callable[[], SmqError | None],
        preparation: Preparation,
        joins: Joins,
    ) -> None:
        self._host = host
        self._replicas = replicas
        self._liveness = liveness
        self._barriers = barriers
        self._external = external
        self._now_ns = host.clock.monotonic_ns
        self._latency = {acks: host.measures.produce.series(acks.name.lower()) for acks in Acks}
        self._batches = 0  # that have arrived, to time some of them
        self._lookup = Lookup(host, barriers, refusal)
        self._arrivals = Arrivals(lambda: host.state, self._lookup)
        self._preparation = preparation
        self._joins = joins
        self.find = self._lookup.find

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        if isinstance(command, AdvanceLogStart):
            self._replicas.log_starts.propose(command, clipped(timeout_ms), done)
        else:
            self._host.propose(command, clipped(timeout_ms), done)

    def barrier(self, timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self._barriers.wait(clipped(timeout_ms), done)

    def produce(
        self,
        topic: str | TopicId,
        partition: int,
        batch: Buffer,
        acks: Acks,
        timeout_ms: int,
        done: DoneFn[Produced],
        *,
        transactional_id: str | None = None,
        is_joining: bool = False,
        trace: StageSink | None = None,
    ) -> None:
        order, began_ns, joins = self._replicas.send_order, self._now_ns(), self._joins
        self._batches += 1
        done = partial(self._on_produced, began_ns, acks, done)

        def append(part: PartitionState, prepared: Offer | None = None) -> None:
            if joins.behind and joins.hold(part.pid, batch, partial(on_prepared, part.pid, prepared)):
                return
            name = topic if isinstance(topic, str) else self._host.state.topic_names[part.topic_id]
            order.place(name, partition, part.pid)
            if (replica := self._replicas.get(part.pid)) is None:
                check_has_records(part, name)
                raise leader_error(self._host.node_id, self._host.state, part)
            if prepared is None:
                prepared = Offer(batch, batch_rules(self._host.state.topics[name].config), transactional_id)
                if self._preparation.concerns(part.pid, prepared.rules):
                    if replica.leading is None:
                        raise replica.not_leader()
                    self._preparation.start(part.pid, prepared, partial(on_prepared, part.pid))
                    return
            if trace is None and self._batches % BATCHES_PER_SAMPLE:
                replica.produce(prepared, acks, clipped(timeout_ms), done)
                return
            queued_ns, stage = self._now_ns(), self._host.measures.stage if trace is None else trace
            stage.observe(queued_ns - began_ns, "queue")
            replica.produce(prepared, acks, clipped(timeout_ms), done, trace)
            stage.observe(self._now_ns() - queued_ns, "append")

        def on_prepared(pid: PartitionId, prepared: Offer | SmqError | None) -> None:
            now = self._host.state.partition(pid)
            if isinstance(prepared, SmqError):
                fail(prepared)
            elif now is None:
                fail(unknown_topic_id(topic) if isinstance(topic, bytes) else unknown_topic(topic))
            else:
                use(now, prepared)

        def use(part: PartitionState, prepared: Offer | None = None) -> None:
            try:
                append(part, prepared)
            except SmqError as e:
                # Without its traceback: that leads to this frame, and so to the request, which only the garbage
                # collector would find again. It counts objects, and a request may have megabytes.
                error = e.with_traceback(None)
                if error.code in JUDGED_BY_THE_LOG:
                    self._confirm(part, topic, timeout_ms, error, fail)
                elif isinstance(error, NotYetKnown):
                    again = partial(self._append_again, topic, partition, lambda p: append(p, prepared), fail)
                    self._make_certain(part.pid, batch, timeout_ms, again, is_joining=is_joining)
                else:
                    fail(error)

        def fail(error: SmqError) -> None:
            if acks is not Acks.NONE and comes_again(error.code):
                self._expect(topic, partition, batch)
            self._host.deliver(partial(done, error))

        self._arrivals.with_partition(topic, partition, timeout_ms, fail, use)

    def _make_certain(
        self,
        pid: PartitionId,
        batch: Buffer,
        timeout_ms: int,
        again: Callable[[LogIndex | SmqError | None], None],
        *,
        is_joining: bool,
    ) -> None:
        """Calls `again` when this node's state says for certain whether the batch has a transaction here. The later
        batches of its producer wait meanwhile."""
        if is_joining:
            self._joins.start(pid, parse_header(batch), clipped(timeout_ms), again)
        else:
            self._replicas.send_order.expect(pid, batch)
            self._barriers.wait(clipped(timeout_ms), again)

    def _append_again(
        self,
        topic: str | TopicId,
        partition: int,
        append: Callable[[PartitionState], None],
        fail: Callable[[SmqError], None],
        result: LogIndex | SmqError | None,
    ) -> None:
        """The transaction may have begun through another node, and was not applied here, or the partition had yet to
        join it. Now the state is as of after the batch's arrival, and what it does not have there is not."""
        part = partition_in(self._host.state, topic, partition)
        if isinstance(result, SmqError):
            fail(result)
        elif part is None:
            fail(unknown_topic_id(topic) if isinstance(topic, bytes) else unknown_topic(topic))
        else:
            try:
                append(part)
            except SmqError as e:
                fail(e.with_traceback(None))

    def _on_produced(self, began_ns: int, acks: Acks, done: DoneFn[Produced], result: Produced | SmqError) -> None:
        measures = self._host.measures
        if isinstance(result, SmqError):
            measures.produced.add(1, result.code.name)
        else:
            labels, counts = _DUPLICATE if result.duplicate else _STORED, measures.produced.by_labels
            counts[labels] = counts.get(labels, 0) + 1
            self._latency[acks].observe(self._now_ns() - began_ns)
        done(result)

    def _confirm(
        self,
        part: PartitionState,
        topic: str | TopicId,
        timeout_ms: int,
        error: SmqError,
        fail: Callable[[SmqError], None],
    ) -> None:
        """A leader that has been deposed without knowing it misses what its successor has stored: a batch before this
        one, or this one itself. Its producers would give their sessions up, so only a leader that leads after a barrier
        refuses a batch for what its log does not have."""
        epoch = part.epoch

        def after_barrier(result: LogIndex | SmqError) -> None:
            if isinstance(result, SmqError):
                fail(result)
                return
            now, replica = self._host.state.partition(part.pid), self._replicas.get(part.pid)
            if now is None or replica is None:
                fail(unknown_topic_id(topic) if isinstance(topic, bytes) else unknown_topic(topic))
            elif replica.leading == now.epoch == epoch:
                fail(error)
            else:
                fail(replica.not_leader())

        self._barriers.wait(clipped(timeout_ms), after_barrier)

    def expect(self, topic: str, partition: int, batch: Buffer) -> None:
        self._expect(topic, partition, batch)

    def _expect(self, topic: str | TopicId, partition: int, batch: Buffer) -> None:
        order = self._replicas.send_order
        if partition < 0:
            return  # there is none: nothing of it comes again
        if (part := partition_in(self._host.state, topic, partition)) is not None:
            order.expect(part.pid, batch)
        elif isinstance(topic, str):
            order.expect_by_name(topic, partition, batch)
        else:
            order.expect(partition_id(topic, PartitionIndex(partition)), batch)

    def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: DoneFn[Fetched],
        min_bytes: int = 1,
        is_committed: bool = False,
    ) -> Cancel:
        began_ns = self._host.clock.monotonic_ns()
        deadline_ns = began_ns + clipped(max_wait_ms) * 1_000_000
        poll: Poll | None = None
        is_cancelled = False

        def use(part: PartitionState) -> None:
            nonlocal poll
            if is_cancelled:
                return
            replica = self._replica(part, topic)
            size = min(max_bytes, self._host.config.fetch_bytes_max)
            poll = Poll(replica, Offset(offset), size, min_bytes, deadline_ns, done, is_committed, began_ns)
            self._replicas.reads.fetch(poll)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if poll is not None:
                self._replicas.reads.cancel(poll)

        self._lookup.with_partition(topic, partition, max(max_wait_ms, REGISTER_MS_MAX), done, use)
        return cancel

    def _not_replica(self, part: PartitionState) -> SmqError:
        if self._host.node_id in part.replicas:
            return leader_error(self._host.node_id, self._host.state, part)
        names = ", ".join(str(n) for n in part.replicas)
        hint = self._host.state.nodes.get(part.leader)
        details = ErrorDetails(leader=part.leader, leader_address=hint.grpc_address if hint is not None else None)
        return SmqError(ErrorCode.NOT_REPLICA, f"the partition's replicas are on nodes {names}", details)

    def partition_ranges(
        self,
        partitions: Sequence[tuple[str, int]],
        timeout_ms: int,
        done: DoneFn[list[PartitionRange | SmqError]],
        *,
        at_leader: bool = False,
    ) -> None:
        RangesRequest(self._host, self._lookup, self._replicas.ends, partitions, timeout_ms, done, at_leader).start()

    def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int, done: DoneFn[TimeOffset]
    ) -> Cancel:
        time_left_ms = self._lookup.timer(timeout_ms)
        withdrawn: list[Cancel] = [_nothing]
        is_cancelled = False

        def replica_now() -> Replica:
            return self._replica(self._lookup.applied_partition(topic, partition), topic)

        def begin(found: Replica | SmqError) -> None:
            if isinstance(found, SmqError):
                done(found)
            elif not is_cancelled:
                withdrawn[0] = self._replicas.look_ups.time(found, kind, value, time_left_ms(), done)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            withdrawn[0]()

        self._lookup.after_barrier(timeout_ms, begin, replica_now)
        return cancel

    def _replica(self, part: PartitionState, topic: str) -> Replica:
        replica = self._replicas.get(part.pid)
        if replica is None:
            check_has_records(part, topic)
            raise self._not_replica(part)
        return replica

    def follower_ends(self, partition: PartitionId) -> Mapping[NodeId, Offset]:
        replica = self._replicas.get(partition)
        if replica is None or replica.leading is None:
            return {}
        return {n: end for n, end in replica.follower_ends().items() if self._liveness.is_candidate(n)}

    def request_preferred_leader(self, partition: PartitionId) -> bool:
        part = self._host.state.partition(partition)
        if part is None or not self._liveness.is_fit_to_lead(part.replicas[0]):
            return False
        if part.leader != part.replicas[0]:
            request_transfer(self._host, self._replicas, part, part.replicas[0])
        return True

    def sized_run(
        self, topic: str, partition: int, offset: int, bytes_max: int, timeout_ms: int, done: DoneFn[SizedRun]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition), topic)
            return self._replicas.look_ups.sized_run(replica, Offset(offset), bytes_max, clipped(timeout_ms), done)
        except SmqError as e:
            self._host.deliver(partial(done, e.with_traceback(None)))
            return _nothing

    def backlog(
        self, topic: str, partition: int, offset: int, end: int, timeout_ms: int, done: DoneFn[Backlog]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition), topic)
            place = Offset(offset), Offset(end)
            return self._replicas.look_ups.backlog(replica, *place, clipped(timeout_ms), done)
        except SmqError as e:
            self._host.deliver(partial(done, e.with_traceback(None)))
            return _nothing

    def assign_offsets(
        self,
        topic: str,
        partition: int,
        count: int,
        *,
        request_id: bytes,
        not_before: int | None,
        timeout_ms: int,
        done: DoneFn[OffsetsAssigned],
    ) -> None:
        if len(request_id) != REQUEST_ID_BYTES:  # what does not fit a command must not spoil one that others share
            raise SmqError(ErrorCode.INVALID_REQUEST, f"request_id has {len(request_id)} bytes, not {REQUEST_ID_BYTES}")

        def use(part: PartitionState) -> None:
            bound = part.next_offset if not_before is None else Offset(not_before)
            item = Assignment(RequestId(request_id), part.pid, count, bound)
            self._external.assign(item, clipped(timeout_ms), done)

        self._lookup.with_partition(topic, partition, timeout_ms, done, use)

    def advance_external_hwm(
        self, topic: str, partition: int, offset: int, timeout_ms: int, done: DoneFn[Offset]
    ) -> None:
        def use(part: PartitionState) -> None:
            item = ExternalAdvance(partition=part.pid, offset=Offset(offset))
            self._external.advance(item, clipped(timeout_ms), done)

        self._lookup.with_partition(topic, partition, timeout_ms, done, use)

    def fetch_offsets(
        self,
        group: str,
        pids: Sequence[PartitionId] | None,
        timeout_ms: int,
        done: DoneFn[dict[PartitionId, CommittedOffset]],
    ) -> None:
        def look_up() -> dict[PartitionId, CommittedOffset]:
            state = self._host.state.groups.get(group)
            if state is None:
                return {}
            wanted = state.offsets if pids is None else [pid for pid in pids if pid in state.offsets]
            return {pid: state.offsets[pid] for pid in wanted}

        self._lookup.after_barrier(timeout_ms, done, look_up)
