"""Deadlines without a timer each: buckets that the node's tick empties.

Owns the only way a waiting request times out. The resolution is the node's tick: fine for time-outs, and
nothing else may wait for it.
"""

import heapq
from collections.abc import Callable
from typing import Final

_BUCKET_NS: Final = 10_000_000  # 10 ms: finer than the tick buys nothing


class Deadline:
    """One deadline that can be cancelled."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self.fn = None


class Deadlines:
    """Bounded by its users: each entry belongs to a request that has its own bound."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Deadline]] = {}
        self._order: list[int] = []  # a heap of the buckets' numbers

    def add(self, at_ns: int, fn: Callable[[], None]) -> Deadline:
        """Runs fn in the first tick after `at_ns` (monotonic)."""
        deadline = Deadline(fn)
        number = at_ns // _BUCKET_NS
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = []
            heapq.heappush(self._order, number)
        bucket.append(deadline)
        return deadline

    def run(self, now_ns: int) -> None:
        """Runs everything due, in order of time, then of registration."""
        while self._order and (self._order[0] + 1) * _BUCKET_NS <= now_ns:
            for deadline in self._buckets.pop(heapq.heappop(self._order)):
                if deadline.fn is not None:
                    deadline.fn()
