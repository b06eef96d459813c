"""Pages that the medium cannot give: the batch is damaged, and the process goes on.

LMDB's map would answer such a page with SIGBUS. A file that ends too early does the same as a failing medium, so the
test with a real fault takes one, in a process of its own.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smq.replication.ports import DataDamaged, Delete, Examined, Put, Table
from smq.replication.storage import pages_lmdb
from smq.replication.storage.environment_lmdb import DATA_FILE, walk
from tests.unit.replication.storage.support import LmdbHarness

PAGE = os.sysconf("SC_PAGE_SIZE")
VALUES = {b"%d" % i: bytes([65 + i]) * 20_000 for i in range(8)}


def written(path: Path) -> LmdbHarness:
    harness = LmdbHarness(path)
    for key, value in VALUES.items():
        harness.disk.submit([Put(Table.BATCHES, key, value)])
        harness.settle_in_store()
    return harness


def read_later(harness: LmdbHarness, key: bytes) -> list[tuple[bytes, bytes]] | DataDamaged:
    answers: list[list[tuple[bytes, bytes]] | DataDamaged] = []
    assert harness.disk.read_from(Table.BATCHES, b"", key, key + b"\x00", place=b"", bytes_max=1, done=answers.append)
    harness.wait(lambda: bool(answers))
    return answers[0]


class FailingMedium:
    """`os.pread` fails for some pages until they are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad: set[int] = set()
        self._pread, self._pwrite = os.pread, os.pwrite
        monkeypatch.setattr(os, "pread", self.pread)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(pages_lmdb, "_NOWAIT", None)  # what cannot be read is not in memory either

    def pread(self, fd: int, size: int, at: int) -> bytes:
        if self.bad.intersection(range(at // PAGE, (at + size - 1) // PAGE + 1)):
            raise OSError(5, "Input/output error")
        return self._pread(fd, size, at)

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        self.bad.discard(at // PAGE)
        return self._pwrite(fd, data, at)


def page_of(harness: LmdbHarness, value: bytes) -> int:
    """The first page of a stored value."""
    at = (harness.path / DATA_FILE).read_bytes().index(value)
    assert at % PAGE == 16, "it has pages of its own, and the first begins with a header"
    return at // PAGE


@pytest.mark.parametrize("which", [(0,), (2,), (0, 1, 2, 3, 4)])
def test_a_value_on_unreadable_pages_is_read_as_empty_and_can_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: tuple[int, ...]
) -> None:
    harness = written(tmp_path / "node")
    medium = FailingMedium(monkeypatch)
    medium.bad = {page_of(harness, VALUES[b"3"]) + i for i in which}
    assert read_later(harness, b"3") == [(b"3", b"")]
    assert medium.bad, "nothing is overwritten before there is something to put in its place"
    assert read_later(harness, b"4") == [(b"4", VALUES[b"4"])]
    harness.write(Delete(Table.BATCHES, b"3", b"4"), Put(Table.BATCHES, b"3", b"new" * 9_000))
    assert read_later(harness, b"3") == [(b"3", b"new" * 9_000)]
    for i in range(50):  # the pages are used again
        harness.disk.submit([Put(Table.BATCHES, b"%d" % (i % 8), bytes([i]) * 20_000)])
        harness.settle_in_store()
    assert [value[0] for _, value in harness.disk.scan(Table.BATCHES, b"", b"z")] == [48, 49, *range(42, 48)]
    harness.close()
    walk(str(harness.path))


def test_an_error_of_the_medium_that_passes_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = written(tmp_path / "node")
    medium = FailingMedium(monkeypatch)
    medium.bad = {page_of(harness, VALUES[b"3"])}
    assert read_later(harness, b"3") == [(b"3", b"")]
    medium.bad.clear()
    assert read_later(harness, b"3") == [(b"3", VALUES[b"3"])]
    harness.disk.submit([Put(Table.BATCHES, b"4", b"other")])
    harness.settle_in_store()
    assert read_later(harness, b"3") == [(b"3", VALUES[b"3"])]
    harness.close()


def test_a_start_overwrites_unreadable_pages_before_it_brings_a_row_to_lmdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that met them was killed while the new row was in the write-ahead file alone."""
    harness = LmdbHarness(tmp_path / "node")
    harness.disk.submit([Put(Table.RAFT_META, b"k", VALUES[b"3"])])
    harness.settle_in_store()
    harness.write(Put(Table.RAFT_META, b"k", b"new"))
    shutil.copytree(harness.path, tmp_path / "killed")
    medium = FailingMedium(monkeypatch)
    medium.bad = {page_of(harness, VALUES[b"3"])}
    started = LmdbHarness(tmp_path / "killed")
    assert (medium.bad, started.disk.get(Table.RAFT_META, b"k")) == (set(), b"new")
    started.close()
    harness.close()


def test_a_row_written_since_its_pages_were_unreadable_keeps_its_new_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of it may come late, from a read of an older transaction."""
    harness = written(tmp_path / "node")
    harness.disk.submit([Put(Table.BATCHES, b"3", b"new" * 9_000)])
    harness.settle_in_store()
    harness.disk._pages.unreadable[Table.BATCHES.value.encode(), b"3"] = None
    wrote: list[int] = []
    monkeypatch.setattr(os, "pwrite", lambda *_: wrote.append(1))
    harness.write(Delete(Table.BATCHES, b"x", b"x"), Put(Table.BATCHES, b"3", b"newer" * 9_000))
    assert (wrote, read_later(harness, b"3")) == ([], [(b"3", b"newer" * 9_000)])
    harness.close()


def test_a_slice_that_is_examined_reports_an_unreadable_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = written(tmp_path / "node")
    FailingMedium(monkeypatch).bad = {page_of(harness, VALUES[b"5"])}
    slices: list[Examined] = []
    harness.disk.examine(Table.BATCHES, b"", b"z", 1 << 30, lambda _key, value: bool(value), slices.append)
    harness.wait(lambda: bool(slices))
    assert (slices[0].damaged, slices[0].unreadable, harness.fatal) == ([b"5"], [b"5"], [])
    harness.close()


def test_an_unreadable_page_of_the_tree_is_damage_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = written(tmp_path / "node")
    FailingMedium(monkeypatch).bad = set(range(2, 10_000))
    assert isinstance(read_later(harness, b"3"), DataDamaged)
    with pytest.raises(DataDamaged, match="cannot be walked"):
        harness.disk.get(Table.BATCHES, b"3")
    harness.close()


SCRIPT = """
import os, sys
from pathlib import Path
from tests.unit.replication.storage.test_unreadable_pages import DATA_FILE, PAGE, VALUES, page_of, read_later, written
from smq.replication.ports import Delete, Put, Table
harness = written(Path(sys.argv[1]))
last = max(VALUES, key=lambda key: page_of(harness, VALUES[key]))
os.truncate(harness.path / DATA_FILE, (page_of(harness, VALUES[last]) + int(sys.argv[2])) * PAGE)
assert read_later(harness, last) == [(last, b"")]
harness.disk.submit([Delete(Table.BATCHES, last, last + b"x"), Put(Table.BATCHES, last, b"new")])
harness.settle()
assert read_later(harness, last) == [(last, b"new")]
print("went on")
"""


@pytest.mark.parametrize("readable", ["0", "2"])
def test_a_process_survives_pages_that_its_map_cannot_give(tmp_path: Path, readable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "node"), readable], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


RAFT_ROW = """
import os, sys
from functools import partial
from pathlib import Path
from tests.unit.replication.storage.support import LmdbHarness
from tests.unit.replication.storage.test_unreadable_pages import DATA_FILE, PAGE, VALUES, page_of
from smq.replication.ports import Put, Table
from smq.replication.maintenance.scrub import found_again
harness = LmdbHarness(Path(sys.argv[1]))
for key, value in VALUES.items():
    harness.disk.submit([Put(Table.RAFT_META, key, value)])
    harness.settle_in_store()
last = max(VALUES, key=lambda key: page_of(harness, VALUES[key]))
os.truncate(harness.path / DATA_FILE, (page_of(harness, VALUES[last]) + 1) * PAGE)
found = []
harness.disk.look_up(b"", partial(found_again, Table.RAFT_META, [last]), found.append)
harness.wait(lambda: bool(found))
assert found == [[last]], found
print("went on")
"""


def test_the_scrubber_reads_an_unreadable_row_of_raft_again_and_the_process_goes_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RAFT_ROW, str(tmp_path / "node")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n"), ended.stderr
