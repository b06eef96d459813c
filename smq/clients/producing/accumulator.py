"""The producer's accumulator: records go in, due batches come out, answers go back in. Sans-IO.

Owns the decision which batch goes when (by size, linger, flush, back-off and the window of each partition; immediately
if nothing is in flight) and the bound on buffered bytes. It must never send, sleep or read a clock: every call is given
the time. Only the producer and the publisher import it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from smq.clients.arguments import check_name
from smq.clients.producing.partition_queue import (
    NO_SEQUENCE,
    NOT_IDEMPOTENT,
    Batch,
    PartitionQueue,
    append_to,
    check_record,
)
from smq.clients.producing.partition_queue import ProducerIdentity as ProducerIdentity
from smq.clients.producing.partitioner import TopicQueues
from smq.clients.retry import Backoff, RandomFn, Verdict, judge_batch, of_partition
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import Headers, open_batch

IN_FLIGHT_MAX: Final = 5  # a leader remembers a producer's last five batches (Kafka's number), no more
WAITING_OVERHEAD_BYTES: Final = 64  # counted for a record that waits for its topic's partition count

RouteFn = Callable[[str, int], str | None]  # topic, partition -> the leader's address, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    batch_bytes: int = 128 << 10  # a gRPC message costs ~100 us of Python whatever its size: larger than Kafka's 16 KiB
    linger_ms: float = 5.0
    compression: str = "none"
    buffer_bytes_max: int = 32 << 20  # Kafka's buffer.memory
    in_flight_max: int = IN_FLIGHT_MAX
    delivery_timeout_ms: float = 120_000.0
    is_idempotent: bool = True
    acks_all: bool = True
    is_transactional: bool = False
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(slots=True, kw_only=True)
class Polled:
    """The work that is due now."""

    sends: list[tuple[str, Batch]] = field(default_factory=list)
    failed: list[tuple[Batch, SmqError]] = field(default_factory=list)
    failed_waiting: list[tuple[object, SmqError]] = field(default_factory=list)  # tokens that reached no batch
    ended_marks: list[object] = field(default_factory=list)  # of flushes that waited for those
    unrouted: set[str] = field(default_factory=set)  # topics with something to send and no known leader
    need_identity: list[PartitionQueue] = field(default_factory=list)


@dataclass(slots=True)
class Waiting:
    """A record of a topic whose partitions are not known yet. `marks` are those of flushes, for its batch."""

    created_ms: float
    bytes_counted: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    partition: int | None
    token: object
    marks: tuple[object, ...] = ()


class Accumulator:
    def __init__(self, settings: BatchingSettings, random: RandomFn) -> None:
        self.settings = settings
        self.buffered_bytes = 0
        self.needs_poll = False  # set when poll() has new work; the publisher clears it
        self.retries = 0
        self.identity_resets = 0
        self.failure: SmqError | None = None  # of a transaction: the first error of a record
        self._batch_bytes = settings.batch_bytes
        self._random = random
        self._identity: ProducerIdentity | None = None if settings.is_idempotent else NOT_IDEMPOTENT
        self._topics: dict[str, TopicQueues] = {}
        self._waiting: dict[str, deque[Waiting]] = {}  # bounded by buffer_bytes_max, like the batches
        self._active: dict[PartitionQueue, None] = {}  # not empty, in order of first use
        self._failed: list[tuple[Batch, SmqError]] = []
        self._failed_waiting: list[tuple[object, SmqError]] = []
        self._ended_marks: list[object] = []

    @property
    def is_full(self) -> bool:
        return self.buffered_bytes >= self.settings.buffer_bytes_max

    @property
    def is_empty(self) -> bool:
        return not self._active and not any(self._waiting.values())

    def unsettled(self) -> int:
        """The number of records that are neither acknowledged nor failed."""
        in_batches = sum(batch.count for queue in self._active for batch in queue.batches())
        return in_batches + sum(len(waiting) for waiting in self._waiting.values())

    def oldest(self) -> Batch | None:
        """Of the batches that are not acknowledged: the one that was opened first."""
        batches = (next(iter(queue.batches()), None) for queue in self._active)
        return min((b for b in batches if b is not None), key=lambda b: b.created_ms, default=None)

    def unknown_topic(self) -> str | None:
        """A topic whose records wait for the number of its partitions."""
        return next((name for name, waiting in self._waiting.items() if waiting), None)

    # -- records in

    def topic(self, name: str) -> TopicQueues:
        """INVALID_REQUEST for a name that cannot be sent. Without a look-up of its partitions, its records would wait
        until they expire, and so would those of the topics that are looked up with it."""
        found = self._topics.get(name) if type(name) is str else None
        if found is None:
            check_name("topic", name)
            found = self._topics[name] = TopicQueues(name, self._random)
        return found

    def add(
        self,
        topic: TopicQueues,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int,
        token: object,
        now_ms: float,
    ) -> None:
        """Adds a record. OVERLOADED if the buffer is full; INVALID_REQUEST, UNKNOWN_PARTITION."""
        if self.buffered_bytes >= self.settings.buffer_bytes_max:
            size = self.settings.buffer_bytes_max
            message = f"the producer's buffer of {size} bytes is full: await wait_room() first"
            raise SmqError(ErrorCode.OVERLOADED, message)
        if not topic.queues:
            self._wait(topic, key, value, headers, partition, timestamp_ms, token, now_ms)
        else:
            self._place(topic, key, value, headers, partition, timestamp_ms, token, now_ms)

    def _place(
        self,
        topic: TopicQueues,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int,
        token: object,
        created_ms: float,
    ) -> Batch:
        if partition is not None:
            queue = topic.explicit(partition)
        elif key is not None:
            queue = topic.for_key(key)
        else:
            queue = topic.sticky()
        batch, size = queue.open, 0
        while batch is not None and not size:
            size = append_to(batch, timestamp_ms, key, value, headers)
            if not size:
                queue.seal()
                self.needs_poll = True
                if partition is None and key is None:
                    queue = topic.sticky()
                batch = queue.open
        if batch is None:
            batch = self._fresh(queue, created_ms)
            size = append_to(batch, timestamp_ms, key, value, headers)
            self._opened(batch)
        batch.tokens.append((batch.count - 1, 1, token))
        batch.bytes_counted += size
        self.buffered_bytes += size
        return batch

    def add_run(
        self,
        queue: PartitionQueue,
        keys: Sequence[bytes | None] | None,
        values: Sequence[bytes | None],
        timestamps_ms: int | Sequence[int],
        start: int,
        count_max: int,
        token: object,
        now_ms: float,
    ) -> int:
        """Adds records from index `start` on to one batch: at most `count_max`, until the batch or the buffer is full.
        Returns how many; 0 if the open batch was full, which is then sealed. One token for the whole run."""
        batch = queue.open or self._fresh(queue, now_ms)
        first, before = batch.count, batch.bytes_counted
        stop = min(len(values), start + count_max)
        bytes_left = self.settings.buffer_bytes_max - self.buffered_bytes
        try:
            is_full = _fill(batch, keys, values, timestamps_ms, range(start, stop), bytes_left)
        finally:
            added = batch.count - first
            if added:
                batch.tokens.append((first, added, token))
                self.buffered_bytes += batch.bytes_counted - before
                if queue.open is not batch:
                    self._opened(batch)
        if is_full:
            queue.seal()
            self.needs_poll = True
        return added

    def _fresh(self, queue: PartitionQueue, created_ms: float) -> Batch:
        encoder = open_batch(
            codec=self.settings.compression,
            bytes_max=self._batch_bytes,
            is_transactional=self.settings.is_transactional,
        )
        return Batch(queue, encoder, created_ms)

    def _opened(self, batch: Batch) -> None:
        """Called when a fresh batch has its first record: only now its queue gets to know it."""
        batch.queue.open = batch
        self._active.setdefault(batch.queue)
        self.needs_poll = True

    def _wait(
        self,
        topic: TopicQueues,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int,
        token: object,
        now_ms: float,
    ) -> None:
        check_record(timestamp_ms, key, value, headers)  # now, and not when the partitions are known
        # Copies: what the caller changes later belongs to its next record.
        key, value = None if key is None else bytes(key), None if value is None else bytes(value)
        counted = len(key or b"") + len(value or b"") + WAITING_OVERHEAD_BYTES
        record = Waiting(now_ms, counted, timestamp_ms, key, value, headers, partition, token)
        self._waiting.setdefault(topic.topic, deque()).append(record)
        self.buffered_bytes += counted
        self.needs_poll = True

    def set_partition_count(self, name: str, count: int) -> None:
        """The number of partitions of a topic is known now; records that waited for it are assigned."""
        topic = self.topic(name)
        topic.grow(count)
        waiting = self._waiting.pop(name, None) if count else None
        for w in waiting or ():
            self.buffered_bytes -= w.bytes_counted
            try:
                batch = self._place(
                    topic, w.key, w.value, w.headers, w.partition, w.timestamp_ms, w.token, w.created_ms
                )
            except SmqError as e:
                self._fail_waiting(w, e)
            else:
                if w.marks:
                    batch.tokens += [(0, 0, mark) for mark in w.marks]
                    batch.is_due = True
        self.needs_poll = True

    def set_identity(self, identity: ProducerIdentity) -> None:
        """The shared identity, for every partition that has none of its own."""
        self._identity = identity
        self.needs_poll = True

    def limit_batch_bytes(self, bytes_max: int) -> None:
        """The cluster accepts no larger batches than this."""
        self._batch_bytes = min(self._batch_bytes, bytes_max)

    def give_identity(self, queue: PartitionQueue, identity: ProducerIdentity) -> None:
        """A new identity for a partition that abandoned its old one."""
        if queue.identity is None:
            queue.take_identity(identity)
            self.needs_poll = True

    # -- batches out

    def poll(self, now_ms: float, route: RouteFn) -> Polled:
        """Everything that is due: batches to send and where, final failures, and missing routes and identities."""
        out = Polled()
        # If nothing is in flight, lingering saves no message: later records fill the next batch all the same.
        is_idle = not any(queue.in_flight for queue in self._active)
        linger_ms = 0.0 if is_idle else self.settings.linger_ms
        for queue in list(self._active):
            self._expire(queue, now_ms)
            if queue.reset_pending and not queue.in_flight:
                self._reset(queue)
            if queue.is_empty:
                del self._active[queue]
            else:
                self._take_due(queue, now_ms, linger_ms, route, out)
        self._expire_waiting(now_ms, out)
        out.failed, self._failed = self._failed, []
        out.failed_waiting, self._failed_waiting = self._failed_waiting, []
        out.ended_marks, self._ended_marks = self._ended_marks, []
        return out

    def _take_due(self, queue: PartitionQueue, now_ms: float, linger_ms: float, route: RouteFn, out: Polled) -> None:
        if queue.reset_pending or now_ms < queue.retry_at_ms:
            return
        if queue.recovering and queue.in_flight:
            return
        window = queue.window(self.settings.in_flight_max)
        while queue.in_flight < window:
            batch = queue.candidate(now_ms, linger_ms)
            if batch is None or not self._has_identity(queue, out):
                return
            address = route(queue.topic, queue.partition)
            if address is None:
                out.unrouted.add(queue.topic)
                return
            self.retries += batch.attempts > 0
            queue.sent(batch)
            out.sends.append((address, batch))

    def _has_identity(self, queue: PartitionQueue, out: Polled) -> bool:
        if queue.identity is not None:
            return True
        if self._identity is not None and not queue.needs_own_identity:
            queue.take_identity(self._identity)
            queue.primed = not self.settings.is_idempotent
            return True
        out.need_identity.append(queue)
        return False

    def _expire(self, queue: PartitionQueue, now_ms: float) -> None:
        oldest = now_ms - self.settings.delivery_timeout_ms
        for batch in queue.batches():
            if batch.created_ms > oldest:
                return
            if not batch.in_flight:
                self._give_up(batch, self._expiry_error(batch))

    def _expiry_error(self, batch: Batch) -> SmqError:
        timeout_ms = self.settings.delivery_timeout_ms
        message = f"no acknowledgement in {timeout_ms:.0f} ms of {batch.in_words}"
        last = batch.last_error
        if last is None:
            return SmqError(ErrorCode.LEADER_UNAVAILABLE, f"{message}: no leader was found")
        last = of_partition(last)
        code = last.code if last.code.is_definite and not batch.outcome_unknown else ErrorCode.TIMED_OUT
        return SmqError(code, f"{message}; the last answer was {last.code.name}: {last.message}", last.details)

    def _expire_waiting(self, now_ms: float, out: Polled) -> None:
        oldest = now_ms - self.settings.delivery_timeout_ms
        for name, waiting in self._waiting.items():
            while waiting and waiting[0].created_ms <= oldest:
                timeout_ms = self.settings.delivery_timeout_ms
                message = f"no node reported the number of partitions of {name!r} in {timeout_ms:.0f} ms"
                self._drop_waiting(waiting, SmqError(ErrorCode.NODE_NOT_READY, message))
            if waiting:
                out.unrouted.add(name)

    def _drop_waiting(self, waiting: deque[Waiting], error: SmqError) -> None:
        record = waiting.popleft()
        self.buffered_bytes -= record.bytes_counted
        self._fail_waiting(record, error)

    def _fail_waiting(self, record: Waiting, error: SmqError) -> None:
        self._failed_waiting.append((record.token, error))
        self._ended_marks += record.marks
        self._note_failure(error)

    def _note_failure(self, error: SmqError) -> None:
        """The transaction must be aborted, and the next one has a new epoch."""
        if self.settings.is_transactional:
            self.failure = self.failure or error

    def next_wakeup_ms(self, now_ms: float) -> float | None:
        """When poll() will next have work even if nothing comes in; None for never."""
        times = [t for queue in self._active for t in self._wakeups(queue, now_ms)]
        timeout = self.settings.delivery_timeout_ms
        times += [w[0].created_ms + timeout for w in self._waiting.values() if w]
        return min(times, default=None)

    def _wakeups(self, queue: PartitionQueue, now_ms: float) -> Iterable[float]:
        oldest = queue.sealed[0] if queue.sealed else queue.open
        if oldest is not None and not oldest.in_flight:
            yield oldest.created_ms + self.settings.delivery_timeout_ms
        if queue.retry_at_ms > now_ms:
            yield queue.retry_at_ms
        elif queue.open is not None and len(queue.sealed) == queue.in_flight:
            due = queue.open.created_ms + self.settings.linger_ms
            if due > now_ms:
                yield due

    def mark_due(self) -> list[Batch]:
        """Flush: every open batch goes without lingering. Returns all batches that are not done."""
        batches = [b for queue in self._active for b in queue.batches()]
        for batch in batches:
            batch.is_due = True
        self.needs_poll = True
        return batches

    def waiting(self) -> list[Waiting]:
        """Records that wait for their topic's partition count."""
        return [record for waiting in self._waiting.values() for record in waiting]

    # -- answers in

    def acked(self, batch: Batch) -> bool:
        """The leader has stored the batch. False if the answer is too late to matter."""
        if batch.is_done:
            return False
        queue = batch.queue
        queue.remove(batch)
        queue.primed = queue.primed or batch.identity is queue.identity
        self._release(batch)
        return True

    def refused(self, batch: Batch, error: SmqError, now_ms: float) -> Verdict | None:
        """The leader has refused the batch, or its stream broke. What was decided; None for a late answer."""
        if batch.is_done or not batch.in_flight:
            return None
        queue = batch.queue
        is_head = queue.sealed[0] is batch
        queue.answered(batch)
        batch.last_error = error
        batch.outcome_unknown = batch.outcome_unknown or not error.code.is_definite
        batch.refusals += is_head and not error.code.is_retriable
        settings = self.settings
        verdict = judge_batch(error, is_head=is_head, refusals=batch.refusals, acks_all=settings.acks_all)
        if verdict is Verdict.RETRY:
            self._retry_later(batch, error, now_ms)
        elif verdict is Verdict.RESTAMP:
            batch.outcome_unknown = False  # the leader's log does not hold it: otherwise it had answered "duplicate"
            queue.reset_pending = True
        else:
            self._give_up(batch, batch.final_error(error))
        self.needs_poll = True
        return verdict

    def _retry_later(self, batch: Batch, error: SmqError, now_ms: float) -> None:
        queue = batch.queue
        queue.recovering = True
        queue.primed = queue.primed and self.settings.acks_all  # an acks=leader log may have lost the producer id
        hinted = error.code is ErrorCode.NOT_LEADER and error.details.leader_address is not None
        if not hinted or batch.attempts > 1:
            pause = self.settings.backoff.delay_ms(batch.attempts, self._random, error.details.retry_after_ms)
            queue.retry_at_ms = now_ms + pause

    def _give_up(self, batch: Batch, error: SmqError) -> None:
        queue = batch.queue
        queue.remove(batch)
        self._note_failure(error)
        if batch.sequence != NO_SEQUENCE and self.settings.is_idempotent and not self.settings.is_transactional:
            queue.reset_pending = True
        self._release(batch)
        self._failed.append((batch, error))

    def _reset(self, queue: PartitionQueue) -> None:
        self.identity_resets += 1
        for batch in queue.reset():
            message = "an earlier batch was given up, and this one may have been stored"
            self._give_up(batch, SmqError(ErrorCode.TIMED_OUT, message))
        queue.reset_pending = False  # giving up those batches has set it again

    def _release(self, batch: Batch) -> None:
        self.buffered_bytes -= batch.bytes_counted
        self.needs_poll = True

    def end_transaction(self) -> None:
        """Every batch is acknowledged, or given up."""
        self.failure = None
        for topic in self._topics.values():
            for queue in topic.queues:
                queue.end_transaction()

    def fail_all(self, error: SmqError, topic: str | None = None) -> None:
        """Gives up everything (of one topic); the next poll() reports it. Later answers are ignored."""
        for queue in self._active:
            for batch in queue.batches() if topic in (None, queue.topic) else ():
                batch.outcome_unknown = batch.outcome_unknown or batch.in_flight
                self._give_up(batch, batch.final_error(error))
        for name, waiting in self._waiting.items():
            while waiting and topic in (None, name):
                self._drop_waiting(waiting, error)
        self.needs_poll = True


def _fill(
    batch: Batch,
    keys: Sequence[bytes | None] | None,
    values: Sequence[bytes | None],
    timestamps_ms: int | Sequence[int],
    indexes: range,
    bytes_left: int,
) -> bool:
    """The bulk path: only the encoder runs per record. True if the batch is full."""
    encoder = batch.open
    if encoder is None:
        return True
    append, size, count, counted = encoder.append, encoder.size, batch.count, batch.bytes_counted
    before, headers, index = size(), list[tuple[str, bytes | None]](), 0
    try:
        for index in indexes:
            when = timestamps_ms if isinstance(timestamps_ms, int) else timestamps_ms[index]
            if append(count, when, None if keys is None else keys[index], values[index], headers) is None:
                return True
            count += 1
            if size() - before >= bytes_left:
                break
        return False
    except (TypeError, OverflowError) as e:
        message = f"record {index} cannot be encoded: keys and values must be bytes or None, times integers ({e})"
        raise SmqError(ErrorCode.INVALID_REQUEST, message) from e
    finally:
        batch.count = count
        batch.bytes_counted = counted + size() - before
