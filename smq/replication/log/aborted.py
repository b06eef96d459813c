"""The aborted transactions of one partition's log: which of its records no committed reader returns.

Owns the index of the abort markers that the log holds, in memory, its rows on disk, and how both follow a compacted
segment that is installed. It is a fold over the log, and is cut and pruned with it. Readers get the transactions that
have batches in what they have read, and leave out the records of those producers from `first` to the marker. An entry
whose batches are gone does no harm, but a control batch has one entry at most: some readers count them. It must never
touch a disk. This package imports it, and the readers, the compaction and the scrubber of partitions.

    TIMES  partition(20) 2 marker(8) first(8)  -> CRC, producer id

There is one entry in memory per abort marker that the log retains, 150 bytes each.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from crc32c import crc32c

from smq.raft_state.binary import BYTE, INT64, UINT32, UINT64, CodecError, Layout
from smq.raft_state.fields import PARTITION
from smq.raft_state.ids import Offset, PartitionId, ProducerId
from smq.records import CONTROL_MASK, TRANSACTIONAL_MASK
from smq.replication.api import Aborted, StoredBatch
from smq.replication.log.log_state import LogState
from smq.replication.log.stored_batch import TIME_ABORTED, StoredValue, info_of_stored
from smq.replication.ports import DataDamaged, Delete, Op, Put, Table

_KEY: Final = Layout(PARTITION, BYTE, UINT64, UINT64)
_ROW: Final = Layout(UINT32, INT64)
_CRC_BYTES: Final = 4
_ATTRIBUTES_AT: Final = 22  # of a batch: the low byte, which has the flags
_PRODUCER_ID_AT: Final = 43
_PRODUCER_ID: Final = struct.Struct(">q")


class _Arriving(NamedTuple):
    """The aborted transactions that end in [start, stop), once the batches of a segment are on disk."""

    start: Offset
    stop: Offset
    new: list[Aborted]


class AbortedTransactions:
    """In the order of their markers. While a segment `is_arriving`, readers may get its old batches or its new ones,
    so what either needs is known."""

    __slots__ = ("_arriving", "_entries", "_lowest", "_of_producers")

    def __init__(self, entries: list[Aborted]) -> None:
        self._entries = entries
        # Of each entry, the lowest `first` from it on, or lower: there a look-up stops. None: to be made.
        self._lowest: list[Offset] | None = None
        self._of_producers: dict[ProducerId, list[Aborted]] | None = None  # made by `covers`, void after a change
        self._arriving: _Arriving | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Aborted]:
        return iter(self._entries)

    def add(self, aborted: Aborted) -> None:
        self._entries.append(aborted)
        self._of_producers = None
        if (lowest := self._lowest) is not None:
            lowest.append(aborted.first)
            at = len(lowest) - 2
            while at >= 0 and lowest[at] > aborted.first:  # the entries since it began
                lowest[at] = aborted.first
                at -= 1

    def cut(self, end: Offset) -> None:
        """The log ends at `end` now."""
        at = self._index(end)
        del self._entries[at:]
        if self._lowest is not None:
            del self._lowest[at:]
        self._of_producers = None

    def forget_before(self, first: Offset) -> None:
        """The log begins at `first` now."""
        at = self._index(first)
        del self._entries[:at]
        if self._lowest is not None:
            del self._lowest[:at]
        self._of_producers = None

    def between(self, start: Offset, end: Offset) -> list[Aborted]:
        """Those with a marker in [start, end)."""
        return self._entries[self._index(start) : self._index(end)]

    def put(self, start: Offset, end: Offset, entries: Iterable[Aborted]) -> None:
        """In place of those with a marker in [start, end)."""
        self._entries[self._index(start) : self._index(end)] = sorted(entries)
        self._lowest = self._of_producers = None

    def within(self, start: Offset, end: Offset) -> list[Aborted]:
        """Those that have records in [start, end)."""
        if self._lowest is None:
            backwards = accumulate((aborted.first for aborted in reversed(self._entries)), min)
            self._lowest = list(backwards)[::-1]
        found: list[Aborted] = []
        for at in range(self._index(start), len(self._entries)):
            if self._lowest[at] >= end:
                break
            if self._entries[at].first < end:
                found.append(self._entries[at])
        return found

    def of_key(self, key: bytes) -> Aborted | None:
        """The one whose row has this key."""
        if len(key) != _KEY.size:
            return None
        _, _, marker, first = _KEY.unpack(key)
        at = self._index(marker)
        is_here = at < len(self._entries) and self._entries[at][:2] == (marker, first)
        return self._entries[at] if is_here else None

    def covers(self, producer_id: ProducerId, base: Offset) -> bool:
        """Whether a transactional batch of this producer at `base` was aborted. A producer's transactions follow one
        another, so it is the first one that ends after that, or none, however many others were open meanwhile."""
        if self._of_producers is None:
            self._of_producers = {}
            for aborted in self._entries:
                self._of_producers.setdefault(aborted.producer_id, []).append(aborted)
        own = self._of_producers.get(producer_id, [])
        at = bisect_left(own, base, key=lambda aborted: aborted.marker)
        return at < len(own) and own[at].first <= base

    def copy(self) -> "AbortedTransactions":
        """Shares the entries, which never change. A millisecond for 100,000."""
        return AbortedTransactions(self._entries.copy())

    # ------------------------------------------------------------------------------------- with a segment
    @property
    def is_arriving(self) -> bool:
        return self._arriving is not None

    def replace(
        self, pid: PartitionId, start: Offset, end: Offset, values: Sequence[StoredValue], base_end: Offset
    ) -> list[Op]:
        """The log is about to get these batches in [start, end), and ends at `end` or later. A transaction that ends
        below its base is read by no client, and counted by no state."""
        # What began before the segment keeps the control batch that ended it, in every version.
        before = [aborted for aborted in self.between(start, end) if aborted.first < start]
        markers = {aborted.marker for aborted in before}
        inside = [aborted for aborted in _aborted_in(start, values) if aborted.marker not in markers]
        new = [aborted for aborted in (*before, *inside) if aborted.marker >= base_end]
        return self._exchange(pid, start, end, new)

    def grow(
        self,
        pid: PartitionId,
        start: Offset,
        at: Offset,
        end: Offset,
        values: Sequence[StoredValue],
        found: list[Aborted],
    ) -> list[Op]:
        """As `replace`, of a log that ends before `end`: its state from `at` on was folded again, and found these. If
        `at` is the base, in the middle of the segment's first batch, what is open there may have ended in a control
        batch that is gone, and would end in a later one again."""
        if start < at:
            inside = {aborted.marker: aborted for aborted in _aborted_in(start, values)}
            found = [
                aborted._replace(first=max(aborted.first, inside.get(aborted.marker, aborted).first))
                for aborted in found
                if aborted.first < start or aborted.marker in inside
            ]
        return self._exchange(pid, at, end, found)

    def _exchange(self, pid: PartitionId, start: Offset, end: Offset, new: list[Aborted]) -> list[Op]:
        """These are the aborted transactions that end in [start, end), once the segment's batches are on disk. Until
        then a reader may get the old ones, too, so both are known: once for each control batch, as a reader takes each
        entry for one. If they differ in where it began, one comes from a state in the middle of a segment, which took
        an earlier transaction for open: the later place is right."""
        new = sorted(new)
        self._arriving = _Arriving(start, end, new)
        old = self.between(start, end)
        either = {aborted.marker: aborted for aborted in old}
        for aborted in new:
            first = max(aborted.first, either.get(aborted.marker, aborted).first)
            either[aborted.marker] = aborted._replace(first=first)
        self.put(start, end, either.values())
        if old == new:
            return []
        rows = [Put(Table.TIMES, *aborted_row(pid, aborted)) for aborted in new]
        return [Delete(Table.TIMES, aborted_key(pid, start), aborted_key(pid, end)), *rows]

    def cut_arriving(self, end: Offset) -> None:
        """The log ends at `end` now, and so does what arrives."""
        if self._arriving is not None:
            start, stop, new = self._arriving
            self._arriving = _Arriving(start, min(stop, end), [aborted for aborted in new if aborted.marker < end])

    def take_arrived(self) -> None:
        """The segment's batches are on disk."""
        if self._arriving is not None:
            start, stop, new = self._arriving
            self.put(start, max(start, stop), new)
            self._arriving = None

    def _index(self, marker: Offset) -> int:
        """Of the first entry whose marker is not below."""
        return bisect_left(self._entries, marker, key=lambda aborted: aborted.marker)


def _aborted_in(start: Offset, values: Sequence[StoredValue]) -> list[Aborted]:
    """The aborted transactions that begin and end in these batches."""
    state = LogState(start)
    found = state.found = []
    for stored in values:
        state.add(info_of_stored(stored))
    return found


def with_batches(entries: list[Aborted], batches: list[StoredBatch]) -> list[Aborted]:
    """Those that one of these batches belongs to. A reader leaves out a producer's records up to its next control batch
    that aborts. Compaction may have removed that one, together with everything that it aborted."""
    bases: dict[int, list[Offset]] = {aborted.producer_id: [] for aborted in entries}
    for batch in batches if entries else ():
        if batch.data[_ATTRIBUTES_AT] & (TRANSACTIONAL_MASK | CONTROL_MASK) == TRANSACTIONAL_MASK:
            own = bases.get(*_PRODUCER_ID.unpack_from(batch.data, _PRODUCER_ID_AT))
            if own is not None:
                own.append(batch.base_offset)
    found = []
    for aborted in entries:
        own = bases[aborted.producer_id]
        at = bisect_left(own, aborted.first)
        if at < len(own) and own[at] < aborted.marker:
            found.append(aborted)
    return found


def aborted_key(pid: PartitionId, marker: Offset, first: Offset = Offset(0)) -> bytes:
    """Without `first`: sorts before every row of this marker and of later ones."""
    return _KEY.pack(pid, TIME_ABORTED, marker, first)


def aborted_row(pid: PartitionId, aborted: Aborted) -> tuple[bytes, bytes]:
    """Key and value."""
    key = aborted_key(pid, aborted.marker, aborted.first)
    body = _ROW.pack(0, aborted.producer_id)[_CRC_BYTES:]
    return key, crc32c(key + body).to_bytes(_CRC_BYTES, "big") + body


def parse_aborted_row(key: bytes, value: bytes) -> Aborted:
    """Inverse of `aborted_row`; DataDamaged if the CRC differs."""
    try:
        _, _, marker, first = _KEY.unpack(key)
        crc, producer_id = _ROW.unpack(value)
    except CodecError as e:
        raise DataDamaged(f"the row at {key.hex()} of table times does not decode: {e}") from e
    if crc32c(key + value[_CRC_BYTES:]) != crc:
        raise DataDamaged(f"the row at {key.hex()} of table times does not match its CRC-32C")
    return Aborted(Offset(marker), Offset(first), ProducerId(producer_id))
