"""The store SQLite: one database of the standard library's sqlite3, one connection that writes, others that read.

Owns the connections, the number of each transaction, and when SQLite's own journal is brought to the data file. It
must never know what the keys and values mean. `opening` builds it; all other code sees the `Disk` port.

SQLite frees the pages of a value by following their chain, and has no checksums in its data file. So unlike with LMDB,
damage to the chain of a value that is deleted ends the process, if SQLite sees it, or frees pages of other rows: these
then fail their CRC.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from queue import SimpleQueue
from typing import Final

from smq.replication.ports import DataDamaged, Op, Put, Rows, T, Table
from smq.replication.storage.database_sqlite import (
    BUSY_MS,
    DATA_FILE,
    JOURNAL_FILE,
    PAGE_BYTES,
    SHARED_FILE,
    checkpoint_start,
    open_database,
)
from smq.replication.storage.disk import READERS, StoreDisk
from smq.replication.storage.engine import Engine
from smq.replication.storage.moment_sqlite import Moment
from smq.replication.storage.rows import Row
from smq.replication.storage.write_ahead import WRITE_AHEAD_BYTES, WRITE_AHEAD_KEY, Active

CHECKPOINT_BYTES: Final = 16 << 20  # of new pages in SQLite's journal, before the data file gets them
JOURNAL_BYTES_MAX: Final = 128 << 20  # beyond, the writer waits for the reads under way, for RESTART_MS
RESTART_MS: Final = 200  # far less than disk_hang_ms: a read on a failing medium must not make the disk look hung
_NUMBER_MAX: Final = (1 << 31) - 1  # of a user_version

_PUT: Final = {table: f"REPLACE INTO {table.value} VALUES (?, ?)" for table in Table}
_DELETE: Final = {table: f"DELETE FROM {table.value} WHERE key >= ? AND key < ?" for table in Table}


class SqliteDisk(StoreDisk):
    """See StoreDisk."""

    engine = Engine.SQLITE
    errors = (sqlite3.Error,)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_fatal: Callable[[BaseException], None],
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        write_ahead_bytes: int = WRITE_AHEAD_BYTES,
    ) -> None:
        self._checkpoint_bytes = checkpoint_bytes
        super().__init__(
            path,
            call_soon_threadsafe=call_soon_threadsafe,
            on_fatal=on_fatal,
            call_soon=call_soon,
            write_ahead_bytes=write_ahead_bytes,
        )

    def _open_store(self, undo: ExitStack, write_ahead_bytes: int) -> int:
        self._connection, reading = open_database(
            self._path,
            write_ahead_bytes=write_ahead_bytes,
            readers=READERS + 2,  # one for the loop, one for the examiner
        )
        for connection in (*reading, self._connection):  # this one is closed first, so that the journal stays
            undo.callback(connection.close)
        self._of_loop, *self._of_threads = reading
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()  # of the threads that read
        for connection in self._of_threads:
            self._idle.put(connection)
        self._unchecked_bytes = 0  # of new pages in the journal, at most
        (self._number,) = self._connection.execute("PRAGMA user_version").fetchone()
        number: int = self._number
        return number

    def _close_store(self) -> None:
        """In order, the last connection brings the journal to the data file, and removes it. After a failure the
        journal stays, as after a kill: the data file says that it is needed."""
        last = (self._connection, self._of_loop) if self._is_failed else (self._of_loop, self._connection)
        for connection in (*self._of_threads, *last):
            connection.close()

    def _prepare_recovery(self) -> None:
        """SQLite reports what it cannot read, also where it frees the pages of a value."""

    def _settle_start(self) -> None:
        checkpoint_start(self._connection, self._path)

    # ------------------------------------------------------------------------------------------ writes
    def _write(self, ops: Sequence[Op], active: Active) -> int:
        run = self._connection
        run.execute("BEGIN IMMEDIATE")
        size, changes = 0, run.total_changes
        for (kind, table), group in groupby(ops, key=_kind):
            if kind is Put:
                rows = [(op.key, op.value) for op in group if isinstance(op, Put)]
                size += sum(len(value) for _, value in rows)
                run.executemany(_PUT[table], rows)
            else:
                run.executemany(_DELETE[table], [(op.start, op.stop) for op in group if not isinstance(op, Put)])
        run.execute(_PUT[Table.META], (WRITE_AHEAD_KEY, active.encode()))
        number = self._number + 1 if self._number < _NUMBER_MAX else 0
        run.execute(f"PRAGMA user_version = {number}")
        run.execute("COMMIT")
        self._number = number
        self._unchecked_bytes += size + (run.total_changes - changes) * PAGE_BYTES  # a deleted range changes many rows
        return number

    def _tidy(self) -> None:
        """Brings the journal to the data file once it is long: it then begins again, unless reads still use it. While
        one read lasts, the journal grows."""
        if self._unchecked_bytes < self._checkpoint_bytes:
            return
        run = self._connection.execute
        _, pages, _ = run("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if pages * PAGE_BYTES > JOURNAL_BYTES_MAX:
            run(f"PRAGMA busy_timeout = {RESTART_MS}")
            run("PRAGMA wal_checkpoint(RESTART)").fetchone()
            run(f"PRAGMA busy_timeout = {BUSY_MS}")
        self._unchecked_bytes = 0

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
        with (
            self._moment(is_loop=is_loop, is_of_all_tables=False) as moment,
            moment.walk(table, start, stop, reverse=reverse, limit=limit, lowest=lowest) as rows,
        ):
            yield rows

    def _find(self, find: Callable[[Rows], T]) -> T:
        with self._moment(is_loop=False, is_of_all_tables=True) as moment:
            return find(moment)

    @contextmanager
    def _moment(self, *, is_loop: bool, is_of_all_tables: bool) -> Iterator[Moment]:
        connection = self._of_loop if is_loop else self._idle.get()
        moment = Moment(connection, self._pending, is_of_all_tables=is_of_all_tables)
        try:
            yield moment
        except DataDamaged as e:
            raise DataDamaged(f"{self._path / DATA_FILE}: {e}") from e
        except sqlite3.Error as e:
            raise DataDamaged(f"{self._path / DATA_FILE} cannot be read: {e}") from e
        finally:
            moment.end()
            if not is_loop:
                self._idle.put(connection)

    # ------------------------------------------------------------------------------------------- space
    def _reusable_bytes(self) -> int:
        try:
            (pages,) = self._of_loop.execute("PRAGMA freelist_count").fetchone()
        except sqlite3.Error as e:
            raise DataDamaged(f"{self._path / DATA_FILE} cannot be read: {e}") from e
        size: int = pages * PAGE_BYTES
        return size

    def _store_files(self) -> tuple[str, ...]:
        return tuple(name for name in (DATA_FILE, JOURNAL_FILE, SHARED_FILE) if (self._path / name).exists())


def _kind(op: Op) -> tuple[type[Op], Table]:
    return type(op), op.table
