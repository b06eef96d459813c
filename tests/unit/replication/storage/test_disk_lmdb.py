"""Features of the real disk alone: a directory, its lock, its format version, a growing map, a dying process."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from smq.replication.ports import DataDamaged, Delete, Put, Table
from smq.replication.storage import disk, disk_lmdb
from smq.replication.storage.directory import LOCK_FILE, DiskOpenError
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.environment_lmdb import DATA_FILE, LMDB_MAJOR
from tests.unit.replication.storage.support import LmdbHarness

T = Table.RAFT_LOG


def open_disk(path: Path) -> LmdbDisk:
    return LmdbDisk(path, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None)


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """test_crash_images.py covers power losses of a recorded trace only; a fresh trace needs strace."""
    disk = open_disk(tmp_path)
    flags = disk._env.flags()
    disk.close()
    found = {name: flags[name] for name in ("sync", "metasync", "writemap", "map_async")}
    assert found == {"sync": True, "metasync": True, "writemap": False, "map_async": False}


def test_a_full_map_grows_and_nothing_is_lost(tmp_path: Path) -> None:
    harness = LmdbHarness(tmp_path / "node", map_size=1 << 20)
    for i in range(64):
        harness.disk.submit([Put(T, b"%03d" % i, bytes(100_000)), Delete(T, b"x", b"z")])
        harness.disk.get(T, b"000")
    harness.settle()
    assert harness.fatal == []
    assert len(harness.disk.scan_keys(T, b"0", b"9")) == 64
    assert len(harness.reopen().scan(T, b"0", b"9")) == 64
    harness.close()


def test_a_map_that_cannot_grow_further_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_lmdb, "MAP_BYTES_MAX", 2 << 20)
    harness = LmdbHarness(tmp_path / "node", map_size=1 << 20)
    harness.write(Put(T, b"k", bytes(4 << 20)))
    assert [type(e) for e in harness.fatal] == [lmdb.MapFullError]
    harness.close()


def test_a_transaction_takes_no_more_than_its_cap_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "COMMIT_BYTES_MAX", 1000)
    harness = LmdbHarness(tmp_path / "node")
    for i in range(20):
        harness.disk.submit([Put(T, b"%02d" % i, bytes(600))])
    harness.settle()
    assert harness.posts == 20  # no two fit into one
    assert len(harness.disk.scan_keys(T, b"0", b"9")) == 20
    harness.close()


def test_every_callback_is_posted_to_the_loop(tmp_path: Path) -> None:
    harness = LmdbHarness(tmp_path / "node")
    threads: list[threading.Thread] = []
    harness.disk.submit([Put(T, b"k", b"v")], lambda: threads.append(threading.current_thread()))
    harness.settle()
    assert threads == [threading.current_thread()]
    harness.close()


def test_a_closed_loop_stops_the_writer_quietly(tmp_path: Path) -> None:
    def closed(fn: object) -> None:
        raise RuntimeError("Event loop is closed")

    disk = LmdbDisk(tmp_path, call_soon_threadsafe=closed, on_fatal=lambda e: None)
    disk.submit([Put(T, b"k", b"v")])
    disk.close()
    disk = open_disk(tmp_path)
    assert disk.get(T, b"k") == b"v"
    disk.close()


def test_an_unreadable_store_is_damage(tmp_path: Path) -> None:
    harness = LmdbHarness(tmp_path / "node")
    harness.close()
    for read in (lambda: harness.disk.get(T, b"k"), lambda: harness.disk.scan(T, b"a", b"b")):
        with pytest.raises(DataDamaged, match="raft_log"):
            read()


WRITER = """
import sys, queue
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.ports import Put, Table
calls = queue.SimpleQueue()
disk = LmdbDisk(sys.argv[1], call_soon_threadsafe=calls.put, on_fatal=print)
for i in range(10**9):
    disk.submit([Put(Table.RAFT_LOG, b"%09d" % i, bytes(500)), Put(Table.TIMES, b"%09d" % i, b"x")],
                lambda i=i: print(i, flush=True))
    if i % 20 == 0:
        calls.get()()
"""


def test_after_kill_9_every_reported_submission_is_complete_and_in_order(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        reported = -1
        while reported < 200:
            reported = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout.read().splitlines():
            if line.isdigit():
                reported = max(reported, int(line))
    with (tmp_path / LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ended with the process
    disk = open_disk(tmp_path)
    keys = disk.scan_keys(T, b"0", b":")
    assert len(keys) > reported
    assert keys == [b"%09d" % i for i in range(len(keys))]
    assert disk.scan_keys(Table.TIMES, b"0", b":") == keys
    disk.close()


def test_a_data_file_whose_missing_end_is_unused_is_accepted(tmp_path: Path) -> None:
    """LMDB need not write pages that a transaction took and gave back, so a short file by itself proves no damage."""
    open_disk(tmp_path).close()
    file = tmp_path / DATA_FILE
    with lmdb.open(str(tmp_path), max_dbs=8, lib_version=LMDB_MAJOR) as env:
        db = env.open_db(T.value.encode())
        with env.begin(write=True, db=db) as txn:
            txn.put(b"gone", b"x" * (1 << 20))
        with env.begin(write=True, db=db) as txn:
            txn.delete(b"gone")
        for i in range(20):  # until all live data has moved to the freed pages
            with env.begin(write=True, db=db) as txn:
                txn.put(b"kept", b"%d" % i)
    size = file.stat().st_size
    os.truncate(file, size - (1 << 19))
    disk = open_disk(tmp_path)
    assert disk.get(T, b"kept") == b"19"
    disk.close()
    assert file.stat().st_size == size


def test_a_header_with_more_pages_than_a_file_can_hold_is_refused(tmp_path: Path) -> None:
    harness = LmdbHarness(tmp_path)
    harness.write(Put(T, b"k", b"v"))
    harness.close()
    file = tmp_path / DATA_FILE
    content = bytearray(file.read_bytes())
    for meta in (0, 4096):  # the last page's number, after the roots of both trees
        content[meta + 16 + 24 + 2 * 48 : meta + 16 + 24 + 2 * 48 + 8] = (1 << 58).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(DiskOpenError, match="empty one"):
        open_disk(tmp_path)
