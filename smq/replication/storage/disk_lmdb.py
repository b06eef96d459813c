"""The store LMDB: one environment, read by page where a failing medium must not end the process.

Owns the only write transactions in it. It must never know what the keys and values mean: its caller hands in
`home_of`, which answers its one question. `opening` builds it; all other code sees the `Disk` port. LMDB's own quirks
live here and in the modules named for it. After an fsync error it carries on in an unknown state.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import lmdb

from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.ports import DataDamaged, Delete, GiveUp, Op, Put, Rows, T, Table
from smq.replication.storage.directory import REPLACE_ADVICE
from smq.replication.storage.disk import READERS, StoreDisk
from smq.replication.storage.engine import Engine
from smq.replication.storage.environment_lmdb import DATA_FILE, open_environment
from smq.replication.storage.pages_lmdb import TREE_DAMAGE, NotCached, PageFile, PageReader, SnapshotGone
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import HomeOf, Row, WalkedRows, beginning_at, merged, nothing, within
from smq.replication.storage.workers import Gate
from smq.replication.storage.write_ahead import WRITE_AHEAD_BYTES, WRITE_AHEAD_KEY, Active

if TYPE_CHECKING:
    from lmdb import _Database

MAP_BYTES: Final = 1 << 40  # virtual; large from the start, so that it rarely has to grow
MAP_BYTES_MAX: Final = 1 << 46  # half of a process's address space; a larger map is impossible
SNAPSHOT_TRIES: Final = 20  # each fails only if two commits end within microseconds
_META_PAGES: Final = 2


class LmdbDisk(StoreDisk):
    """See StoreDisk."""

    engine = Engine.LMDB
    errors = (lmdb.Error,)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_fatal: Callable[[BaseException], None],
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        home_of: HomeOf | None = None,
        map_size: int = MAP_BYTES,
        write_ahead_bytes: int = WRITE_AHEAD_BYTES,
    ) -> None:
        """Without `home_of`, no batch may be deleted."""
        self._home_of = home_of
        self._map_size = map_size
        self._map_lock = threading.Lock()  # held by each read of the loop, and while the map moves
        self._gate = Gate()  # passed by each read of another thread, and shut while the map moves
        super().__init__(
            path,
            call_soon_threadsafe=call_soon_threadsafe,
            on_fatal=on_fatal,
            call_soon=call_soon,
            write_ahead_bytes=write_ahead_bytes,
        )

    def _open_store(self, undo: ExitStack, write_ahead_bytes: int) -> int:
        self._env, self._tables = open_environment(
            self._path,
            map_size=self._map_size,
            write_ahead_bytes=write_ahead_bytes,
            spare_txns=READERS + 2,  # one for the loop, one for the examiner
        )
        undo.callback(self._env.close)
        self._pages = PageFile(self._path / DATA_FILE)
        undo.callback(self._pages.close)
        last: int = self._env.info()["last_txnid"]
        return last

    def _close_store(self) -> None:
        self._pages.close()
        self._env.close()

    def _prepare_recovery(self) -> None:
        """Reads the values that the pending rows replace. The process that found some of them unreadable has ended, and
        LMDB must not touch their pages before they have been overwritten."""
        with self._env.begin() as txn:
            stored = Snapshot(self._pages.reader(cached_only=False), txn.id(), PendingRows(base=0))
            for put in self._pending.all():
                stored.get(put.table, put.key)

    def _settle_start(self) -> None:
        """A transaction is in the data file."""

    def _tidy(self) -> None:
        """Nothing is left after a transaction: LMDB uses freed pages again by itself."""

    # ------------------------------------------------------------------------------------------ writes
    def _write(self, ops: Sequence[Op], active: Active) -> int:
        while True:
            try:
                return self._write_once(ops, active)
            except lmdb.MapFullError:
                if self._map_size >= MAP_BYTES_MAX:
                    raise
                self._grow_map()

    def _write_once(self, ops: Sequence[Op], active: Active) -> int:
        tables = self._tables
        with self._env.begin(write=True) as txn:
            for op in ops:
                self._prepare(txn, op)
                if isinstance(op, Put):
                    txn.put(op.key, op.value, db=tables[op.table])
                else:
                    _delete_range(txn, tables[op.table], op.start, op.stop)
            txn.put(WRITE_AHEAD_KEY, active.encode(), db=tables[Table.META])
            number: int = txn.id()
            return number

    def _prepare(self, txn: "lmdb.Transaction[bytes]", op: Op) -> None:
        """Before LMDB touches the pages of rows that exist. A batch is only ever put in place of another after a Delete
        in the same submission, so the check of a Delete covers that too."""
        is_delete_of_batches = isinstance(op, Delete) and op.table is Table.BATCHES
        if not is_delete_of_batches and not self._pages.unreadable:
            return
        start, stop = (op.key, op.key + b"\x00") if isinstance(op, Put) else (op.start, op.stop)
        transaction, table = txn.id() - 1, op.table.value.encode()
        try:
            if is_delete_of_batches:
                assert self._home_of is not None, "opened by a caller that deletes no batches"
                self._pages.reader(cached_only=False).check_freeable(
                    transaction,
                    table,
                    start,
                    stop,
                    self._home_of,
                    PARTITION_ID_BYTES,
                    partial(self._pending.owners, op.table),
                )
            self._pages.make_replaceable(transaction, table, start, stop)
        except TREE_DAMAGE as e:
            raise DataDamaged(f"table {op.table.value} of {self._path} cannot be changed: {e}. {REPLACE_ADVICE}") from e

    def _grow_map(self) -> None:
        self._map_size = min(self._map_size * 2, MAP_BYTES_MAX)
        with self._gate.alone(), self._map_lock:
            self._env.set_mapsize(self._map_size)

    # ------------------------------------------------------------------------------------------- reads
    @contextmanager
    def _walk(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool = False,
        limit: int = 1 << 30,
        is_loop: bool = True,
        lowest: bytes | None = None,
        bytes_wanted: int = 1 << 62,
    ) -> Iterator[Iterator[Row]]:
        """On the loop, batches alone are read by page: through the map, one that the medium cannot give would end the
        process."""
        if not is_loop or table is Table.BATCHES:
            guard = (lambda: self._map_lock) if is_loop else self._gate.shared
            with self._pages_of(
                table, start, stop, guard=guard, lowest=lowest, reverse=reverse, limit=limit, bytes_wanted=bytes_wanted
            ) as rows:
                yield rows
            return
        assert lowest is None, "only threads read from the last key before a start"
        try:
            with self._map_lock:
                base, pending = self._pending.between(table, start, stop, lowest=None, reverse=reverse, limit=limit)
                with self._env.begin() as txn, txn.cursor(self._tables[table]) as cursor:
                    found = ((key, None, cursor.value) for key in _keys(cursor, start, stop, reverse=reverse))
                    yield merged(found, pending if txn.id() == base else [], reverse=reverse)
        except lmdb.Error as e:
            raise DataDamaged(f"table {table.value} of {self._path} cannot be read: {e}") from e

    @contextmanager
    def _pages_of(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        guard: Callable[[], AbstractContextManager[object]],
        lowest: bytes | None = None,
        reverse: bool = False,
        limit: int = 1 << 30,
        bytes_wanted: int = 1 << 62,
        cached_only: bool = False,
    ) -> Iterator[Iterator[Row]]:
        """As `_walk`. Raises NotCached only with `cached_only`."""
        for _ in range(SNAPSHOT_TRIES):
            with guard():
                base, pending = self._pending.between(table, start, stop, lowest=lowest, reverse=reverse, limit=limit)
                try:
                    with self._env.begin() as txn:
                        rows = self._pages.reader(cached_only=cached_only).rows(
                            txn.id(),
                            table.value.encode(),
                            start,
                            stop,
                            lowest=lowest,
                            reverse=reverse,
                            bytes_wanted=bytes_wanted,
                        )
                        try:
                            first = next(rows, None)
                        except SnapshotGone:
                            continue
                        found = rows if first is None else chain((first,), rows)
                        if pending and txn.id() == base:
                            found = merged(found, pending, reverse=reverse)
                            yield found if lowest is None else beginning_at(found, start)
                        else:
                            yield found
                        return
                except (lmdb.Error, *TREE_DAMAGE) as e:
                    raise DataDamaged(f"table {table.value} of {self._path} cannot be walked: {e}") from e
        raise DataDamaged(f"table {table.value} of {self._path} was changed faster than it could be read")

    def read_from(
        self,
        table: Table,
        lowest: bytes,
        start: bytes,
        stop: bytes,
        *,
        place: bytes,
        bytes_max: int,
        done: Callable[[list[tuple[bytes, bytes]] | DataDamaged], None],
    ) -> GiveUp | None:
        """What is in memory need not change threads."""
        try:
            with self._pages_of(
                table,
                start,
                stop,
                guard=lambda: self._map_lock,
                lowest=lowest,
                bytes_wanted=bytes_max,
                cached_only=True,
            ) as rows:
                found = within(rows, bytes_max)
        except NotCached:
            return super().read_from(table, lowest, start, stop, place=place, bytes_max=bytes_max, done=done)
        except DataDamaged as e:
            self._post(partial(done, e))
        else:
            self._post(partial(done, found))
        return nothing

    def _find(self, find: Callable[[Rows], T]) -> T:
        for _ in range(SNAPSHOT_TRIES):
            pending = self._pending.copy()
            try:
                with self._gate.shared(), self._env.begin() as txn:
                    reader = self._pages.reader(cached_only=False)
                    return find(Snapshot(reader, txn.id(), pending))
            except SnapshotGone:
                continue
            except lmdb.Error as e:
                raise DataDamaged(f"{self._path} cannot be read: {e}") from e
        raise DataDamaged(f"{self._path} was changed faster than it could be read")

    # ------------------------------------------------------------------------------------------- space
    def _reusable_bytes(self) -> int:
        """The pages of LMDB's own free list count as free: they are few."""
        try:
            with self._map_lock, self._env.begin() as txn:
                stats = [self._env.stat(), *(txn.stat(table) for table in self._tables.values())]
                pages = self._env.info()["last_pgno"] + 1
        except lmdb.Error as e:
            raise DataDamaged(f"{self._path} cannot be read: {e}") from e
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats) + _META_PAGES
        size: int = max(pages - used, 0) * stats[0]["psize"]
        return size

    def _store_files(self) -> tuple[str, ...]:
        return (DATA_FILE,)


class Snapshot(WalkedRows):
    """All tables as of one moment, for a thread of its own: a transaction of LMDB's, which it holds, and the pending
    rows that come after it."""

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


def _keys(cursor: "lmdb.Cursor[bytes]", start: bytes, stop: bytes, *, reverse: bool) -> Iterator[bytes]:
    """The keys in [start, stop); the cursor stands on each while it is yielded."""
    if reverse:
        found = cursor.prev() if cursor.set_range(stop) else cursor.last()
        while found and (key := cursor.key()) >= start:
            if key < stop:  # a flipped bit may have turned an earlier row's key into a larger one
                yield key
            found = cursor.prev()
    else:
        found = cursor.set_range(start) if start else cursor.first()
        while found and (key := cursor.key()) < stop:
            yield key
            found = cursor.next()


def _delete_range(txn: "lmdb.Transaction[bytes]", table: "_Database", start: bytes, stop: bytes) -> None:
    with txn.cursor(table) as cursor:
        found = cursor.set_range(start) if start else cursor.first()
        while found and cursor.key() < stop:
            found = cursor.delete() and bool(cursor.key())  # moves to the next key; an empty key is the table's end
