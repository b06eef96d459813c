"""The aborted transactions of one partition's log: which of its records no committed reader returns.

Owns the index of the abort markers that the log holds, in memory, and its rows on disk. It is a fold over the log, and
is cut and pruned with it. Readers get the transactions that overlap with what they have read, and leave out the
records of those producers from `first` to the marker. It must never touch a disk. This package imports it, and
the leader's compaction.

    TIMES  partition(20) 2 marker(8) first(8)  -> CRC, producer id, stable

There is one entry in memory per abort marker that the log retains, 150 bytes each.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from crc32c import crc32c

from smq.raft_state.ids import Offset, PartitionId, ProducerId
from smq.replication.api import Aborted
from smq.replication.log.codec import TIME_ABORTED
from smq.replication.ports import DataDamaged

_KEY: Final = struct.Struct(">20sBQQ")
_ROW: Final = struct.Struct(">Iqq")
_CRC_BYTES: Final = 4


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
