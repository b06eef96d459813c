"""The real disk: one log per node, an index of it, one writer thread, group commit.

Owns the data directory (its lock) and the threads: one appends rounds to the log, the only durable path; one brings
the index up to the log behind the acknowledgements, and collects what is dead; some read. It must never know what the
keys and values mean, and never call back from a thread other than the loop's.
- Any error of the writer or of the index is fatal to the process: what is on disk after a failed sync is unknown.
- Every call of LMDB gives up the GIL, so the process should run with SWITCH_INTERVAL_S.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from smq.replication.monitoring.measures import DiskMeasures
from smq.replication.ports import DataDamaged, Delete, Examined, GiveUp, Op, Put, Rows, Space, T, Table
from smq.replication.storage.collection import Collection
from smq.replication.storage.directory import REPLACE_ADVICE, lock_directory, make_directory
from smq.replication.storage.format_version import refuse_old_files
from smq.replication.storage.frames import encode_round, located
from smq.replication.storage.hang import CLOSE_S_MAX, DiskHung
from smq.replication.storage.node_log import FILE_BYTES, NodeLog
from smq.replication.storage.overlay import Overlay, Piece
from smq.replication.storage.recovery import open_index
from smq.replication.storage.rows import Moment
from smq.replication.storage.workers import Workers

COMMIT_BYTES_MAX: Final = 16 << 20  # of values per round: some 50 ms of a slow disk
PENDING_S_MAX: Final = 5.0  # then the index gets what it does not have, however little
RETIRED_S: Final = 0.2  # between two looks whether a file is still read
READERS: Final = 6  # threads: one read may take seconds on a failing medium. One place has at most four (see Workers)
SWITCH_INTERVAL_S: Final = 0.0005  # for sys.setswitchinterval, set by the composition root
READS_QUEUED_MAX: Final = 10_000  # a small object each; above the partitions that one fetch may name


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class _Submission:
    seq: int
    ops: Sequence[Op]
    size: int
    done: Callable[[], None] | None


class NodeLogDisk:
    """See the Disk port. Raises DiskOpenError from the constructor."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        on_fatal: Callable[[BaseException], None],
        call_soon: Callable[[Callable[[], None]], object] | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """`call_soon`: of the loop that submits; what one turn of it submits then shares one synced write. None: a
        caller without a loop. `file_bytes`: the full size of a file of the log."""
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
            refuse_old_files(self._path)
            self._log = NodeLog(self._path, file_bytes)
            undo.callback(self._log.close)
            self._index = open_index(
                self._path, self._log, readers=READERS + 3
            )  # the loop, the examiner and the keeper
            undo.callback(self._index.close)
            self._overlay = Overlay(self._log.end)
            undo.pop_all()
        self._collection = Collection(self._index, self._log, file_bytes)
        self._collection.sweep()
        workers = partial(Workers, post=self._post, on_error=on_fatal)
        self._readers = workers("smq-disk-reader", threads=READERS, queued_max=READS_QUEUED_MAX)
        self._examiner = workers("smq-disk-examiner", threads=1, queued_max=1)
        self._submitted_seq = 0
        self._durable_seq = 0
        self._queued_bytes = 0
        self._turn: list[_Submission] = []  # of this turn of the loop: the writer gets them when it ends
        # Turns; None: close. Bounded by the node's in-flight cap.
        self._queue: SimpleQueue[list[_Submission] | None] = SimpleQueue()
        self._taken: deque[_Submission] = deque()  # from the queue: what the previous round had no room for
        self._group_bytes = 0  # of the group that the writer has
        self._writes = 0  # that are durable, of both threads
        self._is_failed = False
        self._is_closed = False
        self._changed = threading.Condition()  # what the writer and the keeper wait for
        self._pending_since = 0.0  # when the oldest round came that the index does not have; 0 without one
        self._is_wanted = False  # the index should take all rounds now
        self._has_written_all = False
        self._writer = threading.Thread(target=self._write_forever, name="smq-disk-writer", daemon=True)
        self._keeper = threading.Thread(target=self._keep_forever, name="smq-disk-keeper", daemon=True)
        self._writer.start()
        self._keeper.start()

    @property
    def remark(self) -> str:
        """For an operator: what the start has found, and repaired."""
        return self._index.remark

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
                self._write(group)
                if self._is_failed:  # the index: nothing is reported any more
                    return
                self._writes += 1
                self._measure(group, began_ns)
                self._post(partial(self._report, group))
                self._log.reserve()
        except BaseException as e:  # noqa: BLE001  # after any error the disk's state is unknown: the process must end
            self._fail(e)
        finally:
            with self._changed:
                self._has_written_all = True
                self._changed.notify_all()

    def _measure(self, group: list[_Submission], began_ns: int) -> None:
        self.measures.write.observe(time.monotonic_ns() - began_ns, "log")
        self._submissions.observe(len(group))
        self._sizes.observe(self._group_bytes)

    def _next_group(self) -> list[_Submission] | None:
        """Waits for a submission, and takes those queued after it. None at close."""
        if not self._taken:
            turn = self._queue.get()
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
        if self._queue.empty():
            return False
        turn = self._queue.get()
        if turn is None:
            self._queue.put(None)  # after this group the thread ends: nothing may be submitted after a close
            return False
        self._taken.extend(turn)
        return True

    def _write(self, group: list[_Submission]) -> None:
        """One frame, one sync. What reads see is durable."""
        ops = group[0].ops if len(group) == 1 else list(chain(*(submission.ops for submission in group)))
        if not ops:
            return
        made = encode_round(ops)
        file, values_at = self._log.append(made)
        changes = located(ops, made, file, values_at)
        self._overlay.add(changes, self._log.end, len(made.rows) + self._group_bytes)
        makes_room = self._collection.is_short and any(
            isinstance(op, Delete) and op.table is Table.BATCHES for op in ops
        )
        with self._changed:
            self._is_wanted |= makes_room  # what is deleted counts as soon as the index knows
            if not self._pending_since or makes_room:
                self._pending_since = self._pending_since or time.monotonic()
                self._changed.notify_all()
            elif self._overlay.grows.is_full:
                self._changed.notify_all()
                while self._overlay.grows.is_overfull and not self._is_failed:
                    self._changed.wait()

    def _fail(self, error: BaseException) -> None:
        """Reported once."""
        with self._changed:
            is_first, self._is_failed = not self._is_failed, True
            self._changed.notify_all()
        if is_first:
            self._post(partial(self._on_fatal, error))

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

    # ------------------------------------------------------------------------------------------- the index
    def _keep_forever(self) -> None:
        """The keeper thread. In between, the collection takes one step at a time."""
        try:
            while True:
                has_ended = self._has_written_all  # asked first: a last round may come while the rest is asked
                if self._is_failed:
                    return
                if self._is_due():
                    self._take_layer()
                elif has_ended:
                    self._index.set_place(self._log.end, is_clean=True)
                    return
                elif not self._collection.step():
                    self._wait_for_work()
        except BaseException as e:  # noqa: BLE001  # what is on disk is unknown, as for the writer
            self._fail(e)

    def _is_due(self) -> bool:
        since = self._pending_since
        if not since:
            return False
        is_old = time.monotonic() - since >= PENDING_S_MAX
        return is_old or self._is_wanted or self._has_written_all or self._overlay.grows.is_full

    def _take_layer(self) -> None:
        began_ns = time.monotonic_ns()
        with self._changed:
            self._pending_since = 0.0
            self._is_wanted = False
            layer = self._overlay.take()
        self._index.apply(layer)
        self._overlay.forget_taken()
        with self._changed:
            self._changed.notify_all()
        self._writes += 1
        self.measures.write.observe(time.monotonic_ns() - began_ns, "index")
        self._collection.sweep()

    def _wait_for_work(self) -> None:
        with self._changed:
            if self._is_due() or self._has_written_all or self._is_failed:
                return
            since = self._pending_since
            left = max(since + PENDING_S_MAX - time.monotonic(), 0.0) if since else None
            if self._log.retired:
                left = min(left, RETIRED_S) if left is not None else RETIRED_S
            self._changed.wait(left)
        self._log.reclaim()

    def settle(self) -> None:
        """The index gets all rounds soon."""
        with self._changed:
            self._is_wanted = bool(self._pending_since)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- reads
    @contextmanager
    def _moment(self, table: Table, start: bytes, stop: bytes) -> Iterator[Moment]:
        """For reads of that table within these keys."""
        pin = self._log.pins.enter()
        try:
            pieces = self._overlay.pieces(table, start, stop)
            with self._index.snapshot() as snapshot:
                yield Moment(snapshot, lambda _table, _start, _stop: pieces, self._log)
        finally:
            self._log.pins.leave(pin)

    def get(self, table: Table, key: bytes) -> bytes | None:
        with self._moment(table, key, key + b"\x00") as moment:
            return moment.get(table, key)

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
        with self._moment(table, start, stop) as moment:
            return moment.scan(table, start, stop, reverse=reverse, limit=limit, bytes_max=bytes_max)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        with self._moment(table, start, stop) as moment:
            return moment.scan_keys(table, start, stop, reverse=reverse, limit=limit)

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
                with self._moment(table, lowest, stop) as moment:
                    return partial(done, moment.scan_from(table, lowest, start, stop, bytes_max))
            except DataDamaged as e:
                return partial(done, e)

        return self._readers.submit(job, place, start)

    def look_up(
        self, place: bytes, find: Callable[[Rows], T], done: Callable[[T | DataDamaged], None]
    ) -> GiveUp | None:
        def job() -> Callable[[], None]:
            try:
                with self._whole_moment() as moment:
                    return partial(done, find(moment))
            except DataDamaged as e:
                return partial(done, e)

        return self._readers.submit(job, ("look-ups", place), b"")  # a long one holds up no fetch

    @contextmanager
    def _whole_moment(self) -> Iterator[Moment]:
        """For reads of any table."""
        pin = self._log.pins.enter()
        try:
            layers = self._overlay.copies()

            def pieces(table: Table, start: bytes, stop: bytes) -> list[Piece]:
                return [layer.piece(table, start, stop) for layer in layers]

            with self._index.snapshot() as snapshot:
                yield Moment(snapshot, pieces, self._log)
        finally:
            self._log.pins.leave(pin)

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
                with self._moment(table, start, stop) as moment:
                    return partial(done, moment.examined(table, start, stop, bytes_max, check))
            except DataDamaged as e:
                raise DataDamaged(f"{e}. {REPLACE_ADVICE}") from e

        if self._examiner.submit(job, b"", b"") is None:
            raise RuntimeError("a slice is examined already")

    # ------------------------------------------------------------------------------------------- space
    def space(self) -> Space:
        """What the log has reserved counts as free, and as reusable what the collection gives back. But the index grows
        with the log, and nothing is reserved for it: no more counts than as much again as the file system has."""
        found = os.statvfs(self._path)
        outside = found.f_bavail * found.f_frsize
        return Space(
            free_bytes=outside + min(self._log.reserved_bytes, outside),
            total_bytes=found.f_blocks * found.f_frsize,
            reusable_bytes=self._collection.reusable_bytes,
        )

    def size_bytes(self) -> int:
        return self._log.size_bytes() + self._index.size_bytes()

    # ------------------------------------------------------------------------------------------- the end
    def _has_ended(self) -> bool:
        """Waits for the threads, as long as writes go on. A disk may hang for ever without an error."""
        for thread in (self._writer, self._keeper):
            writes = -1
            while thread.is_alive() and writes != self._writes:
                writes = self._writes
                thread.join(CLOSE_S_MAX)
            if thread.is_alive():
                return False
        return all(w.close(CLOSE_S_MAX) for w in (self._readers, self._examiner))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._hand_over()
        self._queue.put(None)
        if not self._has_ended():
            self._on_fatal(DiskHung(self._path))
            return  # a thread still uses what would be closed
        self._log.close()
        self._index.close()
        os.close(self._lock_fd)
