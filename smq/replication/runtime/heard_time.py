"""The clock by which a node measures the silence of others: it stops while the node does not run.

A process that got no processor for a second, or whose loop was busy for one, has heard nothing meanwhile. What the
others sent waits unread in the kernel, and timers run before sockets are read. So a silence that the node slept through
must not count: neither for an election, nor for a leader that misses its majority, nor against a node that is to be
fenced.

Owns how much of the time between two looks counts. It must never be used for a promise about time to another node: it
may be slower than the others' clocks. Raft and `nodes.liveness` use it.
"""

from typing import Final

from smq.replication.ports import Clock

_NS_PER_MS: Final = 1_000_000
LOOKS_MIN: Final = 3  # at the clock, with the messages between two of them handled, before a silence means anything
TICKS_MAX: Final = 3  # that count of the time between two looks: a node that is later than that lacks processor time


class HeardTime:
    """Advances between two looks by some ticks at most, and by a part of `silence_ms`, the shortest silence that it is
    to measure. So on a machine that is too busy it is slow: there the others get no processor for long, either. But it
    also ends the wait of a node that is always late. Its user looks at each tick."""

    def __init__(self, clock: Clock, silence_ms: int, tick_ms: int) -> None:
        self._clock = clock
        self._step_ns_max = min(silence_ms * _NS_PER_MS // LOOKS_MIN, TICKS_MAX * tick_ms * _NS_PER_MS)
        self._looked_ns = clock.monotonic_ns()
        self._now_ns = self._looked_ns

    def now_ns(self) -> int:
        looked_ns = self._clock.monotonic_ns()
        self._now_ns += min(looked_ns - self._looked_ns, self._step_ns_max)
        self._looked_ns = looked_ns
        return self._now_ns
