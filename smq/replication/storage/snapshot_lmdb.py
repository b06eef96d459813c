"""All tables of the disk as of one moment: the port's Rows, for a look-up that reads several of them.

Owns the choice of what that moment is: a transaction of LMDB's, and the pending rows that come after it, the same for
every row read. It must never read a row by any other way. Only the real disk imports it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from smq.replication.ports import DataDamaged, Table
from smq.replication.storage.pages_lmdb import TREE_DAMAGE, PageReader, SnapshotGone
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import Row, WalkedRows, merged


class Snapshot(WalkedRows):
    """For a thread of its own, while it holds the transaction."""

    def __init__(self, reader: PageReader, transaction: int, pending: PendingRows) -> None:
        """`pending`: a copy, made before the transaction began."""
        self._reader = reader
        self._transaction = transaction
        self._pending = pending

    @contextmanager
    def _walk(self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int) -> Iterator[Iterator[Row]]:
        base, pending = self._pending.between(table, start, stop, lowest=None, reverse=reverse, limit=limit)
        try:
            found = self._reader.rows(self._transaction, table.value.encode(), start, stop, reverse=reverse)
            yield merged(found, pending if self._transaction == base else [], reverse=reverse)
        except SnapshotGone:
            raise
        except TREE_DAMAGE as e:
            raise DataDamaged(f"table {table.value} cannot be walked: {e}") from e
