"""One node's disk alone, beside a dict in memory as the floor.

Owns these figures: rounds that wait for the disk, a stream of batches, reads of them, the deletion of the older half,
the files' size, and a start. The two alternate, so that what else the machine does hits both. Bytes are those that this
process hands to the block layer. Needs no cluster.
"""

import queue
import random
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.report import Report, percentile
from smq.replication.ports import DataDamaged, Delete, Disk, Op, Put, Table
from smq.replication.storage.disk import NodeLogDisk
from smq.testing.virtual.clock import Machine, Process, Scheduler, SimClock
from smq.testing.virtual.disk import FakeDisk

ROUNDS: Final = {
    "100 B": (1, 250),
    "16 KB": (1, 16_300),
    "6 x 16 KB": (6, 16_300),
    "63 x 16 KB": (63, 16_300),
}  # batches
TURN: Final = 10  # rounds of one store before the next has its turn
STREAMS: Final = {"250 B": 250, "16 KB": 16_300, "1 MB": 1_000_000}
QUEUED_BYTES: Final = 4 << 20  # submitted before the writer has to be waited for
FETCH_BYTES: Final = 1 << 20
PID: Final = b"p" * 20


def round_ops(number: int, batches: int, size: int) -> list[Op]:
    """What that many batches write on a node, with Raft's entry."""
    ops: list[Op] = []
    for base in range(number * batches, (number + 1) * batches):
        key = base.to_bytes(8, "big")
        ops.append(Put(Table.BATCHES, PID + key, bytes(size)))
        ops.append(Put(Table.TIMES, PID + b"\x00" + key * 2, bytes(42)))
    entry = number.to_bytes(8, "big")
    return [*ops, Put(Table.RAFT_LOG, entry, bytes(90)), Put(Table.RAFT_META, b"journal", bytes(29))]


def fail(error: BaseException) -> None:
    raise error


def written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


class Store(ABC):
    """A disk behind the port, with a loop of its own that runs while its caller waits."""

    disk: Disk

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.written = 0
        self.count = 0

    @abstractmethod
    def run_next(self) -> None:
        """Runs the loop until something has happened."""

    def settle(self) -> None:
        """Returns when everything submitted is durable."""
        while self.disk.durable_seq < self.disk.submitted_seq:
            self.run_next()

    def turn(self, batches: int, size: int) -> None:
        before = written_bytes()
        for _ in range(TURN):
            self.count += 1
            began = time.perf_counter()
            self.disk.submit(round_ops(self.count, batches, size))
            self.settle()
            self.taken.append((time.perf_counter() - began) * 1000)
        self.written += written_bytes() - before

    def fill(self, values: list[bytes]) -> None:
        for number, value in enumerate(values):
            key = PID + number.to_bytes(8, "big")
            ops: list[Op] = [Put(Table.BATCHES, key, value), Put(Table.TIMES, PID + b"\x00" + key[20:] * 2, bytes(42))]
            self.disk.submit(ops)
            while self.disk.queued_bytes > QUEUED_BYTES:
                self.run_next()
        self.settle()

    def read_all(self, stop: bytes) -> int:
        at, size = PID, 0
        while True:
            found: list[list[tuple[bytes, bytes]] | DataDamaged] = []
            self.disk.read_from(Table.BATCHES, at, at, stop, place=b"", bytes_max=FETCH_BYTES, done=found.append)
            while not found:
                self.run_next()
            rows = found[0]
            assert not isinstance(rows, DataDamaged)
            if not rows:
                return size
            size += sum(len(value) for _, value in rows)
            at = rows[-1][0] + b"\x00"


class RealStore(Store):
    """On a disk, at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.disk = NodeLogDisk(path, call_soon_threadsafe=self._calls.put, on_fatal=fail)

    def run_next(self) -> None:
        self._calls.get()()


class _Memory(Store):
    """The simulation's disk, whose time is virtual."""

    def __init__(self) -> None:
        super().__init__()
        self._scheduler = Scheduler()
        clock = SimClock(Process(self._scheduler, "memory", fail), Machine())
        self.disk = FakeDisk(clock, random.Random(1), on_fatal=fail)

    def run_next(self) -> None:
        self._scheduler.run_for_ms(1)


def _stores(folder: Path) -> dict[str, Store]:
    return {"disk": RealStore(folder / "disk"), "memory": _Memory()}


def measure(report: Report, *, rounds: int, stream_mib: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, (batches, size) in ROUNDS.items():
            _measure_rounds(report, Path(folder), name, batches, size, rounds if batches < 10 else rounds // 5)
        for name, size in STREAMS.items():
            _measure_stream(report, Path(folder), name, size, (stream_mib << 20) // max(size, 2_000))


def _measure_rounds(report: Report, folder: Path, name: str, batches: int, size: int, rounds: int) -> None:
    stores = _stores(folder / f"rounds-{batches}-{size}")
    for _ in range(rounds // TURN):
        for store in stores.values():
            store.turn(batches, size)
    for label, store in stores.items():
        p50, p99 = percentile(store.taken, 50), percentile(store.taken, 99)
        kb = store.written / len(store.taken) / 1024
        text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, {kb:.1f} KB written"
        report.add(f"round of {name}, {label}", text, p50_ms=p50, p99_ms=p99, kb=kb)
        store.disk.close()


def _measure_stream(report: Report, folder: Path, name: str, size: int, count: int) -> None:
    rng = random.Random(1)
    values = [rng.randbytes(size) for _ in range(min(count, 64))]
    values = [values[n % len(values)] for n in range(count)]
    total = size * count
    half = PID + (count // 2).to_bytes(8, "big")
    for label, store in _stores(folder / f"stream-{size}").items():
        before = written_bytes()
        write_s = _timed(partial(store.fill, values))
        written = (written_bytes() - before) / total
        read_s = _timed(partial(store.read_all, PID + b"\xff" * 8))
        size_ratio = store.disk.size_bytes() / total
        store.disk.submit([Delete(Table.BATCHES, PID, half)])
        delete_s = _timed(store.settle)
        figures = {"write_mb_s": total / write_s / 1e6, "read_mb_s": total / read_s / 1e6, "delete_ms": delete_s * 1000}
        text = (
            f"write {figures['write_mb_s']:.0f} MB/s ({written:.1f} bytes per byte), read {figures['read_mb_s']:.0f} "
            f"MB/s, delete half {figures['delete_ms']:.0f} ms, file {size_ratio:.2f} of the data"
        )
        report.add(f"{total >> 20} MiB of {name}, {label}", text, written=written, file=size_ratio, **figures)
        _measure_start(report, store, name, label)
        store.disk.close()


def _measure_start(report: Report, store: Store, name: str, label: str) -> None:
    """After a kill."""
    if not isinstance(store, RealStore):
        return
    copy = store.path.with_name(store.path.name + "-killed")
    shutil.copytree(store.path, copy)
    began = time.perf_counter()
    again = RealStore(copy)
    ms = (time.perf_counter() - began) * 1000
    report.add(f"start after a kill, batches of {name}, {label}", f"{ms:.0f} ms", ms=ms)
    again.disk.close()
    shutil.rmtree(copy)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
