"""Whether this node's disk has space for records. On a full disk a reserve keeps Raft working.

Owns the decision, and the error that a producer gets. Appends stop while the reserve is still free, so that elections,
group commits, deletions and snapshots continue, and LMDB never meets a full disk. It must never stop a read. The node
asks before every append; nothing else writes records.
"""

from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.replication.ports import Disk, Space

REFRESHES_PER_RESERVE: Final = 16  # refresh after a sixteenth of the reserve has been appended, whatever the time
RETRY_MS: Final = 1_000  # advice to the producer: space is seldom freed sooner


class SpaceGuard:
    """Full once less than the reserve is free, until an eighth more than the reserve is free.

    Pages that LMDB has freed inside its file count if they make up a reserve by themselves: deleting records frees no
    other space. But a large batch needs contiguous pages, so half of the reserve must be free outside the file.
    """

    def __init__(self, disk: Disk, reserve_bytes: int) -> None:
        self._disk = disk
        self._appended_bytes = 0  # since the last refresh
        self.reserve_bytes = reserve_bytes
        self.is_full = False
        self.space = Space(free_bytes=0, reusable_bytes=0, total_bytes=0)  # as of the last refresh

    def refresh(self) -> None:
        """Asks the disk: some 20 microseconds."""
        self._appended_bytes = 0
        self.space = self._disk.space()
        queued = self._disk.queued_bytes  # as good as written
        needed = self.reserve_bytes + (self.reserve_bytes // 8 if self.is_full else 0)
        outside, inside = self.space.free_bytes - queued, self.space.reusable_bytes
        self.is_full = outside < needed and not (outside >= needed // 2 and inside >= needed)

    def admits(self, size: int) -> bool:
        """Whether this many bytes of records may be appended."""
        self._appended_bytes += size
        if self._appended_bytes > self.reserve_bytes // REFRESHES_PER_RESERVE:
            self.refresh()
        return not self.is_full

    def refusal(self, node: int) -> SmqError:
        space = self.space
        message = (
            f"node {node} has {space.free_bytes >> 20} MiB left on its disk and {space.reusable_bytes >> 20} MiB in "
            f"its file, but its reserve is {self.reserve_bytes >> 20} MiB: delete topics or records, or free space on "
            "that disk; writes then resume by themselves"
        )
        return SmqError(ErrorCode.STORAGE_FULL, message, ErrorDetails(retry_after_ms=RETRY_MS))
