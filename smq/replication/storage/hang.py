"""Whether this node's disk writes at all: a disk may hang for a long time without an error.

Owns the decision, from the progress of the disk's one queue. A node whose disk hangs still receives records and Raft
entries, but adds nothing to their durability, so it should lead nothing that another node can lead. It must never judge
a disk that is merely slow: any progress counts. The node asks once per tick; nothing here reads the disk.
"""

from pathlib import Path
from typing import Final

from smq.replication.ports import Disk

CLOSE_S_MAX: Final = 10.0  # without progress: a commit has 16 MiB, and no client has been promised what is queued then
STEP_NS_MAX: Final = 250_000_000  # counted per tick: a loop that stood still must not blame the disk for it


class DiskHung(Exception):
    """The disk has not ended its work in time while it was closed, and may still be at it: the process must end."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"the disk under {path} has not answered for {CLOSE_S_MAX:.0f} s while it was closed: the process ends "
            "without it. Everything acknowledged is on disk; look for errors of the disk"
        )


class HangGuard:
    """The disk hangs once it has had something to write for `hang_ms` and nothing has become durable meanwhile. It
    hangs no longer as soon as anything becomes durable."""

    def __init__(self, disk: Disk, hang_ms: int) -> None:
        self._disk = disk
        self._hang_ns = hang_ms * 1_000_000
        self._durable_seq = 0
        self._observed_ns: int | None = None
        self.waited_ns = 0  # since something became durable; 0 if nothing waits

    def observe(self, now_ns: int) -> None:
        durable_seq = self._disk.durable_seq
        step_ns = now_ns - self._observed_ns if self._observed_ns is not None else 0
        self._observed_ns = now_ns
        if durable_seq != self._durable_seq or durable_seq == self._disk.submitted_seq:
            self._durable_seq, self.waited_ns = durable_seq, 0
        else:
            self.waited_ns += min(step_ns, STEP_NS_MAX)

    @property
    def hangs(self) -> bool:
        return self.waited_ns >= self._hang_ns

    @property
    def hangs_on(self) -> bool:
        """For so long that an attempt to hand over has had its time."""
        return self.waited_ns >= 2 * self._hang_ns
