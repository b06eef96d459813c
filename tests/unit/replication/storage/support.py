"""Shared by the storage tests: a clock that is advanced by hand, and one harness per disk.

A harness runs the disk's loop (`settle`), reopens its data (`reopen`) and makes a commit fail (`submit_failing`),
so that a test runs unchanged over the real disk and the simulated one.
"""

import heapq
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from crc32c import crc32c

from smq.replication.log.stored_batch import home_of
from smq.replication.ports import Delete, Disk, Op, Put, Table
from smq.replication.storage.disk import StoreDisk
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.disk_sqlite import SqliteDisk
from smq.replication.storage.write_ahead import WRITE_AHEAD_BYTES
from smq.testing.virtual.disk import DiskImage, FakeDisk

SETTLE_TIMEOUT_S = 60
D = TypeVar("D", bound=StoreDisk)


class ManualTimer:
    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn: Callable[[], None] | None = fn

    def cancel(self) -> None:
        self.fn = None


class ManualClock:
    """Time stands still until `run` advances it to the next timer."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._count = 0
        self._timers: list[tuple[int, int, ManualTimer]] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def call_later(self, delay_ms: float, fn: Callable[[], None]) -> ManualTimer:
        self._count += 1
        timer = ManualTimer(fn)
        heapq.heappush(self._timers, (self.now_ns + int(delay_ms * 1_000_000), self._count, timer))
        return timer

    def call_soon(self, fn: Callable[[], None]) -> None:
        self.call_later(0, fn)

    def step(self) -> bool:
        """Runs the next timer; False if there is none."""
        if not self._timers:
            return False
        self.now_ns, _, timer = heapq.heappop(self._timers)
        if timer.fn is not None:
            timer.fn()
        return True

    def run(self) -> None:
        while self.step():
            pass


class Harness(Protocol):
    fatal: list[BaseException]

    @property
    def posts(self) -> int:
        """How many commits were reported."""

    @property
    def disk(self) -> Disk: ...

    def settle(self) -> None:
        """Runs the loop until every submission is reported, or the disk has failed."""

    def write(self, *ops: Op) -> None:
        """One submission, until it is settled."""

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Runs the loop until the condition holds."""

    def reopen(self) -> Disk: ...

    def submit_failing(self) -> None: ...

    def close(self) -> None: ...


class FakeHarness:
    def __init__(self, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.fatal: list[BaseException] = []
        self._open(None)

    def _open(self, image: DiskImage | None) -> None:
        self.fake = FakeDisk(self.clock, self.rng, image=image, on_fatal=self.fatal.append)

    @property
    def disk(self) -> FakeDisk:
        return self.fake

    @property
    def posts(self) -> int:
        return self.fake.commits

    def settle(self) -> None:
        self.clock.run()

    def write(self, *ops: Op) -> None:
        self.fake.submit(ops)
        self.settle()

    def wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert self.clock.step(), "nothing is under way"

    def reopen(self) -> FakeDisk:
        self.fake.close()
        self._open(self.fake.image)
        return self.fake

    def crash(self) -> FakeDisk:
        """Power loss; returns the disk afterwards."""
        self._open(self.fake.crash())
        return self.fake

    def submit_failing(self) -> None:
        self.fake.fail_next_commit(OSError(5, "input/output error"))
        self.fake.submit([Put(Table.RAFT_LOG, b"fails", b"")])

    def close(self) -> None:
        self.fake.close()


class StoreHarness(ABC, Generic[D]):
    """Of a real disk."""

    def __init__(self, path: Path, write_ahead_bytes: int = WRITE_AHEAD_BYTES) -> None:
        self.path = path
        self.write_ahead_bytes = write_ahead_bytes
        self.fatal: list[BaseException] = []
        self.posts = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open()

    @abstractmethod
    def _opened(self) -> D: ...

    def _open(self) -> None:
        self._disk = self._opened()

    @property
    def disk(self) -> D:
        return self._disk

    def settle(self) -> None:
        while self._disk.durable_seq < self._disk.submitted_seq and not self.fatal:
            self._calls.get(timeout=SETTLE_TIMEOUT_S)()
            self.posts += 1

    def write(self, *ops: Op) -> None:
        self._disk.submit(ops)
        self.settle()

    def wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.run_next()

    def run_next(self) -> None:
        """Waits for the next callback that a thread of the disk posts to the loop, and runs it."""
        self._calls.get(timeout=SETTLE_TIMEOUT_S)()

    def run_all(self) -> None:
        """Runs what has been posted, without waiting."""
        while not self._calls.empty():
            self._calls.get()()

    def reopen(self) -> D:
        self._disk.close()
        self.settle()
        self._open()
        return self._disk

    def settle_in_store(self) -> None:
        """Until nothing is in the write-ahead file alone: a round that deletes takes everything with it."""
        self._disk.submit([Delete(Table.META, b"x", b"x")])
        self.settle()

    def submit_failing(self) -> None:
        self._disk.submit([Put(Table.RAFT_LOG, b"k" * 1000, b"keys have at most 511 bytes")])

    def close(self) -> None:
        self._disk.close()


class LmdbHarness(StoreHarness[LmdbDisk]):
    def __init__(self, path: Path, map_size: int = 1 << 30, write_ahead_bytes: int = WRITE_AHEAD_BYTES) -> None:
        self.map_size = map_size
        super().__init__(path, write_ahead_bytes)

    def _opened(self) -> LmdbDisk:
        return LmdbDisk(
            self.path,
            call_soon_threadsafe=self._calls.put,
            on_fatal=self.fatal.append,
            home_of=home_of,
            map_size=self.map_size,
            write_ahead_bytes=self.write_ahead_bytes,
        )


class SqliteHarness(StoreHarness[SqliteDisk]):
    def _opened(self) -> SqliteDisk:
        return SqliteDisk(
            self.path,
            call_soon_threadsafe=self._calls.put,
            on_fatal=self.fatal.append,
            write_ahead_bytes=self.write_ahead_bytes,
        )


HARNESSES: Final = {"lmdb": LmdbHarness, "sqlite": SqliteHarness}


def make_batch(
    count: int = 1,
    *,
    created_ms: int = 0,
    producer: tuple[int, int, int] = (-1, -1, -1),
    payload: bytes = b"records",
) -> bytes:
    """A batch with a valid header and CRC, and arbitrary bytes for records. `producer`: id, epoch, sequence."""
    rest = struct.pack(">hiqqqhii", 0, count - 1, created_ms, created_ms, *producer, count) + payload
    return struct.pack(">qiibI", 0, len(rest) + 9, -1, 2, crc32c(rest)) + rest
