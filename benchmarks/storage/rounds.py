"""One node's disk alone: the time and the bytes of a round, with the write-ahead file and straight to LMDB.

Owns these figures, for a round as one record causes it and for one with a batch of 16 KB; the longest a round waits
because the write-ahead file is full; and the time of a start that replays it. Both ways alternate, so that what else
the machine does hits both. Bytes are those that this process hands to the block layer. Needs no cluster.
"""

import queue
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.report import Report, percentile
from smq.replication.ports import Delete, Op, Put, Table
from smq.replication.storage.disk_lmdb import LmdbDisk

SIZES: Final = {"100 B": 250, "16 KB": 16_300}  # of the stored batch
TURN: Final = 20  # rounds of one way before the other has its turn
NOTHING: Final = Delete(Table.META, b"x", b"x")  # a round that deletes goes straight to LMDB


class _Disk:
    def __init__(self, path: Path, *, is_direct: bool) -> None:
        self.path = path
        self._is_direct = is_direct
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.disk = LmdbDisk(path, call_soon_threadsafe=self._calls.put, on_fatal=fail)
        self._count = 0
        self.taken: list[float] = []
        self.written = 0

    def round(self, size: int) -> None:
        self._count += 1
        ops = round_ops(self._count, size)
        began = time.perf_counter()
        self.disk.submit([NOTHING, *ops] if self._is_direct else ops)
        while self.disk.durable_seq < self.disk.submitted_seq:
            self._calls.get()()
        self.taken.append((time.perf_counter() - began) * 1000)

    def turn(self, size: int, rounds: int) -> None:
        before = written_bytes()
        for _ in range(rounds):
            self.round(size)
        self.written += written_bytes() - before


def round_ops(number: int, size: int) -> list[Op]:
    """What one batch writes on a node, with Raft's entry."""
    pid, base = b"p" * 20, number.to_bytes(8, "big")
    return [
        Put(Table.BATCHES, pid + base, bytes(size)),
        Put(Table.TIMES, pid + b"\x00" + base * 2, bytes(42)),
        Put(Table.TIMES, pid + b"\x01" + base * 2, b""),
        Put(Table.RAFT_LOG, base, bytes(90)),
        Put(Table.RAFT_META, b"journal", bytes(29)),
    ]


def fail(error: BaseException) -> None:
    raise error


def written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def measure(report: Report, *, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            _measure_size(report, Path(folder) / name.replace(" ", "-"), name, size, rounds)


def _measure_size(report: Report, folder: Path, name: str, size: int, rounds: int) -> None:
    ways = {way: _Disk(folder / way, is_direct=way == "LMDB") for way in ("write-ahead", "LMDB")}
    for _ in range(rounds // TURN):
        for way in ways.values():
            way.turn(size, TURN)
    for label, way in ways.items():
        p50, p99, longest = percentile(way.taken, 50), percentile(way.taken, 99), max(way.taken)
        kb = way.written / len(way.taken) / 1024
        text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {longest:.1f} ms, {kb:.1f} KB"
        report.add(f"round of {name}, {label}", text, p50_ms=p50, p99_ms=p99, longest_ms=longest, kb=kb)
    copy = folder / "killed"
    shutil.copytree(ways["write-ahead"].path, copy)
    began = time.perf_counter()
    again = LmdbDisk(copy, call_soon_threadsafe=lambda fn: None, on_fatal=fail)
    taken = (time.perf_counter() - began) * 1000
    report.add(f"start after a kill, rounds of {name}", f"{taken:.0f} ms", ms=taken)
    for disk in (again, *(way.disk for way in ways.values())):
        disk.close()
