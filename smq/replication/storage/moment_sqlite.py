"""All tables of an SQLite database as of one moment, with the pending rows that come after it: the port's Rows.

Owns the read transaction of one connection, and what a row is in SQL. A value that is not in its row's page is read by
itself, so that a walk passes over what its caller leaves out, and a value that the medium cannot give is empty. SQLite
ends the transaction over such a value: what follows is then read in a newer one, with the pending rows of that moment.
So the rows after a value that could not be read may be of a later moment. It must never write. Only the real disk
imports it.
"""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Final

from smq.replication.ports import DataDamaged, Table
from smq.replication.storage.database_sqlite import INLINE_BYTES_MAX
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import Row, WalkedRows, beginning_at, merged

_ROWS: Final = (
    f"SELECT key, length(value), CASE WHEN length(value) <= {INLINE_BYTES_MAX} THEN value END FROM {{}} "
    "WHERE key >= ? AND key < ? ORDER BY key"
)
_ASCENDING: Final = {table: _ROWS.format(table.value) for table in Table}
_DESCENDING: Final = {table: sql + " DESC" for table, sql in _ASCENDING.items()}
_VALUE: Final = {table: f"SELECT value FROM {table.value} WHERE key = ?" for table in Table}
_LAST_BEFORE: Final = {
    table: f"SELECT key FROM {table.value} WHERE key >= ? AND key <= ? ORDER BY key DESC LIMIT 1" for table in Table
}


class Moment(WalkedRows):
    """For one thread, until `end`."""

    def __init__(self, connection: sqlite3.Connection, pending: PendingRows, *, is_of_all_tables: bool) -> None:
        """`is_of_all_tables`: several walks see the same moment."""
        self._connection = connection
        self._live = pending
        self._pending = pending
        self._is_of_all_tables = is_of_all_tables
        self._number = -1

    def end(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _walk(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int
    ) -> AbstractContextManager[Iterator[Row]]:
        return self.walk(table, start, stop, reverse=reverse, limit=limit, lowest=None)

    @contextmanager
    def walk(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int, lowest: bytes | None
    ) -> Iterator[Iterator[Row]]:
        """With `lowest`, beginning with the last key in [lowest, start] if there is one."""
        try:
            with closing(self._rows(table, start, stop, lowest, reverse=reverse, limit=limit)) as rows:
                yield rows
        except sqlite3.Error as e:
            raise DataDamaged(f"table {table.value} cannot be walked: {e}") from e

    def _rows(
        self, table: Table, start: bytes, stop: bytes, lowest: bytes | None, *, reverse: bool, limit: int
    ) -> Generator[Row, None, None]:
        while start < stop or lowest is not None:
            pending = self._begin(table, start, stop, lowest, reverse=reverse, limit=limit)
            first = start if lowest is None else self._last_before(table, lowest, start)
            with closing(self._connection.execute((_DESCENDING if reverse else _ASCENDING)[table], (first, stop))) as c:
                found = merged(self._stored(table, c), pending, reverse=reverse)
                for row in found if lowest is None else beginning_at(found, start):
                    yield row
                    if reverse:
                        stop = row[0]
                    else:
                        start = row[0] + b"\x00"
                    if not self._connection.in_transaction:
                        break
                else:
                    return
            lowest = None

    def _begin(
        self, table: Table, start: bytes, stop: bytes, lowest: bytes | None, *, reverse: bool, limit: int
    ) -> list[tuple[bytes, bytes]]:
        """Begins the moment if there is none. Returns the pending rows, which are taken before: a transaction that is
        newer than they are has them all."""
        is_new = not self._connection.in_transaction
        if is_new and self._is_of_all_tables:
            self._pending = self._live.copy()
        base, pending = self._pending.between(table, start, stop, lowest=lowest, reverse=reverse, limit=limit)
        if is_new:
            self._connection.execute("BEGIN")
            (self._number,) = self._connection.execute("PRAGMA user_version").fetchone()
        return pending if self._number == base else []

    def _last_before(self, table: Table, lowest: bytes, start: bytes) -> bytes:
        found = self._connection.execute(_LAST_BEFORE[table], (lowest, start)).fetchone()
        return start if found is None else bytes(found[0])

    def _stored(self, table: Table, cursor: sqlite3.Cursor) -> Iterator[Row]:
        for key, size, value in cursor:
            yield key, size, partial(self._value, table, key) if value is None else partial(bytes, value)

    def _value(self, table: Table, key: bytes) -> bytes:
        try:
            found = self._connection.execute(_VALUE[table], (key,)).fetchone()
        except sqlite3.DatabaseError:
            return b""
        return b"" if found is None else bytes(found[0])
