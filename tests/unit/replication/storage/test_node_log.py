"""The real disk alone: its directory, its rules, what the collection keeps, and what a start makes of damage."""

import errno
import fcntl
import os
import queue
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from crc32c import crc32c

from chaos_tests.crash.planted import OTHER_BUGS
from smq.replication.ports import DataDamaged, Delete, Examined, Put, Table
from smq.replication.storage import disk as disk_module
from smq.replication.storage.collection import Collection
from smq.replication.storage.directory import LOCK_FILE, DirectoryInUse, DiskOpenError, FormatUnsupported
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.storage.format_version import FORMAT_KEY, FORMAT_VERSION
from smq.replication.storage.frames import PAGE_BYTES, _is_one_bit
from smq.replication.storage.index import DATA_FILE
from smq.replication.storage.node_log import LogDamaged, LogFile
from tests.unit.replication.storage.support import SmallFilesHarness, StoreHarness

T = Table.RAFT_LOG
WAIT_S = 30
VALUE = 5_000


def opened(path: Path) -> NodeLogDisk:
    return NodeLogDisk(path, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None)


def key(number: int) -> bytes:
    return b"%06d" % number


def batch(number: int, size: int = VALUE) -> Put:
    return Put(Table.BATCHES, key(number), random.Random(number).randbytes(size))


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def indexed(harness: StoreHarness) -> None:
    """Until the index has everything, and the collection has nothing to do."""
    disk = harness.disk
    disk.settle()
    until(lambda: not disk._pending_since and disk._overlay._taken is None and disk._collection._running is None)


def log_files(path: Path, suffix: str = ".log") -> list[Path]:
    return sorted((path / "log").glob("*" + suffix))


def change(file: Path, at: int, by: int = 0x55) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        old = f.read(1)[0]
        f.seek(at)
        f.write(bytes([old ^ by]))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StoreHarness]:
    made = StoreHarness(tmp_path / "node")
    yield made
    made.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[StoreHarness]:
    made = SmallFilesHarness(tmp_path / "node")
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------- the directory
def test_only_the_owner_can_access_the_directory_and_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "node-1"
    old_umask = os.umask(0)
    try:
        disk = opened(path)
    finally:
        os.umask(old_umask)
    modes = {str(file.relative_to(path)): stat.S_IMODE(file.stat().st_mode) for file in path.rglob("*")}
    disk.close()
    assert modes.pop("log") == stat.S_IMODE(path.stat().st_mode) == 0o700
    assert modes == dict.fromkeys([DATA_FILE, "lock.mdb", LOCK_FILE, "log/0000000001.log"], 0o600)


SECOND = """
import sys
from smq.replication.storage.directory import DirectoryInUse
from smq.replication.storage.disk import NodeLogDisk
try:
    NodeLogDisk(sys.argv[1], call_soon_threadsafe=print, on_fatal=print)
except DirectoryInUse as e:
    print(e)
"""


def test_a_second_process_is_refused_with_the_first_ones_id(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    second = subprocess.run(
        [sys.executable, "-c", SECOND, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"in use by process {os.getpid()}" in second.stdout
    with pytest.raises(DirectoryInUse, match=f"in use by process {os.getpid()}"):
        opened(tmp_path)
    disk.close()
    opened(tmp_path).close()


def test_a_directory_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    harness = StoreHarness(tmp_path / "node")
    assert harness.disk.get(Table.META, FORMAT_KEY) == FORMAT_VERSION.to_bytes(4, "big")
    harness.write(Put(Table.META, FORMAT_KEY, (99).to_bytes(4, "big")))
    harness.close()
    for _ in range(2):
        with pytest.raises(FormatUnsupported, match=r"on-disk format 99, .*the version that wrote it.*empty one"):
            opened(tmp_path / "node")


@pytest.mark.parametrize("name", ["data.wal", "data.sqlite3"])
def test_what_an_earlier_format_left_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"rounds")
    with pytest.raises(FormatUnsupported, match=f"{name}, of an earlier on-disk format.*move the directory away"):
        opened(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, LOCK_FILE])


def test_an_index_that_is_not_smqs_is_refused_and_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=2, lib_version=0) as env:
        env.open_db(b"theirs")
    before = (tmp_path / DATA_FILE).read_bytes()
    with pytest.raises(FormatUnsupported, match="not smq's"):
        opened(tmp_path)
    assert (tmp_path / DATA_FILE).read_bytes() == before


WRITER = """
import sys, queue
from smq.replication.storage.disk import NodeLogDisk
from smq.replication.ports import Put, Table
calls = queue.SimpleQueue()
disk = NodeLogDisk(sys.argv[1], call_soon_threadsafe=calls.put, on_fatal=print)
for i in range(10**9):
    disk.submit([Put(Table.RAFT_LOG, b"%09d" % i, bytes(500)), Put(Table.BATCHES, b"%09d" % i, bytes(300))],
                lambda i=i: print(i, flush=True))
    if i % 20 == 0:
        calls.get()()
"""


def test_after_kill_9_every_reported_submission_is_complete_and_in_order(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        reported = -1
        while reported < 5_000:
            reported = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout.read().splitlines():
            if line.isdigit():
                reported = max(reported, int(line))
    with (tmp_path / LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ended with the process
    disk = opened(tmp_path)
    keys = disk.scan_keys(T, b"0", b":")
    assert len(keys) > reported
    assert keys == [b"%09d" % i for i in range(len(keys))]
    assert disk.scan(Table.BATCHES, b"0", b":") == [(k, bytes(300)) for k in keys]
    disk.close()


def test_a_round_takes_no_more_than_its_cap_of_bytes(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "COMMIT_BYTES_MAX", 1000)
    for i in range(20):
        harness.disk.submit([Put(T, b"%02d" % i, bytes(600))])
    harness.settle()
    assert harness.posts == 20  # no two fit into one
    assert len(harness.disk.scan_keys(T, b"0", b"9")) == 20


def test_a_closed_loop_stops_the_threads_quietly(tmp_path: Path) -> None:
    def closed(fn: object) -> None:
        raise RuntimeError("Event loop is closed")

    disk = NodeLogDisk(tmp_path, call_soon_threadsafe=closed, on_fatal=lambda e: None)
    disk.submit([Put(T, b"k", b"v")])
    disk.close()
    disk = opened(tmp_path)
    assert disk.get(T, b"k") == b"v"
    disk.close()


def test_a_round_larger_than_a_file_gets_a_file_of_its_own(small: StoreHarness) -> None:
    puts = [batch(number, 70_000) for number in range(3)]
    small.write(*puts)
    assert small.crash().scan(Table.BATCHES, b"", b":") == [(put.key, put.value) for put in puts]


def test_a_round_that_comes_while_the_disk_is_closed_is_not_left_out_of_the_index(
    small: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer ends just after the keeper has seen nothing that is due: the index must not name that end."""
    disk, is_due = small.disk, NodeLogDisk._is_due

    def last_round_comes_then(asked: NodeLogDisk) -> bool:
        found = is_due(asked)
        if not asked._changed._is_owned() and not asked._is_closed:  # type: ignore[attr-defined]  # an RLock's, private
            monkeypatch.undo()
            disk._is_closed = True
            disk._queue.put([disk_module._Submission(1, [Put(T, b"k", b"last"), batch(1)], 4, None)])
            disk._queue.put(None)
            disk._writer.join(WAIT_S)
        return found

    monkeypatch.setattr(NodeLogDisk, "_is_due", last_round_comes_then)

    def has_ended() -> bool:
        with disk._changed:
            disk._changed.notify_all()
        return not disk._keeper.is_alive()

    until(has_ended)
    disk._is_closed = False
    small.close()
    small._open()
    assert small.disk.get(T, b"k") == b"last"
    assert small.disk.get(Table.BATCHES, key(1)) == batch(1).value


# --------------------------------------------------------------------------------------------- rule 4: damage
def crashed(path: Path, rounds: int = 8) -> tuple[StoreHarness, Path]:
    """Rounds that only the log has, each of two pages, and the file that they are in."""
    harness = StoreHarness(path)
    for number in range(rounds):
        harness.write(batch(number), Put(T, key(number), b"entry"))
    harness.disk._is_failed = True
    harness.close()
    (file,) = log_files(path)
    return harness, file


def place(number: int) -> int:
    """In the file, of a round."""
    return PAGE_BYTES + 2 * PAGE_BYTES * number


DAMAGES = {
    "head of a round": (place(3) + 40, 0x55),
    "generation of a sector, one bit": (place(3) + 510, 0x01),
    "head of the last round": (place(7) + 40, 0x55),
    "first page of the file": (8, 0x01),
}


@pytest.mark.parametrize("where", DAMAGES)
def test_rot_in_the_log_is_refused_by_name(tmp_path: Path, where: str) -> None:
    _, file = crashed(tmp_path / "node")
    change(file, *DAMAGES[where])
    with pytest.raises(LogDamaged, match=rf"{file} is damaged: .*Move the directory away"):
        opened(tmp_path / "node")


def lost_round_is_refused(path: Path) -> None:
    """All of it, as if it had never been written; later ones are there."""
    _, file = crashed(path)
    with file.open("r+b") as f:
        f.seek(place(3))
        f.write(bytes(2 * PAGE_BYTES))
    with pytest.raises(LogDamaged, match="round 4 is lost, but round"):
        opened(path).close()


def test_a_lost_round_before_others_is_refused(tmp_path: Path) -> None:
    lost_round_is_refused(tmp_path / "node")


@pytest.mark.parametrize("at", [0, 512, PAGE_BYTES + 100], ids=["head", "batch", "end of the batch"])
def test_a_torn_end_is_cut_and_what_is_written_then_survives_the_next_crash(tmp_path: Path, at: int) -> None:
    harness, file = crashed(tmp_path / "node")
    with file.open("r+b") as f:
        f.seek(place(7) + at // 512 * 512)
        f.write(bytes(512))
    harness._open()
    assert harness.disk.scan_keys(T, b"", b":") == [key(number) for number in range(7)]
    harness.write(batch(9), Put(T, key(9), b"after"))
    assert harness.crash().scan_keys(T, b"", b":") == [key(number) for number in (*range(7), 9)]
    assert harness.disk.get(Table.BATCHES, key(9)) == batch(9).value
    harness.close()


def test_a_flipped_bit_in_a_batch_of_the_last_round_costs_that_batch_alone(tmp_path: Path) -> None:
    harness, file = crashed(tmp_path / "node")
    change(file, place(7) + 512 + 1_000, 0x04)
    harness._open()
    assert harness.disk.scan_keys(T, b"", b":") == [key(number) for number in range(8)]
    wrong = [k for k, value in harness.disk.scan(Table.BATCHES, b"", b":") if value != batch(int(k)).value]
    assert wrong == [key(7)]
    harness.close()


def test_a_torn_round_is_cut_though_one_of_its_batches_differs_by_one_bit(tmp_path: Path) -> None:
    harness = StoreHarness(tmp_path / "node")
    puts = [batch(number, 1_024) for number in range(4)]
    harness.write(*puts[:2])
    harness.write(*puts[2:])
    harness.disk._is_failed = True
    harness.close()
    (file,) = log_files(harness.path)
    change(file, PAGE_BYTES * 2 + 512 + 1_000, 0x04)
    change(file, PAGE_BYTES * 2 + 512 + 1_500)
    harness._open()
    assert harness.disk.scan(Table.BATCHES, b"", b":") == [(put.key, put.value) for put in puts[:2]]
    harness.close()


@pytest.mark.parametrize("length", [1, 511, 512, 513, 100_000])
def test_one_bit_is_told_from_two_wherever_it_is(length: int) -> None:
    value = random.Random(length).randbytes(length)
    for at in (0, length // 2, length - 1):
        for mask, is_one in ((0x01, True), (0x80, True), (0x81, False)):
            changed = value[:at] + bytes((value[at] ^ mask,)) + value[at + 1 :]
            assert _is_one_bit(crc32c(changed) ^ crc32c(value), length) is is_one


def test_a_file_of_rounds_that_vanished_is_missed_by_name(tmp_path: Path) -> None:
    harness = SmallFilesHarness(tmp_path / "node")
    for number in range(30):
        harness.write(batch(number))
    harness.disk._is_failed = True
    harness.close()
    newest = log_files(harness.path)[-1]
    newest.unlink()
    with pytest.raises(LogDamaged, match=f"{newest} is damaged: it is missing"):
        harness._open()


# ------------------------------------------------------------------------------------- what the medium cannot give
def failing(monkeypatch: pytest.MonkeyPatch, file: Path, at: int) -> None:
    """A sector of that file cannot be read any more."""
    pread, inode = os.pread, file.stat().st_ino

    def fails(fd: int, size: int, start: int) -> bytes:
        if os.fstat(fd).st_ino == inode and start <= at < start + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, start)

    monkeypatch.setattr(os, "pread", fails)


def test_a_batch_that_the_medium_cannot_give_is_empty_and_its_neighbours_are_whole(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = [batch(number) for number in range(5)]
    harness.write(*puts)
    (file,) = log_files(harness.path)
    data = file.read_bytes()
    failing(monkeypatch, file, data.index(puts[2].value) + 100)
    expected = [(put.key, b"" if put is puts[2] else put.value) for put in puts]
    for _ in range(2):
        assert harness.disk.scan(Table.BATCHES, b"", b":") == expected
        indexed(harness)
    found: list[Examined] = []
    harness.disk.examine(Table.BATCHES, b"", b":", 1 << 30, lambda _key, value: bool(value), found.append)
    harness.wait(lambda: bool(found))
    assert (found[0].damaged, found[0].unreadable) == ([key(2)], [key(2)])
    harness.write(Delete(Table.BATCHES, key(2), key(3)), puts[2])  # as a repair does
    assert harness.disk.scan(Table.BATCHES, b"", b":") == [(put.key, put.value) for put in puts]


def test_a_deletion_reads_no_batch(small: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        small.write(batch(number))
    indexed(small)
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, at: int) -> bytes:
        reads.append(size)
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", counted)
    small.write(Delete(Table.BATCHES, b"", b":"))
    indexed(small)
    assert reads == []
    until(lambda: len(log_files(small.path)) <= 2)


def test_a_closed_disk_says_so_by_damage(tmp_path: Path) -> None:
    harness = StoreHarness(tmp_path / "node")
    harness.close()
    with pytest.raises(DataDamaged, match=DATA_FILE):
        harness.disk.get(T, b"k")


# ------------------------------------------------------------------------------------------- rule 8: the index
def with_unreadable_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start finds it, and makes it again from a log that has everything."""
    harness = StoreHarness(path)
    harness.write(batch(1), Put(T, b"k", b"v"))
    harness.close()
    real, file = Path.open, path / DATA_FILE

    def fails(opened_path: Path, *arguments: Any, **options: Any) -> Any:
        if opened_path == file:
            raise OSError(errno.EIO, "input/output error")
        return real(opened_path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        harness._open()
    assert (path / (DATA_FILE + ".damaged")).exists()
    assert "made again from the log" in harness.disk.remark
    assert harness.disk.get(T, b"k") == b"v"
    assert harness.disk.get(Table.BATCHES, key(1)) == batch(1).value
    harness.close()


def test_an_unreadable_index_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_unreadable_index(tmp_path / "node", monkeypatch)


@pytest.mark.parametrize("damage", ["gone", "cut", "no index", "place"])
def test_a_damaged_index_is_made_again_or_refused_as_the_log_allows(tmp_path: Path, damage: str) -> None:
    harness = SmallFilesHarness(tmp_path / "node")
    file = harness.path / DATA_FILE

    def spoil() -> None:
        if damage == "gone":
            file.unlink()
        elif damage == "cut":
            os.truncate(file, file.stat().st_size // 2 // PAGE_BYTES * PAGE_BYTES)
        elif damage == "no index":
            file.write_bytes(b"something else entirely" * 1000)
        else:
            with lmdb.open(str(harness.path), max_dbs=9, lib_version=0) as env:
                meta = env.open_db(b"meta")
                with env.begin(write=True, db=meta) as txn:
                    row = bytearray(txn.get(b"log_place") or b"")
                    row[9] ^= 1
                    txn.put(b"log_place", bytes(row))

    harness.write(*[Put(T, key(number), bytes(300)) for number in range(100)], batch(1))
    harness.close()
    spoil()
    harness._open()
    assert len(harness.disk.scan_keys(T, b"", b":")) == 100
    assert harness.disk.get(Table.BATCHES, key(1)) == batch(1).value
    for number in range(60):  # until the first file is used again
        harness.write(batch(number), Delete(Table.BATCHES, b"", key(max(number - 5, 0))))
    indexed(harness)
    until(lambda: not (harness.path / "log" / "0000000001.log").exists())
    harness.close()
    spoil()
    for _ in range(2):  # and the lock was given back
        with pytest.raises(DiskOpenError, match=r"data\.mdb.* no longer has everything.*Move the directory away"):
            harness._open()


# ----------------------------------------------------------------------------------------------- the collection
def test_what_lives_is_collected_sorted_and_what_is_dead_is_used_again(small: StoreHarness) -> None:
    kept = [number for number in range(200) if number % 5 == 0]
    for first in range(0, 200, 4):
        small.write(*[batch(number, 3_000) for number in range(first + 3, first - 1, -1)])
    for number in range(200):
        if number not in kept:
            small.disk.submit([Delete(Table.BATCHES, key(number), key(number) + b"\x00")])
    small.settle()
    indexed(small)
    until(lambda: len(log_files(small.path)) <= 2)
    assert small.disk.size_bytes() < 40 * 3_000 * 2 + (1 << 20)
    rows = [(key(number), batch(number, 3_000).value) for number in kept]
    assert small.disk.scan(Table.BATCHES, b"", b":") == rows
    assert log_files(small.path, ".sorted")
    assert len(log_files(small.path, ".spare")) == 1
    (newest, *_) = log_files(small.path, ".sorted")
    data = newest.read_bytes()
    places = [data.find(value) for _, value in rows if value in data]
    assert places == sorted(places)
    assert len(places) > 3
    assert small.crash().scan(Table.BATCHES, b"", b":") == rows
    assert sum(small.disk._index.live.values()) == len(kept) * 3_000


def test_files_that_were_made_ahead_do_not_add_up_by_starts(small: StoreHarness) -> None:
    while small.disk._log._next is None:
        small.write(Put(Table.META, b"k", bytes(5_000)))
    indexed(small)
    files = log_files(small.path)
    for _ in range(3):
        small.reopen()
        small.write(Put(Table.META, b"k", b""))
        until(lambda: small.disk._log._next is not None)
    assert len(log_files(small.path)) == len(files)


def test_a_spare_file_keeps_its_number_to_itself(small: StoreHarness) -> None:
    file_bytes = small.disk._log._file_bytes
    small.disk.close()
    (small.path / "log" / "0000000099.spare").write_bytes(bytes(file_bytes))
    small.reopen()
    assert small.disk._log._last_number >= 99


def idle(small: StoreHarness, kept: int, size: int) -> None:
    """Some batches live in files that the log has left, and nothing is dead any more."""
    puts = [batch(0, 0), *(batch(number, size) for number in range(1, kept))]
    small.write(*puts)
    for _ in range(6):
        small.write(Put(Table.META, b"filler", bytes(20_000)))
    indexed(small)
    until(lambda: not small.disk._collection._victims())
    assert small.disk.scan(Table.BATCHES, b"", b":") == [(put.key, put.value) for put in puts]


@pytest.mark.parametrize("is_short", [False, True], ids=["with space", "short of space"])
def test_the_collection_comes_to_an_end(small: StoreHarness, monkeypatch: pytest.MonkeyPatch, is_short: bool) -> None:
    """A copy of small batches is mostly heads and padding, and so would be its copy."""
    if is_short:
        monkeypatch.setattr(Collection, "is_short", property(lambda _: True, lambda _self, _found: None), raising=False)
    idle(small, 5 if not is_short else 300, 100)
    found = log_files(small.path, ".sorted")
    assert found
    assert small.crash()._collection._victims() == []


def test_what_fits_is_collected_though_a_file_that_is_more_dead_does_not_fit(
    small: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {1: 20_000, 2: 5_000}
    files = [
        LogFile(small.path / "log" / f"{number:010}.log", number, size) for number, size in ((1, 100_000), (2, 20_000))
    ]
    collection = small.disk._collection
    monkeypatch.setattr(small.disk._index, "live", live)
    monkeypatch.setattr(collection, "_closed", lambda: files)
    monkeypatch.setattr(collection, "_free_bytes", lambda: 12_000)
    assert [file.number for file in collection._victims()] == [2]


def test_a_batch_that_has_rotted_stays_where_it_is_and_is_not_made_whole_by_the_collection(small: StoreHarness) -> None:
    for number in range(24):
        small.write(batch(number))
    indexed(small)
    damaged = next(file for file in log_files(small.path) if batch(1).value in file.read_bytes())
    change(damaged, damaged.read_bytes().index(batch(1).value) + 9)
    for number in range(2, 20):
        small.write(Delete(Table.BATCHES, key(number), key(number) + b"\x00"))
    indexed(small)
    until(lambda: bool(log_files(small.path, ".sorted")) and not small.disk._collection.step())
    assert damaged.exists()
    found = dict(small.disk.scan(Table.BATCHES, b"", b":"))
    assert found.pop(key(1)) != batch(1).value
    assert found == {key(number): batch(number).value for number in (0, 20, 21, 22, 23)}
    small.write(Delete(Table.BATCHES, key(1), key(2)), batch(1))  # as a repair does
    indexed(small)
    until(lambda: not damaged.exists())


def reader_and_collection(small: StoreHarness) -> None:
    """Rule 6: a read that began before its file was dead gets the old bytes, though others have been used again."""
    for number in range(24):
        small.write(batch(number))
    indexed(small)
    disk = small.disk
    with disk._whole_moment() as moment:
        log_file = log_files(small.path)[0]
        small.write(Delete(Table.BATCHES, b"", b":"))
        indexed(small)
        for number in range(100, 160):
            small.write(batch(number), Delete(Table.BATCHES, key(100), key(number)))
        indexed(small)
        time.sleep(2 * disk_module.RETIRED_S)
        assert moment.scan(Table.BATCHES, b"", key(24)) == [(key(number), batch(number).value) for number in range(24)]
        assert log_file.exists()
    until(lambda: not log_file.exists())


def test_a_file_is_not_used_again_while_it_is_read(small: StoreHarness) -> None:
    reader_and_collection(small)


# --------------------------------------------------------------------------------------------- rule 7: a full disk
def without_space(harness: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be made any more: the one that is reserved takes the rounds that make room, and the collection waits
    for it without an error."""
    for number in range(16):
        harness.write(batch(number))
    current = harness.disk._log._current
    assert current is not None
    while harness.disk._log.end.at < current.size * 0.6:
        harness.write(batch(1))
    indexed(harness)

    def full(fd: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        harness.disk._log.give_back()
        for number in range(100, 107):
            harness.write(batch(number), Delete(Table.BATCHES, b"", key(90)))
        indexed(harness)
        assert harness.fatal == []
        assert harness.disk.scan_keys(Table.BATCHES, b"", b":") == [key(number) for number in range(100, 107)]


def test_a_full_disk_has_room_for_what_makes_room(small: StoreHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    without_space(small, monkeypatch)


def test_a_disk_that_others_have_filled_is_full_though_the_log_has_reserved_space(
    small: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(small.path)
    full = os.statvfs_result((*found[:4], 1, *found[5:]))
    assert small.disk._log.reserved_bytes > 2 * found.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert small.disk.space().free_bytes == 2 * found.f_frsize


def test_space_that_is_reserved_counts_as_free_and_what_comes_back_as_reusable(small: StoreHarness) -> None:
    disk = small.disk
    for number in range(40):
        small.write(batch(number))
    indexed(small)
    found = os.statvfs(small.path)
    assert disk.space().free_bytes == pytest.approx(
        found.f_bavail * found.f_frsize + disk._log.reserved_bytes, abs=64 << 20
    )
    assert disk._log.reserved_bytes > 0
    pin = disk._log.pins.enter()
    small.write(Delete(Table.BATCHES, b"", b":"))
    indexed(small)
    until(lambda: disk.space().reusable_bytes >= 30 * VALUE)
    disk._log.pins.leave(pin)
    until(lambda: disk.space().reusable_bytes == 0 or bool(log_files(small.path, ".spare")))


# ------------------------------------------------------------------------------------------------- planted bugs
@pytest.mark.parametrize("bug", OTHER_BUGS)
def test_a_planted_bug_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str, request: pytest.FixtureRequest
) -> None:
    checks: dict[str, Callable[[], None]] = {
        "4": lambda: lost_round_is_refused(tmp_path / "other"),
        "6": lambda: reader_and_collection(request.getfixturevalue("small")),
        "7": lambda: without_space(request.getfixturevalue("small"), monkeypatch),
        "8": lambda: with_unreadable_index(tmp_path / "other", monkeypatch),
    }
    with OTHER_BUGS[bug].planted(), pytest.raises((AssertionError, pytest.fail.Exception, queue.Empty)):
        checks[bug[0]]()
