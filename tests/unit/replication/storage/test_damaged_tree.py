"""Flipped bits in the pages that hold the tree of LMDB's file: no other row may be lost, and the node ends with advice.

A flipped page number makes two rows share the pages of one. LMDB would free them with the first, and use them again.
"""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged, StoredValue, batch_key
from smq.replication.maintenance.scrub import Check
from smq.replication.ports import DataDamaged, Delete, Examined, Put, Table
from smq.replication.storage import pages_lmdb
from smq.replication.storage.directory import REPLACE_ADVICE
from smq.replication.storage.environment_lmdb import DATA_FILE
from smq.replication.storage.pages_lmdb import PageReader, PagesDamaged
from tests.unit.replication.storage.support import LmdbHarness, make_batch
from tests.unit.replication.storage.test_unreadable_pages import PAGE, FailingMedium, page_of, read_later, written

# --------------------------------------------------------------------------------------------------------- damaged tree
# Flipped bits in the pages that hold the tree of LMDB's file: no other row may be lost, and the node ends with
# advice. A flipped page number makes two rows share the pages of one. LMDB would free them with the first, and use
# them again.
PID = PartitionId(bytes(range(20)))


BATCHES = 40


K, V = 17, 22


BATCHES_TABLE = Table.BATCHES.value.encode()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LmdbHarness]:
    made = LmdbHarness(tmp_path / "node")
    yield made
    made.close()


def filled(
    harness: LmdbHarness, pid: PartitionId = PID, *, size: int = 10_000
) -> tuple[PartitionLog, list[StoredValue]]:
    """A log of batches of one record each. Large ones have pages of their own."""
    log = LogStore(harness.disk).create(pid, Offset(0))
    stored = []
    for i in range(BATCHES):
        data = make_batch(payload=bytes([i]) * size)
        ts_ns = TsNs(log.last_ts_ns + 10)
        stored.append(log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=ts_ns, done=lambda: None))
        harness.settle()
    log = LogStore(harness.reopen(), tail_bytes_kept=0).open_all()[pid]
    log.keep_from(Offset(BATCHES))
    return log, stored


class Leaf:
    """The leaf of table BATCHES that holds a key, for damage by hand."""

    def __init__(self, harness: LmdbHarness, key: bytes) -> None:
        self._fd = os.open(harness.path / DATA_FILE, os.O_RDWR)
        metas = [pages_lmdb._META.unpack(os.pread(self._fd, pages_lmdb._META.size, n * PAGE + 16)) for n in (0, 1)]
        reader = PageReader(self._fd, PAGE, os.pread, os.pread, lambda _table, _key: None)
        path = reader._descend(reader._root_of(max(meta[-1] for meta in metas), BATCHES_TABLE), key)
        self.page, self.index = path[-1]
        assert self.page.key(self.index) == key
        self.number = struct.unpack_from("<Q", self.page.data)[0]
        at, key_size, _, self.size = self.page.node(self.index)
        self.node_at = at - 8
        self.number_at = at + key_size
        self.first = struct.unpack_from("<Q", self.page.data, self.number_at)[0]

    def write(self, at: int, data: bytes) -> None:
        os.pwrite(self._fd, data, self.number * PAGE + at)
        os.close(self._fd)

    def point_to(self, page: int) -> None:
        self.write(self.number_at, struct.pack("<Q", page))


def leaf_of(harness: LmdbHarness, offset: int) -> Leaf:
    return Leaf(harness, batch_key(PID, offset))


def assert_refused(harness: LmdbHarness) -> None:
    """The node ends, as it does after other damage of the tree."""
    assert len(harness.fatal) == 1
    assert isinstance(harness.fatal[0], DataDamaged)
    assert REPLACE_ADVICE in str(harness.fatal[0])


def examine(harness: LmdbHarness) -> None:
    answers: list[object] = []
    harness.disk.examine(Table.BATCHES, b"", b"\xff" * 64, 1 << 30, lambda _key, _value: True, answers.append)
    harness.wait(lambda: bool(answers or harness.fatal))
    assert not answers


# ------------------------------------------------------------------------------- a row that names another row's pages
@pytest.mark.parametrize("change", ["repair", "retention", "truncation"])
@pytest.mark.parametrize(("row", "other"), [(K, V), (K, K - 1), (K - 1, K), (K, K + 4)])
def test_pages_of_another_row_are_not_freed(harness: LmdbHarness, change: str, row: int, other: int) -> None:
    """Neighbours, and offsets that differ in one bit, among them: as if a key were damaged."""
    log, stored = filled(harness)
    leaf_of(harness, row).point_to(leaf_of(harness, other).first)
    if change == "repair":
        with pytest.raises(DataDamaged, match=f"it holds offset {other}"):
            log.read(Offset(row), Offset(row + 1), 1)
        assert log.replace(stored[row], None, lambda: None)
    elif change == "retention":
        log.advance_log_start(Offset(row + 1))
    else:
        log.truncate(Offset(row))
    harness.settle()
    assert_refused(harness)
    harness.close()
    after = LmdbHarness(harness.path)
    assert after.disk.get(Table.BATCHES, batch_key(PID, other)) == stored[other].value
    after.close()


@pytest.mark.parametrize("change", ["repair", "retention", "truncation"])
def test_pages_of_another_partition_at_the_same_offset_are_neither_served_nor_freed(
    harness: LmdbHarness, change: str
) -> None:
    other = PartitionId(PID[:-1] + bytes((PID[-1] ^ 1,)))
    theirs = filled(harness, other)[1][K]
    log, stored = filled(harness)
    leaf_of(harness, K).point_to(Leaf(harness, batch_key(other, K)).first)
    with pytest.raises(DataDamaged, match="its partition"):
        log.read(Offset(K), Offset(K + 1), 1)
    if change == "repair":
        assert log.replace(stored[K], None, lambda: None)
    elif change == "retention":
        log.advance_log_start(Offset(K + 1))
    else:
        log.truncate(Offset(K))
    harness.settle()
    assert_refused(harness)
    harness.close()
    after = LmdbHarness(harness.path)
    assert after.disk.get(Table.BATCHES, batch_key(other, K)) == theirs.value
    after.close()


def test_pages_that_a_partition_with_pending_rows_alone_gave_back_are_not_freed_twice(harness: LmdbHarness) -> None:
    other = PartitionId(PID[:-1] + bytes((PID[-1] ^ 1,)))
    filled(harness, other)
    log, _ = filled(harness)
    given_back = Leaf(harness, batch_key(other, K)).first
    harness.write(Delete(Table.BATCHES, other, other + b"\xff" * 9))
    harness.write(Put(Table.BATCHES, batch_key(other, BATCHES), b"small: in the write-ahead file"))
    leaf_of(harness, K).point_to(given_back)
    log.advance_log_start(Offset(K + 1))
    harness.settle()
    assert_refused(harness)


@pytest.mark.parametrize(("log_start", "row"), [(1, K), (1, 16), (3, 3)])
def test_pages_of_a_deleted_row_are_not_freed_twice(harness: LmdbHarness, log_start: int, row: int) -> None:
    log, stored = filled(harness)
    freed = leaf_of(harness, 0).first
    log.advance_log_start(Offset(log_start))
    harness.settle()
    leaf_of(harness, row).point_to(freed)
    assert log.replace(stored[row], None, lambda: None)
    harness.settle()
    assert_refused(harness)


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
def test_a_row_with_a_damaged_key_owns_its_pages_and_is_replaced(harness: LmdbHarness, bit: int) -> None:
    log, stored = filled(harness)
    leaf = leaf_of(harness, K)
    leaf.write(leaf.node_at + 8, batch_key(PID, K ^ 1 << bit))
    for offset in (K, min(K ^ 1 << bit, BATCHES - 1)):
        assert log.replace(stored[offset], None, lambda: None)
        harness.settle()
    assert harness.fatal == []
    assert log.read(Offset(K), Offset(K + 1), 1) == [stored[K]]


@pytest.mark.parametrize("what", ["middle of a value", "leaf"])
def test_a_page_that_is_not_the_first_of_a_value_is_damage_of_the_tree(harness: LmdbHarness, what: str) -> None:
    log, stored = filled(harness)
    leaf = leaf_of(harness, K)
    leaf.point_to(leaf_of(harness, V).first + 1 if what != "leaf" else leaf.number)
    assert isinstance(read_later(harness, batch_key(PID, K)), DataDamaged)
    assert harness.disk._pages.unreadable == {}
    assert log.replace(stored[K], None, lambda: None)
    harness.settle()
    assert_refused(harness)


@pytest.mark.parametrize("at", [0, 10, 14], ids=["number", "flags", "count"])
def test_a_damaged_header_of_a_value_is_damage_of_the_tree(harness: LmdbHarness, at: int) -> None:
    """LMDB would free as many pages as the header says."""
    log, stored = filled(harness)
    leaf = leaf_of(harness, K)
    leaf.write((leaf.first - leaf.number) * PAGE + at, b"\xff")
    assert isinstance(read_later(harness, batch_key(PID, K)), DataDamaged)
    assert log.replace(stored[K], None, lambda: None)
    harness.settle()
    assert_refused(harness)


# ---------------------------------------------------------------------------------- pages that the file does not have
@pytest.mark.parametrize("bit", [12, 22, 30, 55], ids=lambda bit: f"bit{bit}")
def test_a_page_number_beyond_the_end_leaves_the_file_as_it_is(harness: LmdbHarness, bit: int) -> None:
    log, stored = filled(harness)
    leaf = leaf_of(harness, K)
    leaf.point_to(leaf.first | 1 << bit)
    size = (harness.path / DATA_FILE).stat().st_size
    assert isinstance(read_later(harness, batch_key(PID, K)), DataDamaged)
    assert harness.disk._pages.unreadable == {}
    harness.disk._pages.unreadable[BATCHES_TABLE, batch_key(PID, K)] = None  # read before the damage
    assert log.replace(stored[K], None, lambda: None)
    harness.settle()
    assert_refused(harness)
    assert (harness.path / DATA_FILE).stat().st_size == size


@pytest.mark.parametrize("bit", [18, 24, 31], ids=lambda bit: f"bit{bit}")
def test_a_flipped_size_asks_for_no_page_beyond_the_value(
    harness: LmdbHarness, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, stored = filled(harness)
    leaf = leaf_of(harness, K)
    size = leaf.size ^ 1 << bit
    leaf.write(leaf.node_at, struct.pack("<HH", size & 0xFFFF, size >> 16))
    harness.disk._pages.unreadable[BATCHES_TABLE, batch_key(PID, K)] = None
    wrote: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: wrote.append(1))
        assert isinstance(read_later(harness, batch_key(PID, K)), DataDamaged)
        assert log.replace(stored[K], None, lambda: None)
        harness.settle()
    assert wrote == []
    assert_refused(harness)


def test_a_note_of_a_page_beyond_the_end_does_not_extend_the_file(harness: LmdbHarness) -> None:
    filled(harness)
    leaf = leaf_of(harness, K)
    leaf.point_to(leaf.first | 1 << 22)
    size = (harness.path / DATA_FILE).stat().st_size
    pages = harness.disk._pages
    pages.unreadable[BATCHES_TABLE, batch_key(PID, K)] = None
    with harness.disk._env.begin() as txn, pytest.raises(PagesDamaged):
        pages.make_replaceable(txn.id(), BATCHES_TABLE, batch_key(PID, K), batch_key(PID, K + 1))
    assert (harness.path / DATA_FILE).stat().st_size == size


def test_unreadable_pages_of_another_row_are_not_overwritten(
    harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(harness)
    first = leaf_of(harness, V).first
    leaf_of(harness, K).point_to(first + 1)
    medium = FailingMedium(monkeypatch)
    medium.bad = {first + 2}
    pages = harness.disk._pages
    pages.unreadable[BATCHES_TABLE, batch_key(PID, K)] = None
    with harness.disk._env.begin() as txn, pytest.raises(PagesDamaged):
        pages.make_replaceable(txn.id(), BATCHES_TABLE, batch_key(PID, K), batch_key(PID, K + 1))
    assert medium.bad == {first + 2}


def test_a_page_that_can_be_neither_read_nor_written_ends_the_node_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = written(tmp_path / "node")
    medium = FailingMedium(monkeypatch)
    medium.bad = {page_of(harness, b"D" * 20_000)}
    assert read_later(harness, b"3") == [(b"3", b"")]

    def fail(_fd: int, _data: bytes, _at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    harness.write(Delete(Table.BATCHES, b"3", b"4"))
    assert_refused(harness)
    harness.close()


# ---------------------------------------------------------------------------------------------- pages out of order
def _far_place(leaf: Leaf) -> None:
    leaf.write(16 + 2 * leaf.index, struct.pack("<H", leaf.page.places[leaf.index] | 0x8000))


def _place_in_header(leaf: Leaf) -> None:
    leaf.write(16 + 2 * leaf.index, struct.pack("<H", 2))


def _long_key(leaf: Leaf) -> None:
    leaf.write(leaf.node_at + 6, struct.pack("<H", 28 | 0x4000))


def _no_pages_of_its_own(leaf: Leaf) -> None:
    leaf.write(leaf.node_at + 4, struct.pack("<H", 0))


@pytest.mark.parametrize("damage", [_far_place, _place_in_header, _long_key, _no_pages_of_its_own])
def test_a_node_outside_its_page_is_damage(harness: LmdbHarness, damage: Callable[[Leaf], None]) -> None:
    filled(harness)
    damage(leaf_of(harness, K))
    assert isinstance(read_later(harness, batch_key(PID, K)), DataDamaged)
    with pytest.raises(DataDamaged, match="cannot be walked"):
        harness.disk.scan(Table.BATCHES, batch_key(PID, 0), batch_key(PID, BATCHES))
    examine(harness)
    assert_refused(harness)


def test_an_empty_branch_is_damage() -> None:
    header = struct.pack("<QHHHH", 5, 0, 0x01, 16, 4096)
    with pytest.raises(PagesDamaged, match="page 5 has no nodes"):
        pages_lmdb._Page(header.ljust(PAGE, b"\x00"), 5)


def test_a_page_of_the_tree_beyond_the_end_is_damage(harness: LmdbHarness) -> None:
    """A byte position above 2^63 would be an OverflowError."""
    filled(harness)
    with harness.disk._env.begin() as txn:
        reader = harness.disk._pages.reader(cached_only=False)
        reader._root_of(txn.id(), BATCHES_TABLE)
        with pytest.raises(PagesDamaged, match="is the last"):
            reader._page(1 << 60)


@pytest.mark.parametrize("error", [IndexError, OverflowError, ValueError])
def test_what_no_check_has_caught_is_damage_too(
    harness: LmdbHarness, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, stored = filled(harness)

    def search(_page: object, _key: bytes) -> tuple[int, bool]:
        raise error

    monkeypatch.setattr(pages_lmdb._Page, "search", search)
    with pytest.raises(DataDamaged, match="cannot be walked"):
        harness.disk.get(Table.BATCHES, batch_key(PID, K))
    assert log.replace(stored[K], None, lambda: None)
    harness.settle()
    assert_refused(harness)


# --------------------------------------------------------------------------------------------------------- garbled keys
# A flipped bit in a key of LMDB's tree: a search by that key no longer finds its row, and the table is out of order.
# The simulation cannot show it: it reads a damaged file as a whole, which puts the rows in order again.
def garble(harness: LmdbHarness, offset: int, to: int) -> None:
    """Changes every copy of the key in the file while the node runs: it reads through the page cache."""
    path = harness.path / DATA_FILE
    found = path.read_bytes()
    old, new = batch_key(PID, Offset(offset)), batch_key(PID, Offset(to))
    assert found.count(old) >= 1
    at = found.find(old)
    with path.open("r+b") as f:
        while at >= 0:
            f.seek(at)
            f.write(new)
            at = found.find(old, at + 1)


def read_whole(harness: LmdbHarness, log: PartitionLog, stored: list[StoredValue]) -> int:
    """Reads every batch as a reader does, and puts back missing ones as a repair does; returns how many."""
    at, repairs = Offset(0), 0
    while at < BATCHES:
        try:
            found = log.read(at, Offset(BATCHES), 1 << 20)
        except BatchDamaged as damage:
            missing = damage.offset
        else:
            assert found, f"nothing at {at}, and the log ends at {BATCHES}"
            assert [s.base for s in found] == list(range(at, at + len(found)))
            at = found[-1].end
            continue
        assert log.replace(stored[missing], None, lambda: None)
        harness.settle()
        repairs += 1
        assert repairs <= BATCHES, "what was put back is not found"
    return repairs


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
@pytest.mark.parametrize("offset", [0, 17, BATCHES - 1])
def test_a_batch_with_a_garbled_key_is_missing_and_can_be_repaired(harness: LmdbHarness, offset: int, bit: int) -> None:
    log, stored = filled(harness, size=7)
    garble(harness, offset, offset ^ 1 << bit)
    assert read_whole(harness, log, stored) >= 1
    assert [s.base for s in log.read(Offset(offset), Offset(BATCHES), 1)] == [offset]
    assert harness.fatal == []


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
def test_the_scrubber_finds_the_gap_that_a_garbled_key_leaves(harness: LmdbHarness, bit: int) -> None:
    log, _ = filled(harness, size=7)
    garble(harness, 17, 17 ^ 1 << bit)
    check, slices = Check(Table.BATCHES), list[Examined]()
    harness.disk.examine(Table.BATCHES, b"", b"\xff" * 64, 1 << 20, check, slices.append)
    harness.run_next()
    assert len(slices) == 1
    assert (PID, Offset(17)) in check.gaps
    with pytest.raises(BatchDamaged):
        log.read(Offset(17), Offset(18), 1)


def test_a_key_visible_only_to_backward_scans_is_not_the_end_of_the_log(
    harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = filled(harness, size=7)
    scan = harness.disk.scan
    monkeypatch.setattr(
        harness.disk, "scan", lambda table, *keys, **options: [] if table is Table.BATCHES else scan(table, *keys)
    )
    with pytest.raises(BatchDamaged, match=r"offset 5.*missing"):
        log.read(Offset(5), Offset(BATCHES), 1 << 20)
