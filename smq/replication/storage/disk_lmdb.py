"""The real disk: one LMDB environment, one writer thread, group commit.

Owns the data directory (its lock, permissions and format version) and the only write transactions in it. It must
never know what the keys and values mean (the codec's `home_of` answers its one question), and never call back from a
thread other than the loop's. The composition root builds it; all other code sees the `Disk` port. LMDB's own quirks
live here and nowhere else:
- a failed commit leaves the environment in an unknown state (it carries on after an fsync error), so any error of the
  writer is fatal to the process;
- every call gives up the GIL, so the process should run with SWITCH_INTERVAL_S: beside a busy loop, a transaction of
  30 puts took 36 ms with Python's default of 5 ms, and 0.7 ms with 0.5 ms.
"""

import fcntl
import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import lmdb

from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.log.codec import home_of
from smq.replication.ports import DataDamaged, Delete, Examined, GiveUp, Op, Put, Rows, Space, T, Table
from smq.replication.storage.hang import CLOSE_S_MAX, DiskHung
from smq.replication.storage.pages_lmdb import (
    TREE_DAMAGE,
    NotCached,
    PageFile,
    Row,
    Snapshot,
    SnapshotGone,
    examined,
    nothing,
    taken,
)
from smq.replication.storage.workers import Gate, Workers

if TYPE_CHECKING:
    from lmdb import _Database

FORMAT_VERSION: Final = 1
FORMAT_KEY: Final = b"format_version"
_FORMAT: Final = struct.Struct(">I")

LMDB_MAJOR: Final = 0  # LMDB 0.9's file format, explicit so that no environment variable can choose another
MAP_BYTES: Final = 1 << 40  # virtual; large from the start, so that it rarely has to grow
MAP_BYTES_MAX: Final = 1 << 46  # half of a process's address space; a larger map is impossible
COMMIT_BYTES_MAX: Final = 16 << 20  # of values per transaction: some 50 ms of a slow disk; LMDB's own cap is 512 MiB
READERS: Final = 4  # threads: one read may take seconds on a failing medium, and must not hold up all others
READS_QUEUED_MAX: Final = 10_000  # a small object each; above the partitions that one fetch may name
SNAPSHOT_TRIES: Final = 20  # each fails only if two commits end within microseconds
SWITCH_INTERVAL_S: Final = 0.0005  # for sys.setswitchinterval, set by the composition root
REPLACE_ADVICE: Final = (
    "Move the directory away and start the node with an empty one while the others are up; they hold every "
    "acknowledged record"
)
LOCK_FILE: Final = "smq.lock"
DATA_FILE: Final = "data.mdb"
_META_PAGES: Final = 2
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600


class DiskOpenError(Exception):
    """The data directory cannot be used; the message says why and what to do."""


class DirectoryInUse(DiskOpenError):
    """Another process holds the directory."""


class FormatUnsupported(DiskOpenError):
    """The directory was written by another version, or is not smq's."""


@dataclass(frozen=True, slots=True)
class _Submission:
    seq: int
    ops: Sequence[Op]
    size: int
    done: Callable[[], None] | None


class LmdbDisk:
    """See the Disk port. Raises DiskOpenError from the constructor."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_fatal: Callable[[BaseException], None],
        map_size: int = MAP_BYTES,
    ) -> None:
        self._path = Path(path)
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_fatal = on_fatal
        _make_directory(self._path)
        self._lock_fd = _lock_directory(self._path)
        try:
            self._env, self._tables = _open_environment(self._path, map_size)
        except BaseException:  # an interrupt, too, gives the lock back
            os.close(self._lock_fd)
            raise
        self._map_size = map_size
        self._map_lock = threading.Lock()  # held by each read of the loop, and while the map moves
        self._gate = Gate()  # passed by each read of another thread, and shut while the map moves
        self._pages = PageFile(self._path / DATA_FILE)
        workers = partial(Workers, post=self._post, on_error=on_fatal)
        self._readers = workers("smq-disk-reader", threads=READERS, queued_max=READS_QUEUED_MAX)
        self._examiner = workers("smq-disk-examiner", threads=1, queued_max=1)
        self._submitted_seq = 0
        self._durable_seq = 0
        self._queued_bytes = 0
        self._queue: SimpleQueue[_Submission | None] = SimpleQueue()  # None: close. Bounded by the node's in-flight cap
        self._carried: _Submission | None = None  # taken from the queue, but too large for the previous transaction
        self._commits = 0
        self._is_failed = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_forever, name="smq-disk-writer", daemon=True)
        self._writer.start()

    # ------------------------------------------------------------------------------------------ writes
    @property
    def submitted_seq(self) -> int:
        return self._submitted_seq

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def durable_seq(self) -> int:
        return self._durable_seq

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def submit(self, ops: Sequence[Op], done: Callable[[], None] | None = None) -> int:
        if self._is_closed:
            raise RuntimeError("the disk is closed: nothing more may be submitted")
        self._submitted_seq += 1
        if not self._is_failed:
            size = 0
            for op in ops:
                if isinstance(op, Put):
                    size += len(op.value)
            self._queued_bytes += size
            self._queue.put(_Submission(self._submitted_seq, ops, size, done))
        return self._submitted_seq

    def _write_forever(self) -> None:
        """The writer thread. It ends with the first error, and reports nothing after it."""
        try:
            while group := self._next_group():
                self._commit(group)
                self._commits += 1
                self._post(partial(self._report, group))
        except BaseException as e:  # noqa: BLE001  # after any error the disk's state is unknown: the process must end
            self._is_failed = True
            self._post(partial(self._on_fatal, e))

    def _next_group(self) -> list[_Submission]:
        """Waits for a submission, and takes those queued after it; empty at close."""
        first = self._carried or self._queue.get()
        self._carried = None
        if first is None:
            return []
        group, size = [first], first.size
        while size < COMMIT_BYTES_MAX:
            try:
                submission = self._queue.get_nowait()
            except Empty:
                break
            if submission is None:
                self._queue.put(None)  # after this group the thread ends: nothing may be submitted after a close
                break
            if size + submission.size > COMMIT_BYTES_MAX:
                self._carried = submission
                break
            group.append(submission)
            size += submission.size
        return group

    def _commit(self, group: list[_Submission]) -> None:
        while True:
            try:
                self._write(group)
                return
            except lmdb.MapFullError:
                if self._map_size >= MAP_BYTES_MAX:
                    raise
                self._grow_map()

    def _write(self, group: list[_Submission]) -> None:
        tables = self._tables
        with self._env.begin(write=True) as txn:
            for submission in group:
                for op in submission.ops:
                    self._prepare(txn, op)
                    if isinstance(op, Put):
                        txn.put(op.key, op.value, db=tables[op.table])
                    else:
                        _delete_range(txn, tables[op.table], op.start, op.stop)

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
                self._pages.reader(cached_only=False).check_freeable(
                    transaction, table, start, stop, home_of, PARTITION_ID_BYTES
                )
            self._pages.make_replaceable(transaction, table, start, stop)
        except TREE_DAMAGE as e:
            raise DataDamaged(f"table {op.table.value} of {self._path} cannot be changed: {e}. {REPLACE_ADVICE}") from e

    def _grow_map(self) -> None:
        self._map_size = min(self._map_size * 2, MAP_BYTES_MAX)
        with self._gate.alone(), self._map_lock:
            self._env.set_mapsize(self._map_size)

    def _post(self, fn: Callable[[], None]) -> None:
        try:
            self._call_soon_threadsafe(fn)
        except RuntimeError:
            self._is_failed = True  # the loop is closed: nothing is left to report to

    def _report(self, group: list[_Submission]) -> None:
        for submission in group:
            self._durable_seq = submission.seq
            self._queued_bytes -= submission.size
            if submission.done is not None:
                submission.done()

    # ------------------------------------------------------------------------------------------- reads
    @contextmanager
    def _rows_of(self, table: Table, start: bytes, stop: bytes, *, reverse: bool) -> Iterator[Iterator[Row]]:
        """For the loop, in a read transaction that ends with the block. Any error of LMDB counts as damage. Batches are
        read by page: through the map, one that the medium cannot give would end the process."""
        if table is Table.BATCHES:
            with self._pages_of(table, start, stop, guard=lambda: self._map_lock, reverse=reverse) as rows:
                yield rows
            return
        try:
            with self._map_lock, self._env.begin() as txn, txn.cursor(self._tables[table]) as cursor:
                yield ((key, cursor.value) for key in _keys(cursor, start, stop, reverse=reverse))
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
        cached_only: bool = False,
    ) -> Iterator[Iterator[Row]]:
        """In a read transaction that ends with the block. Raises NotCached only with `cached_only`."""
        for _ in range(SNAPSHOT_TRIES):
            with guard():
                try:
                    with self._env.begin() as txn:
                        rows = self._pages.reader(cached_only=cached_only).rows(
                            txn.id(), table.value.encode(), start, stop, lowest=lowest, reverse=reverse
                        )
                        try:
                            first = next(rows, None)
                        except SnapshotGone:
                            continue
                        yield rows if first is None else chain((first,), rows)
                        return
                except (lmdb.Error, *TREE_DAMAGE) as e:
                    raise DataDamaged(f"table {table.value} of {self._path} cannot be walked: {e}") from e
        raise DataDamaged(f"table {table.value} of {self._path} was changed faster than it could be read")

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
        with self._rows_of(table, start, stop, reverse=reverse) as rows:
            return taken(rows, limit, bytes_max)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        if limit <= 0 or start >= stop:
            return []
        with self._rows_of(table, start, stop, reverse=reverse) as rows:
            return [key for key, _ in islice(rows, limit)]

    def read_from(
        self,
        table: Table,
        lowest: bytes,
        start: bytes,
        stop: bytes,
        *,
        bytes_max: int,
        done: Callable[[list[tuple[bytes, bytes]] | DataDamaged], None],
    ) -> GiveUp | None:
        def read(guard: Callable[[], AbstractContextManager[object]], *, cached_only: bool) -> Callable[[], None]:
            try:
                with self._pages_of(table, start, stop, guard=guard, lowest=lowest, cached_only=cached_only) as rows:
                    return partial(done, taken(rows, 1 << 30, bytes_max))
            except DataDamaged as e:
                return partial(done, e)

        try:  # what is in memory need not change threads
            self._post(read(lambda: self._map_lock, cached_only=True))
        except NotCached:
            return self._readers.submit(lambda: read(self._gate.shared, cached_only=False))
        return nothing

    def look_up(self, find: Callable[[Rows], T], done: Callable[[T | DataDamaged], None]) -> GiveUp | None:
        def job() -> Callable[[], None]:
            for _ in range(SNAPSHOT_TRIES):
                try:
                    with self._gate.shared(), self._env.begin() as txn:
                        return partial(done, find(Snapshot(self._pages.reader(cached_only=False), txn.id())))
                except SnapshotGone:
                    continue
                except lmdb.Error as e:
                    return partial(done, DataDamaged(f"{self._path} cannot be read: {e}"))
                except DataDamaged as e:
                    return partial(done, e)
            return partial(done, DataDamaged(f"{self._path} was changed faster than it could be read"))

        return self._readers.submit(job)

    def examine(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        bytes_max: int,
        check: Callable[[bytes, bytes], bool],
        done: Callable[[Examined], None],
    ) -> None:
        def job() -> Callable[[], None]:
            try:
                with self._pages_of(table, start, stop, guard=self._gate.shared) as rows:
                    return partial(done, examined(rows, bytes_max, check))
            except DataDamaged as e:
                raise DataDamaged(f"{e}. {REPLACE_ADVICE}") from e

        if self._examiner.submit(job) is None:
            raise RuntimeError("a slice is examined already")

    def space(self) -> Space:
        """The pages of LMDB's own free list count as free: they are few."""
        found = os.statvfs(self._path)
        try:
            with self._map_lock, self._env.begin() as txn:
                stats = [self._env.stat(), *(txn.stat(table) for table in self._tables.values())]
                pages = self._env.info()["last_pgno"] + 1
        except lmdb.Error as e:
            raise DataDamaged(f"{self._path} cannot be read: {e}") from e
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats) + _META_PAGES
        return Space(
            free_bytes=found.f_bavail * found.f_frsize,
            total_bytes=found.f_blocks * found.f_frsize,
            reusable_bytes=max(pages - used, 0) * stats[0]["psize"],
        )

    def size_bytes(self) -> int:
        return os.stat(self._path / DATA_FILE).st_blocks * 512

    def _has_ended(self) -> bool:
        """Waits for the threads, as long as commits go on. A disk may hang for ever without an error."""
        commits = -1
        while self._writer.is_alive() and commits != self._commits:
            commits = self._commits
            self._writer.join(CLOSE_S_MAX)
        return not self._writer.is_alive() and all(w.close(CLOSE_S_MAX) for w in (self._readers, self._examiner))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        if not self._has_ended():
            self._on_fatal(DiskHung(self._path))
            return  # a thread still uses what would be closed
        self._pages.close()
        self._env.close()
        os.close(self._lock_fd)


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


# ---------------------------------------------------------------------------------------------- opening
def is_used(path: Path) -> bool:
    """Whether a process has ever opened the directory, so that one may have it open now."""
    return (path / LOCK_FILE).exists()


def _make_directory(path: Path) -> None:
    """Creates the directory (and syncs its name into its parent), or tightens the permissions of an existing one."""
    try:
        created = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != DIRECTORY_MODE:
            path.chmod(DIRECTORY_MODE)
        for directory in created:
            _sync_directory(directory.parent)
    except OSError as e:
        raise DiskOpenError(
            f"data directory {path} cannot be used: {e.strerror}; choose a directory that this user owns"
        ) from e


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock_directory(path: Path) -> int:
    """The descriptor of the lock file; the lock ends with the process, however that ends."""
    try:
        fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as e:
        raise DiskOpenError(f"{path / LOCK_FILE} cannot be opened: {e.strerror}; correct its owner or mode") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        owner = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DirectoryInUse(
            f"data directory {path} is in use by process {owner}: stop that node first, or choose another directory"
        ) from e
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _open_environment(path: Path, map_size: int) -> tuple[lmdb.Environment, dict[Table, "_Database"]]:
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
            max_spare_txns=READERS + 2,  # one for the loop, one for the examiner
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
        tables = _open_tables(env, path)
        _sync_directory(path)  # the names of LMDB's own files
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


def _open_tables(env: lmdb.Environment, path: Path) -> dict[Table, "_Database"]:
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
        version = FORMAT_VERSION if found is None else int.from_bytes(found, "big")
        if version != FORMAT_VERSION:
            raise FormatUnsupported(
                f"{path} has on-disk format {version}, this version of smq reads format {FORMAT_VERSION}: use the "
                "version that wrote it, or move the directory away and start with an empty one while the others are up"
            )
        tables = {table: env.open_db(table.value.encode(), txn=txn) for table in Table}
        if found is None:
            txn.put(FORMAT_KEY, _FORMAT.pack(FORMAT_VERSION), db=meta)
    return tables
