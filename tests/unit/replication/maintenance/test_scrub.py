"""The scrubber reads every table once per period, finds damaged rows, and continues where it was after a restart."""

import random
from collections.abc import Callable

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, ProducerId, TsNs
from smq.records import parse_header
from smq.replication.api import Aborted
from smq.replication.log.aborted import aborted_row
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged, base_of_key
from smq.replication.maintenance import scrub
from smq.replication.maintenance.scrub import Damage, Scrubber
from smq.replication.ports import Put, Table
from smq.replication.raft.journal import JournalWriter, RaftJournal, is_whole_row
from smq.testing.virtual.clock import Scheduler
from smq.testing.virtual.disk import DiskImage, FakeDisk
from tests.unit.replication.storage.support import make_batch
from tests.unit.replication.support import process_clock, raise_it

PID = PartitionId(bytes(range(20)))
PERIOD_S = 1000
BATCHES = 12


class Node:
    """A scrubber over a disk that holds one partition and a journal."""

    def __init__(self, image: DiskImage | None = None, *, period_s: int = PERIOD_S) -> None:
        self.scheduler = Scheduler()
        self.clock = process_clock(self.scheduler)
        self.disk = FakeDisk(self.clock, random.Random(1), image=image, on_fatal=raise_it)
        self.batches: list[tuple[Offset, bytes | None]] = []
        self.verified: list[tuple[PartitionId, Offset]] = []
        self.checkpoints: list[bytes] = []
        self.aborted: list[bytes] = []
        self.raft: list[tuple[Table, bytes]] = []
        self.scrubber = Scrubber(
            self.clock, self.disk, period_s, repair=self.repair, verify_batch_at=self.verify_batch_at
        )
        self.scrubber.start()

    def repair(self, table: Table, damage: Damage) -> None:
        if isinstance(damage, BatchDamaged):
            self.batches.append((damage.offset, damage.row))
        elif table is Table.CHECKPOINTS:
            self.checkpoints.append(damage)
        elif table is Table.TIMES:
            self.aborted.append(damage)
        else:
            self.raft.append((table, damage))

    def verify_batch_at(self, pid: PartitionId, offset: Offset, done: Callable[[bool], None]) -> bool:
        self.verified.append((pid, offset))
        done(True)
        return True

    def fill(self) -> PartitionLog:
        log = LogStore(self.disk).create(PID, Offset(0))
        for i in range(BATCHES):
            data = make_batch(2)
            log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(2 * i + 1), done=lambda: None)
        journal = RaftJournal()
        journal.set_term(1, None)
        for index in range(1, 5):
            journal.add(b"\x00command", index, 1)
        JournalWriter(self.disk, journal, lambda: None).flush()
        self.scheduler.run_for_ms(100)
        return log

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(int(seconds * 10)):
            if until():
                return
            self.scrubber.on_beat()
            self.scheduler.run_for_ms(100)

    def a_pass(self) -> None:
        before = self.scrubber.progress.passes
        self.run(PERIOD_S * 2, until=lambda: self.scrubber.progress.passes > before)
        assert self.scrubber.progress.passes == before + 1


def flip(node: Node, table: Table, number: int) -> bytes:
    rows = node.disk.image.tables[table]
    key: bytes = [key for key in rows if rows[key]][number]
    rows[key] = rows[key][:-1] + bytes([rows[key][-1] ^ 1])
    return key


@pytest.fixture
def node() -> Node:
    made = Node()
    made.fill()
    return made


def test_a_pass_over_intact_data_reads_everything_and_finds_nothing(node: Node) -> None:
    size = sum(len(v) for t in scrub.TABLES for v in node.disk.image.tables[t].values())
    node.a_pass()
    assert (node.batches, node.verified, node.checkpoints, node.raft) == ([], [], [], [])
    assert node.scrubber.progress.read_bytes == size
    assert node.scrubber.progress.ended_ms >= node.scrubber.progress.started_ms


def test_a_damaged_row_of_every_table_is_found_and_handed_over_for_repair(node: Node) -> None:
    batch, row = flip(node, Table.BATCHES, 3), flip(node, Table.TIMES, 7)
    checkpoint, entry = flip(node, Table.CHECKPOINTS, 1), flip(node, Table.RAFT_LOG, 2)
    vote = flip(node, Table.RAFT_META, 1)
    node.a_pass()
    assert sorted(node.batches, key=str) == sorted([(base_of_key(batch), None), (base_of_key(row), row)], key=str)
    assert node.verified == []  # a batch damaged in its place leaves no gap
    assert node.checkpoints == [checkpoint]
    assert node.raft == [(Table.RAFT_META, vote), (Table.RAFT_LOG, entry)]
    assert node.scrubber.progress.found == 5


def test_a_missing_index_row_is_detected_by_its_neighbours(node: Node) -> None:
    rows = node.disk.image.tables[Table.TIMES]
    key = [key for key in rows if rows[key]][4]
    del rows[key]
    node.a_pass()
    assert node.batches == [(base_of_key(key), None)]


@pytest.mark.parametrize("slice_bytes", [1, 100, 1 << 20])
def test_a_batch_that_the_walk_misses_is_verified_by_its_offset(
    monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    """As in a tree out of order, between two slices or within one."""
    monkeypatch.setattr(scrub, "SLICE_BYTES", slice_bytes)
    node = Node()
    node.fill()
    rows = node.disk.image.tables[Table.BATCHES]
    hidden = sorted(rows)[3]
    del rows[hidden]
    node.a_pass()
    assert node.verified == [(PID, base_of_key(hidden))]
    assert node.scrubber.progress.found == 1
    assert node.batches == []


def test_a_row_rewritten_in_the_meantime_is_not_reported(node: Node) -> None:
    rows = node.disk.image.tables[Table.BATCHES]
    key = next(iter(rows))
    good = rows[key]
    flip(node, Table.BATCHES, 0)
    scrubber, check = node.scrubber, scrub.Check
    while scrub.TABLES[scrubber._table] is not Table.BATCHES:
        node.run(0.1)
    node.disk.examine(Table.BATCHES, b"", b"\xff" * 40, 1 << 20, check(Table.BATCHES), scrubber._on_slice)
    rows[key] = good
    node.scheduler.run_for_ms(1)
    assert node.batches == []


def test_after_a_restart_the_pass_continues_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "SLICE_BYTES", 100)
    monkeypatch.setattr(scrub, "SLICES_PER_SAVE", 1)
    node = Node()
    node.fill()
    node.run(PERIOD_S, until=lambda: scrub.TABLES[node.scrubber._table] is Table.BATCHES)
    node.scheduler.run_for_ms(10)
    image = node.disk.crash()
    again = Node(image)
    assert scrub.TABLES[again.scrubber._table] is Table.BATCHES
    flip(again, Table.RAFT_LOG, 0)  # after it
    flip(again, Table.BATCHES, BATCHES - 1)  # before it
    again.a_pass()
    assert (len(again.batches), again.raft) == (1, [])


def test_an_unreadable_position_restarts_the_pass(node: Node) -> None:
    node.disk.submit([Put(Table.META, b"scrub", b"nonsense of no length at all, and of no checksum either")])
    node.scheduler.run_for_ms(10)
    again = Node(node.disk.crash())
    again.a_pass()
    assert again.scrubber.progress.passes == 1


def test_a_pass_begins_once_per_period_and_never_without_one(node: Node) -> None:
    node.a_pass()
    node.run(PERIOD_S / 2)
    assert node.scrubber.progress.passes == 1
    node.run(PERIOD_S)
    assert node.scrubber.progress.passes == 2
    never = Node(node.disk.image, period_s=0)
    never.run(PERIOD_S)
    assert never.scrubber.progress.passes == 2, "as the disk reported it"


def test_the_journal_rewrites_its_rows_from_memory(node: Node) -> None:
    journal = RaftJournal()
    writer = JournalWriter(node.disk, journal, lambda: None)
    assert list(journal.load(node.disk))
    before = _remembered(journal)
    for table in (Table.RAFT_LOG, Table.RAFT_META):
        for number in range(len(node.disk.image.tables[table])):
            key = flip(node, table, number)
            journal.rewrite_row(table, key)
            writer.flush()
            node.scheduler.run_for_ms(100)
            assert is_whole_row(key, node.disk.image.tables[table][key])
    reopened = RaftJournal()
    assert list(reopened.load(node.disk))
    assert _remembered(reopened) == before


def _remembered(journal: RaftJournal) -> tuple[object, ...]:
    entries = journal.entries_from(journal.first_index, count_max=len(journal))
    return journal.term, journal.voted_for, journal.commit_index, journal.snapshot, entries


def test_a_row_of_no_entry_is_removed(node: Node) -> None:
    """It rotted, and memory has nothing to put there: an entry that was truncated, or a key that flipped."""
    journal = RaftJournal()
    writer = JournalWriter(node.disk, journal, lambda: None)
    assert list(journal.load(node.disk))
    key = (journal.last_index + 7).to_bytes(8)
    node.disk.image.tables[Table.RAFT_LOG][key] = b"rotten"
    journal.rewrite_row(Table.RAFT_LOG, key)
    writer.flush()
    node.scheduler.run_for_ms(100)
    assert key not in node.disk.image.tables[Table.RAFT_LOG]
    assert list(RaftJournal().load(node.disk))


def test_a_log_rewrites_its_checkpoints_from_memory() -> None:
    node = Node()
    log = node.fill()
    for number in range(2):
        log.rewrite_checkpoint(flip(node, Table.CHECKPOINTS, number))
        node.scheduler.run_for_ms(100)
    assert LogStore(node.disk).open_all()[PID].tail_damage is None


def test_a_damaged_row_of_an_aborted_transaction_is_written_again(node: Node) -> None:
    key, value = aborted_row(PID, Aborted(Offset(3), Offset(1), ProducerId(1)))
    node.disk.submit([Put(Table.TIMES, key, value[:-1] + b"\x77")])
    node.scheduler.run_for_ms(100)
    node.run(PERIOD_S, until=lambda: node.scrubber.progress.passes > 0)
    assert (node.aborted, node.batches) == ([key], [])


def test_rows_that_fail_are_read_again_beside_the_loop_however_slow_the_disk_is(node: Node) -> None:
    blocked: list[float] = []
    node.disk.on_blocking_read = blocked.append
    for table in (Table.RAFT_LOG, Table.TIMES, Table.CHECKPOINTS):
        assert node.disk.flip_bit(table, random.Random(3)) is not None
    node.disk.stall_reads(60_000)
    node.run(PERIOD_S, until=lambda: node.scrubber.progress.passes > 0)
    assert blocked == []
    assert node.scrubber.progress.found >= 3
