"""The asyncio producer: takes records, returns futures of their offsets.

Owns the public interface and the way of records into the accumulator. `publisher` sends and handles answers;
`accumulator` and `retry` decide which batch goes when, and what an error means. Users and `sync` import it.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, TypeAlias

from smq.clients.accumulator import IN_FLIGHT_MAX, BatchingSettings
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.delivery import BatchMetadata as BatchMetadata
from smq.clients.delivery import BulkDelivery
from smq.clients.delivery import RecordMetadata as RecordMetadata
from smq.clients.partition_queue import PartitionQueue
from smq.clients.partitioner import TopicQueues
from smq.clients.pb import smq_pb2 as pb
from smq.clients.publisher import PRODUCER_BACKOFF, Publisher
from smq.clients.publisher import ProducerStats as ProducerStats
from smq.clients.retry import RandomFn
from smq.clients.tls import Tls
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import CODECS, Headers

AcksName: TypeAlias = Literal["all", "leader", "none"]
_ACKS: Final = {"all": pb.ACKS_ALL, "leader": pb.ACKS_LEADER, "none": pb.ACKS_NONE}

YIELD_EVERY_RECORDS: Final = 4096  # send_many lets the event loop run this often (about 1 ms)


class Producer:
    """`async with Producer("host:port") as p: await p.send("topic", b"value")`.

    send() returns a future immediately; it is cheap, and fails with OVERLOADED while the buffer is full (await
    wait_room()). send_many() is the fast way for many records. A record waits up to `linger_ms` for others to share its
    batch, but only while batches are in flight: an idle producer sends immediately. With `idempotent` (the default)
    every record is stored once and in order, whatever fails; without it a retry may store records twice. `acks="none"`
    implies idempotent=False. delivery_timeout_ms bounds all attempts for a record together, request_timeout_ms one
    attempt.
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
        tls: Tls | None = None,
        random_source: RandomFn = random.random,
    ) -> None:
        idempotent = idempotent and acks != "none"
        _check(acks, compression, max_in_flight, linger_ms, delivery_timeout_ms)
        # Without sequences, a resent batch keeps its place only if one batch is in flight at a time.
        in_flight_max = max_in_flight if idempotent or acks == "none" else 1
        self._request_timeout_ms = request_timeout_ms
        self._cluster = ClusterClient(
            bootstrap, connect_timeout_ms=connect_timeout_ms, random_source=random_source, tls=tls
        )
        settings = BatchingSettings(
            batch_bytes=batch_bytes,
            linger_ms=linger_ms,
            compression=compression,
            buffer_bytes_max=buffer_bytes,
            in_flight_max=in_flight_max,
            delivery_timeout_ms=delivery_timeout_ms,
            is_idempotent=idempotent,
            acks_all=acks == "all",
            backoff=PRODUCER_BACKOFF,
        )
        self._publisher = Publisher(self._cluster, settings, acks=_ACKS[acks], request_timeout_ms=request_timeout_ms)
        self._accumulator = self._publisher.accumulator
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life

    async def start(self) -> None:
        """Finds the cluster. TIMED_OUT if none of the bootstrap addresses answers."""
        self._loop = asyncio.get_running_loop()
        self._publisher.start()
        await self._cluster.start()

    async def __aenter__(self) -> "Producer":
        try:
            await self.start()
        except BaseException:  # cancellation included: __aexit__ is not called if __aenter__ fails
            await self._cluster.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancelled user (Ctrl-C) does not want to wait for a cluster that may be down.
        await self.close(deliver=kind is None or not issubclass(kind, asyncio.CancelledError))

    async def close(self, *, deliver: bool = True) -> None:
        """With `deliver`, first delivers all records sent so far (within the delivery timeout). Then releases
        everything; undelivered records fail."""
        if self._publisher.is_closing:
            return
        try:
            if deliver and self._loop is not None:
                await self.flush()
        finally:
            await self._publisher.close()
            await self._cluster.close()

    @property
    def stats(self) -> ProducerStats:
        return self._publisher.stats

    @property
    def waits_for(self) -> str | None:
        """In words for a person: what start() waits for, then what the oldest records do. None if nothing waits."""
        return self._publisher.waits_for()

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
        """Takes the record. The future gives its offset once it is acknowledged, or the SmqError that ended it.

        OVERLOADED (raised here) while the buffer is full: `await wait_room()` and send again.
        """
        loop = self._usable()
        token: asyncio.Future[RecordMetadata] = loop.create_future()
        when = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        accumulator = self._accumulator
        accumulator.add(self._topic(topic), key, value, headers, partition, when, token, now_ms())
        if accumulator.needs_poll:
            self._publisher.wake()
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
        """The bulk path. Returns once all records are buffered (waiting for space if necessary), with a future of
        their offsets: one BatchMetadata per run of adjacent records. Records of one partition keep their order. The
        future fails with the first error once all records are settled."""
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
            for queue, indexes in groups.items():
                some_keys, some_values = [keys[i] for i in indexes], [values[i] for i in indexes]
                times = when if isinstance(when, int) else [when[i] for i in indexes]
                taken = 0
                while taken < len(indexes):
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
        """Fills at most one batch; returns how many records it took."""
        await self.wait_room()
        self._usable()
        taken = self._accumulator.add_run(queue, keys, values, when, start, YIELD_EVERY_RECORDS, bulk, now_ms())
        if self._accumulator.needs_poll:
            self._publisher.wake()
        await asyncio.sleep(0)
        return taken

    async def wait_room(self) -> None:
        """Waits until the buffer has space for at least one record."""
        while self._accumulator.is_full and not self._publisher.is_closing:
            self._publisher.not_full.clear()
            await self._publisher.not_full.wait()

    async def flush(self) -> None:
        """Waits until every record sent before is acknowledged or failed. Errors are in the records' own futures."""
        loop = self._usable(even_if_fatal=True)
        waiting = [t.future if isinstance(t, BulkDelivery) else t for t in self._accumulator.waiting_tokens()]
        marks: list[asyncio.Future[RecordMetadata]] = [t for t in waiting if isinstance(t, asyncio.Future)]
        for batch in self._accumulator.mark_due():
            mark: asyncio.Future[RecordMetadata] = loop.create_future()
            batch.tokens.append((0, 0, mark))
            marks.append(mark)
        self._publisher.wake()
        if marks:
            await asyncio.wait(marks)

    def _usable(self, *, even_if_fatal: bool = False) -> asyncio.AbstractEventLoop:
        fatal = self._publisher.fatal
        if fatal is not None and not even_if_fatal:
            raise SmqError(fatal.code, fatal.message, fatal.details)
        if self._loop is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the producer is not started: await start() first")
        if self._publisher.is_closing:
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


def _check(acks: str, compression: str, max_in_flight: int, linger_ms: float, delivery_timeout_ms: float) -> None:
    message = None
    if acks not in _ACKS:
        message = f"acks must be one of {', '.join(_ACKS)}, not {acks!r}"
    elif compression not in CODECS:
        message = f"compression must be one of {', '.join(CODECS)}, not {compression!r}"
    elif not 1 <= max_in_flight <= IN_FLIGHT_MAX:
        message = f"max_in_flight must be 1 to {IN_FLIGHT_MAX}: a leader remembers so many batches; got {max_in_flight}"
    elif linger_ms < 0 or delivery_timeout_ms <= linger_ms:
        message = "linger_ms must be >= 0 and below delivery_timeout_ms"
    if message is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, message)


def _check_many(
    values: Sequence[bytes | None], keys: Sequence[bytes | None] | None, times: int | Sequence[int] | None
) -> None:
    """All or nothing: finds a record that cannot be encoded before any is buffered."""
    message = None
    allowed = {bytes, bytearray, memoryview, type(None)}
    if not values:
        message = "send_many needs at least one record"
    elif not set(map(type, values)) <= allowed or (keys is not None and not set(map(type, keys)) <= allowed):
        message = "keys and values must be bytes or None"
    elif keys is not None and len(keys) != len(values):
        message = f"there are {len(values)} values and {len(keys)} keys"
    elif times is not None and not isinstance(times, int) and len(times) != len(values):
        message = f"there are {len(values)} values and {len(times)} timestamps"
    if message is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, message)
