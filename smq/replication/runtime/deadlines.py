"""Deadlines without one timer each: buckets that a tick empties.

Owns the only way in which a waiting request times out: the node's by its tick, the services' by theirs. The resolution
is the tick: good enough for timeouts, and nothing else may use it.
"""

import heapq
from collections.abc import Callable
from typing import Final

_BUCKET_NS: Final = 10_000_000  # 10 ms: a resolution finer than the tick buys nothing


class Deadline:
    """One deadline that can be cancelled."""

    __slots__ = ("_bucket", "fn")

    def __init__(self, fn: Callable[[], None], bucket: dict["Deadline", None]) -> None:
        self.fn: Callable[[], None] | None = fn
        self._bucket = bucket

    def cancel(self) -> None:
        """Frees the entry immediately: most requests end long before their deadline."""
        self.fn = None
        self._bucket.pop(self, None)


class Deadlines:
    """Bounded by its users: each entry belongs to a request that has its own bound."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Deadline, None]] = {}
        self._order: list[int] = []  # a heap of the buckets' numbers

    def add(self, at_ns: int, fn: Callable[[], None]) -> Deadline:
        """Runs fn in the first tick after `at_ns` (monotonic)."""
        number = at_ns // _BUCKET_NS
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._order, number)
        deadline = Deadline(fn, bucket)
        bucket[deadline] = None
        return deadline

    @property
    def is_empty(self) -> bool:
        """No bucket is left: neither a pending deadline nor a cancelled one that is still ahead."""
        return not self._order

    def run(self, now_ns: int) -> None:
        """Runs everything due, in order of time, then of registration."""
        while self._order and (self._order[0] + 1) * _BUCKET_NS <= now_ns:
            for deadline in list(self._buckets.pop(heapq.heappop(self._order))):
                if deadline.fn is not None:
                    deadline.fn()
