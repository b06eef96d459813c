"""The write-ahead file: what a start brings back, what it takes for a torn write, and what it reports as damage."""

import errno
import fcntl
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smq.replication.ports import Delete, Op, Put, Table
from smq.replication.storage import disk, pages_lmdb, pending_rows, write_ahead
from smq.replication.storage.directory import DiskOpenError
from smq.replication.storage.disk_lmdb import LmdbDisk
from smq.replication.storage.environment_lmdb import DATA_FILE
from smq.replication.storage.write_ahead import (
    PAGE_BYTES,
    ROUND_BYTES_MAX,
    SECTOR_BYTES,
    WRITE_AHEAD_BYTES,
    WRITE_AHEAD_FILE,
    WRITE_AHEAD_KEY,
    Active,
    WriteAhead,
    WriteAheadDamaged,
    encode_rows,
    make_file,
    recover,
)
from tests.unit.replication.storage.support import LmdbHarness

T = Table.RAFT_LOG
SIZE = 16 * PAGE_BYTES
GENERATION, OLDER = b"the-one-", b"older---"
ACTIVE = Active(SIZE, GENERATION, OLDER)
# One page, two pages, one page; rows of several tables, and an empty value
ROUNDS = [
    [Put(T, b"a", b"1"), Put(Table.BATCHES, b"b", b"2" * 100)],
    [Put(T, b"c", random.Random(1).randbytes(6_000))],
    [Put(Table.TIMES, b"d", b""), Put(T, b"a", b"3")],
]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LmdbHarness]:
    made = LmdbHarness(tmp_path / "node")
    yield made
    made.close()


def written(path: Path, rounds: list[list[Put]] = ROUNDS, active: Active = ACTIVE) -> Path:
    make_file(path, active.size)
    file = WriteAhead(path, active)
    for puts in rounds:
        file.append(encode_rows(puts))
    file.close()
    return path


def changed(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        f.write(data)


# --------------------------------------------------------------------------------------------------- recovery
def test_the_rounds_of_the_generation_come_back_in_order(tmp_path: Path) -> None:
    assert recover(written(tmp_path / "f"), ACTIVE) == ROUNDS


def test_a_file_that_is_full_to_its_last_page_comes_back(tmp_path: Path) -> None:
    rounds = [[Put(T, b"%d" % i, b"v")] for i in range(SIZE // PAGE_BYTES)]
    assert recover(written(tmp_path / "f", rounds), ACTIVE) == rounds


def test_rounds_of_an_older_generation_are_not_replayed_whatever_lies_before_them(tmp_path: Path) -> None:
    path = written(tmp_path / "f", [[Put(T, b"old-%d" % i, b"x")] for i in range(10)], Active(SIZE, OLDER, b""))
    assert recover(path, ACTIVE) == []
    file = WriteAhead(path, ACTIVE)
    file.append(encode_rows(ROUNDS[0]))
    file.close()
    assert recover(path, ACTIVE) == ROUNDS[:1]


@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("sector_bytes", [SECTOR_BYTES, PAGE_BYTES])
def test_a_last_write_of_which_any_sectors_are_missing_never_happened(
    tmp_path: Path, last: int, sector_bytes: int
) -> None:
    """Every set of sectors that a power loss may leave, over what the generation before left there."""
    before = written(tmp_path / "f", [[Put(T, b"old", b"x" * 5_000)] for _ in range(8)], Active(SIZE, OLDER, b""))
    shutil.copy(before, tmp_path / "g")
    old = written(before, ROUNDS[: last - 1]).read_bytes()
    new = written(tmp_path / "g", ROUNDS[:last]).read_bytes()
    sectors = [at for at in range(0, SIZE, sector_bytes) if old[at : at + sector_bytes] != new[at : at + sector_bytes]]
    rng = random.Random(last)
    torn = {frozenset(rng.sample(sectors, rng.randrange(len(sectors)))) for _ in range(200)}
    for kept in torn:
        image = bytearray(old)
        for at in kept:
            image[at : at + sector_bytes] = new[at : at + sector_bytes]
        before.write_bytes(image)
        assert recover(before, ACTIVE) == ROUNDS[: last - 1]
    assert len(torn) > 1 or len(sectors) == 1


def test_a_flipped_bit_in_a_round_is_reported_and_never_cuts_anything(tmp_path: Path) -> None:
    path = written(tmp_path / "f")
    whole = path.read_bytes()
    end = 4 * PAGE_BYTES
    refused = 0
    rng = random.Random(2)
    tags = [at * 8 + bit for at in range(end) if at % SECTOR_BYTES >= SECTOR_BYTES - 4 for bit in range(8)]
    for bit in [*rng.sample(range(end * 8), 1_500), *rng.sample(tags, 500)]:
        at = bit // 8
        changed(path, at, bytes([whole[at] ^ 1 << bit % 8]))
        try:
            assert recover(path, ACTIVE) == ROUNDS, "the bit lies in the padding"
        except WriteAheadDamaged:
            refused += 1
        changed(path, at, whole[at : at + 1])
    assert refused > 1_000


@pytest.mark.parametrize("lost", [0, PAGE_BYTES, 2 * PAGE_BYTES])
@pytest.mark.parametrize("content", [bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES])
def test_a_lost_page_before_a_later_round_is_damage(tmp_path: Path, lost: int, content: bytes) -> None:
    path = written(tmp_path / "f")
    changed(path, lost, content)
    with pytest.raises(WriteAheadDamaged, match=r"is damaged: round \d is lost, but round [12] is there"):
        recover(path, ACTIVE)


def test_the_bytes_of_a_client_cannot_look_like_a_round(tmp_path: Path) -> None:
    """A torn round whose records hold frames of every generation but this one."""
    forged = written(tmp_path / "g", active=Active(SIZE, OLDER, b"")).read_bytes()
    rounds = [*ROUNDS, [Put(Table.BATCHES, b"e", forged[: 5 * PAGE_BYTES])]]
    path = written(tmp_path / "f", rounds)
    changed(path, 5 * PAGE_BYTES, bytes(PAGE_BYTES))
    assert recover(path, ACTIVE) == ROUNDS


def test_a_file_of_another_size_or_none_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "f")
    os.truncate(path, SIZE - PAGE_BYTES)
    with pytest.raises(WriteAheadDamaged, match="bytes instead of"):
        recover(path, ACTIVE)
    path.unlink()
    with pytest.raises(WriteAheadDamaged, match="copy all its files"):
        recover(path, ACTIVE)


def test_rounds_that_lmdb_cannot_know_of_are_damage(tmp_path: Path) -> None:
    """LMDB has lost the transaction that named their generation, or the file belongs to another data file."""
    path = written(tmp_path / "f")
    for active in (Active(SIZE, OLDER, b"oldest--"), Active(SIZE, b"", OLDER)):
        with pytest.raises(WriteAheadDamaged, match="another data file"):
            recover(path, active)


def test_a_medium_that_cannot_give_the_file_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "f")

    def fail(_path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(WriteAheadDamaged, match="Input/output error"):
        recover(path, ACTIVE)


# --------------------------------------------------------------------------------------------------- the disk
def crashed(harness: LmdbHarness, to: Path) -> LmdbHarness:
    """The directory as kill -9 would leave it now, opened."""
    shutil.copytree(harness.path, to)
    return LmdbHarness(to)


def in_lmdb(path: Path, key: bytes) -> bool:
    return key in (path / DATA_FILE).read_bytes()


def test_a_small_round_is_in_the_write_ahead_file_alone_until_a_delete_or_a_large_round_comes(
    harness: LmdbHarness,
) -> None:
    laters: list[Op] = [Delete(T, b"x", b"x"), Put(T, b"large", bytes(ROUND_BYTES_MAX + 1))]
    for number, later in enumerate(laters):
        key = b"a-small-round-%d" % number
        harness.write(Put(T, key, b"v"))
        assert not in_lmdb(harness.path, key)
        assert harness.disk.get(T, key) == b"v"
        harness.write(later)
        assert in_lmdb(harness.path, key)


def test_an_orderly_close_leaves_nothing_in_the_write_ahead_file_alone(harness: LmdbHarness) -> None:
    harness.disk.submit([Put(T, b"key", b"v")])
    harness.close()
    (harness.path / WRITE_AHEAD_FILE).unlink()
    again = LmdbHarness(harness.path)
    assert again.disk.get(T, b"key") == b"v"
    again.close()


def test_a_close_while_the_file_holds_rounds_of_the_generation_before_starts_again(harness: LmdbHarness) -> None:
    harness.write(Put(T, b"key", b"v"))
    harness.settle_in_store()
    for _ in range(3):
        assert harness.reopen().get(T, b"key") == b"v"


def test_after_a_crash_every_small_round_is_replayed_and_again_after_another(tmp_path: Path) -> None:
    harness = LmdbHarness(tmp_path / "0")
    for generation in range(1, 4):
        for i in range(20):
            harness.write(Put(T, b"%d-%02d" % (generation, i), b"v" * 300), Put(T, b"same", b"%d" % i))
        harness, dead = crashed(harness, tmp_path / str(generation)), harness
        assert len(harness.disk.scan_keys(T, b"0", b":")) == generation * 20
        assert harness.disk.get(T, b"same") == b"19"
        dead.close()
    harness.close()


def test_a_crash_during_the_replay_repeats_it(
    harness: LmdbHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.write(Put(T, b"key", b"v"))
    shutil.copytree(harness.path, tmp_path / "copy")
    harness.close()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    # The second time LMDB has the rounds, and the file is about to begin again
    for place, name in ((LmdbDisk, "_write"), (disk, "WriteAhead")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, killed)
            with pytest.raises(KeyboardInterrupt):
                LmdbHarness(tmp_path / "copy")
    again = LmdbHarness(tmp_path / "copy")
    assert again.disk.scan(T, b"a", b"z") == [(b"key", b"v")]
    again.close()


def test_a_full_write_ahead_file_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_rows, "ROWS_MAX", 1 << 20)
    harness = LmdbHarness(tmp_path / "node", write_ahead_bytes=SIZE)
    for i in range(50):
        harness.write(Put(T, b"%02d" % i, b"v"))
    assert 0 < harness.disk._pending.count <= SIZE // PAGE_BYTES
    again = crashed(harness, tmp_path / "copy")
    assert again.disk.scan_keys(T, b"0", b":") == [b"%02d" % i for i in range(50)]
    again.close()
    harness.close()


def test_rounds_that_lmdb_has_taken_over_are_never_replayed(harness: LmdbHarness, tmp_path: Path) -> None:
    """The file holds them after the newer rounds. What they put may be deleted by now, or replaced."""
    for i in range(10):
        harness.write(Put(T, b"old-%d" % i, b"v"), Put(T, b"same", b"old"))
    harness.write(Delete(T, b"old-", b"old."), Put(T, b"same", b"new"))
    harness.write(Put(T, b"other", b"v"))
    again = crashed(harness, tmp_path / "copy")
    assert again.disk.scan(T, b"a", b"z") == [(b"other", b"v"), (b"same", b"new")]
    again.close()


def test_too_many_pending_rows_go_to_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_rows, "ROWS_MAX", 10)
    harness = LmdbHarness(tmp_path / "node")
    for i in range(25):
        harness.write(Put(T, b"%02d" % i, b"v"))
        assert harness.disk._pending.count <= 10
    assert len(harness.disk.scan_keys(T, b"0", b":")) == 25
    harness.close()


def test_an_idle_disk_brings_everything_to_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PENDING_S_MAX", 0.01)
    harness = LmdbHarness(tmp_path / "node")
    harness.write(Put(T, b"a-small-round", b"v"))
    harness.wait(lambda: not harness.disk._pending.count)
    assert in_lmdb(harness.path, b"a-small-round")
    assert harness.disk.get(T, b"a-small-round") == b"v"
    harness.close()


def test_a_write_that_fails_is_fatal_and_nothing_is_reported_after_it(
    harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[int] = []

    def fail(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        harness.disk.submit([Put(T, b"a", b"v")], lambda: reported.append(1))
        harness.settle()
    harness.disk.submit([Put(T, b"b", b"v")], lambda: reported.append(2))
    harness.close()
    assert [type(e) for e in harness.fatal] == [OSError]
    assert reported == []


def test_a_write_of_which_only_a_part_is_taken_is_fatal(harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda _fd, data, _at: len(data) // 2)
    harness.write(Put(T, b"a", b"v"))
    assert "only a part" in str(harness.fatal[0])


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_a_key_that_lmdb_does_not_take_is_fatal_before_it_is_durable(
    harness: LmdbHarness, tmp_path: Path, key: bytes
) -> None:
    """Otherwise no start could bring the round to LMDB."""
    harness.write(Put(T, b"before", b"v"))
    harness.write(Put(T, key, b"v"))
    assert len(harness.fatal) == 1
    again = crashed(harness, tmp_path / "copy")
    assert again.disk.scan_keys(T, b"a", b"z") == [b"before"]
    again.close()


def test_a_file_system_without_direct_writes_is_written_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_ahead, "_DIRECT", os.O_DIRECTORY)  # refused for a file, as O_DIRECT may be
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECTORY and str(path).endswith(WRITE_AHEAD_FILE):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert recover(written(tmp_path / WRITE_AHEAD_FILE), ACTIVE) == ROUNDS


def test_a_full_disk_refuses_a_new_directory_with_the_space_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskOpenError, match=r"No space left.* 4 MiB"):
        make_file(tmp_path / "f", 4 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_row_on_the_file_is_refused(harness: LmdbHarness, tmp_path: Path) -> None:
    harness.write(Put(Table.META, WRITE_AHEAD_KEY, b"\x00" * 28), Delete(T, b"x", b"x"))
    shutil.copytree(harness.path, tmp_path / "copy")
    data = bytearray((tmp_path / "copy" / DATA_FILE).read_bytes())
    for at in [i for i in range(len(data)) if data.startswith(WRITE_AHEAD_KEY, i)]:
        data[at + len(WRITE_AHEAD_KEY) + 9] ^= 1
    (tmp_path / "copy" / DATA_FILE).write_bytes(data)
    with pytest.raises(DiskOpenError, match="does not match its CRC-32C"):
        LmdbHarness(tmp_path / "copy")


def test_pending_rows_count_as_written_space(
    harness: LmdbHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _path: found)
    before = harness.disk.space().free_bytes
    harness.write(Put(T, b"a", bytes(30_000)))
    harness.write(Put(T, b"a", bytes(20_000)), Put(T, b"b", bytes(1_000)))
    assert before - harness.disk.space().free_bytes == 21_000
    harness.settle_in_store()
    assert harness.disk.space().free_bytes == before
    assert harness.disk.size_bytes() >= WRITE_AHEAD_BYTES


@pytest.mark.parametrize("table", [T, Table.BATCHES])
def test_a_read_that_a_transaction_overtakes_sees_no_row_that_it_deleted(
    harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    """The transaction comes between the two halves of the read: the pending rows, and those of LMDB."""
    pending, disk = harness.disk._pending, harness.disk
    harness.write(Put(table, b"deleted", b"v"), Put(table, b"replaced", b"old"))
    take = pending.between

    def overtaken(*arguments: Any, **options: Any) -> tuple[int, list[tuple[bytes, bytes]]]:
        taken = take(*arguments, **options)
        assert len(taken[1]) == 2
        disk.submit([Delete(table, b"deleted", b"e"), Put(table, b"replaced", b"new")])
        deadline = time.monotonic() + 60
        while pending.count and time.monotonic() < deadline:
            time.sleep(0.001)
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(pending, "between", overtaken)
        assert disk.scan(table, b"a", b"z") == [(b"replaced", b"new")]


def test_reads_during_a_transaction_never_see_a_deleted_row_again(harness: LmdbHarness) -> None:
    """A row is put by a small round, deleted by the next, and read all the time from the loop and from threads."""
    disk = harness.disk
    for i in range(150):
        key = b"%03d" % i
        harness.write(Put(Table.BATCHES, key, b"v"), Put(T, key, b"v"))
        disk.submit([Delete(Table.BATCHES, key, key + b"x"), Delete(T, key, key + b"x")])
        gone = {Table.BATCHES: False, T: False}
        while disk.durable_seq < disk.submitted_seq:
            for table in gone:
                found = disk.get(table, key) is not None
                assert not (found and gone[table]), "it was gone already"
                gone[table] = not found
            harness.run_all()
        assert disk.get(Table.BATCHES, key) is disk.get(T, key) is None


@pytest.mark.parametrize("seed", range(4))
def test_reads_merge_pending_rows_with_lmdbs_in_either_direction(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    harness = LmdbHarness(tmp_path / "node")
    disk = harness.disk
    keys = [b"%03d" % i for i in range(60)]
    expected = {key: rng.randbytes(rng.choice((0, 5, 3_000))) for key in keys}
    stored = rng.sample(keys, 40)
    for table in (Table.BATCHES, Table.TIMES):
        disk.submit([Put(table, key, expected[key] if rng.random() < 0.7 else b"older") for key in stored])
    harness.settle_in_store()
    for table in (Table.BATCHES, Table.TIMES):
        late = [key for key in keys if key not in stored or disk.get(table, key) != expected[key]]
        for at in range(0, len(late), 10):
            harness.write(*[Put(table, key, expected[key]) for key in late[at : at + 10]])
    assert disk._pending.count > 20
    rows = sorted(expected.items())
    answers: list[object] = []
    for _ in range(60):
        lowest, start, stop = sorted(b"%03d" % rng.randrange(62) + rng.choice((b"", b"x")) for _ in range(3))
        stop += b"y"
        bytes_max = rng.choice((1, 4_000, 1 << 30))
        before = max((key for key, _ in rows if lowest <= key <= start), default=start)
        for table in (Table.BATCHES, Table.TIMES):
            found = [row for row in rows if start <= row[0] < stop]
            limit = rng.randrange(1, 9)
            assert disk.scan(table, start, stop, limit=limit) == found[:limit]
            assert disk.scan(table, start, stop, limit=limit, reverse=True) == found[::-1][:limit]
            assert disk.read_from(table, lowest, start, stop, place=b"", bytes_max=bytes_max, done=answers.append)
            harness.wait(lambda: bool(answers))
            assert answers.pop() == _within([row for row in rows if before <= row[0] < stop], bytes_max)
    harness.close()


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_read_of_limited_size_leaves_no_gap_before_pending_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """LMDB has the first rows, and the newer ones, which are smaller, are pending: they may not follow the row at which
    the limit ends LMDB's."""
    if not is_cached:
        monkeypatch.setattr(pages_lmdb, "_NOWAIT", None)  # so that a thread reads
    harness = LmdbHarness(tmp_path / "node")
    rows = [(b"%02d" % i, bytes([i]) * (3_000 if i < 10 else 10)) for i in range(15)]
    harness.disk.submit([Put(Table.BATCHES, key, value) for key, value in rows[:10]])
    harness.settle_in_store()
    harness.write(*[Put(Table.BATCHES, key, value) for key, value in rows[10:]])
    assert harness.disk._pending.count == 5
    answers: list[object] = []
    for start in (0, 5, 9, 12):
        for bytes_max in (1, 20, 3_000, 6_010, 10_000, 30_020, 1 << 20):
            harness.disk.read_from(
                Table.BATCHES, b"", rows[start][0], b"99", place=b"", bytes_max=bytes_max, done=answers.append
            )
            harness.wait(lambda: bool(answers))
            assert answers.pop() == _within(rows[start:], bytes_max)
    harness.close()


def _within(rows: list[tuple[bytes, bytes]], bytes_max: int) -> list[tuple[bytes, bytes]]:
    total = 0
    for count, (_, value) in enumerate(rows, 1):
        total += len(value)
        if total > bytes_max:
            return rows[: max(count - 1, 1)]
    return rows


def test_every_write_of_the_file_waits_for_the_disk(tmp_path: Path) -> None:
    """test_crash_images.py judges a recorded trace; a fresh one needs strace."""
    make_file(tmp_path / "f", SIZE)
    file = WriteAhead(tmp_path / "f", ACTIVE)
    assert fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DSYNC
    file.close()
