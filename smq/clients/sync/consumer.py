"""The blocking consumer.

Owns what iteration has read ahead, and what a poll that Ctrl-C has ended had taken already. The loop's thread puts it
there, so that no record is lost between the threads. Users import it through `smq.clients`.
"""

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from itertools import chain
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar, Unpack

from smq.clients.arguments import Duration, Instant
from smq.clients.consumer import Assignment, Consumer, ConsumerOptions, End
from smq.clients.forked import check_owner
from smq.clients.groups.subscribing import OnPartitions, Resume
from smq.clients.metadata import Servers
from smq.clients.positions import Start
from smq.clients.search import RecordFilter, SearchPage
from smq.clients.sync.background_loop import BlockingClient, Call, Running, documented_as
from smq.clients.types import (
    CommittedOffset,
    ConsumerRecord,
    FetchedRange,
    GroupMembership,
    RawBatch,
    TopicPartition,
)
from smq.raft_state.errors import ErrorCode, SmqError

T = TypeVar("T")

OnPartitionsSync: TypeAlias = Callable[[list[TopicPartition]], object]

ITERATION_WAIT_MS: Final = 1_000.0  # how long iteration waits before it checks for close()


@documented_as(Consumer)
class SyncConsumer(BlockingClient):
    """`with SyncConsumer("host:port") as c: c.assign([("t", 0)]); for r in c: ...`. Options as Consumer's."""

    def __init__(self, bootstrap: Servers | None = None, **options: Unpack[ConsumerOptions]) -> None:
        super().__init__()
        self._ahead: deque[ConsumerRecord] = deque()  # one batch, for iteration: one call per record would be too slow
        self._raw_ahead: RawBatch | None = None  # for getbatch()
        self._is_closed = False
        self._run(self._make(bootstrap, options))

    async def _make(self, bootstrap: Servers | None, options: ConsumerOptions) -> None:
        self._consumer = Consumer(bootstrap, **options)
        await self._consumer.__aenter__()

    def assign(
        self,
        partitions: Assignment,
        start: Start | None = None,
        *,
        end_offset: End | None = None,
        until_ms: Instant | None = None,
    ) -> dict[TopicPartition, int]:
        self._discard_ahead()
        return self._run(self._consumer.assign(partitions, start, end_offset=end_offset, until_ms=until_ms))

    def subscribe(
        self,
        topics: str | Iterable[str],
        *,
        start: Resume = "RESUME_OR_EARLIEST",
        on_assigned: OnPartitionsSync | None = None,
        on_revoked: OnPartitionsSync | None = None,
        on_lost: OnPartitionsSync | None = None,
    ) -> None:
        """As Consumer.subscribe, with its errors (UNKNOWN_TOPIC, INVALID_REQUEST). The callbacks are functions, and run
        in the thread that polls."""
        self._run(
            self._consumer.subscribe(
                topics,
                start=start,
                on_assigned=_in_caller(on_assigned),
                on_revoked=_in_caller(on_revoked),
                on_lost=_in_caller(on_lost),
            )
        )

    def unsubscribe(self) -> None:
        self._discard_ahead()
        self._poll(self._consumer.unsubscribe())

    def subscription(self) -> list[str]:
        self._check_usable()
        return self._consumer.subscription()

    def membership(self) -> GroupMembership:
        self._check_usable()
        return self._consumer.membership()

    def _poll(self, work: Coroutine[Any, Any, T]) -> T:
        """For calls that may run the callbacks of a subscription."""
        return wait_for_result(self._running(work))

    @property
    def is_finished(self) -> bool:
        """Every assigned partition has an end, and everything before it has been returned."""
        return not self._ahead and self._raw_ahead is None and self._consumer.is_finished

    def assignment(self) -> list[TopicPartition]:
        self._check_usable()
        return self._consumer.assignment()

    def seek(self, topic: str, partition: int, start: Start) -> int:
        self._discard_ahead()
        return self._run(self._consumer.seek(topic, partition, start))

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._discard_ahead()
        self._run(self._consumer.pause(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._run(self._consumer.resume(partitions))

    def paused(self) -> list[TopicPartition]:
        self._check_usable()
        return self._consumer.paused()

    def position(self, topic: str, partition: int) -> int:
        """The offset after the last record that was returned. INVALID_REQUEST for a partition that is not assigned."""
        self._check_usable()
        raw = self._raw_ahead
        if raw is not None and (raw.topic, raw.partition) == (topic, partition):
            return raw.base_offset
        ahead = (r.offset for r in self._ahead if (r.topic, r.partition) == (topic, partition))
        return next(ahead, self._consumer.position(topic, partition))

    def lag(self, topic: str, partition: int) -> int:
        ahead = self._consumer.position(topic, partition) - self.position(topic, partition)
        return self._run(self._consumer.lag(topic, partition)) + ahead

    def commit(self, offsets: Mapping[TopicPartition, int | CommittedOffset] | None = None) -> None:
        self._check_usable()
        self._run(self._commit() if offsets is None else self._consumer.commit(offsets))

    async def _commit(self) -> None:
        """The loop takes the positions: there a reset cannot come in between."""
        await self._consumer.commit(self._consumer.resume_positions(self._first_ahead()))

    def committed(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, CommittedOffset]:
        return self._run(self._consumer.committed(partitions))

    def getmany(
        self, max_records: int = 10_000, timeout_ms: Duration = 0.0
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        self._discard_ahead()
        found = self._poll(self._read_ahead(max_records, timeout_ms))
        self._ahead.clear()
        return found

    async def _read_ahead(self, max_records: int, timeout_ms: Duration) -> dict[TopicPartition, list[ConsumerRecord]]:
        found = await self._consumer.getmany(max_records, timeout_ms)
        self._ahead.extend(chain.from_iterable(found.values()))
        return found

    def getbatch(self, timeout_ms: Duration = 0.0) -> RawBatch | None:
        self._discard_ahead()
        found = self._poll(self._read_batch_ahead(timeout_ms))
        self._raw_ahead = None
        return found

    async def _read_batch_ahead(self, timeout_ms: Duration) -> RawBatch | None:
        self._raw_ahead = found = await self._consumer.getbatch(timeout_ms)
        return found

    def fetch_range(
        self, topic: str, partition: int, offset: int, *, max_bytes: int = 0, max_wait_ms: int = 0
    ) -> FetchedRange:
        return self._run(
            self._consumer.fetch_range(topic, partition, offset, max_bytes=max_bytes, max_wait_ms=max_wait_ms)
        )

    def search_page(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        start: Start = "RESET_TO_EARLIEST",
        end_offset: int | None = None,
        cursor: bytes | None = None,
        max_records: int = 0,
    ) -> SearchPage:
        return self._run(
            self._consumer.search_page(
                topic,
                partition,
                wanted,
                start=start,
                end_offset=end_offset,
                cursor=cursor,
                max_records=max_records,
            )
        )

    def search(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        start: Start = "RESET_TO_EARLIEST",
        end_offset: int | None = None,
        follow: bool = False,
    ) -> Iterator[ConsumerRecord]:
        pages = self._consumer.search_pages(topic, partition, wanted, start=start, end_offset=end_offset, follow=follow)
        while (page := self._run(_next(pages))) is not None:
            yield from page.records

    def __iter__(self) -> Iterator[ConsumerRecord]:
        """Record by record, for ever or to the ends; the position follows the last record returned. CLIENT_CLOSED after
        close()."""
        while True:
            self._check_usable()
            if self._raw_ahead is not None or (self._ahead and self._consumer.is_read_ahead_void()):
                self._discard_ahead()
            if self._ahead:
                yield self._ahead.popleft()
            elif self.is_finished:
                return
            else:
                self._poll(self._read_ahead(1, ITERATION_WAIT_MS))

    def _check_usable(self) -> None:
        """CLIENT_CLOSED, FORKED."""
        check_owner(self._runner.pid)
        if self._is_closed:
            raise SmqError(ErrorCode.CLIENT_CLOSED, "the consumer is closed")

    def _discard_ahead(self) -> None:
        """Moves the position back to before the records that were read ahead: the next call reads them again."""
        if self._ahead or self._raw_ahead is not None:
            self._run(self._rewind())

    async def _rewind(self) -> None:
        """One step of the loop: Ctrl-C comes before it or after it."""
        first = self._first_ahead()
        self._ahead.clear()
        self._raw_ahead = None
        await self._consumer.rewind(first)

    def _first_ahead(self) -> dict[TopicPartition, int]:
        first: dict[TopicPartition, int] = {}
        if self._raw_ahead is not None:
            first[self._raw_ahead.topic, self._raw_ahead.partition] = self._raw_ahead.base_offset
        for record in self._ahead:
            first.setdefault((record.topic, record.partition), record.offset)
        return first

    def close(self, *, commit: bool = True) -> None:
        """As Consumer.close. Every later call raises CLIENT_CLOSED."""
        if not self._is_closed:
            self._discard_ahead()
        try:
            self._poll(self._consumer.close(commit=commit))  # its callbacks may use this consumer
        finally:
            self._is_closed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)


def _in_caller(callback: OnPartitionsSync | None) -> OnPartitions | None:
    return None if callback is None else in_waiting_thread(callback)


async def _next(pages: AsyncIterator[T]) -> T | None:
    return await anext(pages, None)


Q = TypeVar("Q")

# In the context that a coroutine begins with: so it finds the thread that waits for it.
_calls: Final[ContextVar[queue.SimpleQueue[Call]]] = ContextVar("calls for the thread that waits")


def wait_for_result(running: Running[T]) -> T:
    """Begins a coroutine and waits for its end, also on Ctrl-C. Its callbacks run here meanwhile, and may wait in the
    same way."""
    context = copy_context()
    context.run(_calls.set, running.calls)
    return running.wait(context)


def in_waiting_thread(callback: Callable[[Q], object]) -> Callable[[Q], Awaitable[None]]:
    """The callback for the event loop: it runs in the waiting thread, and its error is raised by the await."""

    async def run(argument: Q) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            error: Exception | None = None
            try:
                callback(argument)
            except Exception as e:  # noqa: BLE001 - it is raised where the callback was awaited
                error = e
            loop.call_soon_threadsafe(_finish, done, error)

        _calls.get().put(call)
        await done

    return run


def _finish(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.done():
        return  # the call was cancelled meanwhile
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
