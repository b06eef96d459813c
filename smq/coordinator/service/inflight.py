"""Backpressure: how many bytes, or places, may be in use at the same time.

Owns the one budget of the server, the rule that several budgets are taken together or not at all, and the error for a
budget that stays full. Everything runs on the loop's thread. Knows no wire format; services import it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from smq.coordinator.limits import OVERLOADED_RETRY_AFTER_MS
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError


class ByteBudget:
    """First come, first served. A piece larger than the whole budget is admitted alone."""

    def __init__(self, bytes_max: int) -> None:
        self._max: Final = bytes_max
        self._used = 0
        # At most one per stream. Not a plain dict: finding its first entry is slow after many removals.
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def is_idle(self) -> bool:
        """Nothing is held, and nothing waits."""
        return self._used == 0 and not self._waiting

    @property
    def waiters(self) -> int:
        return len(self._waiting)

    def take(self, size: int) -> None:
        """Counts bytes that are already in memory, whether they fit or not."""
        self._used += size

    def try_acquire(self, size: int) -> bool:
        """Never waits; False while others wait."""
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
                self.release(size)  # granted in the very moment of the cancellation
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


def try_acquire_all(budgets: Sequence[ByteBudget], size: int) -> bool:
    """`size` bytes of each budget, or of none. Never waits."""
    for count, budget in enumerate(budgets):
        if not budget.try_acquire(size):
            release_all(budgets[:count], size)
            return False
    return True


async def acquire_all(budgets: Sequence[ByteBudget], size: int) -> None:
    """Waits for `size` bytes of each budget, one after the other. Holds none of them if it is cancelled."""
    for count, budget in enumerate(budgets):
        try:
            await budget.acquire(size)
        except asyncio.CancelledError:
            release_all(budgets[:count], size)
            raise


def release_all(budgets: Sequence[ByteBudget], size: int) -> None:
    for budget in reversed(budgets):
        budget.release(size)


def overloaded(reason: str) -> SmqError:
    """A budget stayed full: nothing happened, and the client should try again a little later."""
    return SmqError(ErrorCode.OVERLOADED, reason, ErrorDetails(retry_after_ms=OVERLOADED_RETRY_AFTER_MS))
