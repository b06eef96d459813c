"""The real disk: one LMDB environment behind a write-ahead file, one writer thread, group commit.

Owns the data directory (its lock and format version), the only write transactions in it, and the decision which rounds
go to the write-ahead file first: small ones that only put rows. All others go to LMDB, with everything that is only in
that file. It must never know what the keys and values mean (the codec's `home_of` answers its one question), and never
call back from a thread other than the loop's. The composition root builds it; all other code sees the `Disk` port.
LMDB's own quirks live here and nowhere else:
- a failed commit leaves the environment in an unknown state (it carries on after an fsync error), so any error of the
  writer is fatal to the process;
- every call gives up the GIL, so the process should run with SWITCH_INTERVAL_S: beside a busy loop, a transaction of
  30 puts took 36 ms with Python's default of 5 ms, and 0.7 ms with 0.5 ms.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import lmdb

from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.log.codec import home_of
from smq.replication.measures import DiskMeasures
from smq.replication.ports import DataDamaged, Delete, Examined, GiveUp, Op, Put, Rows, Space, T, Table
from smq.replication.storage.directory import REPLACE_ADVICE, DiskOpenError, lock_directory, make_directory
from smq.replication.storage.environment_lmdb import DATA_FILE, WRITE_AHEAD_KEY, open_environment
from smq.replication.storage.hang import CLOSE_S_MAX, DiskHung
from smq.replication.storage.pages_lmdb import TREE_DAMAGE, NotCached, PageFile, SnapshotGone
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import Row, beginning_at, examined, merged, nothing, taken, within
from smq.replication.storage.snapshot_lmdb import Snapshot
from smq.replication.storage.workers import Gate, Workers
from smq.replication.storage.write_ahead import (
    ROUND_BYTES_MAX,
    WRITE_AHEAD_BYTES,
    WRITE_AHEAD_FILE,
    Active,
    WriteAhead,
    encode_rows,
    make_file,
    recover,
)

if TYPE_CHECKING:
    from lmdb import _Database

MAP_BYTES: Final = 1 << 40  # virtual; large from the start, so that it rarely has to grow
MAP_BYTES_MAX: Final = 1 << 46  # half of a process's address space; a larger map is impossible
COMMIT_BYTES_MAX: Final = 16 << 20  # of values per transaction: some 50 ms of a slow disk; LMDB's own cap is 512 MiB
PENDING_S_MAX: Final = 30.0  # without a submission: what rots in the write-ahead file is then in LMDB
KEY_BYTES_MAX: Final = 511  # LMDB's
READERS: Final = 4  # threads: one read may take seconds on a failing medium, and must not hold up all others
READS_QUEUED_MAX: Final = 10_000  # a small object each; above the partitions that one fetch may name
SNAPSHOT_TRIES: Final = 20  # each fails only if two commits end within microseconds
SWITCH_INTERVAL_S: Final = 0.0005  # for sys.setswitchinterval, set by the composition root
_META_PAGES: Final = 2


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
        write_ahead_bytes: int = WRITE_AHEAD_BYTES,
    ) -> None:
        """`write_ahead_bytes`: of a file that has to be made."""
        self._path = Path(path)
        self.measures = DiskMeasures()
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_fatal = on_fatal
        make_directory(self._path)
        with ExitStack() as undo:  # whatever ends the rest, an interrupt too, gives everything back
            self._lock_fd = lock_directory(self._path)
            undo.callback(os.close, self._lock_fd)
            self._env, self._tables = open_environment(
                self._path,
                map_size=map_size,
                write_ahead_bytes=write_ahead_bytes,
                spare_txns=READERS + 2,  # one for the loop, one for the examiner
            )
            undo.callback(self._env.close)
            self._map_size = map_size
            self._map_lock = threading.Lock()  # held by each read of the loop, and while the map moves
            self._gate = Gate()  # passed by each read of another thread, and shut while the map moves
            self._pages = PageFile(self._path / DATA_FILE)
            undo.callback(self._pages.close)
            self._pending = PendingRows(self._env.info()["last_txnid"])
            self._write_ahead = self._open_write_ahead()
            undo.pop_all()
        workers = partial(Workers, post=self._post, on_error=on_fatal)
        self._readers = workers("smq-disk-reader", threads=READERS, queued_max=READS_QUEUED_MAX)
        self._examiner = workers("smq-disk-examiner", threads=1, queued_max=1)
        self._submitted_seq = 0
        self._durable_seq = 0
        self._queued_bytes = 0
        self._queue: SimpleQueue[_Submission | None] = SimpleQueue()  # None: close. Bounded by the node's in-flight cap
        self._carried: _Submission | None = None  # taken from the queue, but too large for the previous transaction
        self._writes = 0  # that are durable
        self._is_failed = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_forever, name="smq-disk-writer", daemon=True)
        self._writer.start()

    def _open_write_ahead(self) -> WriteAhead:
        """Brings the rounds that a crash left in the file to LMDB, and begins a new generation."""
        path = self._path / WRITE_AHEAD_FILE
        try:
            active = Active.decode(self.get(Table.META, WRITE_AHEAD_KEY))
            if not active.generation and not path.exists():
                make_file(path, active.size)
            rounds = recover(path, active)
            for puts in rounds:
                self._pending.add(puts)
            self._read_replaced()
            active = active.next(has_rounds=bool(rounds))
            self._commit([], active)
        except DataDamaged as e:
            raise DiskOpenError(f"{path.with_name(DATA_FILE)} is damaged: {e}. {REPLACE_ADVICE}") from e
        except lmdb.Error as e:
            raise DiskOpenError(
                f"{path} cannot be brought into {DATA_FILE}: {e}. If the disk is full, free space on it. If the file "
                f"is damaged: {REPLACE_ADVICE}"
            ) from e
        return WriteAhead(path, active)

    def _read_replaced(self) -> None:
        """Reads the values that the pending rows replace. The process that found some of them unreadable has ended, and
        LMDB must not touch their pages before they have been overwritten."""
        with self._env.begin() as txn:
            stored = Snapshot(self._pages.reader(cached_only=False), txn.id(), PendingRows(base=0))
            for put in self._pending.all():
                stored.get(put.table, put.key)

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
            while (group := self._next_group()) is not None:
                began_ns = time.monotonic_ns()
                is_small = bool(group) and self._write_small(group)
                if not is_small:
                    self._commit(group, active := self._write_ahead.next())
                    self._write_ahead.restart(active)
                self._writes += 1
                self._measure(group, began_ns, "write_ahead" if is_small else "lmdb")
                self._post(partial(self._report, group))
            self._commit([], self._write_ahead.closed())
        except BaseException as e:  # noqa: BLE001  # after any error the disk's state is unknown: the process must end
            self._is_failed = True
            self._post(partial(self._on_fatal, e))

    def _measure(self, group: list[_Submission], began_ns: int, to: str) -> None:
        self.measures.write.observe(time.monotonic_ns() - began_ns, to)
        if group:
            self.measures.submissions.observe(len(group))
            self.measures.size.observe(sum(submission.size for submission in group))

    def _next_group(self) -> list[_Submission] | None:
        """Waits for a submission, and takes those queued after it. None at close; empty if none has come for a while,
        and LMDB does not have everything."""
        try:
            first = self._carried or self._queue.get(timeout=PENDING_S_MAX if self._pending.count else None)
        except Empty:
            return []
        self._carried = None
        if first is None:
            return None
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

    def _write_small(self, group: list[_Submission]) -> bool:
        """Writes the round to the write-ahead file if it is a small one, and has space there."""
        size = 0
        puts: list[Put] = []
        for submission in group:
            size += submission.size
            if size > ROUND_BYTES_MAX:
                return False
            for op in submission.ops:
                if not isinstance(op, Put) or not 0 < len(op.key) <= KEY_BYTES_MAX:
                    return False  # a key that LMDB does not take is an error now, not when LMDB gets it
                puts.append(op)
        rows = encode_rows(puts)
        if not self._write_ahead.has_space(len(rows)) or not self._pending.has_space(len(puts)):
            return False
        if rows:
            self._write_ahead.append(rows)
            self._pending.add(puts)
        return True

    def _commit(self, group: list[_Submission], active: Active) -> None:
        """Brings the round to LMDB with everything pending. The rounds of another generation than `active` no longer
        count."""
        while True:
            try:
                base = self._write(group, active)
                break
            except lmdb.MapFullError:
                if self._map_size >= MAP_BYTES_MAX:
                    raise
                self._grow_map()
        self._pending.clear(base)

    def _write(self, group: list[_Submission], active: Active) -> int:
        """Returns the number of the transaction."""
        tables = self._tables
        with self._env.begin(write=True) as txn:
            for op in chain(self._pending.all(), *(submission.ops for submission in group)):
                self._prepare(txn, op)
                if isinstance(op, Put):
                    txn.put(op.key, op.value, db=tables[op.table])
                else:
                    _delete_range(txn, tables[op.table], op.start, op.stop)
            txn.put(WRITE_AHEAD_KEY, active.encode(), db=tables[Table.META])
            return txn.id()

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
                    transaction,
                    table,
                    start,
                    stop,
                    home_of,
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
    def _rows_of(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool, limit: int
    ) -> Iterator[Iterator[Row]]:
        """For the loop, in a read transaction that ends with the block. Any error of LMDB counts as damage. Batches are
        read by page: through the map, one that the medium cannot give would end the process.

        The pending rows are taken before the transaction begins: if it is newer than they are, it has them all."""
        if table is Table.BATCHES:
            with self._pages_of(table, start, stop, guard=lambda: self._map_lock, reverse=reverse, limit=limit) as rows:
                yield rows
            return
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
        """As `_rows_of`. Raises NotCached only with `cached_only`."""
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
        with self._rows_of(table, start, stop, reverse=reverse, limit=limit) as rows:
            return taken(rows, limit, bytes_max)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        if limit <= 0 or start >= stop:
            return []
        with self._rows_of(table, start, stop, reverse=reverse, limit=limit) as rows:
            return [key for key, _, _ in islice(rows, limit)]

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
                with self._pages_of(
                    table, start, stop, guard=guard, lowest=lowest, bytes_wanted=bytes_max, cached_only=cached_only
                ) as rows:
                    return partial(done, within(rows, bytes_max))
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
                pending = self._pending.copy()
                try:
                    with self._gate.shared(), self._env.begin() as txn:
                        reader = self._pages.reader(cached_only=False)
                        return partial(done, find(Snapshot(reader, txn.id(), pending)))
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
        """The pages of LMDB's own free list count as free: they are few. Pending rows count as written."""
        found = os.statvfs(self._path)
        try:
            with self._map_lock, self._env.begin() as txn:
                stats = [self._env.stat(), *(txn.stat(table) for table in self._tables.values())]
                pages = self._env.info()["last_pgno"] + 1
        except lmdb.Error as e:
            raise DataDamaged(f"{self._path} cannot be read: {e}") from e
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats) + _META_PAGES
        return Space(
            free_bytes=max(found.f_bavail * found.f_frsize - self._pending.size, 0),
            total_bytes=found.f_blocks * found.f_frsize,
            reusable_bytes=max(pages - used, 0) * stats[0]["psize"],
        )

    def size_bytes(self) -> int:
        return sum(os.stat(self._path / name).st_blocks * 512 for name in (DATA_FILE, WRITE_AHEAD_FILE))

    def _has_ended(self) -> bool:
        """Waits for the threads, as long as writes go on. A disk may hang for ever without an error."""
        writes = -1
        while self._writer.is_alive() and writes != self._writes:
            writes = self._writes
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
        self._write_ahead.close()
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
