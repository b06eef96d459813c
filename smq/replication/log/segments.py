"""Which compacted bytes a log holds: the digest of each of its segments, and what a new segment replaces.

Owns `HeldSegments` and its row on disk, and the reads that prepare an installation. A segment is a stretch of whole
batches in which this log has exactly the bytes of a digest; the replicated state says which digest it ought to be. The
row is written in the same transaction as the bytes. It must never change a log: PartitionLog does.

    CHECKPOINTS  partition(20) 0 0  -> version, compacted_end, compactions, (start, end, digest) of each, CRC
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from typing import Final, NamedTuple

from smq.raft_state.binary import INT64, Fixed, Rows, TaggedLayout
from smq.raft_state.fields import OFFSET
from smq.raft_state.ids import Offset, PartitionId, TsNs
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.replication.log.log_state import decoded, encoded
from smq.replication.log.reader import LogReader
from smq.replication.log.stored_batch import (
    TIME_APPEND,
    TIME_CREATE,
    StoredValue,
    after_append_time,
    after_create_time,
    append_time_key,
    append_time_of_key,
    base_of_key,
    batch_key,
    create_ms_of_key,
    create_time_key,
    index_row,
    info_of_stored,
    times_range,
)
from smq.replication.ports import Delete, Op, Put, Table

NO_DIGEST: Final = bytes(SEGMENT_DIGEST_BYTES)  # of bytes that have never been compacted
_NOWHERE: Final = Offset(0)
_numbers: Final = count()
_PART_BYTES: Final = 1 << 20  # read at a time for a digest
_LAST_OFFSET: Final = b"\xff" * 8  # sorts after that of every row of a time


class _Row(NamedTuple):
    compacted_end: Offset
    segments: tuple[tuple[Offset, Offset, bytes], ...]  # start, end, digest
    compactions: int = 0


_SEGMENTS: Final = ("segments", Rows(OFFSET, OFFSET, Fixed(SEGMENT_DIGEST_BYTES)))
_ROW: Final = TaggedLayout(2, _Row, ("compacted_end", OFFSET), ("compactions", INT64), rest=[_SEGMENTS])
_ROW_1: Final = TaggedLayout(1, _Row, ("compacted_end", OFFSET), rest=[_SEGMENTS])  # of version 1


class HeldSegments:
    """In ascending order; two neighbours need not touch. Below `compacted_end`, batches may have been joined, so that
    older positions lie inside them. Mutable."""

    def __init__(self, compacted_end: Offset = _NOWHERE) -> None:
        self.compacted_end = compacted_end
        self.compactions = 0  # of the partition, when a segment was last installed: a state with fewer is older
        self.changes = next(_numbers)  # differs from that of any other object, and of this one before a change
        self._starts: list[Offset] = []
        self._ends: list[Offset] = []
        self._digests: list[bytes] = []

    def _at(self, offset: Offset) -> int | None:
        number = bisect_right(self._starts, offset) - 1
        return number if number >= 0 and offset < self._ends[number] else None

    def digest_at(self, offset: Offset) -> bytes:
        """Of the segment that contains the offset; NO_DIGEST if none does."""
        number = self._at(offset)
        return NO_DIGEST if number is None else self._digests[number]

    def holds(self, start: Offset, end: Offset, digest: bytes) -> bool:
        return self.end_of(start, digest) == end

    def end_of(self, start: Offset, digest: bytes) -> Offset | None:
        """Where the segment of this start and digest ends; None if there is none."""
        number = self._at(start)
        is_held = number is not None and (self._starts[number], self._digests[number]) == (start, digest)
        return self._ends[number] if number is not None and is_held else None

    def doubt(self, offset: Offset) -> None:
        """The bytes of the segment that contains the offset may not be what its digest says: as if it were not held."""
        number = self._at(offset)
        if number is not None:
            self._fill([row for n, row in enumerate(self._rows()) if n != number])

    def note_compactions(self, compactions: int) -> None:
        """Of the partition, before a segment is installed. Written with the segment's bytes."""
        self.compactions = max(self.compactions, compactions)

    def is_newer_than(self, compactions: int) -> bool:
        """A segment is installed that a state with so many compactions does not know again yet: the node has just
        started, and its Raft log is behind. What the state says of segments is of the past, and its high water mark may
        lie below a record that others were removed for."""
        return compactions < self.compactions

    def put(self, start: Offset, end: Offset, digest: bytes) -> None:
        """Replaces what overlaps."""
        kept = [s for s in self._rows() if s[1] <= start or s[0] >= end]
        self._fill(sorted([*kept, (start, end, digest)]))
        self.compacted_end = max(self.compacted_end, end)

    def forget_before(self, first: Offset) -> bool:
        """Drops segments that begin below `first`, as they are not here in whole. True if there were any."""
        count = len(self._starts)
        self._fill([s for s in self._rows() if s[0] >= first])
        return len(self._starts) < count

    def forget_after(self, end: Offset) -> bool:
        """Drops segments that end beyond `end`: the log ends there. True if there were any."""
        count = len(self._starts)
        self._fill([s for s in self._rows() if s[1] <= end])
        return len(self._starts) < count

    def _rows(self) -> list[tuple[Offset, Offset, bytes]]:
        return list(zip(self._starts, self._ends, self._digests, strict=True))

    def _fill(self, rows: Sequence[tuple[Offset, Offset, bytes]]) -> None:
        self.changes = next(_numbers)
        self._starts = [row[0] for row in rows]
        self._ends = [row[1] for row in rows]
        self._digests = [row[2] for row in rows]

    def encode(self) -> bytes:
        return encoded(_ROW, _Row(self.compacted_end, tuple(self._rows()), self.compactions))

    @classmethod
    def decode(cls, row: bytes) -> "HeldSegments":
        """Inverse of `encode`. Raises DataDamaged."""
        layout = _ROW_1 if row[:1] == b"\x01" else _ROW
        found: _Row = decoded(layout, row, "the row of the segments")
        held = cls(found.compacted_end)
        held.compactions = found.compactions
        held._fill(found.segments)
        return held


def segments_key(pid: PartitionId) -> bytes:
    return pid + b"\x00\x00"


class Replaced(NamedTuple):
    """The rows of a stretch of the log on disk, before a segment is installed there."""

    first: Offset  # of the first batch there; the stretch's end if there is none
    size: int  # of the batches that the log counts
    first_ts_ns: TsNs
    last_ts_ns: TsNs  # of the first record of the last batch
    stop: Offset  # what follows was not looked up: it was not durable
    create_rows: list[tuple[int, Offset]]  # create time and base of each TIMES row of that kind


def replaced(log: LogReader, start: Offset, end: Offset) -> Replaced:
    """Of the durable batches in [start, end). Reads the disk, and only the keys decide: the bytes there may be
    damaged."""
    stop = min(end, log.durable_end)  # after it come rows of a cut that is on its way to the disk
    rows = list(_rows_between(log, TIME_APPEND, start, stop))
    # Either the row or the batch may be lost.
    firsts = [*(base_of_key(key) for key, _ in rows[:1]), log.first_on_disk(start, stop)]
    first = min(base if base < stop else end for base in firsts)
    stamps = [append_time_of_key(key) for key, _ in rows] or [TsNs(0)]
    size = log.counted_size(rows, start, stop)
    create_rows = [(create_ms_of_key(key), base_of_key(key)) for key, _ in _rows_between(log, TIME_CREATE, start, stop)]
    return Replaced(first, size, stamps[0], stamps[-1], stop, create_rows)


def newest_create_ms(log: LogReader, known_ms: int, end: Offset) -> int:
    """The newest create time in the rows of durable batches below `end`, or `known_ms` if that is later. Some rows are
    of records that compaction removed, and the batches between them have no rows: nothing may take the rows for fewer.
    After the durable end come rows of a cut that is on its way to the disk; what is compacted is durable."""
    end = min(end, log.durable_end)
    keys = log.rows.scan_keys(
        Table.TIMES, after_create_time(log.pid, known_ms), times_range(log.pid, TIME_CREATE)[1], limit=1
    )
    if not keys or base_of_key(keys[0]) >= end:
        return known_ms  # as in every log that is not compacted
    lowest = times_range(log.pid, TIME_CREATE)[0]
    stop = _key_at(lowest, max(_first_stamp(log, TIME_CREATE, end) - 1, 0)) + _LAST_OFFSET
    found = log.rows.scan_keys(Table.TIMES, lowest, stop, reverse=True, limit=1)
    return max(known_ms, create_ms_of_key((found or keys)[0]))  # a damaged key may be out of order


def _rows_between(log: LogReader, kind: int, start: Offset, end: Offset) -> Iterator[tuple[bytes, bytes]]:
    """The TIMES rows of a kind whose batches begin in [start, end)."""
    lowest, stop = times_range(log.pid, kind)
    at = _key_at(lowest, max(_first_stamp(log, kind, start) - 1, 0))
    for key, value in log.rows_of_times(at, stop):
        base = base_of_key(key)
        if base >= end:
            return
        if base >= start:
            yield key, value


def _first_stamp(log: LogReader, kind: int, start: Offset) -> int:
    """The lowest time after which no TIMES row of that kind belongs to a batch that begins below `start`. The rows
    ascend in time and in offset, so it is found by halving the times between rows."""
    lowest, stop = times_range(log.pid, kind)
    low, high = 0, 1 << 64
    while low < high:
        middle = _key_at(lowest, (low + high) // 2)
        after = log.rows.scan_keys(Table.TIMES, middle, stop, limit=1)
        if after and base_of_key(after[0]) < start:
            low = _stamp_of(after[0]) + 1
            continue
        before = log.rows.scan_keys(Table.TIMES, _key_at(lowest, low), middle, reverse=True, limit=1)
        if not before:
            break
        high = _stamp_of(before[0]) + 1
        if base_of_key(before[0]) < start:
            return high
    return low


def _stamp_of(key: bytes) -> int:
    return int.from_bytes(key[-16:-8], "big")


def _key_at(lowest: bytes, stamp: int) -> bytes:
    return lowest + stamp.to_bytes(8, "big")


def replacing_ops(pid: PartitionId, start: Offset, end: Offset, values: list[StoredValue], old: Replaced) -> list[Op]:
    """The old rows of [start, end) go, these batches come. A create time leads to the batch that has its record's place
    from now on."""
    ops: list[Op] = [Delete(Table.BATCHES, batch_key(pid, start), batch_key(pid, end))]
    if old.first < end:
        first = append_time_key(pid, old.first_ts_ns, 0)
        ops.append(Delete(Table.TIMES, first, after_append_time(pid, old.last_ts_ns)))
    for stored in values:
        ops.append(Put(Table.BATCHES, batch_key(pid, stored.base), stored.value))
        ops.append(Put(Table.TIMES, *index_row(pid, info_of_stored(stored))))
    bases = [stored.base for stored in values]
    for create_ms, base in old.create_rows:
        key = create_time_key(pid, create_ms, base)
        ops.append(Delete(Table.TIMES, key, key + b"\x00"))
        number = bisect_right(bases, base) - 1
        if number >= 0:
            ops.append(Put(Table.TIMES, create_time_key(pid, create_ms, bases[number]), b""))
    return ops


def digest_of(values: list[StoredValue]) -> bytes:
    """Of a segment's stored values, one after another."""
    total = sha256()
    for stored in values:
        total.update(stored.value)
    return total.digest()[:SEGMENT_DIGEST_BYTES]


def own_digest(log: LogReader, start: Offset, end: Offset) -> bytes:
    """Of the log's own bytes in [start, end), if whole batches fill it; NO_DIGEST otherwise. Reads the disk."""
    total, at = sha256(), start
    while at < end:
        values = log.read_segment(at, end, _PART_BYTES)
        if not values or values[0].base != at:
            return NO_DIGEST
        for stored in values:
            total.update(stored.value)
        at = values[-1].end
    return total.digest()[:SEGMENT_DIGEST_BYTES] if at == end else NO_DIGEST
