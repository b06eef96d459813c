"""The index: small rows, and where each batch lies in the node's log. One LMDB environment.

Owns its only write transactions, the place in the log up to which it has everything, and how many bytes of each file
live. Each transaction is synced, and keeps these three together. It must never know what the keys and values mean.
LMDB's own quirks live here. Rows are read through LMDB's map: a page that the medium cannot give ends the process by
SIGBUS, and the next start finds it (`unreadable`).
"""

import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lmdb
from crc32c import crc32c

from smq.replication.ports import DataDamaged, Table
from smq.replication.storage.directory import (
    DIRECTORY_MODE,
    DiskOpenError,
    FormatUnsupported,
    sync_directory,
)
from smq.replication.storage.format_version import FORMAT_BYTES, FORMAT_KEY, FORMAT_VERSION, check_format
from smq.replication.storage.frames import GENERATION_BYTES, KEY_BYTES_MAX, Location, parse_location
from smq.replication.storage.node_log import Place
from smq.replication.storage.overlay import Layer, Pair, Piece, Span, joined

if TYPE_CHECKING:
    from lmdb import _Database

DATA_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"  # beside it, LMDB's own
PLACE_KEY: Final = b"log_place"  # of table meta
MAP_BYTES: Final = 1 << 40  # virtual
INDEX_ERRORS: Final = (lmdb.Error,)
LMDB_MAJOR: Final = 0  # LMDB 0.9's file format, explicit so that no environment variable can choose another
_FILES: Final = b"files"  # LMDB's name of the table of live bytes
_PLACE: Final = struct.Struct(f">QQQ{GENERATION_BYTES}sB")
_LIVE: Final = struct.Struct(">Q")
_CRC_BYTES: Final = 4
_READ_BYTES: Final = 1 << 20


class IndexDamaged(Exception):
    """It cannot be used. The log may still have everything."""


def unreadable(path: Path) -> str:
    """What the medium cannot give of the index; empty if it can give everything. It reads the file, not the map."""
    try:
        with (path / DATA_FILE).open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
    except FileNotFoundError:
        return ""
    except OSError as e:
        return f"a page of {path / DATA_FILE} cannot be read: {e.strerror}"
    return ""


class Index:
    """Raises IndexDamaged or DiskOpenError from the constructor."""

    def __init__(self, path: Path, *, readers: int) -> None:
        self._path = path
        self.remark = ""  # for an operator: what its start has found
        try:
            self._env = lmdb.open(
                os.fspath(path),
                map_size=MAP_BYTES,
                subdir=True,
                sync=True,
                metasync=True,
                writemap=False,
                map_async=False,
                mode=DIRECTORY_MODE,
                max_dbs=len(Table) + 1,
                max_spare_txns=readers,
                lib_version=LMDB_MAJOR,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as e:
            raise IndexDamaged(f"{path / DATA_FILE} is not an index of this version of smq ({e})") from e
        except lmdb.Error as e:
            raise DiskOpenError(f"data directory {path} cannot be opened: {e}") from e
        try:
            _refuse_cut_file(self._env, path)
            self._tables, self._files = self._open_tables()
            self.place, self.is_clean = self._stored_place()
            self.live = self._stored_live()
            sync_directory(path)  # the names of LMDB's own files
        except lmdb.Error as e:
            self._env.close()
            raise IndexDamaged(f"{path / DATA_FILE} is damaged: {e}") from e
        except BaseException:  # LMDB refuses to open a file twice in one process
            self._env.close()
            raise

    def _open_tables(self) -> tuple[dict[Table, "_Database"], "_Database"]:
        """Checks the format version before anything is created. A new one gets its tables in one transaction."""
        with self._env.begin() as txn:
            names = set(self._env.dbs(txn))
        if names and Table.META.value.encode() not in names:
            raise FormatUnsupported(f"{self._path} holds a data.mdb that is not smq's: choose another directory")
        with self._env.begin(write=True) as txn:
            meta = self._env.open_db(Table.META.value.encode(), txn=txn)
            found = txn.get(FORMAT_KEY, db=meta)
            if found is None and names:
                raise FormatUnsupported(f"{self._path} has no format version: it is not smq's, or it is damaged")
            if found is not None:
                check_format(self._path, found)
            tables = {table: self._env.open_db(table.value.encode(), txn=txn) for table in Table}
            files = self._env.open_db(_FILES, txn=txn)
            if found is None:
                txn.put(FORMAT_KEY, FORMAT_VERSION.to_bytes(FORMAT_BYTES, "big"), db=meta)
        return tables, files

    def _stored_place(self) -> tuple[Place | None, bool]:
        with self._env.begin() as txn:
            row = txn.get(PLACE_KEY, db=self._tables[Table.META])
        if row is None:
            return None, False
        body = _checked(row)
        if body is None or len(body) != _PLACE.size:
            raise IndexDamaged(f"{self._path / DATA_FILE} is damaged: its place in the log does not match its CRC-32C")
        file, at, number, generation, is_clean = _PLACE.unpack(body)
        return Place(file, at, number, generation), bool(is_clean)

    def _stored_live(self) -> dict[int, int]:
        live: dict[int, int] = {}
        with self._env.begin() as txn:
            for key, row in txn.cursor(self._files):
                body = _checked(row, key)
                if body is None or len(body) != _LIVE.size:
                    raise IndexDamaged(f"{self._path / DATA_FILE} is damaged: a count of live bytes fails its CRC-32C")
                live[int.from_bytes(key, "big")] = _LIVE.unpack(body)[0]
        return live

    def close(self) -> None:
        self._env.close()

    def size_bytes(self) -> int:
        return os.stat(self._path / DATA_FILE).st_blocks * 512

    # ------------------------------------------------------------------------------------------- changes
    def set_place(self, place: Place, *, is_clean: bool = False) -> None:
        with self._env.begin(write=True) as txn:
            self._put_place(txn, place, is_clean=is_clean)
        self.place, self.is_clean = place, is_clean

    def apply(self, layer: Layer) -> None:
        """Everything of it, in one transaction."""
        live = self.live.copy()
        with self._env.begin(write=True) as txn:
            for table, rows in layer.rows.items():
                database = self._tables[table]
                is_batches = table is Table.BATCHES
                for start, stop in rows.gone.all():
                    _delete_range(txn, database, start, stop, live if is_batches else None)
                for key in rows.sort():
                    value = rows.values[key]
                    if is_batches:
                        _count(live, key, txn.get(key, db=database), -1)
                        _count(live, key, value, 1)
                    txn.put(key, value, db=database)
            self._put_live(txn, live)
            self._put_place(txn, layer.end)
        self.live, self.place, self.is_clean = live, layer.end, False

    def move(self, moved: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Key, old row and new row of batches that lie elsewhere now. One that has another row meanwhile keeps it."""
        live, batches = self.live.copy(), self._tables[Table.BATCHES]
        with self._env.begin(write=True) as txn:
            for key, old, new in moved:
                if txn.get(key, db=batches) == old:
                    txn.put(key, new, db=batches)
                    _count(live, key, old, -1)
                    _count(live, key, new, 1)
            self._put_live(txn, live)
        self.live = live

    def has_rows(self, rows: Iterable[Pair]) -> list[bool]:
        """Of table BATCHES: whether each is as it says."""
        with self._env.begin() as txn:
            return [txn.get(key, db=self._tables[Table.BATCHES]) == row for key, row in rows]

    def _put_place(self, txn: "lmdb.Transaction[bytes]", place: Place, *, is_clean: bool = False) -> None:
        body = _PLACE.pack(*place, is_clean)
        txn.put(PLACE_KEY, crc32c(body).to_bytes(_CRC_BYTES, "big") + body, db=self._tables[Table.META])

    def _put_live(self, txn: "lmdb.Transaction[bytes]", live: dict[int, int]) -> None:
        """What has changed."""
        for file in [file for file, size in live.items() if not size]:
            del live[file]
        for file in self.live.keys() - live.keys():
            txn.delete(_LIVE.pack(file), db=self._files)
        for file, size in live.items():
            if self.live.get(file) != size:
                key, body = _LIVE.pack(file), _LIVE.pack(size)
                txn.put(key, crc32c(key + body).to_bytes(_CRC_BYTES, "big") + body, db=self._files)

    # --------------------------------------------------------------------------------------------- reads
    @contextmanager
    def snapshot(self) -> Iterator["Snapshot"]:
        try:
            with self._env.begin() as txn:
                yield Snapshot(self._tables, txn)
        except lmdb.Error as e:
            raise DataDamaged(f"{self._path / DATA_FILE} cannot be read: {e}") from e


class Snapshot:
    """The index as of one moment."""

    def __init__(self, tables: dict[Table, "_Database"], txn: "lmdb.Transaction[bytes]") -> None:
        self._tables = tables
        self._txn = txn
        row = txn.get(PLACE_KEY, db=tables[Table.META])
        body = _checked(row) if row is not None else None
        self._number = _PLACE.unpack(body)[2] if body is not None and len(body) == _PLACE.size else 0

    def rows(
        self, table: Table, start: bytes, stop: bytes, pieces: Sequence[Piece], *, reverse: bool
    ) -> Iterator[Pair]:
        """Those in [start, stop), with the pieces in front that the index does not have."""
        newer = [piece for piece in pieces if piece.first >= self._number]
        gone, pairs = joined(newer) if newer else ([], [])
        if pairs and (pairs[0][0] < start or pairs[-1][0] >= stop):  # the pieces were made for a wider range
            pairs = [pair for pair in pairs if start <= pair[0] < stop]
        found = self._kept(table, start, stop, gone, reverse=reverse)
        return _merged(found, pairs[::-1] if reverse else pairs, reverse=reverse) if pairs else found

    def _kept(self, table: Table, start: bytes, stop: bytes, gone: list[Span], *, reverse: bool) -> Iterator[Pair]:
        """Without the keys in the ranges."""
        at = start
        if reverse:
            end = stop
            for range_start, range_stop in reversed(gone):
                yield from self._stored(table, max(range_stop, start), end, reverse=True)
                end = min(end, range_start)
            yield from self._stored(table, start, end, reverse=True)
            return
        for range_start, range_stop in gone:
            yield from self._stored(table, at, min(range_start, stop), reverse=False)
            at = max(at, range_stop)
        yield from self._stored(table, at, stop, reverse=False)

    def _stored(self, table: Table, start: bytes, stop: bytes, *, reverse: bool) -> Iterator[Pair]:
        if start >= stop:
            return
        with self._txn.cursor(self._tables[table]) as cursor:
            if reverse:
                found = cursor.set_range(stop[:KEY_BYTES_MAX])
                while found and cursor.key() < stop:
                    found = cursor.next()
                found = cursor.prev() if found else cursor.last()
                while found and (key := cursor.key()) >= start:
                    if key < stop:  # a flipped bit may have turned an earlier row's key into a larger one
                        yield key, cursor.value()
                    found = cursor.prev()
            elif cursor.set_range(start[:KEY_BYTES_MAX]) if start else cursor.first():
                for key, value in cursor.iternext():
                    if key >= stop:
                        return
                    if key >= start:  # which may be just beyond the longest key
                        yield key, value


def _merged(rows: Iterator[Pair], newer: list[Pair], *, reverse: bool) -> Iterator[Pair]:
    """Both in order; of two with the same key, the newer one."""
    ours = iter(newer)
    mine = next(ours, None)
    for row in rows:
        key = row[0]
        while mine is not None and (mine[0] > key if reverse else mine[0] < key):
            yield mine
            mine = next(ours, None)
        if mine is not None and mine[0] == key:
            yield mine
            mine = next(ours, None)
        else:
            yield row
    while mine is not None:
        yield mine
        mine = next(ours, None)


def _delete_range(
    txn: "lmdb.Transaction[bytes]", table: "_Database", start: bytes, stop: bytes, live: dict[int, int] | None
) -> None:
    with txn.cursor(table) as cursor:
        found = cursor.set_range(start[:KEY_BYTES_MAX]) if start else cursor.first()
        if found and cursor.key() < start:  # which is just beyond the longest key
            found = cursor.next()
        while found and cursor.key() < stop:
            if live is not None:
                _count(live, cursor.key(), cursor.value(), -1)
            found = cursor.delete() and bool(cursor.key())  # moves to the next key; an empty key is the table's end


def _count(live: dict[int, int], key: bytes, row: bytes | None, sign: int) -> None:
    """A damaged row names no file: what it named lives on."""
    location: Location | None = parse_location(key, row) if row is not None else None
    if location is not None:
        live[location.file] = live.get(location.file, 0) + sign * location.length


def _checked(row: bytes, key: bytes = b"") -> bytes | None:
    body = row[_CRC_BYTES:]
    return body if crc32c(key + body).to_bytes(_CRC_BYTES, "big") == row[:_CRC_BYTES] else None


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
        raise IndexDamaged(f"{file} is damaged: its header claims {needed} bytes") from e
    code = f"from {__name__} import walk; walk({os.fspath(path)!r})"
    if subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode != 0:
        os.truncate(file, found)
        raise IndexDamaged(f"{file} has {found} bytes, but its header claims {needed}: it was truncated")


def walk(path: str) -> None:
    """Touches every row of every table; on damage this raises or aborts. For a child process."""
    env = lmdb.open(path, max_dbs=len(Table) + 1, readonly=True, lock=False, lib_version=LMDB_MAJOR)
    with env, env.begin() as txn:
        for name in env.dbs(txn):
            for _ in txn.cursor(env.open_db(name, txn=txn, create=False)):
                pass
