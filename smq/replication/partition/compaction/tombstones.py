"""When the tombstones of a segment may go: `delete.retention.ms` after no replica has what they delete.

Owns the stamps of segments with tombstones. A pass that removes what a tombstone deletes removes it from the leader. A
replica that was away serves it until its own segments are in line, which may be long after that. So the time begins
once all replicas were found in step, by a stamp that is replicated: it goes on when the leader changes. The
compaction's passes alone use it.
"""

from typing import Final

from smq.raft_state.state import NOT_IN_STEP_MS, Segment
from smq.raft_state.topic_config import Compaction
from smq.replication.host import Host

STAMP_AHEAD_MS_MAX: Final = 600_000  # the longest step of the replicated clock


def stamp_ms(host: Host) -> int:
    """From now on, tombstones are kept for their time, which is the replicated clock's. That moves in steps and may be
    behind, so this node's clock counts, too, within bounds: a tombstone goes too early only while the replicated clock
    catches up after the whole cluster was down, at twice the speed, and none stays much too long."""
    clock_ms, wall_ms = host.state.expiry_clock_ms, host.clock.wall_ns() // 1_000_000
    return max(1, clock_ms, min(wall_ms, clock_ms + STAMP_AHEAD_MS_MAX) if clock_ms else wall_ms)


def is_waiting(segment: Segment) -> bool:
    """Whether the time of its tombstones has not begun. That of a dirty one's begins after it has been cleaned."""
    return segment.tombstones_ms == NOT_IN_STEP_MS and not segment.is_dirty


def is_expired(segment: Segment, limits: Compaction, now_ms: int) -> bool:
    """Whether its tombstones have been kept for long enough."""
    is_clean = segment.tombstones_ms > 0 and not segment.is_dirty
    return is_clean and now_ms - segment.tombstones_ms >= limits.tombstones_ms


def is_alike(first: Segment, next_: Segment, limits: Compaction, now_ms: int, *, drops: bool) -> bool:
    """Whether two neighbours may become one segment."""
    return first.is_dirty == next_.is_dirty and (not drops or is_expired(next_, limits, now_ms))
