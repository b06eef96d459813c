"""Rows of one moment: from the index and what is in front of it, with the batches read from the log.

Owns how many rows a read takes, and reads batches that lie together as one. It must never change anything.
"""

from collections.abc import Callable, Iterator, Sequence

from smq.replication.ports import Examined, Table
from smq.replication.storage.frames import Location, parse_location
from smq.replication.storage.index import Snapshot
from smq.replication.storage.node_log import NodeLog
from smq.replication.storage.overlay import Pair, Piece

Pieces = Callable[[Table, bytes, bytes], Sequence[Piece]]


class Moment:
    """The port's Rows, within a transaction of the index and a pin of the log's files."""

    def __init__(self, snapshot: Snapshot, pieces: Pieces, log: NodeLog) -> None:
        """`pieces`: of the overlay, as of a moment before the transaction began."""
        self._snapshot = snapshot
        self._pieces = pieces
        self._log = log

    def _rows(self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False) -> Iterator[Pair]:
        if start >= stop:
            return iter(())
        return self._snapshot.rows(table, start, stop, self._pieces(table, start, stop), reverse=reverse)

    def get(self, table: Table, key: bytes) -> bytes | None:
        rows = self.scan(table, key, key + b"\x00", limit=1)
        return rows[0][1] if rows else None

    def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool = False,
        limit: int = 1 << 30,
        bytes_max: int = 1 << 62,
    ) -> list[Pair]:
        taken = _Taken(table)
        if limit > 0:
            for key, row in self._rows(table, start, stop, reverse=reverse):
                taken.add(key, row)
                if len(taken.keys) >= limit or taken.size >= bytes_max:
                    break
        return taken.pairs(self._log)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        keys: list[bytes] = []
        if limit > 0:
            for key, _ in self._rows(table, start, stop, reverse=reverse):
                keys.append(key)
                if len(keys) >= limit:
                    break
        return keys

    def scan_from(self, table: Table, lowest: bytes, start: bytes, stop: bytes, bytes_max: int) -> list[Pair]:
        """As the port's `read_from`."""
        before = next(self._rows(table, lowest, min(start + b"\x00", stop), reverse=True), None)
        taken = _Taken(table)
        for key, row in self._rows(table, before[0] if before is not None else start, stop):
            if taken.keys and taken.size + taken.size_of(key, row) > bytes_max:
                break
            taken.add(key, row)
        return taken.pairs(self._log)

    def examined(
        self, table: Table, start: bytes, stop: bytes, bytes_max: int, check: Callable[[bytes, bytes], bool]
    ) -> Examined:
        taken = _Taken(table)
        next_key = None
        for key, row in self._rows(table, start, stop):
            taken.add(key, row)
            if taken.size >= bytes_max:
                next_key = key + b"\x00"
                break
        pairs = taken.pairs(self._log)
        return Examined(
            damaged=[key for key, value in pairs if not check(key, value)],
            unreadable=taken.unreadable(pairs),
            size=sum(len(value) for _, value in pairs),
            next_key=next_key,
        )


class _Taken:
    """Rows whose values have yet to be read: those of batches are where they lie."""

    def __init__(self, table: Table) -> None:
        self._is_batches = table is Table.BATCHES
        self.keys: list[bytes] = []
        self._values: list[bytes] = []
        self._locations: list[Location | None] = []
        self.size = 0

    def size_of(self, key: bytes, row: bytes) -> int:
        location = parse_location(key, row) if self._is_batches else None
        return len(row) if not self._is_batches else location.length if location is not None else 0

    def add(self, key: bytes, row: bytes) -> None:
        self.keys.append(key)
        if self._is_batches:
            location = parse_location(key, row)
            self._locations.append(location)
            self.size += location.length if location is not None else 0
        else:
            self._values.append(row)
            self.size += len(row)

    def pairs(self, log: NodeLog) -> list[Pair]:
        values = log.read(self._locations) if self._is_batches else self._values
        return list(zip(self.keys, values, strict=True))

    def unreadable(self, pairs: Sequence[Pair]) -> list[bytes]:
        """Of the pairs: those that the medium cannot give."""
        if not self._is_batches:
            return []
        found = zip(pairs, self._locations, strict=True)
        return [key for (key, value), at in found if at is None or len(value) != at.length]
