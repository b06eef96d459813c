"""Rows as the disk reads them: merged from the store and from those that it does not have yet, and taken within bounds.

Owns the order of a merge. It must never touch a disk. Only the real disk and its parts import it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

from smq.replication.ports import Examined, Table

# Key, size of the value if it is known unread, and how to read it: empty if the medium cannot give it
Row = tuple[bytes, int | None, Callable[[], bytes]]
Pair = tuple[bytes, bytes]
# Of a key of table BATCHES and the first bytes of a value: the key that the value belongs to, if it is intact and of
# the same partition
HomeOf = Callable[[bytes, bytes], bytes | None]


def merged(rows: Iterator[Row], pending: list[Pair], *, reverse: bool) -> Iterator[Row]:
    """Both in order; of two with the same key, the pending one. A row of the store must be read before the next one."""
    return _interleaved(rows, pending, reverse=reverse) if pending else rows


def _interleaved(rows: Iterator[Row], pending: list[Pair], *, reverse: bool) -> Iterator[Row]:
    ours = iter(pending)
    mine = next(ours, None)
    for row in rows:
        key = row[0]
        while mine is not None and (mine[0] > key if reverse else mine[0] < key):
            yield _held(mine)
            mine = next(ours, None)
        if mine is not None and mine[0] == key:
            yield _held(mine)
            mine = next(ours, None)
        else:
            yield row
    while mine is not None:
        yield _held(mine)
        mine = next(ours, None)


def _held(pair: Pair) -> Row:
    key, value = pair
    return key, len(value), partial(bytes, value)


def beginning_at(rows: Iterator[Row], start: bytes) -> Iterator[Row]:
    """Without the first row if the second is not beyond `start` either: both sides of a merge gave their last one."""
    first, second = next(rows, None), next(rows, None)
    if first is not None and (second is None or second[0] > start):
        yield first
    if second is not None:
        yield second
        yield from rows


def nothing() -> None:
    """Gives up a read that has ended."""


def taken(rows: Iterator[Row], limit: int, bytes_max: int) -> list[Pair]:
    pairs: list[Pair] = []
    total = 0
    for key, _, read_value in rows:
        value = read_value()
        pairs.append((key, value))
        total += len(value)
        if len(pairs) >= limit or total >= bytes_max:
            break
    return pairs


def within(rows: Iterator[Row], bytes_max: int) -> list[Pair]:
    """For rows whose sizes are known. Ends before the row that would make the values' total exceed `bytes_max`, but not
    before the first. It must see merged rows: if the store's ended there, newer pending ones would follow after a gap.
    """
    pairs: list[Pair] = []
    left = bytes_max
    for key, size, read_value in rows:
        assert size is not None
        if size > left and pairs:
            break
        pairs.append((key, read_value()))
        left -= size
    return pairs


def examined(rows: Iterator[Row], bytes_max: int, check: Callable[[bytes, bytes], bool]) -> Examined:
    """For rows whose sizes are known."""
    damaged: list[bytes] = []
    unreadable: list[bytes] = []
    total = 0
    next_key = None
    for key, size, read_value in rows:
        value = read_value()
        if len(value) != size:
            unreadable.append(key)
        if not check(key, value):
            damaged.append(key)
        total += len(value)
        if total >= bytes_max:
            next_key = key + b"\x00"
            break
    return Examined(damaged=damaged, unreadable=unreadable, size=total, next_key=next_key)


class WalkedRows(ABC):
    """The port's Rows, read by one walk over a table."""

    @abstractmethod
    def _walk(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int
    ) -> AbstractContextManager[Iterator[Row]]:
        """The rows in [start, stop), to be read within the block. Of pending rows at most `limit` are merged in."""

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
    ) -> list[tuple[bytes, bytes]]:
        if limit <= 0 or start >= stop:
            return []
        with self._walk(table, start, stop, reverse=reverse, limit=limit) as rows:
            return taken(rows, limit, bytes_max)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        if limit <= 0 or start >= stop:
            return []
        with self._walk(table, start, stop, reverse=reverse, limit=limit) as rows:
            return [key for key, _, _ in islice(rows, limit)]
