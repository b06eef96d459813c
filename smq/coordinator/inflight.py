"""Backpressure: how many bytes, or places, may be taken at once.

Owns one counter with waiters in order. Everything on the loop's thread; it knows no wire format.
"""

import asyncio
from collections import deque
from typing import Final


class ByteBudget:
    """First come, first served. One piece larger than the whole budget goes alone."""

    def __init__(self, bytes_max: int) -> None:
        self._max: Final = bytes_max
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # at most one per stream

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def is_idle(self) -> bool:
        """Nobody holds any, nor waits for some."""
        return self._used == 0 and not self._waiting

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    def take(self, size: int) -> None:
        """Counts what is there already, whether it fits or not."""
        self._used += size

    def try_acquire(self, size: int) -> bool:
        """Without waiting; False while others wait."""
        if self._waiting or not self._fits(size):
            return False
        self._used += size
        return True

    async def acquire(self, size: int) -> None:
        """Waits until `size` bytes fit."""
        if self.try_acquire(size):
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(size)  # it was granted in the very moment of the cancellation
            elif (size, place) in self._waiting:
                self._waiting.remove((size, place))
                self._grant()
            raise

    def release(self, size: int) -> None:
        self._used -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self._used + size <= self._max or self._used == 0

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, place = self._waiting.popleft()
            if not place.done():
                self._used += size
                place.set_result(None)
