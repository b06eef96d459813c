"""Whether this node's disk takes more records: how many bytes wait for it, and how much of it is free.

Owns the node's bound on records that are not yet durable: one half for the partitions that it follows, which take
turns, the other half for those that it leads and for repairs. Neither half can starve the other. Raft's writes ask for
no room and take none. A batch is taken while its half has room, so each half ends at most one batch above its bound.

Owns also the reserve that keeps Raft working on a full disk, and the error that a producer gets. Appends stop while the
reserve is still free, so that elections, group commits, deletions and snapshots continue, and LMDB never meets a full
disk. It must never append, drop or send anything by itself, nor stop a read. Nothing else writes records.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import PartitionId
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.stored_batch import ENVELOPE_BYTES, StoredValue
from smq.replication.monitoring.measures import Traffic
from smq.replication.ports import Disk, Space

REFRESHES_PER_RESERVE: Final = 16  # refresh after a sixteenth of the reserve has been appended, whatever the time
RETRY_MS: Final = 1_000  # advice to the producer: space is seldom freed sooner


class _Half:
    """Bytes that wait for the disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._waiting: deque[tuple[int, int]] = deque()  # (submission, bytes); as bounded as the bytes in it
        self._bytes = 0

    def add(self, size: int) -> None:
        """Of the newest submission."""
        self._waiting.append((self._disk.submitted_seq, size))
        self._bytes += size

    @property
    def bytes(self) -> int:
        durable = self._disk.durable_seq
        while self._waiting and self._waiting[0][0] <= durable:
            self._bytes -= self._waiting.popleft()[1]
        return self._bytes


class Intake:
    def __init__(self, disk: Disk, bytes_max: int) -> None:
        """`bytes_max`: of both halves together."""
        self._disk = disk
        self._half = bytes_max // 2
        self._led = _Half(disk)
        self._followed = _Half(disk)
        # Followed partitions that were sent more than there was room for, the longest waiting first, and the bytes that
        # were dropped of each: what it will send again.
        self._waiting: dict[PartitionId, int] = {}

    # ------------------------------------------------------------------------------------------ led, and repairs
    @property
    def led_bytes(self) -> int:
        """The appends of led partitions and the repaired batches that wait for the disk."""
        return self._led.bytes

    @property
    def has_room(self) -> bool:
        """A batch of a led partition, or a repaired batch, may be submitted."""
        return self._led.bytes < self._half

    def took_produced(self, traffic: Traffic, records: int, size: int) -> None:
        """As `took`, for a producer's batch. `traffic`: of its partition."""
        traffic.produced_records += records
        traffic.produced_bytes += size - ENVELOPE_BYTES
        self._led.add(size)

    def took(self, size: int) -> None:
        """A batch of `size` bytes is the disk's newest submission."""
        self._led.add(size)

    # ------------------------------------------------------------------------------------------ followed
    @property
    def followed_bytes(self) -> int:
        """The appends of followed partitions that wait for the disk, with their index rows and checkpoints."""
        return self._followed.bytes

    def admits(self, pid: PartitionId, size: int) -> bool:
        """Whether a followed partition may append now. If not, it waits for its turn, and everything that it is sent
        until then is refused: an append that arrives later does not overtake it."""
        if pid not in self._waiting and self.followed_bytes < self._half:
            return True
        self._waiting[pid] = self._waiting.get(pid, 0) + size
        return False

    def append(self, log: PartitionLog, values: list[StoredValue], done: Callable[[], None]) -> None:
        """Appends to the log of a followed partition, and counts the bytes."""
        before = self._disk.queued_bytes
        log.append_stored(values, done)
        self._followed.add(self._disk.queued_bytes - before)

    def is_waiting(self, pid: PartitionId) -> bool:
        return pid in self._waiting

    def next_turns(self) -> list[PartitionId]:
        """The partitions whose turn it is; they wait no longer. Only once half of the room is free, so that not every
        append needs a refusal first; and only as many as fill the room, judged by what they were refused."""
        if not self._waiting or (followed := self.followed_bytes) > self._half // 2:
            return []
        room = self._half - followed
        turns: list[PartitionId] = []
        while self._waiting and room > 0:
            pid = next(iter(self._waiting))
            room -= self._waiting.pop(pid)
            turns.append(pid)
        return turns


class SpaceGuard:
    """Full once the room is less than the reserve, until it is an eighth more than the reserve.

    Room is what is free on the file system, and what the store uses again inside its file: deleting records frees only
    that. But a large batch needs pages that lie together, for which the file may have to grow. So half of the reserve
    must be free outside the file: what is in flight, twice.
    """

    def __init__(self, disk: Disk, reserve_bytes: int) -> None:
        self._disk = disk
        self._appended_bytes = 0  # since the last refresh
        self.reserve_bytes = reserve_bytes
        self.is_full = False
        self.space = Space(free_bytes=0, reusable_bytes=0, total_bytes=0)  # as of the last refresh
        self._queued_bytes = 0  # at the last refresh; as good as written

    def refresh(self) -> None:
        """Asks the disk: some 20 microseconds."""
        self._appended_bytes = 0
        self.space = self._disk.space()
        self._queued_bytes = self._disk.queued_bytes
        self.is_full = self._missing_bytes > 0

    @property
    def _missing_bytes(self) -> int:
        """How much must be freed before records are taken."""
        wanted = self.reserve_bytes + (self.reserve_bytes // 8 if self.is_full else 0)
        room = self.space.free_bytes + self.space.reusable_bytes - self._queued_bytes
        return max(wanted - room, self._missing_outside_bytes)

    @property
    def _missing_outside_bytes(self) -> int:
        """How much of that only the file system can give."""
        return max(self.reserve_bytes // 2 - self.space.free_bytes + self._queued_bytes, 0)

    def admits(self, size: int) -> bool:
        """Whether this many bytes of records may be appended."""
        self._appended_bytes += size
        if self._appended_bytes > self.reserve_bytes // REFRESHES_PER_RESERVE:
            self.refresh()
        return not self.is_full

    def refusal(self, node: int) -> SmqError:
        """Of a full disk."""
        missing, outside = self._missing_bytes, self._missing_outside_bytes
        advice = "delete topics or records, or free space on that disk"
        if outside:
            advice = f"free {_mib(outside)} of them on that disk's file system, where no deletion of records helps"
            advice += "; for the rest delete topics or records, too" if outside < missing else ""
        message = (
            f"node {node} has {self.space.free_bytes >> 20} MiB left on its disk and "
            f"{self.space.reusable_bytes >> 20} MiB to use again in its file, too little for its reserve of "
            f"{_mib(self.reserve_bytes)}: {_mib(missing)} must still go: {advice}; writes then resume by themselves"
        )
        return SmqError(ErrorCode.STORAGE_FULL, message, ErrorDetails(retry_after_ms=RETRY_MS))


def _mib(size: int) -> str:
    """Rounded up: it is enough."""
    return f"{-(-size >> 20)} MiB"
