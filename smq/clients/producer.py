"""The asyncio producer: batches, sends to leaders, retries idempotently, keeps the order of every partition.

Owns the I/O around `batching`: one PublishRecord stream a node, the timer, metadata refreshes, producer ids. What
is sent when, and what an error means, is decided in `batching` and `retry`. Users and `sync` import it.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

from smq.clients.batch_queue import Batch, PartitionQueue
from smq.clients.batching import IN_FLIGHT_MAX, Accumulator, BatchingSettings, Polled, ProducerIdentity
from smq.clients.bulk import BatchMetadata as BatchMetadata
from smq.clients.bulk import BulkDelivery
from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.errors import error_from_detail
from smq.clients.partitioner import TopicQueues
from smq.clients.pb import smq_pb2 as pb
from smq.clients.publish_stream import PublishStream
from smq.clients.retry import Backoff, RandomFn, Verdict, wants_refresh
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import CODECS, Headers

AcksName: TypeAlias = Literal["all", "leader", "none"]
_ACKS: Final = {"all": pb.ACKS_ALL, "leader": pb.ACKS_LEADER, "none": pb.ACKS_NONE}

# A refresh every 150 ms while a leader is missing: an election takes 0.3-1.5 s, so little is added to it.
PRODUCER_BACKOFF: Final = Backoff(first_ms=10.0, max_ms=150.0)
# No answer for this long: ask the cluster whether the leader is still the leader. A node that hangs (rather than
# dies) keeps its connection; it is fenced after 1.5 s, and its batches need not wait for the request's time-out.
SLOW_ANSWER_MS: Final = 1_000.0
IDENTITY_TIMEOUT_MS: Final = 10_000.0
YIELD_EVERY_RECORDS: Final = 4096  # send_many lets the event loop run this often (about 1 ms)


class RecordMetadata(NamedTuple):
    """Where a record lies. `offset` and `ts_ns` are -1 with acks="none"."""

    topic: str
    partition: int
    offset: int
    ts_ns: int


@dataclass(slots=True, kw_only=True)
class ProducerStats:
    """Counters since the start; `leader_changes` counts partitions whose leader became another node."""

    records_acked: int = 0
    records_failed: int = 0
    batches_acked: int = 0
    bytes_acked: int = 0
    duplicates: int = 0  # batches whose earlier attempt had been stored
    retries: int = 0  # batches sent again
    leader_changes: int = 0
    streams_broken: int = 0
    identity_resets: int = 0


class Producer:
    """`async with Producer("host:port") as p: await p.send("topic", b"value")`.

    send() hands back a future at once; it is cheap, and fails with OVERLOADED while the buffer is full (await
    wait_room()). send_many() is the fast way for many records. With `idempotent` (the default) every record is
    stored once and in order whatever fails; without it a retry may store records twice. `acks="none"` implies
    idempotent=False. delivery_timeout_ms bounds a record's whole way, request_timeout_ms one attempt.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str],
        *,
        acks: AcksName = "all",
        linger_ms: float = 5.0,
        batch_bytes: int = 128 << 10,
        compression: str = "none",
        idempotent: bool = True,
        request_timeout_ms: float = 30_000.0,
        delivery_timeout_ms: float = 120_000.0,
        max_in_flight: int = IN_FLIGHT_MAX,
        buffer_bytes: int = 32 << 20,
        connect_timeout_ms: float = 10_000.0,
        random_source: RandomFn = random.random,
    ) -> None:
        idempotent = idempotent and acks != "none"
        _check(acks, compression, max_in_flight, linger_ms, delivery_timeout_ms)
        # Without sequences only one batch at a time keeps the order when it has to be sent again.
        in_flight_max = max_in_flight if idempotent or acks == "none" else 1
        self._acks = _ACKS[acks]
        self._request_timeout_ms = request_timeout_ms
        self._delivery_timeout_ms = delivery_timeout_ms
        self._accumulator = Accumulator(
            BatchingSettings(
                batch_bytes=batch_bytes,
                linger_ms=linger_ms,
                compression=compression,
                buffer_bytes_max=buffer_bytes,
                in_flight_max=in_flight_max,
                delivery_timeout_ms=delivery_timeout_ms,
                is_idempotent=idempotent,
                acks_all=acks == "all",
                backoff=PRODUCER_BACKOFF,
            ),
            random_source,
        )
        self._cluster = ClusterClient(bootstrap, connect_timeout_ms=connect_timeout_ms, random_source=random_source)
        self._streams: dict[str, PublishStream] = {}
        self._stats = ProducerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fatal: SmqError | None = None
        self._is_closing = False
        self._pump_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._refresh_task: asyncio.Task[None] | None = None
        self._refresh_attempts = 0
        self._slow_checked_ms = 0.0
        self._identity_task: asyncio.Task[None] | None = None
        self._broken_streams: set[asyncio.Task[None]] = set()  # being closed
        self._room: asyncio.Event = asyncio.Event()

    # -- life

    async def start(self) -> None:
        """Finds the cluster. TIMED_OUT where none of the bootstrap addresses answers."""
        self._loop = asyncio.get_running_loop()
        await self._cluster.start()

    async def __aenter__(self) -> "Producer":
        try:
            await self.start()
        except BaseException:
            await self._cluster.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Delivers what was sent (within the delivery time-out), then lets go of everything."""
        if self._is_closing:
            return
        if self._loop is not None:
            await self.flush()
        self._is_closing = True
        for handle in (self._pump_handle, self._timer):
            if handle is not None:
                handle.cancel()
        tasks = [t for t in (self._refresh_task, self._identity_task) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._broken_streams, return_exceptions=True)
        for stream in list(self._streams.values()):
            await stream.close()
        await self._cluster.close()

    @property
    def stats(self) -> ProducerStats:
        self._stats.retries = self._accumulator.retries
        self._stats.identity_resets = self._accumulator.identity_resets
        self._stats.leader_changes = self._cluster.metadata.leader_changes
        return self._stats

    @property
    def is_full(self) -> bool:
        return self._accumulator.is_full

    # -- records

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> "asyncio.Future[RecordMetadata]":
        """Takes the record; the future gives its place when it is acknowledged, or the SmqError that ended it.

        OVERLOADED (raised here) while the buffer is full: `await wait_room()` and send again.
        """
        loop = self._usable()
        token: asyncio.Future[RecordMetadata] = loop.create_future()
        when = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        accumulator = self._accumulator
        accumulator.add(self._topic(topic), key, value, headers, partition, when, token, now_ms())
        if accumulator.needs_poll:
            self._wake()
        return token

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: int | Sequence[int] | None = None,
    ) -> "asyncio.Future[list[BatchMetadata]]":
        """The bulk path. Returns when all records are taken in (waiting for room as it must), with a future of
        their places: one BatchMetadata for every run of records that lie side by side. Records of one partition
        keep their order. The future fails with the first error once all records are settled."""
        loop = self._usable()
        _check_many(values, keys, timestamp_ms)
        when = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        queues = await self._known_topic(topic)
        bulk = BulkDelivery(loop.create_future(), len(values))
        try:
            if keys is None:
                await self._add_unkeyed(queues, values, when, partition, bulk)
            else:
                await self._add_keyed(queues, values, keys, when, partition, bulk)
        except SmqError as e:
            bulk.refused(e)
            raise
        return bulk.future

    async def _add_unkeyed(
        self,
        topic: TopicQueues,
        values: Sequence[bytes | None],
        when: int | Sequence[int],
        partition: int | None,
        bulk: BulkDelivery,
    ) -> None:
        taken = 0
        while taken < len(values):
            queue = topic.sticky() if partition is None else topic.explicit(partition)
            taken += await self._add_some(queue, None, values, when, taken, bulk)

    async def _add_keyed(
        self,
        topic: TopicQueues,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None],
        when: int | Sequence[int],
        partition: int | None,
        bulk: BulkDelivery,
    ) -> None:
        for start in range(0, len(values), YIELD_EVERY_RECORDS):
            groups: dict[PartitionQueue, list[int]] = {}
            fixed = None if partition is None else topic.explicit(partition)
            for index in range(start, min(start + YIELD_EVERY_RECORDS, len(values))):
                key = keys[index]
                queue = fixed or (topic.sticky() if key is None else topic.for_key(key))
                groups.setdefault(queue, []).append(index)
            for queue, places in groups.items():
                some_keys, some_values = [keys[i] for i in places], [values[i] for i in places]
                times = when if isinstance(when, int) else [when[i] for i in places]
                taken = 0
                while taken < len(places):
                    taken += await self._add_some(queue, some_keys, some_values, times, taken, bulk)

    async def _add_some(
        self,
        queue: PartitionQueue,
        keys: Sequence[bytes | None] | None,
        values: Sequence[bytes | None],
        when: int | Sequence[int],
        start: int,
        bulk: BulkDelivery,
    ) -> int:
        """Fills one batch at most."""
        await self.wait_room()
        self._usable()
        taken = self._accumulator.add_run(queue, keys, values, when, start, YIELD_EVERY_RECORDS, bulk, now_ms())
        if self._accumulator.needs_poll:
            self._wake()
        await asyncio.sleep(0)
        return taken

    async def wait_room(self) -> None:
        """Until the buffer has room for at least one record."""
        while self._accumulator.is_full:
            self._room.clear()
            await self._room.wait()

    async def flush(self) -> None:
        """Until every record sent before is acknowledged or failed. Its errors are in the records' own futures."""
        loop = self._usable(even_if_fatal=True)
        waiting = [t.future if isinstance(t, BulkDelivery) else t for t in self._accumulator.waiting_tokens()]
        marks: list[asyncio.Future[RecordMetadata]] = [t for t in waiting if isinstance(t, asyncio.Future)]
        for batch in self._accumulator.mark_due():
            mark: asyncio.Future[RecordMetadata] = loop.create_future()
            batch.tokens.append((0, 0, mark))
            marks.append(mark)
        self._wake()
        if marks:
            await asyncio.wait(marks)

    def _usable(self, *, even_if_fatal: bool = False) -> asyncio.AbstractEventLoop:
        if self._fatal is not None and not even_if_fatal:
            raise self._fatal
        if self._loop is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the producer is not started: await start() first")
        if self._is_closing:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the producer is closed: make a new one")
        return self._loop

    def _topic(self, name: str) -> TopicQueues:
        topic = self._accumulator.topic(name)
        if not topic.queues:
            count = self._cluster.metadata.partition_count(name)
            if count:
                self._accumulator.set_partition_count(name, count)
        return topic

    async def _known_topic(self, name: str) -> TopicQueues:
        if not self._topic(name).queues:
            missing = await self._cluster.refresh((name,), timeout_ms=self._request_timeout_ms)
            if missing:
                raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {name!r}")
        return self._topic(name)

    # -- the pump: everything that is due, now

    def _wake(self) -> None:
        if self._pump_handle is None and self._loop is not None and not self._is_closing:
            self._pump_handle = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        if self._is_closing:
            return
        accumulator, now = self._accumulator, now_ms()
        accumulator.needs_poll = False
        self._check_streams(now)
        polled = accumulator.poll(now, self._cluster.metadata.leader_address)
        for address, batch in polled.sends:
            self._stream(address).submit(batch, self._time_left(batch, now), now)
        self._report(polled)
        if polled.unrouted:
            self._want_refresh(polled.unrouted)
        else:
            self._refresh_attempts = 0
        if polled.need_identity:
            self._want_identity(polled.need_identity)
        self._set_timer(now)
        if not accumulator.is_full:
            self._room.set()

    def _check_streams(self, now: float) -> None:
        """Gives up streams that are overdue, or whose batches have another leader by now."""
        slow: set[str] = set()
        for stream in list(self._streams.values()):
            deadline, sent = stream.deadline_ms(), stream.oldest_sent_ms()
            if deadline is None or sent is None:
                continue
            if deadline <= now:
                stream.give_up(SmqError(ErrorCode.TIMED_OUT, f"the node at {stream.address} gave no answer in time"))
            elif sent + SLOW_ANSWER_MS <= now:
                batches = stream.unanswered()
                leaders = [self._cluster.metadata.leader_address(b.topic, b.partition) for b in batches]
                if any(leader not in (None, stream.address) for leader in leaders):
                    told = f"the node at {stream.address} does not answer, and leads no more"
                    stream.give_up(SmqError(ErrorCode.TIMED_OUT, told))
                elif self._slow_checked_ms + SLOW_ANSWER_MS <= now:
                    slow |= {b.topic for b in batches}
                    self._cluster.metadata.node_failed(stream.address, now)  # ask another node
        if slow:
            self._slow_checked_ms = now
            self._want_refresh(slow)

    def _time_left(self, batch: Batch, now: float) -> float:
        return min(self._request_timeout_ms, max(batch.created_ms + self._delivery_timeout_ms - now, 1.0))

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [d for d in (s.deadline_ms() for s in self._streams.values()) if d is not None]
        sent = [t for t in (s.oldest_sent_ms() for s in self._streams.values()) if t is not None]
        times += [max(t, self._slow_checked_ms) + SLOW_ANSWER_MS for t in sent]
        wakeup = self._accumulator.next_wakeup_ms(now)
        due = min([*times, wakeup] if wakeup is not None else times, default=None)
        if due is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(due - now, 0.0) / 1000.0, self._wake)

    def _stream(self, address: str) -> PublishStream:
        found = self._streams.get(address)
        if found is None:
            node = self._cluster.channels.node(address)
            found = PublishStream(address, node, self._acks, self._answered, self._broken)
            self._streams[address] = found
        return found

    # -- answers

    def _answered(self, batch: Batch, answer: pb.PublishRecordResponse) -> None:
        if answer.HasField("error"):
            self._refused(batch, error_from_detail(answer.error))
        elif self._accumulator.acked(batch):
            stats = self._stats
            stats.records_acked += batch.count
            stats.batches_acked += 1
            stats.bytes_acked += len(batch.data)
            stats.duplicates += answer.duplicate
            _deliver(batch, answer.base_offset, answer.ts_ns)
        self._wake()

    def _refused(self, batch: Batch, error: SmqError) -> None:
        metadata = self._cluster.metadata
        if error.code is ErrorCode.NOT_LEADER and error.details.leader is not None:
            metadata.hint(batch.topic, batch.partition, error.details.leader, error.details.leader_address)
        elif wants_refresh(error):
            metadata.suspect(batch.topic, batch.partition)
        if self._accumulator.refused(batch, error, now_ms()) is Verdict.FENCED:
            self._fatal = error
            self._accumulator.fail_all(error)
        self._wake()

    def _broken(self, stream: PublishStream, returned: list[tuple[Batch, SmqError]]) -> None:
        if self._streams.get(stream.address) is stream:
            del self._streams[stream.address]
        if self._is_closing:
            return
        self._stats.streams_broken += 1
        self._cluster.metadata.node_failed(stream.address, now_ms())
        self._cluster.metadata.suspect_node(stream.address)
        for batch, error in returned:
            self._refused(batch, error)
        closing = asyncio.ensure_future(stream.close())
        self._broken_streams.add(closing)
        closing.add_done_callback(self._broken_streams.discard)

    def _report(self, polled: Polled) -> None:
        for batch, error in polled.failed:
            self._stats.records_failed += batch.count
            _fail(batch, error)
        for token, error in polled.failed_waiting:
            self._stats.records_failed += 1
            _fail_token(token, 1, error)

    # -- metadata and identity

    def _want_refresh(self, topics: Iterable[str]) -> None:
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._refresh(sorted(topics)))

    async def _refresh(self, topics: list[str]) -> None:
        """One refresh, after a pause that grows while nothing gets through; the pump asks for the next."""
        if self._refresh_attempts:
            pause_ms = PRODUCER_BACKOFF.delay_ms(self._refresh_attempts, self._cluster.random)
            await asyncio.sleep(pause_ms / 1000.0)
        self._refresh_attempts += 1
        try:
            missing = await self._cluster.refresh(topics)
        except SmqError:
            missing = frozenset()  # nobody answered: asked again until the records' delivery time-out
        for topic in missing:
            self._accumulator.fail_all(SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}"), topic)
        for topic in topics:
            count = self._cluster.metadata.partition_count(topic)
            if count:
                self._accumulator.set_partition_count(topic, count)
        self._refresh_task = None
        self._wake()

    def _want_identity(self, queues: list[PartitionQueue]) -> None:
        if self._identity_task is None or self._identity_task.done():
            self._identity_task = asyncio.create_task(self._allocate_identity(queues))

    async def _allocate_identity(self, queues: list[PartitionQueue]) -> None:
        """A fresh producer id: the shared one at first, later one for partitions that had to leave theirs."""
        topic, request_id = queues[0].topic, uuid.uuid4().bytes

        async def run(node: NodeStubs, node_ms: int, call_s: float) -> ProducerIdentity:
            session = str(uuid.uuid4())
            request = pb.StartPublishSessionRequest(session_id=session, topic=topic, request_id=request_id)
            answer = await node.agent.StartPublishSession(request, timeout=call_s)
            if answer.batch_bytes_max > 0:
                self._accumulator.limit_batch_bytes(answer.batch_bytes_max)
            # Only the id is wanted: batches name their topic themselves, at any node.
            await node.agent.ClosePublishSession(pb.ClosePublishSessionRequest(session_id=session), timeout=call_s)
            return ProducerIdentity(producer_id=answer.producer_id, producer_epoch=answer.producer_epoch)

        try:
            identity = await self._cluster.call(run, timeout_ms=IDENTITY_TIMEOUT_MS)
        except SmqError as e:
            if not e.code.is_retriable:
                self._accumulator.fail_all(e, topic)
            await asyncio.sleep(PRODUCER_BACKOFF.max_ms / 1000.0)
        else:
            self._take_identity(identity, queues)
        self._identity_task = None
        self._wake()

    def _take_identity(self, identity: ProducerIdentity, queues: list[PartitionQueue]) -> None:
        shared = [q for q in queues if not q.needs_own_identity]
        if shared:
            self._accumulator.set_identity(identity)
        for queue in queues if not shared else ():
            self._accumulator.give_identity(queue, identity)


def _deliver(batch: Batch, base_offset: int, ts_ns: int) -> None:
    topic, partition = batch.topic, batch.partition
    for first, count, token in batch.tokens:
        if isinstance(token, BulkDelivery):
            start = base_offset + first if base_offset >= 0 else -1
            last = start + count - 1 if base_offset >= 0 else -1
            token.delivered(BatchMetadata(topic, partition, start, last, ts_ns), count)
        elif isinstance(token, asyncio.Future) and not token.done():
            token.set_result(RecordMetadata(topic, partition, base_offset + first if base_offset >= 0 else -1, ts_ns))


def _fail(batch: Batch, error: SmqError) -> None:
    for _, count, token in batch.tokens:
        if count == 0 and isinstance(token, asyncio.Future):  # a flush only wants to know that it is over
            if not token.done():
                token.set_result(None)
        else:
            _fail_token(token, count, error)


def _fail_token(token: object, count: int, error: SmqError) -> None:
    if isinstance(token, BulkDelivery):
        token.failed(error, count)
    elif isinstance(token, asyncio.Future) and not token.done():
        token.set_exception(SmqError(error.code, error.message, error.details))


def _check(acks: str, compression: str, max_in_flight: int, linger_ms: float, delivery_timeout_ms: float) -> None:
    told = None
    if acks not in _ACKS:
        told = f"acks must be one of {', '.join(_ACKS)}, not {acks!r}"
    elif compression not in CODECS:
        told = f"compression must be one of {', '.join(CODECS)}, not {compression!r}"
    elif not 1 <= max_in_flight <= IN_FLIGHT_MAX:
        told = f"max_in_flight must be 1 to {IN_FLIGHT_MAX}: a leader remembers that many batches, not {max_in_flight}"
    elif linger_ms < 0 or delivery_timeout_ms <= linger_ms:
        told = "linger_ms must be >= 0 and below delivery_timeout_ms"
    if told is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, told)


def _check_many(
    values: Sequence[bytes | None], keys: Sequence[bytes | None] | None, times: int | Sequence[int] | None
) -> None:
    """All or nothing: a record that cannot be encoded is found before any is taken in."""
    told = None
    allowed = {bytes, bytearray, memoryview, type(None)}
    if not values:
        told = "send_many needs at least one record"
    elif not set(map(type, values)) <= allowed or (keys is not None and not set(map(type, keys)) <= allowed):
        told = "keys and values must be bytes or None"
    elif keys is not None and len(keys) != len(values):
        told = f"there are {len(values)} values and {len(keys)} keys"
    elif times is not None and not isinstance(times, int) and len(times) != len(values):
        told = f"there are {len(values)} values and {len(times)} timestamps"
    if told is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, told)
