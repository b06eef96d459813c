"""The scrubber: reads everything on this disk periodically, so that bit rot is found before the data is needed.

Owns the walk over the tables: its pace, its position (saved in META, so that a restart continues the pass) and its
counters, and the checks of a row. Its caller repairs what is damaged. The disk's own threads read and check the rows,
and read those that fail once more; the loop only receives the results, slice by slice. It must never change a row
itself. Only the maintenance of the disk uses it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from crc32c import crc32c

from smq.raft_state.binary import BYTE, INT64, UINT32, UINT64, Layout, Reader
from smq.raft_state.ids import Offset, PartitionId
from smq.replication.log.aborted import parse_aborted_row
from smq.replication.log.log_state import decode_checkpoint, decode_partition, partition_key
from smq.replication.log.reader import parse_row, parse_stored
from smq.replication.log.segments import HeldSegments, segments_key
from smq.replication.log.stored_batch import TIME_ABORTED, TIME_APPEND, BatchDamaged, StoredValue, base_of_key
from smq.replication.ports import Clock, DataDamaged, Disk, Examined, Put, Rows, Table
from smq.replication.raft.journal import is_whole_row

SLICE_BYTES: Final = 1 << 20  # per read: some 10 ms of a slow disk, 1 ms of processor time with a fast one
RATE_MIN: Final = 256 << 10  # bytes per second; a small disk is read faster than necessary
SLICES_PER_SAVE: Final = 64  # between two writes of the position: a restart reads that much again
TABLES: Final = (Table.RAFT_META, Table.RAFT_LOG, Table.CHECKPOINTS, Table.TIMES, Table.BATCHES)

_KEY: Final = b"scrub"
# CRC of what follows, version, table, bytes so far, started ms, ended ms, passes; then the key
_POSITION: Final = Layout(UINT32, BYTE, BYTE, UINT64, INT64, INT64, UINT64)
_CRC_BYTES: Final = 4
_VERSION: Final = 1
_BEYOND_ALL: Final = b"\xff" * 64
_PID_BYTES: Final = 20
Damage: TypeAlias = BatchDamaged | bytes  # a batch or its index row, or the key of another row


@dataclass(slots=True)
class ScrubProgress:
    """Times are wall-clock milliseconds, 0 for never."""

    read_bytes: int = 0  # in the present pass
    started_ms: int = 0
    ended_ms: int = 0  # the last whole pass
    passes: int = 0
    found: int = 0  # damaged rows, since the start of this process


class Check:
    """Checks the rows of one slice. Runs on the disk's thread, and knows nothing of the node."""

    def __init__(self, table: Table, before: tuple[PartitionId, Offset] | None = None) -> None:
        self._table = table
        self.before = before  # partition and end of the batch, or index row, before
        self.gaps: list[tuple[PartitionId, Offset]] = []  # places where two neighbouring batches do not touch

    def __call__(self, key: bytes, value: bytes) -> bool:
        try:
            match self._table:
                case Table.BATCHES:
                    self._follow(parse_stored(PartitionId(key[:_PID_BYTES]), key, value), key)
                case Table.TIMES:
                    return self._is_next_row(key, value)
                case Table.CHECKPOINTS:
                    pid = PartitionId(key[:_PID_BYTES])
                    if key == partition_key(pid):
                        decode_partition(value)
                    elif key == segments_key(pid):
                        HeldSegments.decode(value)
                    else:
                        decode_checkpoint(value)
                case _:
                    return is_whole_row(key, value)
        except DataDamaged:
            return False
        return True

    def _follow(self, stored: StoredValue, key: bytes) -> None:
        """A tree out of order may hide a batch: each batch must begin where the one before it ends."""
        pid = PartitionId(key[:_PID_BYTES])
        if self.before is not None and self.before[0] == pid and self.before[1] != stored.base:
            self.gaps.append(self.before)
        self.before = pid, stored.end

    def _is_next_row(self, key: bytes, value: bytes) -> bool:
        """If two neighbouring rows do not touch, one between them is missing: reported as damage of the second."""
        if _is_of_aborted(key):
            parse_aborted_row(key, value)
        if len(key) <= _PID_BYTES or key[_PID_BYTES] != TIME_APPEND:
            return True
        pid = PartitionId(key[:_PID_BYTES])
        info = parse_row(pid, key, value)
        before, self.before = self.before, (pid, info.end)
        return before is None or before[0] != pid or before[1] == info.base


class Scrubber:
    def __init__(
        self,
        clock: Clock,
        disk: Disk,
        period_s: int,
        *,
        repair: Callable[[Table, Damage], None],
        verify_batch_at: Callable[[PartitionId, Offset, Callable[[bool], None]], bool],
    ) -> None:
        """A `period_s` of 0 switches it off. `repair` gets each damaged row. `verify_batch_at` reads the batch there as
        a reader would, and repairs it if that fails; its last argument then gets True. It returns False, and does not
        call that, if too many reads wait."""
        self._clock = clock
        self._disk = disk
        self._repair = repair
        self._verify_batch_at = verify_batch_at
        self._period_ns = period_s * 1_000_000_000
        self._table = 0
        self._key = b""
        self._next_ns = 0
        self._is_reading = False
        self._check = Check(TABLES[0])
        self._slices_unsaved = 0
        self._doubtful: tuple[Table, list[bytes]] | None = None  # the rows of the last slice that failed
        self._gaps: deque[tuple[PartitionId, Offset]] = deque()  # of the last slice
        self.progress = ScrubProgress()

    def start(self) -> None:
        """Restores the position. If it cannot be read, the pass starts again."""
        value = self._disk.get(Table.META, _KEY)
        if value is None or len(value) < _POSITION.size:
            return
        reader = Reader(value)
        crc, version, table, size, started_ms, ended_ms, passes = _POSITION.read(reader)
        if crc == crc32c(value[_CRC_BYTES:]) and version == _VERSION and table < len(TABLES):
            self._table, self._key = table, bytes(reader.rest())
            self.progress = ScrubProgress(size, started_ms, ended_ms, passes)
            if not table and not self._key:
                self._wait_for_next_pass()

    def on_beat(self) -> None:
        if self._is_reading or not self._period_ns or not self._check_again():
            return
        if self._clock.monotonic_ns() < self._next_ns:
            return
        if not self._table and not self._key:
            self.progress.started_ms = self._clock.wall_ns() // 1_000_000
            self.progress.read_bytes = 0
        table = TABLES[self._table]
        self._is_reading = True
        self._check = Check(table, self._check.before if self._key else None)
        self._disk.examine(table, self._key, _BEYOND_ALL, SLICE_BYTES, self._check, self._on_slice)

    def _on_slice(self, slice_: Examined) -> None:
        self._is_reading = False
        table = TABLES[self._table]
        self.progress.read_bytes += slice_.size
        if slice_.damaged:
            self._doubtful = (table, slice_.damaged)
        reported = {(key[:_PID_BYTES], base_of_key(key)) for key in slice_.damaged} if table is Table.BATCHES else set()
        for pid, offset in self._check.gaps:
            if (pid, offset) not in reported:  # otherwise the gap is a damaged batch in its place
                self._gaps.append((pid, offset))
        self._check_again()
        rate = max(self._disk.size_bytes() * 1_000_000_000 // self._period_ns, RATE_MIN)
        self._next_ns = self._clock.monotonic_ns() + slice_.size * 1_000_000_000 // rate
        if slice_.next_key is not None:
            self._key = slice_.next_key
        else:
            self._table, self._key = (self._table + 1) % len(TABLES), b""
            if not self._table:
                self._end_pass()
        self._slices_unsaved += 1
        if self._slices_unsaved >= SLICES_PER_SAVE or not self._table:
            self._save_position()

    def _end_pass(self) -> None:
        self.progress.ended_ms = self._clock.wall_ns() // 1_000_000
        self.progress.passes += 1
        self._wait_for_next_pass()

    def _wait_for_next_pass(self) -> None:
        since_ns = self._clock.wall_ns() - self.progress.started_ms * 1_000_000
        self._next_ns = self._clock.monotonic_ns() + min(max(self._period_ns - since_ns, 0), self._period_ns)

    def _save_position(self) -> None:
        self._slices_unsaved = 0
        p = self.progress
        fields = (_VERSION, self._table, p.read_bytes, p.started_ms, p.ended_ms, p.passes)
        crc = crc32c(_POSITION.pack(0, *fields)[_CRC_BYTES:] + self._key)
        self._disk.submit([Put(Table.META, _KEY, _POSITION.pack(crc, *fields) + self._key)])

    # ------------------------------------------------------------------------------------------------- damage
    def _check_again(self) -> bool:
        """Rows that failed are read again: they may have been deleted or rewritten meanwhile. Reads again beside the
        loop; false while any is left."""
        while self._gaps:
            if not self._verify_batch_at(*self._gaps[0], self._count):
                return False
            self._gaps.popleft()
        if not self._doubtful:
            return True
        table, keys = self._doubtful
        find = partial(found_again, table, keys)
        if not self._is_reading and self._disk.look_up(keys[0][:_PID_BYTES], find, self._on_found_again):
            self._is_reading = True
        return False

    def _count(self, is_damaged: bool) -> None:
        self.progress.found += is_damaged

    def _on_found_again(self, found: "list[Damage] | DataDamaged") -> None:
        self._is_reading = False
        if isinstance(found, DataDamaged) or self._doubtful is None:
            return  # the table cannot be walked at present: the next beat tries again, and `examine` ends the node
        table, self._doubtful = self._doubtful[0], None
        for damage in found:
            self.progress.found += 1
            self._repair(table, damage)


def _is_of_aborted(key: bytes) -> bool:
    return len(key) > _PID_BYTES and key[_PID_BYTES] == TIME_ABORTED


def found_again(table: Table, keys: list[bytes], rows: Rows) -> list[Damage]:
    """The rows under these keys that are still there, and still fail."""
    found: list[Damage] = []
    for key in keys:
        value = rows.get(table, key)
        if value is None:
            continue
        pid = PartitionId(key[:_PID_BYTES])
        if table is Table.TIMES and not _is_of_aborted(key):
            damage = _damage_of_row(rows, pid, key, value)
            if damage is not None:
                found.append(damage)
        elif not Check(table)(key, value):
            is_batch = table is Table.BATCHES
            found.append(BatchDamaged(pid, base_of_key(key), "its bytes do not match its CRC-32C") if is_batch else key)
    return found


def _damage_of_row(rows: Rows, pid: PartitionId, key: bytes, value: bytes) -> BatchDamaged | None:
    try:
        info = parse_row(pid, key, value)
    except BatchDamaged as damage:
        return damage
    start = pid + bytes((TIME_APPEND,))
    for before, row in rows.scan(Table.TIMES, start, key, reverse=True, limit=1):
        try:
            end = parse_row(pid, before, row).end
        except BatchDamaged:
            return None  # reported by itself
        if end < info.base:
            return BatchDamaged(pid, end, "its index row is missing")
    return None
