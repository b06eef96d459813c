"""The real disk: one store behind a write-ahead file, one writer thread, group commit.

Owns the data directory (its lock), the threads, and the decision which rounds go to the write-ahead file first: small
ones that only put rows. All others go to the store, with everything that is only in that file. A subclass per engine
is the store: its transactions, its walks and its space. It must never know what the keys and values mean, and never
call back from a thread other than the loop's.
- Any error of the writer is fatal to the process: a store that carries on after a failed commit is in an unknown state.
- Every call of a store gives up the GIL, so the process should run with SWITCH_INTERVAL_S: beside a busy loop, a
  transaction of 30 puts took 36 ms with Python's default of 5 ms, and 0.7 ms with 0.5 ms.
"""

import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar, Final

from smq.replication.monitoring.measures import DiskMeasures
from smq.replication.ports import DataDamaged, Examined, GiveUp, Op, Put, Rows, Space, T, Table
from smq.replication.storage.directory import REPLACE_ADVICE, DiskOpenError, lock_directory, make_directory
from smq.replication.storage.engine import StoreName, refuse_other_engine
from smq.replication.storage.hang import CLOSE_S_MAX, DiskHung
from smq.replication.storage.pending_rows import PendingRows
from smq.replication.storage.rows import Row, WalkedRows, examined, within
from smq.replication.storage.workers import Workers
from smq.replication.storage.write_ahead import (
    ROUND_BYTES_MAX,
    WRITE_AHEAD_FILE,
    WRITE_AHEAD_KEY,
    Active,
    WriteAhead,
    encode_rows,
    make_file,
    recover,
)

COMMIT_BYTES_MAX: Final = 16 << 20  # of values per transaction: some 50 ms of a slow disk; LMDB's own cap is 512 MiB
PENDING_S_MAX: Final = 30.0  # without a submission: what rots in the write-ahead file is then in the store
KEY_BYTES_MAX: Final = 511  # LMDB's, and every store's: a directory can be copied from one to another
READERS: Final = 6  # threads: one read may take seconds on a failing medium. One place has at most four (see Workers)
SWITCH_INTERVAL_S: Final = 0.0005  # for sys.setswitchinterval, set by the composition root
READS_QUEUED_MAX: Final = 10_000  # a small object each; above the partitions that one fetch may name


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class _Submission:
    seq: int
    ops: Sequence[Op]
    size: int
    done: Callable[[], None] | None


class StoreDisk(WalkedRows):
    """See the Disk port. Raises DiskOpenError from the constructor."""

    engine: ClassVar[StoreName]
    errors: ClassVar[tuple[type[Exception], ...]]  # that the store raises

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_fatal: Callable[[BaseException], None],
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        write_ahead_bytes: int,
    ) -> None:
        """`call_soon`: of the loop that submits; what one turn of it submits then shares one synced write. None: a
        caller without a loop. `write_ahead_bytes`: of a file that has to be made."""
        self._path = Path(path)
        self.measures = DiskMeasures()
        self._submissions, self._sizes = self.measures.submissions.series(), self.measures.size.series()
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_fatal = on_fatal
        self._call_soon = call_soon
        make_directory(self._path)
        with ExitStack() as undo:  # whatever ends the rest, an interrupt too, gives everything back
            self._lock_fd = lock_directory(self._path)
            undo.callback(os.close, self._lock_fd)
            refuse_other_engine(self._path, self.engine)
            self._pending = PendingRows(self._open_store(undo, write_ahead_bytes))
            self._write_ahead = self._open_write_ahead()
            undo.pop_all()
        workers = partial(Workers, post=self._post, on_error=on_fatal)
        self._readers = workers("smq-disk-reader", threads=READERS, queued_max=READS_QUEUED_MAX)
        self._examiner = workers("smq-disk-examiner", threads=1, queued_max=1)
        self._submitted_seq = 0
        self._durable_seq = 0
        self._queued_bytes = 0
        self._turn: list[_Submission] = []  # of this turn of the loop: the writer gets them when it ends
        # Turns; None: close. Bounded by the node's in-flight cap.
        self._queue: SimpleQueue[list[_Submission] | None] = SimpleQueue()
        self._taken: deque[_Submission] = deque()  # from the queue: what the previous transaction had no room for
        self._group_bytes = 0  # of the group that the writer has
        self._writes = 0  # that are durable
        self._is_failed = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_forever, name="smq-disk-writer", daemon=True)
        self._writer.start()

    # ----------------------------------------------------------------------------------------- the store
    @abstractmethod
    def _open_store(self, undo: ExitStack, write_ahead_bytes: int) -> int:
        """Opens the store, or makes it with its format version and the row of the write-ahead file. Returns the number
        of the last transaction. `undo` gives back what was opened if the rest fails."""

    @abstractmethod
    def _close_store(self) -> None: ...

    @abstractmethod
    def _write(self, ops: Sequence[Op], active: Active) -> int:
        """One durable transaction with these ops and the row of the write-ahead file. Returns its number."""

    @abstractmethod
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
    ) -> AbstractContextManager[Iterator[Row]]:
        """Rows of one moment, pending ones included; with `lowest`, beginning as `read_from`. `is_loop`: on the loop,
        or on a thread of the disk's own. DataDamaged for any error of the store.

        The pending rows are taken before the transaction begins: if it is newer than they are, it has them all."""

    @abstractmethod
    def _find(self, find: Callable[[Rows], T]) -> T:
        """Runs it on a thread of the disk's own, over one moment of all tables. Raises DataDamaged."""

    @abstractmethod
    def _reusable_bytes(self) -> int:
        """Of the store's own file."""

    @abstractmethod
    def _store_files(self) -> tuple[str, ...]:
        """The names of those that exist."""

    @abstractmethod
    def _prepare_recovery(self) -> None:
        """Before the pending rows of a crash are brought to the store."""

    @abstractmethod
    def _settle_start(self) -> None:
        """After the first transaction."""

    @abstractmethod
    def _tidy(self) -> None:
        """On the writer's thread, after a transaction was reported."""

    def _open_write_ahead(self) -> WriteAhead:
        """Brings the rounds that a crash left in the file to the store, and begins a new generation."""
        path, data_file = self._path / WRITE_AHEAD_FILE, self._path / self.engine.data_file
        try:
            active = Active.decode(self.get(Table.META, WRITE_AHEAD_KEY))
            if not active.generation and not path.exists():
                make_file(path, active.size)
            rounds = recover(path, active)
            for puts in rounds:
                self._pending.add(puts)
            self._prepare_recovery()
            active = active.next(has_rounds=bool(rounds))
            self._commit([], active)
            self._settle_start()
        except DataDamaged as e:
            raise DiskOpenError(f"{data_file} is damaged: {e}. {REPLACE_ADVICE}") from e
        except self.errors as e:
            raise DiskOpenError(
                f"{path} cannot be brought into {data_file.name}: {e}. If the disk is full, free space on it. If the "
                f"file is damaged: {REPLACE_ADVICE}"
            ) from e
        return WriteAhead(path, active)

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
            self._turn.append(_Submission(self._submitted_seq, ops, size, done))
            if self._call_soon is None:
                self._hand_over()
            elif len(self._turn) == 1:
                self._call_soon(self._hand_over)
        return self._submitted_seq

    def _hand_over(self) -> None:
        """Not one by one: the writer would take the first alone, and all others would wait for its flush."""
        turn, self._turn = self._turn, []
        if turn:
            self._queue.put(turn)

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
                self._measure(group, began_ns, "write_ahead" if is_small else str(self.engine))
                self._post(partial(self._report, group))
                if not is_small:
                    self._tidy()
            self._commit([], self._write_ahead.closed())
        except BaseException as e:  # noqa: BLE001  # after any error the disk's state is unknown: the process must end
            self._is_failed = True
            self._post(partial(self._on_fatal, e))

    def _measure(self, group: list[_Submission], began_ns: int, to: str) -> None:
        self.measures.write.observe(time.monotonic_ns() - began_ns, to)
        if group:
            self._submissions.observe(len(group))
            self._sizes.observe(self._group_bytes)

    def _next_group(self) -> list[_Submission] | None:
        """Waits for a submission, and takes those queued after it. None at close; empty if none has come for a while,
        and the store does not have everything."""
        if not self._taken:
            try:
                turn = self._queue.get(timeout=PENDING_S_MAX if self._pending.count else None)
            except Empty:
                return []
            if turn is None:
                return None
            self._taken.extend(turn)
        group: list[_Submission] = []
        size = 0
        while self._taken or self._takes_more():
            with_next = size + self._taken[0].size
            if group and with_next > COMMIT_BYTES_MAX:
                break
            size = with_next
            group.append(self._taken.popleft())
        self._group_bytes = size
        return group

    def _takes_more(self) -> bool:
        """Whether another turn has come."""
        try:
            turn = self._queue.get_nowait()
        except Empty:
            return False
        if turn is None:
            self._queue.put(None)  # after this group the thread ends: nothing may be submitted after a close
            return False
        self._taken.extend(turn)
        return True

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
                    return False  # a key that the store does not take is an error now, not when the store gets it
                puts.append(op)
        rows = encode_rows(puts)
        if not self._write_ahead.has_space(len(rows)) or not self._pending.has_space(len(puts)):
            return False
        if rows:
            self._write_ahead.append(rows)
            self._pending.add(puts)
        return True

    def _commit(self, group: list[_Submission], active: Active) -> None:
        """Brings the round to the store with everything pending. The rounds of another generation than `active` no
        longer count."""
        ops = list(chain(self._pending.all(), *(submission.ops for submission in group)))
        self._pending.clear(self._write(ops, active))

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
        def job() -> Callable[[], None]:
            try:
                with self._walk(table, start, stop, is_loop=False, lowest=lowest, bytes_wanted=bytes_max) as rows:
                    return partial(done, within(rows, bytes_max))
            except DataDamaged as e:
                return partial(done, e)

        return self._readers.submit(job, place, start)

    def look_up(
        self, place: bytes, find: Callable[[Rows], T], done: Callable[[T | DataDamaged], None]
    ) -> GiveUp | None:
        def job() -> Callable[[], None]:
            try:
                return partial(done, self._find(find))
            except DataDamaged as e:
                return partial(done, e)

        return self._readers.submit(job, ("look-ups", place), b"")  # a long one holds up no fetch

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
                with self._walk(table, start, stop, is_loop=False) as rows:
                    return partial(done, examined(rows, bytes_max, check))
            except DataDamaged as e:
                raise DataDamaged(f"{e}. {REPLACE_ADVICE}") from e

        if self._examiner.submit(job, b"", b"") is None:
            raise RuntimeError("a slice is examined already")

    def space(self) -> Space:
        """Pending rows count as written."""
        found = os.statvfs(self._path)
        return Space(
            free_bytes=max(found.f_bavail * found.f_frsize - self._pending.size, 0),
            total_bytes=found.f_blocks * found.f_frsize,
            reusable_bytes=self._reusable_bytes(),
        )

    def size_bytes(self) -> int:
        return sum(os.stat(self._path / name).st_blocks * 512 for name in (*self._store_files(), WRITE_AHEAD_FILE))

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
        self._hand_over()
        self._queue.put(None)
        if not self._has_ended():
            self._on_fatal(DiskHung(self._path))
            return  # a thread still uses what would be closed
        self._write_ahead.close()
        self._close_store()
        os.close(self._lock_fd)
