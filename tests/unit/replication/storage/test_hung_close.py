"""A disk that hangs while it is closed: the wait is bounded by its progress, and then the process ends."""

import os
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
from smq.replication.storage.hang import DiskHung
from smq.replication.storage.index import Index
from smq.replication.storage.node_log import NodeLog
from tests.unit.replication.storage.support import StoreHarness

WAIT_S = 0.2


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CLOSE_S_MAX", WAIT_S)
    monkeypatch.setattr(disk, "PENDING_S_MAX", 1e9)  # the index gets the rounds when the disk is closed


# A round of the log, and the index's last transaction but one, which takes all rounds
PLACES: list[tuple[type, str]] = [(NodeLog, "append"), (Index, "apply")]


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_a_write_that_never_ends_is_fatal_to_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    go_on, write = threading.Event(), getattr(owner, name)

    def hang(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return write(*arguments)

    harness = StoreHarness(tmp_path / "node")
    monkeypatch.setattr(owner, name, hang)
    harness.disk.submit([Put(Table.META, b"k", b"v")])
    harness.close()
    (error,) = harness.fatal
    assert isinstance(error, DiskHung)
    assert "has not answered" in str(error)
    go_on.set()
    harness.disk._writer.join(60)  # what they use is still open
    harness.disk._keeper.join(60)
    assert (harness.disk.get(Table.META, b"k"), len(harness.fatal)) == (b"v", 1)


def test_a_read_that_never_ends_is_fatal_to_the_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = StoreHarness(tmp_path / "node")
    harness.write(Put(Table.BATCHES, b"3", bytes(5_000)))
    go_on, has_begun, pread = threading.Event(), threading.Event(), os.pread

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


def test_a_disk_that_is_merely_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write shows that the disk goes on, to the log as to the index: no time here, so no slow machine decides what
    this test shows."""
    harness = StoreHarness(tmp_path / "node")
    turns, waits = threading.Semaphore(0), 0

    def in_turn(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_in_turn(*arguments: Any) -> Any:
            assert turns.acquire(timeout=60)
            return write(*arguments)

        return write_in_turn

    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, in_turn(getattr(owner, name)))
    monkeypatch.setattr(disk, "COMMIT_BYTES_MAX", 1)  # each submission is a round of its own
    threads = harness.disk._writer, harness.disk._keeper

    def wait_for_one_write(timeout_s: float) -> None:
        """A wait that is over after one write of several."""
        nonlocal waits
        assert timeout_s == WAIT_S
        writes, waits = harness.disk._writes, waits + 1
        turns.release()
        while any(thread.is_alive() for thread in threads) and harness.disk._writes == writes:
            time.sleep(0.001)

    for thread in threads:
        monkeypatch.setattr(thread, "join", wait_for_one_write)
    for number in range(6):
        harness.disk.submit([Put(Table.META, b"%d" % number, b"slow")])
    harness.close()
    assert harness.fatal == []
    assert waits >= 7  # the last is the index's
    monkeypatch.undo()
    again = StoreHarness(tmp_path / "node")
    assert again.disk.get(Table.META, b"5") == b"slow"
    again.close()


SCRIPT = """
import sys, threading
from smq.coordinator.server.composition import die
from smq.replication.ports import Put, Table
from smq.replication.storage import disk
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.node_log import NodeLog
disk.CLOSE_S_MAX = 0.2
opened = NodeLogDisk(sys.argv[1], call_soon_threadsafe=lambda fn: None, on_fatal=die)
NodeLog.append = lambda log, made: threading.Event().wait()
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
