"""Backpressure: how many bytes, or places, may be taken at once.

Owns one counter with waiters in order. Everything on the loop's thread; it knows no wire format.
"""

import asyncio
from collections import OrderedDict
from typing import Final


class ByteBudget:
    """First come, first served. One piece larger than the whole budget goes alone."""

    def __init__(self, bytes_max: int) -> None:
        self._max: Final = bytes_max
        self._used = 0
        # At most one per stream. A dict's own order has a price: its beginning is slow to find where much has gone.
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def is_idle(self) -> bool:
        """Nobody holds any, nor waits for some."""
        return self._used == 0 and not self._waiting

    @property
    def waiters(self) -> int:
        return len(self._waiting)

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
        self._waiting[place] = size
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(size)  # it was granted in the very moment of the cancellation
            elif self._waiting.pop(place, None) is not None:
                self._grant()
            raise

    def release(self, size: int) -> None:
        self._used -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self._used + size <= self._max or self._used == 0

    def _grant(self) -> None:
        while self._waiting and self._fits(next(iter(self._waiting.values()))):
            place, size = self._waiting.popitem(last=False)
            if not place.done():
                self._used += size
                place.set_result(None)
