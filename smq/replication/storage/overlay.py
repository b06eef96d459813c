"""Rounds that are durable in the log and not in the index yet: every read sees them in front of it.

Owns their rows, in two layers: one that grows, and one that the index is taking. A layer holds what its rounds come to:
per table, the rows they have put and the ranges of older rows they have deleted. It must never hold a row that is not
durable. Only the real disk imports it.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from smq.replication.ports import Delete, Op, Put, Table
from smq.replication.storage.node_log import Place

ROWS_MAX: Final = 8192  # the index takes them in some 20 ms
LOG_BYTES_MAX: Final = 64 << 20  # a start reads no more than this in full, beside a layer that is being taken
ROOM: Final = 8  # times as much, then the writer waits for the index
_FRESH_MAX: Final = 256

Pair = tuple[bytes, bytes]
Span = tuple[bytes, bytes]


class Ranges:
    """Keys, as ranges that neither touch nor overlap, in order."""

    def __init__(self, starts: list[bytes] | None = None, stops: list[bytes] | None = None) -> None:
        self.starts, self.stops = starts if starts is not None else [], stops if stops is not None else []

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, start: bytes, stop: bytes) -> None:
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high] = [start]
        self.stops[low:high] = [stop]

    def has(self, key: bytes) -> bool:
        at = bisect_right(self.starts, key) - 1
        return at >= 0 and key < self.stops[at]

    def meeting(self, start: bytes, stop: bytes) -> list[Span]:
        """Those that have keys in [start, stop)."""
        low, high = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        return list(zip(self.starts[low:high], self.stops[low:high], strict=True))

    def all(self) -> list[Span]:
        return list(zip(self.starts, self.stops, strict=True))

    def copy(self) -> "Ranges":
        return Ranges(self.starts.copy(), self.stops.copy())


class _Rows:
    """Of one table."""

    __slots__ = ("fresh", "gone", "keys", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []  # in order, without the fresh ones
        self.fresh: list[bytes] = []
        self.gone = Ranges()

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            self.fresh.append(key)
        self.values[key] = value

    def delete(self, start: bytes, stop: bytes) -> None:
        if start >= stop:
            return
        self.gone.add(start, stop)
        if len(self.fresh) > _FRESH_MAX:
            self.sort()
        low, high = bisect_left(self.keys, start), bisect_left(self.keys, stop)
        for key in self.keys[low:high]:
            del self.values[key]
        del self.keys[low:high]
        if self.fresh:
            for key in self.fresh:
                if start <= key < stop:
                    del self.values[key]
            self.fresh = [key for key in self.fresh if not start <= key < stop]

    def sort(self) -> list[bytes]:
        if self.fresh:
            self.keys += self.fresh
            self.keys.sort()  # two runs or a few: fast
            self.fresh = []
        return self.keys

    def copy(self) -> "_Rows":
        copied = _Rows()
        copied.values, copied.keys, copied.gone = self.values.copy(), self.sort().copy(), self.gone.copy()
        return copied


class Piece(NamedTuple):
    """A part of a layer. It counts for an index that does not have the round with that number."""

    first: int
    gone: list[Span]
    pairs: list[Pair]  # in order


class Layer:
    """Of the rounds from `first` on. One thread changes it."""

    def __init__(self, end: Place) -> None:
        self.first = end.number
        self.end = end  # the place after its last round
        self.rows = {table: _Rows() for table in Table}
        self.count = 0  # of rows put and ranges deleted
        self.log_bytes = 0

    def add(self, changes: Sequence[Op], end: Place, log_bytes: int) -> None:
        rows = self.rows
        for op in changes:
            if isinstance(op, Put):
                rows[op.table].put(op.key, op.value)
            elif isinstance(op, Delete):
                rows[op.table].delete(op.start, op.stop)
        self.count += len(changes)
        self.end = end
        self.log_bytes += log_bytes

    @property
    def is_full(self) -> bool:
        return self.count >= ROWS_MAX or self.log_bytes >= LOG_BYTES_MAX

    @property
    def is_overfull(self) -> bool:
        return self.count >= ROOM * ROWS_MAX or self.log_bytes >= ROOM * LOG_BYTES_MAX

    def piece(self, table: Table, start: bytes, stop: bytes) -> Piece:
        rows = self.rows[table]
        keys, values = rows.sort(), rows.values
        found = keys[bisect_left(keys, start) : bisect_left(keys, stop)]
        return Piece(self.first, rows.gone.meeting(start, stop), [(key, values[key]) for key in found])

    def copy(self) -> "Layer":
        copied = Layer(self.end)
        copied.first = self.first
        copied.rows = {table: rows.copy() for table, rows in self.rows.items()}
        return copied


class Overlay:
    """One thread adds rounds, one takes layers, any thread reads."""

    def __init__(self, end: Place) -> None:
        self._lock = threading.Lock()
        self._grows = Layer(end)
        self._taken: Layer | None = None  # it does not change any more

    @property
    def grows(self) -> Layer:
        return self._grows

    def add(self, changes: Sequence[Op], end: Place, log_bytes: int) -> None:
        """One round, in whole."""
        with self._lock:
            self._grows.add(changes, end, log_bytes)

    def take(self) -> Layer:
        """For the index. The next rounds go to a new layer."""
        with self._lock:
            assert self._taken is None
            taken = self._taken = self._grows
            for rows in taken.rows.values():
                rows.sort()
            self._grows = Layer(taken.end)
        return taken

    def forget_taken(self) -> None:
        """The index has it."""
        with self._lock:
            self._taken = None

    def pieces(self, table: Table, start: bytes, stop: bytes) -> list[Piece]:
        """Of the layers, the older one first. Ask for them before a transaction of the index begins."""
        with self._lock:
            layers = (self._grows,) if self._taken is None else (self._taken, self._grows)
            return [layer.piece(table, start, stop) for layer in layers]

    def copies(self) -> list[Layer]:
        """As `pieces`, of everything."""
        with self._lock:
            grows = self._grows.copy()
            return [grows] if self._taken is None else [self._taken, grows]


def joined(pieces: Sequence[Piece]) -> tuple[list[Span], list[Pair]]:
    """As one: the newer one in front of the older one."""
    if len(pieces) == 1:
        return pieces[0].gone, pieces[0].pairs
    gone, rows = Ranges(), dict[bytes, bytes]()
    for piece in pieces:
        over = Ranges([start for start, _ in piece.gone], [stop for _, stop in piece.gone])
        rows = {key: value for key, value in rows.items() if not over.has(key)} if len(over) else rows
        rows.update(piece.pairs)
        for start, stop in piece.gone:
            gone.add(start, stop)
    return gone.all(), sorted(rows.items())
