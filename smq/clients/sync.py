"""Blocking versions of producer, consumer and admin, for scripts, notebooks and Spark executors.

Owns one background event loop per process: started on first use, shared by all blocking clients, and started again
after a fork (a forked child has no threads; it must not use clients made before the fork). Users import it.
"""

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, TypeVar

from smq.clients.admin import Admin
from smq.clients.consumer import Assignment, Consumer
from smq.clients.delivery import BatchMetadata
from smq.clients.offset_assigner import OffsetAssigner
from smq.clients.positions import Start
from smq.clients.producer import Producer, ProducerStats, RecordMetadata
from smq.clients.types import (
    ClusterDescription,
    ClusterSetting,
    CommittedOffset,
    ConsumerRecord,
    FetchedRange,
    GroupDescription,
    GroupSummary,
    ListedOffset,
    NodeStatus,
    PartitionRange,
    RawBatch,
    TopicDescription,
    TopicPartition,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import Headers

T = TypeVar("T")

ITERATION_WAIT_MS: Final = 1_000.0  # how long iteration waits before it checks for close()
STOP_TIMEOUT_S: Final = 5.0  # of the loop's thread at exit: it has nothing left to wait for


class _LoopThread:
    """The background loop of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="smq-clients", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self.pid == os.getpid() and self.loop.is_running():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_TIMEOUT_S)


_shared: _LoopThread | None = None
_shared_lock = threading.Lock()


def _loop_thread() -> _LoopThread:
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = _LoopThread()
            atexit.register(_shared.stop)
        return _shared


def _after_fork() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()  # the parent's lock may be held for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _BlockingClient:
    """Runs coroutines on the background loop and waits for them."""

    def __init__(self) -> None:
        self._runner = _loop_thread()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._runner.pid != os.getpid():
            work.close()
            message = "this client was made before the process forked: make a new one in the child"
            raise SmqError(ErrorCode.INVALID_REQUEST, message)
        running = asyncio.run_coroutine_threadsafe(work, self._runner.loop)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            raise


class SyncProducer(_BlockingClient):
    """`with SyncProducer("host:port") as p: p.send("t", b"v").result()`. Options as Producer's."""

    def __init__(self, bootstrap: str | Iterable[str], **options: Any) -> None:
        super().__init__()
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: str | Iterable[str], options: dict[str, Any]) -> None:
        self._producer = Producer(bootstrap, **options)
        await self._producer.__aenter__()

    def __enter__(self) -> "SyncProducer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def stats(self) -> ProducerStats:
        return self._producer.stats

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> "Future[RecordMetadata]":
        """Does not wait for the acknowledgement: call `.result()` of the future for that. Waits while the buffer is
        full. For many records send_many() is far cheaper, because every send() crosses threads."""

        async def work() -> RecordMetadata:
            await self._producer.wait_room()
            return await self._producer.send(topic, value, key, headers, partition, timestamp_ms)

        return asyncio.run_coroutine_threadsafe(work(), self._runner.loop)

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
        timestamp_ms: int | Sequence[int] | None = None,
    ) -> list[BatchMetadata]:
        """Sends all and waits until all are acknowledged."""

        async def work() -> list[BatchMetadata]:
            delivery = await self._producer.send_many(
                topic, values, keys=keys, partition=partition, timestamp_ms=timestamp_ms
            )
            return await delivery

        return self._run(work())

    def flush(self) -> None:
        self._run(self._producer.flush())

    def close(self) -> None:
        self._run(self._producer.close())


class SyncConsumer(_BlockingClient):
    """`with SyncConsumer("host:port") as c: c.assign([("t", 0)]); for r in c: ...`. Options as Consumer's."""

    def __init__(self, bootstrap: str | Iterable[str], **options: Any) -> None:
        super().__init__()
        self._ahead: deque[ConsumerRecord] = deque()  # one batch, for iteration: one call per record would be too slow
        self._is_closed = False
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: str | Iterable[str], options: dict[str, Any]) -> None:
        self._consumer = Consumer(bootstrap, **options)
        await self._consumer.__aenter__()

    def __enter__(self) -> "SyncConsumer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def assign(self, partitions: Assignment, start: Start | None = None) -> dict[TopicPartition, int]:
        self._ahead.clear()
        return self._run(self._consumer.assign(partitions, start))

    def assignment(self) -> list[TopicPartition]:
        return self._consumer.assignment()

    def seek(self, topic: str, partition: int, start: Start) -> int:
        self._discard_ahead()
        return self._run(self._consumer.seek(topic, partition, start))

    def position(self, topic: str, partition: int) -> int:
        """The offset after the last record that was returned."""
        ahead = (r.offset for r in self._ahead if (r.topic, r.partition) == (topic, partition))
        return next(ahead, self._consumer.position(topic, partition))

    def lag(self, topic: str, partition: int) -> int:
        ahead = self._consumer.position(topic, partition) - self.position(topic, partition)
        return self._run(self._consumer.lag(topic, partition)) + ahead

    def commit(self, offsets: Mapping[TopicPartition, int | CommittedOffset] | None = None) -> None:
        """Commits the positions of all assigned partitions, or the given offsets."""
        if offsets is None:
            offsets = {tp: self.position(*tp) for tp in self.assignment()}
        self._run(self._consumer.commit(offsets))

    def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, CommittedOffset]:
        return self._run(self._consumer.committed(partitions))

    def getmany(self, max_records: int = 10_000, timeout_ms: float = 0.0) -> dict[TopicPartition, list[ConsumerRecord]]:
        self._discard_ahead()
        return self._run(self._consumer.getmany(max_records, timeout_ms))

    def getbatch(self, timeout_ms: float = 0.0) -> RawBatch | None:
        self._discard_ahead()
        return self._run(self._consumer.getbatch(timeout_ms))

    def fetch_range(
        self, topic: str, partition: int, offset: int, *, max_bytes: int = 0, max_wait_ms: int = 0
    ) -> FetchedRange:
        return self._run(
            self._consumer.fetch_range(topic, partition, offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms)
        )

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Record by record, for ever; the position follows the last record returned."""

        while not self._is_closed:
            if not self._ahead:
                found = self._run(self._consumer.getmany(1, ITERATION_WAIT_MS))
                self._ahead.extend(record for records in found.values() for record in records)
            while self._ahead and not self._is_closed:
                yield self._ahead.popleft()

    def _discard_ahead(self) -> None:
        """Moves the position back before the records that iteration has read ahead: the next call reads them again."""
        first: dict[TopicPartition, int] = {}
        for record in self._ahead:
            first.setdefault((record.topic, record.partition), record.offset)
        self._ahead.clear()
        for (topic, partition), offset in first.items():
            self._run(self._consumer.seek(topic, partition, offset))

    def close(self) -> None:
        self._is_closed = True
        self._run(self._consumer.close())


class SyncAdmin(_BlockingClient):
    """`with SyncAdmin("host:port") as a: a.create_topic("t", 6)`. Options as Admin's."""

    def __init__(self, bootstrap: str | Iterable[str], **options: Any) -> None:
        super().__init__()
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: str | Iterable[str], options: dict[str, Any]) -> None:
        self._admin = Admin(bootstrap, **options)
        await self._admin.__aenter__()

    def __enter__(self) -> "SyncAdmin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replication_factor: int = 0,
        config: Mapping[str, str] | None = None,
        start_offset: int = 0,
    ) -> bytes:
        return self._run(
            self._admin.create_topic(
                name, partitions, replication_factor=replication_factor, config=config, start_offset=start_offset
            )
        )

    def delete_topic(self, name: str) -> None:
        self._run(self._admin.delete_topic(name))

    def add_partitions(self, name: str, partition_count: int) -> None:
        self._run(self._admin.add_partitions(name, partition_count))

    def alter_topic(self, name: str, *, set: Mapping[str, str] | None = None, unset: Iterable[str] = ()) -> None:
        self._run(self._admin.alter_topic(name, set=set, unset=unset))

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        return self._run(self._admin.delete_records(topic, partition, before_offset))

    def set_node_drained(self, node: int, drained: bool) -> None:
        self._run(self._admin.set_node_drained(node, drained))

    def describe_cluster(self, topics: Iterable[str] = (), *, is_linearizable: bool = True) -> ClusterDescription:
        return self._run(self._admin.describe_cluster(topics, is_linearizable=is_linearizable))

    def list_topics(self) -> list[TopicDescription]:
        return self._run(self._admin.list_topics())

    def describe_topic(self, name: str) -> TopicDescription:
        return self._run(self._admin.describe_topic(name))

    def node_status(self, node: int | str, *, with_digest: bool = False) -> NodeStatus:
        return self._run(self._admin.node_status(node, with_digest=with_digest))

    def partition_range(self, topic: str, partition: int) -> PartitionRange:
        return self._run(self._admin.partition_range(topic, partition))

    def list_offsets(
        self, starts: Mapping[TopicPartition, Start], *, group: str | None = None, reset_if_gone: bool = False
    ) -> dict[TopicPartition, ListedOffset]:
        return self._run(self._admin.list_offsets(starts, group=group, reset_if_gone=reset_if_gone))

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        self._run(self._admin.commit_offsets(group, offsets))

    def fetch_offsets(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        return self._run(self._admin.fetch_offsets(group, partitions))

    def list_groups(self) -> list[GroupSummary]:
        return self._run(self._admin.list_groups())

    def describe_group(self, name: str, *, with_sizes: bool = False) -> GroupDescription:
        return self._run(self._admin.describe_group(name, with_sizes=with_sizes))

    def delete_group(self, name: str) -> None:
        self._run(self._admin.delete_group(name))

    def delete_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._run(self._admin.delete_offsets(group, partitions))

    def cluster_config(self) -> list[ClusterSetting]:
        return self._run(self._admin.cluster_config())

    def alter_cluster_config(self, *, set: Mapping[str, str] | None = None, unset: Sequence[str] = ()) -> None:
        self._run(self._admin.alter_cluster_config(set=set, unset=unset))

    def close(self) -> None:
        self._run(self._admin.close())


class SyncOffsetAssigner(_BlockingClient):
    """`with SyncOffsetAssigner("host:port") as a: base, last = a.assign("t", 0, 5)`. Options as OffsetAssigner's."""

    def __init__(self, bootstrap: str | Iterable[str], **options: Any) -> None:
        super().__init__()
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: str | Iterable[str], options: dict[str, Any]) -> None:
        self._assigner = OffsetAssigner(bootstrap, **options)
        await self._assigner.__aenter__()

    def __enter__(self) -> "SyncOffsetAssigner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def assign(
        self,
        topic: str,
        partition: int,
        count: int = 1,
        *,
        request_id: bytes | None = None,
        not_before: int | None = None,
    ) -> tuple[int, int]:
        return self._run(self._assigner.assign(topic, partition, count, request_id=request_id, not_before=not_before))

    def advance(self, topic: str, partition: int, offset: int) -> int:
        return self._run(self._assigner.advance(topic, partition, offset))

    def close(self) -> None:
        self._run(self._assigner.close())
