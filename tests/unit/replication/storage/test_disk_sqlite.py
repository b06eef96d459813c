"""Features of the SQLite store alone: its settings, its own journal, damage in its files."""

import os
import random
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.raft_state.ids import NodeId
from smq.replication.node_config import NodeConfig
from smq.replication.ports import DataDamaged, Delete, Put, Rows, Table
from smq.replication.storage import database_sqlite, disk_sqlite
from smq.replication.storage.database_sqlite import DATA_FILE, JOURNAL_FILE, PAGE_BYTES
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.disk import READERS
from smq.replication.storage.disk_sqlite import RESTART_MS, SqliteDisk
from smq.replication.storage.journal_sqlite import JournalDamaged, cut_journal, whole_journal
from tests.skips import needs
from tests.unit.replication.storage.support import SqliteHarness

T = Table.RAFT_LOG
LARGE = 60_000  # a round with such a value goes to the store directly
FRAME_BYTES = 24 + PAGE_BYTES


def open_disk(path: Path) -> SqliteDisk:
    return SqliteDisk(path, call_soon_threadsafe=lambda fn: None, on_fatal=lambda e: None)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SqliteHarness]:
    made = SqliteHarness(tmp_path / "node")
    yield made
    made.close()


def rounds(harness: SqliteHarness, *keys: bytes, size: int = LARGE) -> None:
    for key in keys:
        harness.write(Put(T, key, key * (size // len(key))))


def killed(harness: SqliteHarness, name: str = "killed") -> Path:
    """The directory as kill -9 would leave it."""
    copy = harness.path.with_name(name)
    shutil.copytree(harness.path, copy)
    return copy


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        old = f.read(1)[0]
        f.seek(at)
        f.write(bytes([old ^ 1]))


def test_every_commit_waits_for_the_disk(harness: SqliteHarness) -> None:
    """test_crash_images.py covers power losses of a recorded trace only; a fresh trace needs strace."""
    run = harness.disk._connection.execute
    found = {name: run(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode", "mmap_size")}
    assert found == {"synchronous": 2, "journal_mode": "wal", "mmap_size": 0}


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_a_key_that_another_store_could_not_have_is_fatal(harness: SqliteHarness, key: bytes) -> None:
    harness.write(Put(T, key, bytes(LARGE)))
    assert [type(e) for e in harness.fatal] == [sqlite3.IntegrityError]


# -------------------------------------------------------------------------------------------- its own journal
def test_a_rotten_commit_of_the_journal_is_not_passed_over(harness: SqliteHarness) -> None:
    """SQLite would take the first wrong frame for the end."""
    rounds(harness, b"a", b"b", b"c")
    copy = killed(harness)
    frames = (copy / JOURNAL_FILE).stat().st_size // FRAME_BYTES
    flip(copy / JOURNAL_FILE, 32 + FRAME_BYTES * (frames // 3) + 24 + 5_000)
    for _ in range(2):  # what was refused is left as it was
        with pytest.raises(JournalDamaged, match=r"data\.sqlite3-wal is damaged.*empty one"):
            open_disk(copy)


def lose(journal: Path) -> None:
    journal.unlink()


def empty(journal: Path) -> None:
    os.truncate(journal, 0)


def zero(journal: Path) -> None:
    journal.write_bytes(bytes(journal.stat().st_size))


def zero_header(journal: Path) -> None:
    with journal.open("r+b") as f:
        f.write(bytes(512))


@pytest.mark.parametrize("spoil", [lose, empty, zero, zero_header])
@pytest.mark.parametrize("starts", [1, 2])
def test_a_journal_that_is_gone_is_not_taken_for_one_that_was_never_written(
    harness: SqliteHarness, spoil: Callable[[Path], None], starts: int
) -> None:
    """Its commits would be lost without a word."""
    for _ in range(starts - 1):
        harness.reopen()
    rounds(harness, b"a", b"b")
    copy = killed(harness)
    spoil(copy / JOURNAL_FILE)
    for _ in range(2):
        with pytest.raises(JournalDamaged, match=r"data\.sqlite3-wal.*empty one"):
            open_disk(copy)


def test_a_start_that_ends_early_leaves_a_directory_that_opens(
    harness: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or refused at any point: the journal stays, or the data file does not need it."""
    rounds(harness, b"a")
    copy = killed(harness)
    for number, name in enumerate(("_prepare", "sync_directory", "checkpoint_start")):
        module = disk_sqlite if name == "checkpoint_start" else database_sqlite
        real = getattr(module, name)

        def end(*arguments: object, real: Callable[..., object] = real, number: int = number) -> None:
            real(*arguments)
            shutil.copytree(copy, copy.with_name(f"killed-{number}"))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, name, end)
            with pytest.raises(KeyboardInterrupt):
                open_disk(copy)
        for path in (copy, copy.with_name(f"killed-{number}")):
            shutil.copytree(path, again := path.with_name(f"{path.name}-again-{number}"))
            disk = open_disk(again)
            assert disk.scan_keys(T, b"", b"z") == [b"a"]
            disk.close()


@pytest.mark.parametrize("number", [1, 2, READERS + 2])
def test_a_reader_that_cannot_be_opened_is_refused_by_name_and_nothing_stays_open(
    harness: SqliteHarness, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As when the process may open no more files."""
    rounds(harness, b"a")
    copy = killed(harness)
    opened: list[sqlite3.Connection] = []
    real = database_sqlite.open_reader

    def fails(path: Path) -> sqlite3.Connection:
        if len(opened) + 1 == number:
            raise sqlite3.OperationalError("unable to open database file")
        opened.append(real(path))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(database_sqlite, "open_reader", fails)
        with pytest.raises(DiskOpenError, match=rf"{re.escape(str(copy / DATA_FILE))} cannot be opened: unable"):
            open_disk(copy)
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    disk = open_disk(copy)
    assert disk.scan_keys(T, b"", b"z") == [b"a"]
    disk.close()


def test_a_disk_that_failed_leaves_its_journal(harness: SqliteHarness) -> None:
    rounds(harness, b"a")
    harness.submit_failing()
    harness.settle()
    assert harness.fatal
    harness.disk.close()
    assert (harness.path / JOURNAL_FILE).stat().st_size > LARGE
    disk = open_disk(harness.path)
    assert disk.scan_keys(T, b"", b"z") == [b"a"]
    disk.close()
    assert not (harness.path / JOURNAL_FILE).exists(), "as after every orderly close"


def test_what_a_power_loss_has_torn_is_cut_off(harness: SqliteHarness) -> None:
    """The first commit of a journal: the next one may have the same salts, and would look like one that followed it."""
    harness.write(*[Put(T, b"%02d" % n, bytes(LARGE)) for n in range(4)])
    copy = killed(harness)
    with (copy / JOURNAL_FILE).open("r+b") as f:
        f.seek(32)
        f.write(bytes(FRAME_BYTES))
    size = whole_journal(copy / JOURNAL_FILE)
    cut_journal(copy / JOURNAL_FILE, size)
    assert (size, (copy / JOURNAL_FILE).stat().st_size) == (32, 32)


def test_a_start_waits_for_no_other_program_that_reads(harness: SqliteHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal would not begin again."""
    monkeypatch.setattr(database_sqlite, "BUSY_MS", 100)
    rounds(harness, b"a")
    copy = killed(harness)
    theirs = sqlite3.connect(copy / DATA_FILE, isolation_level=None)
    theirs.execute("BEGIN")
    theirs.execute("SELECT count(*) FROM raft_log").fetchone()
    with pytest.raises(DiskOpenError, match=r"another program reads .*data\.sqlite3"):
        open_disk(copy)
    theirs.execute("ROLLBACK")
    disk = open_disk(copy)
    assert disk.scan_keys(T, b"", b"z") == [b"a"]
    disk.close()
    theirs.close()


@pytest.mark.parametrize("at", [3, 9, 17, 25])
def test_a_rotten_header_of_the_journal_is_not_taken_for_an_empty_one(harness: SqliteHarness, at: int) -> None:
    rounds(harness, b"a")
    copy = killed(harness)
    flip(copy / JOURNAL_FILE, at)
    with pytest.raises(JournalDamaged, match="header"):
        open_disk(copy)


def commit_ends(journal: bytes) -> list[int]:
    """Where the frames begin that end a commit of this journal."""
    frames = range(32, len(journal) - FRAME_BYTES + 1, FRAME_BYTES)
    return [at for at in frames if journal[at + 8 : at + 16] == journal[16:24] and any(journal[at + 4 : at + 8])]


def test_whatever_rots_of_the_frame_that_ends_the_last_commit_but_one_it_is_refused(
    harness: SqliteHarness, tmp_path: Path
) -> None:
    """Its page, its mark of a commit, its salts, its checksums; or the sectors that it begins in."""
    rounds(harness, b"a", b"b", b"c", size=LARGE // 2)
    journal = (harness.path / JOURNAL_FILE).read_bytes()
    at = commit_ends(journal)[-2]
    rotten = [journal[: at + byte] + bytes([journal[at + byte] ^ 1]) + journal[at + byte + 1 :] for byte in range(24)]
    sector = at // 512 * 512
    rotten += [journal[:sector] + bytes(count * 512) + journal[sector + count * 512 :] for count in (1, 2)]
    for number, changed in enumerate(rotten):
        (tmp_path / "rotten").write_bytes(changed)
        with pytest.raises(JournalDamaged, match="does not match"):
            raise AssertionError(f"{number}: {whole_journal(tmp_path / 'rotten')}")


def test_no_torn_commit_is_refused(harness: SqliteHarness, tmp_path: Path) -> None:
    """Each sector of a last commit with many pages is as it was before, in another journal, or as it should be."""
    rounds(harness, *(b"%02d" % n for n in range(30)))
    harness.disk._checkpoint_bytes = 0
    rounds(harness, b"a")
    harness.disk._checkpoint_bytes = 1 << 30
    rounds(harness, b"a")  # at the beginning of the file, which keeps the frames of the journal before
    before = (harness.path / JOURNAL_FILE).read_bytes()
    harness.write(*[Put(Table.TIMES, bytes([n]) * 20, bytes(LARGE // 4)) for n in range(60)])
    after = (harness.path / JOURNAL_FILE).read_bytes()
    assert len(before) == len(after)
    whole = commit_ends(before)[-1]
    rng = random.Random(3)
    for share in (0.02, 0.5, 0.98) * 8:
        image = bytearray(after)
        for at in range(0, len(after), 512):
            if rng.random() < share:
                image[at : at + 512] = before[at : at + 512]
        (tmp_path / "torn").write_bytes(image)
        assert whole_journal(tmp_path / "torn") in (whole + FRAME_BYTES, len(after))
    first, split = whole + FRAME_BYTES, 32 + 41 * FRAME_BYTES
    assert split > first
    assert split % 512 == 504, "its page and mark are in one sector, its salts in the next"
    image = bytearray(after)
    image[first : first + FRAME_BYTES] = before[first : first + FRAME_BYTES]
    image[split : split + 8] = struct.pack(">II", 2, 9)  # as of an older journal, whose frame ended a commit
    (tmp_path / "torn").write_bytes(image)
    assert whole_journal(tmp_path / "torn") == first


def test_wherever_a_byte_of_the_journal_has_changed_no_commit_but_the_last_is_lost(
    harness: SqliteHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    rounds(harness, *(b"%d" % n for n in range(6)))
    intact = killed(harness)
    size = (intact / JOURNAL_FILE).stat().st_size
    outcomes = set()
    for number in range(40):
        copy = harness.path.with_name(f"flipped-{number}")
        shutil.copytree(intact, copy)
        flip(copy / JOURNAL_FILE, rng.randrange(32, size))
        try:
            disk = open_disk(copy)
        except JournalDamaged:
            outcomes.add("refused")
            continue
        found = disk.scan_keys(T, b"0", b"9")
        disk.close()
        assert found in ([b"%d" % n for n in range(5)], [b"%d" % n for n in range(6)])
        outcomes.add(f"{len(found)} commits")
    assert {"refused", "5 commits"} <= outcomes
    monkeypatch.setattr(database_sqlite, "whole_journal", lambda path: path.stat().st_size)
    flip(intact / JOURNAL_FILE, 32 + 24 + 100)
    disk = open_disk(intact)
    assert len(disk.scan_keys(T, b"0", b"9")) < 5, "without the check commits are lost silently"
    disk.close()


def test_the_journal_is_bounded_while_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_sqlite, "JOURNAL_BYTES_MAX", 2 << 20)
    harness = SqliteHarness(tmp_path / "node")
    harness.disk._checkpoint_bytes = 1 << 20
    answers: list[object] = []
    asked = 0
    for number in range(100):
        harness.disk.submit([Put(Table.BATCHES, b"%03d" % (number % 20), bytes(LARGE * 2))])
        for place in (b"a", b"b", b"c", b"d"):  # reads of one place would follow one another
            asked += (
                harness.disk.read_from(
                    Table.BATCHES, b"", b"", b"9", place=place, bytes_max=1 << 30, done=answers.append
                )
                is not None
            )
        harness.settle()
    harness.wait(lambda: len(answers) == asked)
    assert harness.fatal == []
    assert (harness.path / JOURNAL_FILE).stat().st_size < 6 << 20, "12 MB were written"
    harness.close()


def test_deleting_ranges_does_not_make_the_journal_grow(harness: SqliteHarness) -> None:
    """As a deleted topic is reaped: each round has one operation, and changes hundreds of rows."""
    disk = harness.disk
    disk._checkpoint_bytes = 1 << 20
    partitions, slices, rows = 8, 6, 100
    for number in range(slices * rows):
        disk.submit(
            [Put(Table.BATCHES, b"%02d/%06d" % (part, number), bytes(3_000)) for part in range(partitions)],
        )
    harness.settle_in_store()
    harness.reopen()
    harness.disk._checkpoint_bytes = 1 << 20
    for part in range(partitions):
        for first in range(0, slices * rows, rows):
            start, stop = b"%02d/%06d" % (part, first), b"%02d/%06d" % (part, first + rows)
            harness.write(Delete(Table.BATCHES, start, stop))
    assert harness.disk.scan_keys(Table.BATCHES, b"", b"9") == []
    assert (harness.path / JOURNAL_FILE).stat().st_size < 6 << 20


def test_one_read_that_does_not_end_holds_up_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages stay in the journal, which grows meanwhile, and begins again afterwards."""
    monkeypatch.setattr(disk_sqlite, "JOURNAL_BYTES_MAX", 1 << 20)
    harness = SqliteHarness(tmp_path / "node")
    harness.disk._checkpoint_bytes = 1 << 20
    rounds(harness, b"k")
    has_begun, may_end = threading.Event(), threading.Event()
    answers: list[object] = []

    def read(found: Rows) -> int:
        found.get(T, b"k")
        has_begun.set()
        may_end.wait()
        return len(found.scan_keys(T, b"", b"z"))

    assert harness.disk.look_up(b"", read, answers.append)
    has_begun.wait()
    waits: list[str] = []
    harness.disk._connection.set_trace_callback(waits.append)
    rounds(harness, *(b"%02d" % number for number in range(60)))
    assert (harness.path / JOURNAL_FILE).stat().st_size > 3 << 20
    restarts = [at for at, sql in enumerate(waits) if "RESTART" in sql]
    assert len(restarts) > 1
    assert {waits[at - 1] for at in restarts} == {f"PRAGMA busy_timeout = {RESTART_MS}"}
    assert NodeConfig(node_id=NodeId(1), cluster_id="c", peers={}).disk_hang_ms > 5 * RESTART_MS
    may_end.set()
    harness.wait(lambda: answers == [1])
    grown = (harness.path / JOURNAL_FILE).stat().st_size
    rounds(harness, *(b"%02d" % number for number in range(60)))
    assert (harness.path / JOURNAL_FILE).stat().st_size < grown + (2 << 20), "and twice that was written"
    assert harness.fatal == []
    harness.close()


def test_freed_pages_are_used_again(harness: SqliteHarness) -> None:
    """First in, first out, as retention deletes."""
    for number in range(120):
        key = b"%03d" % number
        harness.disk.submit(
            [Put(Table.BATCHES, key, bytes(LARGE * 4)), Delete(Table.BATCHES, b"", b"%03d" % max(number - 10, 0))]
        )
        harness.settle()
    file = harness.path / DATA_FILE
    assert file.stat().st_size < 30 * LARGE * 4
    harness.write(Delete(Table.BATCHES, b"", b"9"))
    assert harness.disk.space().reusable_bytes > 5 * LARGE * 4


# --------------------------------------------------------------------------------------------- damaged pages
def settled_file(harness: SqliteHarness) -> Path:
    """Everything is in the data file, and no process has it open."""
    harness.settle_in_store()
    harness.close()
    return harness.path / DATA_FILE


def test_flipped_bytes_of_a_value_change_that_value_alone(harness: SqliteHarness) -> None:
    """The value's CRC, above the port, finds it."""
    rows = [(b"%d" % n, bytes([n + 65]) * LARGE) for n in range(5)]
    harness.write(*[Put(Table.BATCHES, key, value) for key, value in rows])
    file = settled_file(harness)
    flip(file, file.read_bytes().index(b"C" * 4_000) + 2_000)
    disk = open_disk(harness.path)
    found = disk.scan(Table.BATCHES, b"0", b"9")
    disk.close()
    assert [key for (key, value), row in zip(found, rows, strict=True) if (key, value) != row] == [b"2"]


def test_a_value_whose_chain_of_pages_is_broken_is_empty_and_the_others_are_read(harness: SqliteHarness) -> None:
    rows = [(b"%d" % n, bytes([n + 65]) * LARGE) for n in range(5)]
    harness.write(*[Put(Table.BATCHES, key, value) for key, value in rows])
    file = settled_file(harness)
    page = file.read_bytes().index(b"C" * (PAGE_BYTES - 4)) // PAGE_BYTES * PAGE_BYTES
    with file.open("r+b") as f:
        f.seek(page)
        f.write(struct.pack(">I", 1 << 30))  # the next page of the chain
    disk = open_disk(harness.path)
    found = disk.scan(Table.BATCHES, b"0", b"9")
    assert [key for key, value in found if not value] == [b"2"]
    assert [row for row in found if row[1]] == [row for row in rows if row[0] != b"2"]
    disk.close()


def test_a_tree_that_cannot_be_walked_is_damage(harness: SqliteHarness) -> None:
    harness.write(*[Put(T, b"%06d" % n, bytes(900)) for n in range(500)])
    file = settled_file(harness)
    data = file.read_bytes()
    page = data.index(b"%06d" % 250) // PAGE_BYTES * PAGE_BYTES
    with file.open("r+b") as f:
        f.seek(page)
        f.write(bytes(16))  # a page's header
    disk = open_disk(harness.path)
    with pytest.raises(DataDamaged, match=rf"{re.escape(str(file))}.*raft_log cannot be walked"):
        disk.scan(T, b"", b"\xff")
    disk.close()


READ_ALL = """
import sys
from smq.replication.ports import Table
from smq.replication.storage.disk_sqlite import RESTART_MS, SqliteDisk
disk = SqliteDisk(sys.argv[1], call_soon_threadsafe=print, on_fatal=print)
for key, value in disk.scan(Table.BATCHES, b"0", b"9"):
    print(key.decode(), len(value))
sys.stdout.flush()
disk.close()
"""


@needs("strace")
def test_an_unreadable_page_of_a_value_empties_that_value_alone(harness: SqliteHarness, tmp_path: Path) -> None:
    """strace fails one read of one page, as a medium does. SQLite ends the transaction over it; the walk goes on."""
    harness.write(*[Put(Table.BATCHES, b"%d" % n, bytes([n + 65]) * LARGE) for n in range(5)])
    file = settled_file(harness)
    at = file.read_bytes().index(b"C" * (PAGE_BYTES - 4)) // PAGE_BYTES * PAGE_BYTES
    reads = [sys.executable, "-c", READ_ALL, str(harness.path)]
    log = tmp_path / "strace.log"
    strace = ["strace", "-f", "-o", str(log), "-P", str(file), "-e", "trace=pread64"]
    subprocess.run([*strace, *reads], check=True, timeout=120)
    calls = [line for line in log.read_text().splitlines() if "pread64(" in line]
    (when,) = (n for n, line in enumerate(calls, 1) if f", {PAGE_BYTES}, {at})" in line)
    failing = [*strace, "-e", f"inject=pread64:error=EIO:when={when}", *reads]
    found = subprocess.run(failing, check=True, capture_output=True, text=True, timeout=120).stdout
    assert found.split() == ["0", str(LARGE), "1", str(LARGE), "2", "0", "3", str(LARGE), "4", str(LARGE)]


@needs("strace")
def test_a_full_disk_is_refused_by_name_and_loses_nothing(harness: SqliteHarness, tmp_path: Path) -> None:
    """strace fails the writes to the data file, which needs the pages of the journal."""
    rounds(harness, b"a", b"b")
    copy = killed(harness)
    failing = ["-P", str(copy / DATA_FILE), "-e", "trace=pwrite64", "-e", "inject=pwrite64:error=ENOSPC"]
    command = ["strace", "-f", "-o", str(tmp_path / "log"), *failing, sys.executable, "-c", READ_ALL, str(copy)]
    opened = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert re.search(r"DiskOpenError: .*its disk is full.* Free at least .* then start again", opened.stderr)
    disk = open_disk(copy)
    assert disk.scan_keys(T, b"", b"z") == [b"a", b"b"]
    disk.close()
