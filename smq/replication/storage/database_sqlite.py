"""Opens the SQLite database of a data directory, or says why it must not be used.

Owns the settings that make a commit durable, the tables, and what a connection is for. It must never write anything
but the first transaction of a new directory. Only the real disk imports it.

Rows are found by an index of their keys, which are compared as bytes, as by LMDB. (In a table WITHOUT ROWID, a search
would read the whole values of the rows that it passes: one of 1 MB among 200 took 6.7 times the CPU, and one unreadable
value hid other rows.) SQLite keeps its own journal (`data.sqlite3-wal`) beside the file, so that readers never wait for
the writer.
"""

import os
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from smq.replication.ports import DataDamaged, Table
from smq.replication.storage.directory import (
    FILE_MODE,
    REPLACE_ADVICE,
    DiskOpenError,
    FormatUnsupported,
    sync_directory,
)
from smq.replication.storage.disk import KEY_BYTES_MAX
from smq.replication.storage.engine import Engine
from smq.replication.storage.format_version import FORMAT_KEY, check_format, first_rows
from smq.replication.storage.journal_sqlite import JournalDamaged, cut_journal, whole_journal
from smq.replication.storage.write_ahead import WRITE_AHEAD_KEY, Active

DATA_FILE: Final = Engine.SQLITE.data_file
JOURNAL_FILE: Final = DATA_FILE + "-wal"
SHARED_FILE: Final = DATA_FILE + "-shm"
PAGE_BYTES: Final = 8192  # wrote batches of 100 KB 2.8 times as fast as 4,096, and took no more space
INLINE_BYTES_MAX: Final = 7000  # a value of this size is in its row's page, beside a key of KEY_BYTES_MAX
BUSY_MS: Final = 10_000  # for another program that has a lock


def open_database(
    path: Path, *, write_ahead_bytes: int, readers: int
) -> tuple[sqlite3.Connection, list[sqlite3.Connection]]:
    """The writer's connection, whose journal begins again, and the readers'. If a reader's is closed last, the journal
    stays; SQLite removes it with the last connection that may write."""
    file, journal = path / DATA_FILE, path / JOURNAL_FILE
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))  # SQLite would make it readable
        if whole := whole_journal(journal):
            cut_journal(journal, whole)
    except OSError as e:
        raise DiskOpenError(f"{e.filename or journal} cannot be opened: {e.strerror}; correct its owner or mode") from e
    try:
        if not whole:
            _refuse_lost_journal(path)
        with ExitStack() as undo:
            reading = [undo.enter_context(closing(open_reader(path))) for _ in range(readers)]
            connection = undo.enter_context(closing(_connect(file)))
            _prepare(connection, path, write_ahead_bytes)
            sync_directory(path)
            undo.pop_all()
    except sqlite3.Error as e:
        raise _refusal(file, e) from e
    return connection, reading


def open_reader(path: Path) -> sqlite3.Connection:
    """For one thread at a time."""
    with ExitStack() as undo:
        connection = undo.enter_context(closing(_connect(path / DATA_FILE, "mode=ro")))
        connection.execute("PRAGMA user_version").fetchone()  # from here on it is one that has the journal open
        undo.pop_all()
    return connection


def checkpoint_start(connection: sqlite3.Connection, path: Path) -> None:
    """Brings the first transaction to the data file, which then says that the directory is open. Only an orderly close
    says that it is not, so that a journal that is missing is noticed. Raises DiskOpenError."""
    _, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    if moved < pages:
        raise _in_use(path)


def walk(path: str) -> None:
    """Looks at every page; on damage this raises. For tools, while no process has the directory open."""
    whole_journal(Path(path) / JOURNAL_FILE)
    with closing(open_reader(Path(path))) as connection:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise DiskOpenError(f"{Path(path) / DATA_FILE} is damaged: {found}. {REPLACE_ADVICE}")


def _refuse_lost_journal(path: Path) -> None:
    """If the directory was not closed in order. What is in the data file is as of the last checkpoint."""
    with closing(_connect(path / DATA_FILE, "immutable=1")) as connection:
        if Table.META.value not in _names(connection):
            return
        row = connection.execute("SELECT value FROM meta WHERE key = ?", (WRITE_AHEAD_KEY,)).fetchone()
    try:
        is_open = row is not None and bool(Active.decode(row[0]).generation)
    except DataDamaged:
        return  # refused when it is used
    if is_open:
        raise JournalDamaged(
            f"{path / JOURNAL_FILE} is missing or empty, and the directory was not closed in order: commits may be "
            f"lost. If the directory was copied, copy all its files. Otherwise: {REPLACE_ADVICE}"
        )


def _refusal(file: Path, error: sqlite3.Error) -> DiskOpenError:
    match getattr(error, "sqlite_errorcode", None):
        case sqlite3.SQLITE_NOTADB:
            return FormatUnsupported(
                f"{file} is not a data file of this version of smq ({error}): use the version that wrote it, or "
                "restore a backup"
            )
        case sqlite3.SQLITE_FULL:
            return DiskOpenError(
                f"{file} cannot be opened: its disk is full, and what is in {JOURNAL_FILE} needs space in it. Free at "
                "least the size of that file on this disk, then start again: nothing acknowledged is lost"
            )
        case _:
            return DiskOpenError(f"{file} cannot be opened: {error}. If it is damaged: {REPLACE_ADVICE}")


def _in_use(path: Path) -> DiskOpenError:
    return DiskOpenError(f"another program reads {path / DATA_FILE}: end it, then start again")


def _connect(file: Path, option: str = "mode=rw") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?{option}",
        uri=True,
        timeout=BUSY_MS / 1000,
        isolation_level=None,  # transactions begin and end where the code says so
        check_same_thread=False,
        cached_statements=64,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA mmap_size = 0")  # a page that the medium cannot give must be an error, not a signal
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, write_ahead_bytes: int) -> None:
    """Checks the format version before anything is changed. A new database gets our version and its tables in one
    transaction."""
    names = _names(connection)
    if names and Table.META.value not in names:
        raise FormatUnsupported(f"{path} holds an SQLite database that is not smq's: choose another directory")
    if names:
        found = connection.execute("SELECT value FROM meta WHERE key = ?", (FORMAT_KEY,)).fetchone()
        if found is None:
            raise FormatUnsupported(f"{path} has no format version: it is not smq's, or it is damaged")
        check_format(path, found[0])
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise DiskOpenError(f"{path / DATA_FILE} cannot have a journal of its own here: choose a local file system")
    connection.execute("PRAGMA synchronous = FULL")  # each commit waits for the disk
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # the disk decides when
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("PRAGMA cache_size = -16384")  # KiB
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
    if is_busy:
        raise _in_use(path)
    if not names:
        _make_tables(connection, write_ahead_bytes)


def _names(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _make_tables(connection: sqlite3.Connection, write_ahead_bytes: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for table in Table:
        connection.execute(
            f"CREATE TABLE {table.value} (key BLOB PRIMARY KEY NOT NULL CHECK "
            f"(length(key) BETWEEN 1 AND {KEY_BYTES_MAX}), value BLOB NOT NULL)"
        )
    connection.executemany("INSERT INTO meta VALUES (?, ?)", first_rows(write_ahead_bytes).items())
    connection.execute("COMMIT")
