"""What a durable round costs the real disk, counted: system calls that write, flushes, and bytes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from smq.replication.storage.write_ahead import PAGE_BYTES, ROUND_BYTES_MAX
from tests.skips import needs

SMALL, LARGE = 200, ROUND_BYTES_MAX + 10_000
ROUNDS = 100
BEGINNING = "from here on rounds are counted"
COUNT = f"""
import os, sys
from smq.replication.ports import Put, Table
from tests.unit.replication.storage.support import LmdbHarness
from pathlib import Path

def counts():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(fields[name]) for name in ("syscw", "wchar", "write_bytes")]

def commit(i):
    rows = [Put(Table.BATCHES, b"b%d" % i, bytes(int(sys.argv[2]))), Put(Table.TIMES, b"t%d" % i, bytes(40))]
    harness.write(*rows, Put(Table.RAFT_LOG, b"l%d" % i, bytes(90)), Put(Table.RAFT_META, b"m", bytes(29)))

harness = LmdbHarness(Path(sys.argv[1]))
for i in range(10):
    commit(i)
os.write(2, b"{BEGINNING}")
before = counts()
for i in range({ROUNDS}):
    commit(10 + i)
print(*(after - first for after, first in zip(counts(), before)))
assert harness.posts == 10 + {ROUNDS}
"""


def counted(path: Path, batch_bytes: int, *tool: str) -> list[float]:
    """Per round, each of which has one batch: calls, bytes that they were given, and bytes that reach the disk."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the kernel counts no writes per process")
    command = [*tool, sys.executable, "-c", COUNT, str(path / "node"), str(batch_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(figure) / ROUNDS for figure in done.stdout.split()]


def test_a_small_round_costs_one_write_of_one_page(tmp_path: Path) -> None:
    """A write to this file waits for the disk by itself. LMDB alone needs some ten calls, two flushes and 40 KB."""
    calls, _, size = counted(tmp_path, SMALL)
    assert calls <= 1.2
    assert size <= 1.2 * PAGE_BYTES


def test_a_large_round_costs_a_few_writes(tmp_path: Path) -> None:
    """Of LMDB: the batch, the pages of four tables, and the root, which waits for the disk by itself."""
    calls, size, _ = counted(tmp_path, LARGE)
    assert calls <= 6
    assert size <= 2 * LARGE


@needs("strace")
@pytest.mark.parametrize(("batch_bytes", "flushes"), [(SMALL, 0), (LARGE, 1)])
def test_flushes_of_a_round(tmp_path: Path, batch_bytes: int, flushes: int) -> None:
    """Beside the writes that wait for the disk by themselves."""
    log = tmp_path / "strace.log"
    calls = "trace=write,fsync,fdatasync,sync_file_range,msync"
    counted(tmp_path, batch_bytes, "strace", "-f", "-o", str(log), "-e", calls, "-s", "100")
    _, counted_part = log.read_text().split(BEGINNING)
    assert len(re.findall(r"(?:sync|sync_file_range)\(", counted_part)) == flushes * ROUNDS
