"""Rows that are durable in the write-ahead file and not in the store yet: every read of the disk sees them over its.

Owns them, in memory. There are only rows put: a round that deletes goes to the store together with everything here. It
must never hold a row that is not durable. Only the real disk imports it.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import islice
from typing import Final

from smq.replication.ports import Put, Table
from smq.replication.storage.rows import Pair

ROWS_MAX: Final = 8192  # a store takes them in some 10 ms, and a read sorts them in one


class PendingRows:
    """One thread changes it, any thread reads. `base` is the transaction of the store's that these rows come after."""

    def __init__(self, base: int) -> None:
        self._lock = threading.Lock()
        self._base = base
        self._values: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._keys: dict[Table, list[bytes]] = {table: [] for table in Table}  # sorted; a read adds the newest
        self.count = 0
        self.size = 0  # of the values, bytes

    def has_space(self, puts: int) -> bool:
        return self.count + puts <= ROWS_MAX

    def add(self, puts: Iterable[Put]) -> None:
        with self._lock:
            for put in puts:
                values = self._values[put.table]
                self.count += put.key not in values
                self.size += len(put.value) - len(values.get(put.key, b""))
                values[put.key] = put.value

    def clear(self, base: int) -> None:
        """The store has them all, as of this transaction."""
        with self._lock:
            self._base = base
            self.count = self.size = 0
            for table in Table:
                self._values[table], self._keys[table] = {}, []

    def copy(self) -> "PendingRows":
        """As of now, of all tables together."""
        with self._lock:
            copied = PendingRows(self._base)
            copied.count, copied.size = self.count, self.size
            copied._values = {table: values.copy() for table, values in self._values.items()}
            copied._keys = {table: keys.copy() for table, keys in self._keys.items()}
        return copied

    def all(self) -> list[Put]:
        """Each table's in the order of its keys. For the thread that changes it."""
        with self._lock:
            keys = {table: self._sorted(table).copy() for table in Table}
        return [Put(table, key, self._values[table][key]) for table in Table for key in keys[table]]

    def owners(self, table: Table, owner_bytes: int) -> set[bytes]:
        """The first bytes of all keys. For the thread that changes it."""
        return {key[:owner_bytes] for key in self._values[table]}

    def between(
        self, table: Table, start: bytes, stop: bytes, *, lowest: bytes | None, reverse: bool, limit: int
    ) -> tuple[int, list[Pair]]:
        """(base, rows): the rows in [start, stop), ascending or descending, at most `limit`. With `lowest`, the last
        one in [lowest, start] comes first if there is one. They count for a transaction `base`; a later one of the
        store's has them all."""
        with self._lock:
            keys, values = self._sorted(table), self._values[table]
            first, last = bisect_left(keys, start), bisect_left(keys, stop)
            if lowest is not None:
                first = max(bisect_right(keys, start) - 1, bisect_left(keys, lowest))
            last = max(first, last)
            found = keys[max(first, last - limit) : last][::-1] if reverse else keys[first : min(last, first + limit)]
            return self._base, [(key, values[key]) for key in found]

    def _sorted(self, table: Table) -> list[bytes]:
        keys, values = self._keys[table], self._values[table]
        if len(keys) < len(values):
            keys.extend(list(islice(values, len(keys), None)))  # a dict keeps the order of insertion
            keys.sort()  # two runs or a few: fast
        return keys
