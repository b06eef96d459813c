"""Opens the LMDB environment of a data directory, or says why it must not be used.

Owns the settings that make a commit durable, the names of the tables, and the refusal of a file
that was cut. It must never write anything but the first transaction of a new directory. Only the real disk imports it,
and tests and tools that look into its file.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lmdb

from smq.replication.ports import Table
from smq.replication.storage.directory import (
    DIRECTORY_MODE,
    REPLACE_ADVICE,
    DiskOpenError,
    FormatUnsupported,
    sync_directory,
)
from smq.replication.storage.engine import Engine
from smq.replication.storage.format_version import FORMAT_KEY, check_format, first_rows

if TYPE_CHECKING:
    from lmdb import _Database

LMDB_MAJOR: Final = 0  # LMDB 0.9's file format, explicit so that no environment variable can choose another
DATA_FILE: Final = Engine.LMDB.data_file


def open_environment(
    path: Path, *, map_size: int, write_ahead_bytes: int, spare_txns: int
) -> tuple[lmdb.Environment, dict[Table, "_Database"]]:
    try:
        env = lmdb.open(
            os.fspath(path),
            map_size=map_size,
            subdir=True,
            sync=True,
            metasync=True,
            writemap=False,
            map_async=False,
            mode=DIRECTORY_MODE,
            max_dbs=len(Table),
            max_spare_txns=spare_txns,
            lib_version=LMDB_MAJOR,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as e:
        raise FormatUnsupported(
            f"{path / DATA_FILE} is not a data file of this version of smq ({e}): use the version that wrote it, or "
            "restore a backup"
        ) from e
    except lmdb.Error as e:
        raise DiskOpenError(
            f"data directory {path} cannot be opened: {e}. If its file is damaged: {REPLACE_ADVICE}"
        ) from e
    try:
        _refuse_cut_file(env, path)
        tables = _open_tables(env, path, write_ahead_bytes)
        sync_directory(path)  # the names of LMDB's own files
    except lmdb.Error as e:
        env.close()
        raise DiskOpenError(f"{path / DATA_FILE} is damaged: {e}. {REPLACE_ADVICE}") from e
    except BaseException:  # LMDB refuses to open a file twice in one process
        env.close()
        raise
    return env, tables


def _refuse_cut_file(env: lmdb.Environment, path: Path) -> None:
    """Refuses a truncated file: touching a page beyond the end of the file ends the process by SIGBUS.

    A file may be shorter than its header says and yet complete (a transaction that used pages and gave them back did
    not write them). So such a file is extended with zeros, which are never read if it is complete, and a child process
    walks all tables: on a lost page LMDB raises or aborts.
    """
    file = path / DATA_FILE
    found, needed = file.stat().st_size, (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if found >= needed:
        return
    try:
        os.truncate(file, needed)
    except OSError as e:
        raise DiskOpenError(f"{file} is damaged: its header claims {needed} bytes. {REPLACE_ADVICE}") from e
    code = f"from {__name__} import walk; walk({os.fspath(path)!r})"
    if subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode != 0:
        os.truncate(file, found)
        raise DiskOpenError(
            f"{file} has {found} bytes, but its header claims {needed}: it was truncated and cannot be trusted. "
            + REPLACE_ADVICE
        )


def walk(path: str) -> None:
    """Touches every row of every table; on damage this raises or aborts. For the child of `_refuse_cut_file`."""
    env = lmdb.open(path, max_dbs=len(Table), readonly=True, lock=False, lib_version=LMDB_MAJOR)
    with env, env.begin() as txn:
        for name in env.dbs(txn):
            for _ in txn.cursor(env.open_db(name, txn=txn, create=False)):
                pass


def _open_tables(env: lmdb.Environment, path: Path, write_ahead_bytes: int) -> dict[Table, "_Database"]:
    """Checks the format version before anything is created. A new directory gets our version and its tables in one
    transaction."""
    with env.begin() as txn:
        names = set(env.dbs(txn))
    if names and Table.META.value.encode() not in names:
        raise FormatUnsupported(f"{path} holds an LMDB environment that is not smq's: choose another directory")
    with env.begin(write=True) as txn:
        meta = env.open_db(Table.META.value.encode(), txn=txn)
        found = txn.get(FORMAT_KEY, db=meta)
        if found is None and names:
            raise FormatUnsupported(f"{path} has no format version: it is not smq's, or it is damaged")
        if found is not None:
            check_format(path, found)
        tables = {table: env.open_db(table.value.encode(), txn=txn) for table in Table}
        if found is None:
            for key, value in first_rows(write_ahead_bytes).items():
                txn.put(key, value, db=meta)
    return tables
