"""What readers hold while their clients take what was read, and the threads on which records are decoded.

Owns the bound on the memory of all subscriptions of a node, and who gives it back: a stream whose client does not read
loses what it has opened, as soon as another one needs the room, and reads it again later. Owns the threads, because no
record is decoded on the event loop. It must never know what is read. Services import it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Generic, TypeVar

from smq.coordinator.limits import (
    DECODE_THREADS,
    SUBSCRIBE_BYTES_MIN,
    SUBSCRIBE_COPIES,
    SUBSCRIBE_LARGE_MAX,
    SUBSCRIBE_LEASE_S,
    SUBSCRIBE_OPEN_BYTES_PER_NODE_MAX,
    SUBSCRIBE_SENDING_BYTES_PER_NODE_MAX,
    SUBSCRIBE_SHARE,
)
from smq.coordinator.service.byte_budget import ByteBudget

T = TypeVar("T")

STREAMS: Final = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="smq-decode-streams")
PAGES: Final = ThreadPoolExecutor(DECODE_THREADS, thread_name_prefix="smq-decode-pages")  # of searches, of the console


async def on_thread(threads: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """The result of a job that may take long. Python lets the loop go on meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(threads, job)


class Lease(Generic[T]):
    """Some of the memory, for `held`. It may be taken back whenever its holder waits, unless `is_busy`: then `held` is
    None, and `is_over` is True."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.since_s = asyncio.get_running_loop().time()
        self.held: T | None = None
        self.is_busy = False
        self.is_over = False


class ReaderMemory(Generic[T]):
    def __init__(
        self, *, open_bytes_max: int = SUBSCRIBE_OPEN_BYTES_PER_NODE_MAX, lease_s: float = SUBSCRIBE_LEASE_S
    ) -> None:
        self._open = ByteBudget(open_bytes_max)
        self._sending = ByteBudget(SUBSCRIBE_SENDING_BYTES_PER_NODE_MAX)
        self.large = ByteBudget(SUBSCRIBE_LARGE_MAX)  # places of responses with one large record
        self._lease_s: Final = lease_s
        self._leases: dict[Lease[T], None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used_bytes(self) -> int:
        return self._open.used_bytes + self._sending.used_bytes

    @property
    def response_bytes_max(self) -> int:
        """Streams that do not read make the responses of all others smaller, and do not keep them from being sent."""
        left = SUBSCRIBE_SENDING_BYTES_PER_NODE_MAX - self._sending.used_bytes
        return max(left // SUBSCRIBE_SHARE, SUBSCRIBE_BYTES_MIN)

    @asynccontextmanager
    async def lease(self, size: int) -> AsyncIterator[Lease[T]]:
        """Waits for the room. A caller that already holds some could wait for itself."""
        if size and not self._open.try_acquire(size):
            self._reclaim_later()
            await self._open.acquire(size)
        lease = Lease[T](size)
        self._leases[lease] = None
        try:
            yield lease
        finally:
            self._end(lease)

    def resize(self, lease: Lease[T], size: int) -> bool:
        """False, and nothing changes, if there is no room for it now, or the lease is over."""
        if lease.is_over or (size > lease.size and not self._open.try_acquire(size - lease.size)):
            return False
        if size < lease.size:
            self._open.release(lease.size - size)
        lease.size = size
        return True

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Counts a response of `size` bytes for the length of a block."""
        held = SUBSCRIBE_COPIES * size
        self._sending.take(held)
        try:
            yield
        finally:
            self._sending.release(held)

    def _end(self, lease: Lease[T]) -> None:
        if not lease.is_over:
            lease.is_over, lease.held = True, None
            del self._leases[lease]
            self._open.release(lease.size)

    def _reclaim_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._lease_s / 4, self._reclaim)

    def _reclaim(self) -> None:
        """Takes back what is old enough: as long as some wait."""
        self._timer = None
        if not self._open.waiters:
            return
        old_s = asyncio.get_running_loop().time() - self._lease_s
        for lease in [each for each in self._leases if each.since_s <= old_s and not each.is_busy]:
            self._end(lease)
        self._reclaim_later()
