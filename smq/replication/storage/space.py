"""Whether this node's disk has room for records: the reserve that Raft goes on with when it has not.

Owns the judgement, and what a producer is told. Appends stop while the disk still has the reserve, so that elections,
commits of groups, deletions and snapshots go on, and LMDB does not meet a full disk. It must never stop a read. The
node asks before every append; nobody else writes records.
"""

from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.replication.ports import Disk, Space

LOOKS_A_RESERVE: Final = 16  # a sixteenth of the reserve appended since the last look: look again, whatever the time
RETRY_MS: Final = 1_000  # what a producer is told: space is seldom freed sooner


class SpaceGuard:
    """Full once less than the reserve is free, until an eighth more is.

    Pages that LMDB has freed inside its file count where they make up a reserve by themselves, for deleting records
    makes no other room. But a large batch needs pages that lie together, so half of the reserve must be free outside.
    """

    def __init__(self, disk: Disk, reserve_bytes: int) -> None:
        self._disk = disk
        self._unseen = 0
        self.reserve_bytes = reserve_bytes
        self.is_full = False
        self.space = Space(free_bytes=0, reusable_bytes=0)  # as of the last look

    def look(self) -> None:
        """Asks the disk: some 20 microseconds."""
        self._unseen = 0
        self.space = self._disk.space()
        queued = self._disk.queued_bytes  # as good as written
        wanted = self.reserve_bytes + (self.reserve_bytes // 8 if self.is_full else 0)
        outside, inside = self.space.free_bytes - queued, self.space.reusable_bytes
        self.is_full = outside < wanted and not (outside >= wanted // 2 and inside >= wanted)

    def admits(self, size: int) -> bool:
        """Whether so many bytes of records may be appended."""
        self._unseen += size
        if self._unseen > self.reserve_bytes // LOOKS_A_RESERVE:
            self.look()
        return not self.is_full

    def refusal(self, node: int) -> SmqError:
        space = self.space
        message = (
            f"node {node} has {space.free_bytes >> 20} MiB left on its disk and {space.reusable_bytes >> 20} MiB in "
            f"its file, its reserve is {self.reserve_bytes >> 20} MiB: delete topics or records, or free space on that "
            "disk; writes then resume by themselves"
        )
        return SmqError(ErrorCode.STORAGE_FULL, message, ErrorDetails(retry_after_ms=RETRY_MS))
