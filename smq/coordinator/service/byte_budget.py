"""Backpressure: how many bytes, or places, may be in use at the same time.

Owns the one budget of the server, the rule that several budgets are taken together or not at all, the bytes that all
Kafka connections of a node hold together, and the error for a budget that stays full. Everything runs on the loop's
thread. Knows no wire format; services import it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from smq.coordinator.limits import (
    KAFKA_ARRIVING_BYTES_PER_NODE_MAX,
    KAFKA_BUDGET_WAIT_S_MAX,
    KAFKA_INFLIGHT_BYTES_PER_NODE_MAX,
    KAFKA_READING_BYTES_PER_NODE_MAX,
    OVERLOADED_RETRY_AFTER_MS,
)
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError


class ByteBudget:
    """First come, first served. A piece must fit, but one larger than the whole budget is admitted alone. With
    `may_overshoot` a piece is admitted whenever the budget is not full, so the last one may exceed the bound."""

    def __init__(self, bytes_max: int, *, may_overshoot: bool = False) -> None:
        self._max = bytes_max
        self._may_overshoot = may_overshoot
        self._used = 0
        self._is_granting = False
        self._listeners: dict[Callable[[], None], None] = {}
        # At most one per stream. Not a plain dict: finding its first entry is slow after many removals.
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def is_full(self) -> bool:
        return self._used >= self._max

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
                self._grant_soon()
            raise

    def release(self, size: int) -> None:
        self._used -= size
        self._grant_soon()

    def notify_when_free(self, listener: Callable[[], None]) -> None:
        """Calls `listener` once, when the budget is no longer full and everything that waits in `acquire` is served."""
        self._listeners[listener] = None

    def forget(self, listener: Callable[[], None]) -> None:
        self._listeners.pop(listener, None)

    def _fits(self, size: int) -> bool:
        if self._may_overshoot:
            return not self.is_full
        return self._used + size <= self._max or self._used == 0

    def _grant_soon(self) -> None:
        """Not immediately: the reservation for an answer is released just before the answer itself is counted."""
        if (self._waiting or self._listeners) and not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._is_granting = False
        while self._waiting and self._fits(next(iter(self._waiting.values()))):
            place, size = self._waiting.popitem(last=False)
            if not place.done():
                self._used += size
                place.set_result(None)
        if self._listeners and not self._waiting and not self.is_full:
            listeners, self._listeners = self._listeners, {}
            for listener in listeners:
                listener()


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


class InflightBytes(ByteBudget):
    """Of all Kafka connections of a node. These count: requests that have begun to arrive, answers that are being read
    from the log, and answers that their clients have not taken yet. A fetch that waits for records holds nothing and
    costs nothing. On a full node no connection is read, except in the middle of a request, and no answer is read from
    the log: after a while a fetch gets an empty answer, which ends its wait and that of the answers behind it. Answers
    that are being read hold no more than a share, however slow the disk is: they alone never make the node full. The
    last request or answer may exceed the bound, because otherwise nothing that large could ever be served."""

    def __init__(self, bytes_max: int = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX) -> None:
        super().__init__(bytes_max, may_overshoot=True)
        reading = ByteBudget(KAFKA_READING_BYTES_PER_NODE_MAX, may_overshoot=True)
        self.arriving = ByteBudget(KAFKA_ARRIVING_BYTES_PER_NODE_MAX, may_overshoot=True)  # of large requests
        self._for_reading = (reading, self)  # the share first: waiting for it takes no room from others

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Reserves `size` bytes for the length of a block, as soon as neither the node nor its share for
        reading is full. OVERLOADED if that takes too long: the disk may be slow, or the bytes may be held by answers
        that wait, on their own connection, behind this very one."""
        if not try_acquire_all(self._for_reading, size):
            try:
                async with asyncio.timeout(KAFKA_BUDGET_WAIT_S_MAX):  # a timer, but only then
                    await acquire_all(self._for_reading, size)
            except TimeoutError:
                raise overloaded(f"no room for an answer within {KAFKA_BUDGET_WAIT_S_MAX} s") from None
        try:
            yield
        finally:
            release_all(self._for_reading, size)
