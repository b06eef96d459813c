"""What a durable round costs the real disk, counted: system calls that write, flushes, and bytes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from smq.replication.storage.frames import PAGE_BYTES
from tests.skips import needs

SMALL, LARGE = 200, 50_000
ROUNDS = 100
BEGINNING = "from here on rounds are counted"
COUNT = f"""
import os, sys
from smq.replication.ports import Put, Table
from smq.replication.storage import disk
from tests.unit.replication.storage.support import StoreHarness
from pathlib import Path
disk.PENDING_S_MAX = 1e9  # the index's part is counted elsewhere

def counts():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(fields[name]) for name in ("syscw", "wchar", "write_bytes")]

def commit(i):
    rows = [Put(Table.BATCHES, b"b%d" % i, bytes(int(sys.argv[2]))), Put(Table.TIMES, b"t%d" % i, bytes(40))]
    harness.write(*rows, Put(Table.RAFT_LOG, b"l%d" % i, bytes(90)), Put(Table.RAFT_META, b"m", bytes(29)))

harness = StoreHarness(Path(sys.argv[1]))
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


@pytest.mark.parametrize(("batch_bytes", "pages"), [(SMALL, 2), (LARGE, 13)])
def test_a_round_costs_one_write_of_the_pages_that_it_needs(tmp_path: Path, batch_bytes: int, pages: int) -> None:
    """And a small one the zeros ahead of it, as the file is new. LMDB alone needs ten calls, two flushes and 40 KB."""
    calls, size, written = counted(tmp_path, batch_bytes)
    assert calls <= 1.2
    assert size <= 1.2 * pages * PAGE_BYTES
    if batch_bytes == LARGE:  # of a page that was read or written with others, the kernel counts the others, too
        assert written <= 1.2 * pages * PAGE_BYTES


@needs("strace")
@pytest.mark.parametrize("batch_bytes", [SMALL, LARGE])
def test_a_round_costs_no_flush_but_its_write(tmp_path: Path, batch_bytes: int) -> None:
    log = tmp_path / "strace.log"
    calls = "trace=write,fsync,fdatasync,sync_file_range,msync"
    counted(tmp_path, batch_bytes, "strace", "-f", "-o", str(log), "-e", calls, "-s", "100")
    _, counted_part = log.read_text().split(BEGINNING)
    assert len(re.findall(r"(?:sync|sync_file_range)\(", counted_part)) == 0
