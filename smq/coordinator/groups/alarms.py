"""Wakes the live groups when something of theirs runs out, all with one timer.

Owns the order of their due times. It must never decide what has run out: the coordinator asks the group. Only the
coordinator uses it.
"""

import heapq
from collections.abc import Callable
from typing import Final

from smq.coordinator.groups.live import LiveGroup
from smq.coordinator.groups.sessions import NEVER_NS
from smq.replication.ports import Clock, Timer

_NS_PER_MS: Final = 1_000_000
# An event loop may run its timers before it reads its sockets. Heartbeats that have arrived by the deadline are read
# and handled within this time.
_LATE_MS: Final = 1.0


class Alarms:
    """`ring` is called a moment after a group's due time; it takes the groups by `due`."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._heap: list[tuple[int, int, LiveGroup]] = []  # a few entries per live group
        self._tie = 0
        self._timer: Timer | None = None
        self._timer_ns = NEVER_NS

    def set(self, group: LiveGroup, *, not_before_ns: int = 0) -> None:
        """Something of the group is due at its `due_ns`, which may be earlier than before."""
        at_ns = max(group.due_ns, not_before_ns)
        if at_ns < group.alarm_ns:
            group.alarm_ns = at_ns
            self._tie += 1
            heapq.heappush(self._heap, (group.alarm_ns, self._tie, group))
            self._start_timer()

    def due(self, now_ns: int) -> list[LiveGroup]:
        """The groups whose due time has come. The caller sets the alarm of each again."""
        due = []
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, group = heapq.heappop(self._heap)
            if at_ns == group.alarm_ns:  # otherwise an earlier alarm has replaced it
                group.alarm_ns = NEVER_NS
                due.append(group)
        self._start_timer()
        return due

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _start_timer(self) -> None:
        at_ns = self._heap[0][0] if self._heap else NEVER_NS
        if at_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = at_ns
        if at_ns != NEVER_NS:
            after_ms = max(0.0, (at_ns - self._clock.monotonic_ns()) / _NS_PER_MS) + _LATE_MS
            self._timer = self._clock.call_later(after_ms, lambda: self._clock.call_soon(self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_ns = NEVER_NS
        self._ring()
