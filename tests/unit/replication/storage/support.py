"""Shared by the storage tests: a clock that is advanced by hand, and one harness per disk.

A harness runs the disk's loop (`settle`), reopens its data (`reopen`) and makes a commit fail (`submit_failing`),
so that a test runs unchanged over the real disk and the simulated one.
"""

import heapq
import random
import struct
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

from crc32c import crc32c

from smq.replication.ports import Disk, Op, Put, Table
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.node_log import FILE_BYTES
from smq.testing.virtual.disk import DiskImage, FakeDisk

SETTLE_TIMEOUT_S = 60


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


class StoreHarness:
    """Of the real disk."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.fatal: list[BaseException] = []
        self.posts = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open()

    def _open(self) -> None:
        self._disk = NodeLogDisk(
            self.path,
            call_soon_threadsafe=self._calls.put,
            on_fatal=self.fatal.append,
            file_bytes=self.file_bytes,
        )

    @property
    def disk(self) -> NodeLogDisk:
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

    def reopen(self) -> NodeLogDisk:
        self._disk.close()
        self.settle()
        self._open()
        return self._disk

    def crash(self) -> NodeLogDisk:
        """As kill -9 between two system calls: the threads end, and the index does not get what it does not have."""
        self.settle()
        disk = self._disk
        disk._is_failed = True
        disk.close()
        self._open()
        return self._disk

    def submit_failing(self) -> None:
        self._disk.submit([Put(Table.RAFT_LOG, b"k" * 1000, b"keys have at most 511 bytes")])

    def close(self) -> None:
        self._disk.close()


class SmallFilesHarness(StoreHarness):
    """With files so small that the log goes from one to the next all the time, and what is dead is collected."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, file_bytes=64 << 10)


HARNESSES: Final = {"node log": StoreHarness, "small files": SmallFilesHarness}


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
