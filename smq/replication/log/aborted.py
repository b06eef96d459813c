"""The aborted transactions of one partition's log: which of its records no committed reader returns.

Owns the index of the abort markers that the log holds, in memory, and its rows on disk. It is a fold over the log, and
is cut and pruned with it. Readers get the transactions that have batches in what they have read, and leave out the
records of those producers from `first` to the marker. An entry whose batches are gone does no harm, but a control batch
has one entry at most: some readers count them. It must never touch a disk. This package imports it, and the readers and
the compaction of partitions.

    TIMES  partition(20) 2 marker(8) first(8)  -> CRC, producer id, stable

There is one entry in memory per abort marker that the log retains, 150 bytes each.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

from crc32c import crc32c

from smq.raft_state.ids import Offset, PartitionId, ProducerId
from smq.records import CONTROL_MASK, TRANSACTIONAL_MASK, parse_header
from smq.replication.api import Aborted, StoredBatch
from smq.replication.log.codec import TIME_ABORTED
from smq.replication.ports import DataDamaged

_KEY: Final = struct.Struct(">20sBQQ")
_ROW: Final = struct.Struct(">Iqq")
_CRC_BYTES: Final = 4
_ATTRIBUTES_AT: Final = 22  # of a batch: the low byte, which has the flags


class AbortedTransactions:
    """In the order of their markers."""

    __slots__ = ("_entries", "_of_producers")

    def __init__(self, entries: list[Aborted]) -> None:
        self._entries = entries
        self._of_producers: dict[ProducerId, list[Aborted]] | None = None  # made by `covers`, void after a change

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Aborted]:
        return iter(self._entries)

    def add(self, aborted: Aborted) -> None:
        self._entries.append(aborted)
        self._of_producers = None

    def cut(self, end: Offset) -> None:
        """The log ends at `end` now."""
        del self._entries[self._index(end) :]
        self._of_producers = None

    def forget_before(self, first: Offset) -> None:
        """The log begins at `first` now."""
        del self._entries[: self._index(first)]
        self._of_producers = None

    def between(self, start: Offset, end: Offset) -> list[Aborted]:
        """Those with a marker in [start, end)."""
        return self._entries[self._index(start) : self._index(end)]

    def put(self, start: Offset, end: Offset, entries: Iterable[Aborted]) -> None:
        """In place of those with a marker in [start, end)."""
        self._entries[self._index(start) : self._index(end)] = sorted(entries)
        self._of_producers = None

    def discard(self, entries: Iterable[Aborted]) -> None:
        """Those that are not here are ignored."""
        if gone := set(entries):
            self._entries = [aborted for aborted in self._entries if aborted not in gone]
            self._of_producers = None

    def within(self, start: Offset, end: Offset) -> list[Aborted]:
        """Those that have records in [start, end)."""
        found: list[Aborted] = []
        for at in range(self._index(start), len(self._entries)):
            aborted = self._entries[at]
            if aborted.first < end:
                found.append(aborted)
            if aborted.stable >= end:
                break
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

    def _index(self, marker: Offset) -> int:
        """Of the first entry whose marker is not below."""
        return bisect_left(self._entries, marker, key=lambda aborted: aborted.marker)


def with_batches(entries: list[Aborted], batches: list[StoredBatch]) -> list[Aborted]:
    """Those that one of these batches belongs to. A reader leaves out a producer's records up to its next control batch
    that aborts. Compaction may have removed that one, together with everything that it aborted."""
    bases: dict[int, list[Offset]] = {}
    for batch in batches if entries else ():
        if batch.data[_ATTRIBUTES_AT] & (TRANSACTIONAL_MASK | CONTROL_MASK) == TRANSACTIONAL_MASK:
            bases.setdefault(parse_header(batch.data).producer_id, []).append(batch.base_offset)
    found = []
    for aborted in entries:
        own = bases.get(aborted.producer_id, [])
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
    body = _ROW.pack(0, aborted.producer_id, aborted.stable)[_CRC_BYTES:]
    return key, crc32c(key + body).to_bytes(_CRC_BYTES, "big") + body


def parse_aborted_row(key: bytes, value: bytes) -> Aborted:
    """Inverse of `aborted_row`; DataDamaged if the CRC differs."""
    if len(key) != _KEY.size or len(value) != _ROW.size:
        raise DataDamaged(f"the row at {key.hex()} of table times has a wrong size")
    if crc32c(key + value[_CRC_BYTES:]) != int.from_bytes(value[:_CRC_BYTES], "big"):
        raise DataDamaged(f"the row at {key.hex()} of table times does not match its CRC-32C")
    _, _, marker, first = _KEY.unpack(key)
    _, producer_id, stable = _ROW.unpack(value)
    return Aborted(Offset(marker), Offset(first), ProducerId(producer_id), Offset(stable))
