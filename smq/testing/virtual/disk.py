"""A simulated disk: the Disk port over sorted dicts, with virtual latency, group commit, crashes and faults.

Owns the data that survives a crash (`DiskImage`) and the time that a commit takes. It keeps the promises of the port
and no more: writes reported durable survive, queued writes may or may not, and a submission is there as a whole or not
at all. It must never read a real clock or random source. For simulations and tests only.
"""

import errno
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sortedcontainers import SortedDict

from smq.replication.ports import Clock, DataDamaged, Examined, GiveUp, Op, Put, Rng, Rows, Space, Table, Timer

T = TypeVar("T")

NS_PER_MS = 1_000_000
REPORT_DELAY_MS_MAX = 0.2  # reads see a commit a little before its report reaches the loop, as with a real thread
COLD = 0.1  # share of the reads that find no page in memory
COLD_READ_MS_MAX = 20.0
READS_MAX = 10_000  # that wait: as with the real disk
READ_RETRY_MS = 50.0  # a stalled read looks this often whether it may continue
ENDLESS_BYTES = 1 << 40  # free space of a disk without a capacity
REPORTED_AT_ONCE = 0.7  # share of the commits that are reported without this delay
TORN = 0.3  # chance that the unsynced submissions that survive a crash end anywhere, not between two groups


def _empty_tables() -> dict[Table, "SortedDict"]:
    return {table: SortedDict() for table in Table}


@dataclass(slots=True)
class DiskImage:
    """The bytes on the platter, as a restarted node finds them."""

    tables: dict[Table, "SortedDict"] = field(default_factory=_empty_tables)
    is_damaged: bool = False  # by a fault, at any time
    misplaced: dict[bytes, bytes] = field(default_factory=dict)  # by key: the value that is not its own

    def copy(self) -> "DiskImage":
        tables = {table: rows.copy() for table, rows in self.tables.items()}
        return DiskImage(tables, self.is_damaged, self.misplaced.copy())

    def apply(self, ops: Iterable[Op]) -> None:
        for op in ops:
            rows = self.tables[op.table]
            if isinstance(op, Put):
                rows[op.key] = op.value
            else:
                for key in list(rows.irange(op.start, op.stop, inclusive=(True, False))):
                    del rows[key]

    def make_unreadable(self, table: Table, rng: Rng) -> bytes | None:
        """The medium cannot give one value of the table any more, until it is written again. Returns its key, or None
        if the table is empty."""
        rows = self.tables[table]
        if not rows:
            return None
        key: bytes = rows.keys()[int(rng.random() * len(rows))]
        rows[key] = b""
        self.is_damaged = True
        return key

    def misplace(self, table: Table, rng: Rng) -> bytes | None:
        """A row of the table gets the value of a row whose key ends in the same 8 bytes. Returns the first one's key,
        or None if there are no two such rows. What has been misplaced is not moved again: it might come home as an
        older version of its row, which no checksum can tell."""
        rows = self.tables[table]
        alike: dict[bytes, list[bytes]] = {}
        for key in rows:
            alike.setdefault(key[-8:], []).append(key)
        pairs = [keys for keys in alike.values() if len(keys) > 1]
        if not pairs:
            return None
        keys = pairs[int(rng.random() * len(pairs))]
        at = int(rng.random() * len(keys))
        value = rows[keys[at - 1]]
        if self.misplaced.get(keys[at - 1]) == value:
            return None
        rows[keys[at]] = self.misplaced[keys[at]] = value
        self.is_damaged = True
        return keys[at]

    def flip_bit(self, table: Table, rng: Rng) -> bytes | None:
        """Flips one bit of one value of the table. Returns the key of that value, or None if all values are empty."""
        rows = self.tables[table]
        keys = [key for key, value in rows.items() if value]
        if not keys:
            return None
        key: bytes = keys[int(rng.random() * len(keys))]
        value = bytearray(rows[key])
        bit = int(rng.random() * len(value) * 8)
        value[bit // 8] ^= 1 << (bit % 8)
        rows[key] = bytes(value)
        self.is_damaged = True
        return key

    def size_bytes(self) -> int:
        return sum(len(key) + len(value) for rows in self.tables.values() for key, value in rows.items())


class _ImageRows:
    """The port's Rows over an image."""

    def __init__(self, image: DiskImage) -> None:
        self._tables = image.tables

    def get(self, table: Table, key: bytes) -> bytes | None:
        value: bytes | None = self._tables[table].get(key)
        return value

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
        rows = self._tables[table]
        pairs: list[tuple[bytes, bytes]] = []
        total = 0
        if start >= stop or limit <= 0:
            return pairs
        for key in rows.irange(start, stop, inclusive=(True, False), reverse=reverse):
            pairs.append((key, rows[key]))
            total += len(rows[key])
            if len(pairs) >= limit or total >= bytes_max:
                break
        return pairs

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        return [key for key, _ in self.scan(table, start, stop, reverse=reverse, limit=limit)]


@dataclass(frozen=True, slots=True)
class _Submission:
    seq: int
    ops: Sequence[Op]
    size: int
    record_bytes: int
    done: Callable[[], None] | None


class FakeDisk:
    """One commit is in flight at a time; everything that queues up meanwhile goes into the next one. One that finds no
    other in flight begins when the turn of the loop ends."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        *,
        image: DiskImage | None = None,
        latency_ms: tuple[float, float] = (0.1, 1.0),
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._image = image if image is not None else DiskImage()
        self.latency_ms = latency_ms
        self._on_fatal = on_fatal
        self.capacity: int | None = None  # bytes; a commit that would exceed it fails with ENOSPC
        self._file_bytes = 0  # as of the last look
        self.has_failed = False  # a commit failed: the process must end
        self._fail_next: BaseException | None = None
        self._stalled_until_ns = 0
        self._stalled: Timer | None = None  # a commit that waits for the end of the stall
        self._reads_stalled_until_ns = 0
        self.on_blocking_read: Callable[[float], None] | None = None  # a read on the loop, with the ms that it waits
        self.reads: dict[int, None] = {}  # those that have not begun
        self.reads_max = READS_MAX
        self.reads_peak = 0  # the most that have ever waited
        self._read_number = 0
        self._queue: deque[_Submission] = deque()
        self._in_flight: list[_Submission] = []
        self._is_turn_open = False
        self._unreported: deque[_Submission] = deque()  # committed, but not reported to the loop yet
        self._submitted_seq = 0
        self._durable_seq = 0
        self._queued_bytes = 0
        self._queued_record_bytes = 0
        self.queued_record_bytes_peak = 0  # the most that stored batches have ever taken of the queue
        self._is_dead = False  # crashed or failed: nothing is committed or reported any more
        self._is_closed = False
        self.commits = 0

    # ------------------------------------------------------------------------------------------ the port
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
            raise RuntimeError("the disk is closed: nothing may be submitted any more")
        self._submitted_seq += 1
        if self._is_dead:
            return self._submitted_seq
        puts = [op for op in ops if isinstance(op, Put)]
        size = sum(len(op.value) for op in puts)
        record_bytes = sum(len(op.value) for op in puts if op.table is Table.BATCHES)
        self._queued_bytes += size
        self._queued_record_bytes += record_bytes
        self.queued_record_bytes_peak = max(self.queued_record_bytes_peak, self._queued_record_bytes)
        self._queue.append(_Submission(self._submitted_seq, tuple(ops), size, record_bytes, done))
        if not self._in_flight and not self._is_turn_open:
            self._is_turn_open = True
            self._clock.call_soon(self._end_turn)
        return self._submitted_seq

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._wait_for_medium()
        return _ImageRows(self._image).get(table, key)

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
        self._wait_for_medium()
        return _ImageRows(self._image).scan(table, start, stop, reverse=reverse, limit=limit, bytes_max=bytes_max)

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        self._wait_for_medium()
        return _ImageRows(self._image).scan_keys(table, start, stop, reverse=reverse, limit=limit)

    def _wait_for_medium(self) -> None:
        wait_ns = self._reads_stalled_until_ns - self._clock.monotonic_ns()
        if wait_ns > 0 and self.on_blocking_read is not None:
            self.on_blocking_read(wait_ns / NS_PER_MS)

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
        def read() -> list[tuple[bytes, bytes]]:
            rows = _ImageRows(self._image)
            before = rows.scan_keys(table, lowest, start + b"\x00", reverse=True, limit=1)
            found = rows.scan(table, before[0] if before else start, stop, bytes_max=bytes_max)
            if len(found) > 1 and sum(len(value) for _, value in found) > bytes_max:
                del found[-1]
            return found

        return self._read_later(read, done)

    def look_up(
        self, place: bytes, find: Callable[[Rows], T], done: Callable[[T | DataDamaged], None]
    ) -> GiveUp | None:
        def read() -> T | DataDamaged:
            try:
                return find(_ImageRows(self._image))
            except DataDamaged as e:
                return e

        return self._read_later(read, done)

    def _read_later(self, read: Callable[[], T], done: Callable[[T], None]) -> GiveUp | None:
        """Reads at some moment between the request and the answer, as a thread would."""
        if len(self.reads) >= self.reads_max:
            return None
        self._read_number += 1
        number = self._read_number
        self.reads[number] = None
        self.reads_peak = max(self.reads_peak, len(self.reads))

        def attempt() -> None:
            wait_ns = self._reads_stalled_until_ns - self._clock.monotonic_ns()
            if self._is_dead or self._is_closed or number not in self.reads:
                return
            if wait_ns > 0:
                self._clock.call_later(min(wait_ns / NS_PER_MS, READ_RETRY_MS), attempt)
                return
            del self.reads[number]
            found = read()
            self._clock.call_later(self._rng.random() * REPORT_DELAY_MS_MAX, lambda: done(found))

        self._clock.call_later(self._read_latency_ms(), attempt)
        return lambda: self.reads.pop(number, None)

    def _read_latency_ms(self) -> float:
        is_cold = self._rng.random() < COLD
        return self._rng.random() * (COLD_READ_MS_MAX if is_cold else REPORT_DELAY_MS_MAX)

    def examine(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        bytes_max: int,
        check: Callable[[bytes, bytes], bool],
        done: Callable[[Examined], None],
    ) -> None:
        rows = _ImageRows(self._image).scan(table, start, stop, bytes_max=bytes_max)
        size = sum(len(value) for _, value in rows)
        damaged = [key for key, value in rows if not check(key, value)]
        next_key = rows[-1][0] + b"\x00" if size >= bytes_max else None
        self._clock.call_soon(lambda: done(Examined(damaged=damaged, unreadable=[], size=size, next_key=next_key)))

    def space(self) -> Space:
        """While the disk has a capacity, its file grows and never shrinks, as LMDB's."""
        if self.capacity is None:
            self._file_bytes = 0
            return Space(free_bytes=ENDLESS_BYTES, reusable_bytes=0, total_bytes=ENDLESS_BYTES)
        size = self._image.size_bytes()
        self._file_bytes = max(self._file_bytes, size)
        free_bytes = max(self.capacity - self._file_bytes, 0)
        return Space(free_bytes=free_bytes, reusable_bytes=self._file_bytes - size, total_bytes=self.capacity)

    def size_bytes(self) -> int:
        return self._image.size_bytes()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_dead:
            self._in_flight.extend(self._queue)
            self._queue.clear()
            self._commit_in_flight()

    # ---------------------------------------------------------------------------------------- commits
    def _end_turn(self) -> None:
        self._is_turn_open = False
        if self._queue and not (self._in_flight or self._is_dead or self._is_closed):
            self._begin_commit()

    def _begin_commit(self) -> None:
        self._in_flight = list(self._queue)
        self._queue.clear()
        lo, hi = self.latency_ms
        self._clock.call_later(lo + (hi - lo) * self._rng.random(), self._on_latency_passed)

    def _on_latency_passed(self) -> None:
        if self._is_dead or self._is_closed:
            return
        wait_ns = self._stalled_until_ns - self._clock.monotonic_ns()
        if wait_ns > 0:
            self._stalled = self._clock.call_later(wait_ns / NS_PER_MS, self._on_latency_passed)
            return
        self._stalled = None
        self._commit_in_flight()
        if self._queue and not self._is_dead:
            self._begin_commit()

    def _commit_in_flight(self) -> None:
        error = self._fail_next
        if error is None and self.capacity is not None and self._size_with_group() > self.capacity:
            error = OSError(errno.ENOSPC, "no space left on the simulated disk")
        if error is not None:
            self._die(error)
            return
        group, self._in_flight = self._in_flight, []
        if not group:
            return
        for submission in group:
            self._image.apply(submission.ops)
        self.commits += 1
        self._unreported.extend(group)
        upto = group[-1].seq
        delay_ms = self._rng.random() * REPORT_DELAY_MS_MAX
        if self.latency_ms[1] == 0 or self._is_closed or self._rng.random() < REPORTED_AT_ONCE:
            self._clock.call_soon(lambda: self._report(upto))
        else:
            self._clock.call_later(delay_ms, lambda: self._report(upto))

    def _size_with_group(self) -> int:
        """Deleted data frees its space only for later commits, as in a store that copies on write."""
        size = self._image.size_bytes()
        for submission in self._in_flight:
            for op in submission.ops:
                if isinstance(op, Put):
                    old = self._image.tables[op.table].get(op.key)
                    size += len(op.value) - len(old) if old is not None else len(op.key) + len(op.value)
        return size

    def _report(self, upto: int) -> None:
        """Reports in order, whichever timer fires first: a later report includes the earlier groups."""
        while self._unreported and self._unreported[0].seq <= upto and not self._is_dead:
            submission = self._unreported.popleft()
            self._durable_seq = submission.seq
            self._queued_bytes -= submission.size
            self._queued_record_bytes -= submission.record_bytes
            if submission.done is not None:
                submission.done()

    def _die(self, error: BaseException) -> None:
        self._is_dead = self.has_failed = True
        self._clock.call_soon(lambda: self._on_fatal(error))

    # ----------------------------------------------------------------------------------------- faults
    def crash(self) -> DiskImage:
        """Loses power now; returns the image that is left. Nothing of this disk runs afterwards.

        The image holds everything that was reported, and possibly a prefix of the rest: nothing of it, the group in
        flight, the whole queue, or a part that ends between two submissions. (A submission is never torn: the store
        writes pages beside the old ones, in any order, and then one root.)
        """
        unsynced = list(self._in_flight)  # even after its commit failed: the result of a failed fsync is unknown
        groups = [len(unsynced)]
        if not self._is_dead:
            unsynced.extend(self._queue)
            groups.append(len(unsynced))
        self._is_dead = self._is_closed = True
        self._in_flight = []
        self._queue.clear()
        if self._rng.random() < TORN:
            survive = int(self._rng.random() * (len(unsynced) + 1))
        else:
            survive = (0, *groups)[int(self._rng.random() * (len(groups) + 1))]
        for submission in unsynced[:survive]:
            self._image.apply(submission.ops)
        return self._image

    @property
    def image(self) -> DiskImage:
        """The data committed at this moment (live, not a copy)."""
        return self._image

    def fail_next_commit(self, error: BaseException) -> None:
        """Makes the next commit fail: `on_fatal` is called once, and nothing is reported durable any more."""
        self._fail_next = error

    def stall(self, ms: float) -> None:
        """Lets no commit end within `ms` from now."""
        self._stalled_until_ns = max(self._stalled_until_ns, self._clock.monotonic_ns() + int(ms * NS_PER_MS))

    def stall_reads(self, ms: float) -> None:
        """Lets no `read_from` end within `ms` from now."""
        self._reads_stalled_until_ns = self._clock.monotonic_ns() + int(ms * NS_PER_MS)

    def end_stall(self) -> None:
        """Of commits and of reads."""
        self._stalled_until_ns = self._reads_stalled_until_ns = 0
        if self._stalled is not None:
            self._stalled.cancel()
            self._clock.call_soon(self._on_latency_passed)

    def flip_bit(self, table: Table, rng: Rng) -> bytes | None:
        """Damages one committed value in place; returns its key."""
        return self._image.flip_bit(table, rng)
