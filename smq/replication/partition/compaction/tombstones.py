"""When the tombstones of a led partition may go: `delete.retention.ms` after no replica has had what they delete.

Owns the times at which all replicas were found in step, in memory only: a new leader begins without any, so tombstones
stay longer. A stamp says when the leader's bytes had lost what a tombstone deletes. A replica that was away serves it
until its own segments are in line, which may be long after that. It must never take replicas for in step with a segment
that was agreed after they were asked. Time is the replicated clock's. The compaction's passes alone use it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from smq.raft_state.ids import Epoch
from smq.raft_state.state import Segment
from smq.raft_state.topic_config import Compaction
from smq.replication.host import Host

STAMP_AHEAD_MS_MAX: Final = 600_000  # the longest step of the replicated clock
QUESTIONS_PER_TIME: Final = 10  # in each `delete.retention.ms`, so tombstones stay longer by about a tenth of it


class InStepTimes:
    """Of one partition, in the epoch in which it is led."""

    def __init__(self, host: Host, epoch: Epoch) -> None:
        self.epoch = epoch
        self._host = host
        self._found_ms: list[int] = []  # ascending
        self._asked_ms = 0

    def stamp_ms(self) -> int:
        """For tombstones that are kept for their time from now on: later than any time in the list, whatever the clocks
        do. The replicated clock moves in steps and may be behind, so this node's clock counts, too, within bounds: no
        tombstone goes too early, and none stays much too long."""
        clock_ms, wall_ms = self._host.state.expiry_clock_ms, self._host.clock.wall_ns() // 1_000_000
        now_ms = min(wall_ms, clock_ms + STAMP_AHEAD_MS_MAX) if clock_ms else wall_ms
        return max(1, clock_ms, now_ms, self._last_ms + 1)

    def expired_ms(self, limits: Compaction) -> int:
        """Tombstones with this stamp or an older one have been kept for long enough. 0: none."""
        number = bisect_right(self._found_ms, self._host.state.expiry_clock_ms - limits.tombstones_ms)
        del self._found_ms[: max(0, number - 1)]
        return self._found_ms[0] if number else 0

    def asks(self, segments: Sequence[Segment], limits: Compaction) -> bool:
        """Whether to ask now if all replicas are in step: before tombstones go, and from time to time until the answer
        has been yes for the newest. Not before the replicated clock has a time, for nothing bounds a wrong one then."""
        if not self._host.state.expiry_clock_ms:
            return False
        expired_ms = self.expired_ms(limits)
        is_due = self.stamp_ms() - self._asked_ms >= limits.tombstones_ms // QUESTIONS_PER_TIME
        is_asking = any(is_expired(s, expired_ms) or (is_due and s.tombstones_ms > self._last_ms) for s in segments)
        if is_asking:
            self._asked_ms = self.stamp_ms()
        return is_asking

    def note_in_step(self, limits: Compaction) -> None:
        """All replicas are, with every segment that has been agreed."""
        now_ms = self.stamp_ms()
        if now_ms - self._last_ms >= limits.tombstones_ms // QUESTIONS_PER_TIME:  # so the list is short
            self._found_ms.append(now_ms)

    @property
    def _last_ms(self) -> int:
        return self._found_ms[-1] if self._found_ms else 0


def is_expired(segment: Segment, expired_ms: int) -> bool:
    """Whether its tombstones have been kept for long enough."""
    return 0 < segment.tombstones_ms <= expired_ms and not segment.is_dirty


def is_alike(first: Segment, next_: Segment, *, drops: bool, expired_ms: int) -> bool:
    """Whether two neighbours may become one segment."""
    return first.is_dirty == next_.is_dirty and (not drops or is_expired(next_, expired_ms))
