"""A disk that hangs while it is closed: the wait is bounded by its progress, and then the process ends."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smq.coordinator.user_errors import EXIT_FATAL
from smq.replication.ports import Put, Table
from smq.replication.storage import disk
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.hang import DiskHung
from smq.replication.storage.write_ahead import ROUND_BYTES_MAX, WriteAhead
from tests.unit.replication.storage.support import LmdbHarness
from tests.unit.replication.storage.test_unreadable_pages import FailingMedium, written

WAIT_S = 0.2


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CLOSE_S_MAX", WAIT_S)


# A round in the write-ahead file, and LMDB's last commit, which takes all rounds over
PLACES = [(WriteAhead, "append"), (LmdbDisk, "_write")]


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_a_write_that_never_ends_is_fatal_to_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    go_on, write = threading.Event(), getattr(owner, name)

    def hang(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return write(*arguments)

    harness = LmdbHarness(tmp_path / "node")
    monkeypatch.setattr(owner, name, hang)
    harness.disk.submit([Put(Table.META, b"k", b"v")])
    harness.close()
    (error,) = harness.fatal
    assert isinstance(error, DiskHung)
    assert "has not answered" in str(error)
    go_on.set()
    harness.disk._writer.join(60)  # what it uses is still open
    assert (harness.disk.get(Table.META, b"k"), len(harness.fatal)) == (b"v", 1)


def test_a_read_that_never_ends_is_fatal_to_the_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = written(tmp_path / "node")
    go_on, has_begun, medium = threading.Event(), threading.Event(), FailingMedium(monkeypatch)
    pread = medium.pread

    def hang(fd: int, size: int, at: int) -> bytes:
        has_begun.set()
        assert go_on.wait(60)
        return pread(fd, size, at)

    monkeypatch.setattr("os.pread", hang)
    assert (
        harness.disk.read_from(Table.BATCHES, b"", b"3", b"4", place=b"", bytes_max=1, done=lambda _rows: None)
        is not None
    )
    assert has_begun.wait(60)
    harness.close()
    assert [type(error) for error in harness.fatal] == [DiskHung]
    go_on.set()
    assert harness.disk._readers.close(60)


@pytest.mark.parametrize("size", [5, ROUND_BYTES_MAX + 1])
def test_a_disk_that_is_merely_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each write shows that the disk goes on, to the write-ahead file as to LMDB's: no time here, so no slow machine
    decides what this test shows."""
    harness = LmdbHarness(tmp_path / "node")
    turns, waits = threading.Semaphore(0), 0

    def in_turn(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_in_turn(*arguments: Any) -> Any:
            assert turns.acquire(timeout=60)
            return write(*arguments)

        return write_in_turn

    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, in_turn(getattr(owner, name)))
    monkeypatch.setattr(disk, "COMMIT_BYTES_MAX", 1)  # each submission is a round of its own
    writer = harness.disk._writer

    def wait_for_one_write(timeout_s: float) -> None:
        """A wait that is over after one write of several."""
        nonlocal waits
        assert timeout_s == WAIT_S
        writes, waits = harness.disk._writes, waits + 1
        turns.release()
        while writer.is_alive() and harness.disk._writes == writes:
            time.sleep(0.001)

    monkeypatch.setattr(writer, "join", wait_for_one_write)
    for number in range(6):
        harness.disk.submit([Put(Table.META, b"%d" % number, bytes(size))])
    harness.close()
    assert (harness.fatal, waits) == ([], 7)  # the last is LMDB's, which ends the thread
    monkeypatch.undo()
    again = LmdbHarness(tmp_path / "node")
    assert again.disk.get(Table.META, b"5") == bytes(size)
    again.close()


SCRIPT = """
import sys, threading
from smq.coordinator.server.composition import die
from smq.replication.ports import Put, Table
from smq.replication.storage import disk
from smq.replication.storage.disk_lmdb import LmdbDisk
disk.CLOSE_S_MAX = 0.2
opened = LmdbDisk(sys.argv[1], call_soon_threadsafe=lambda fn: None, on_fatal=die)
LmdbDisk._write = lambda disk, group, active: threading.Event().wait()
opened.submit([Put(Table.META, b"k", b"v")])
opened.close()
print("closed")
"""


def test_the_process_ends_as_after_a_failed_commit_and_says_why(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "node")], capture_output=True, text=True, timeout=60, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_FATAL, said
    assert "has not answered" in said
    assert "Traceback" not in said
    assert "closed\n" not in said
