"""Transactions in a log, compared with a list of its batches: what is open, what is stable, what is aborted."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, ProducerId, TsNs
from smq.records import NewRecord, encode_batch, marker_batch, parse_header
from smq.replication.api import Aborted
from smq.replication.log import log_state as log_state
from smq.replication.log import partition_log
from smq.replication.log.aborted import AbortedTransactions, aborted_row, parse_aborted_row
from smq.replication.log.log_state import LogState
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import TIME_ABORTED, TIME_APPEND, BatchDamaged, batch_key, times_range
from smq.replication.ports import DataDamaged, Delete, Put, Table
from tests.examples import examples
from tests.unit.replication.log.support import PID, reopened
from tests.unit.replication.storage.support import FakeHarness


class Row(NamedTuple):
    base: int
    end: int
    producer: int
    kind: str  # plain, data, commit, abort


def batch(count: int, producer: int, epoch: int = 0, sequence: int = 0, *, is_transactional: bool = True) -> bytes:
    return encode_batch(
        [NewRecord(None, b"v", 1_000)] * count,
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=is_transactional,
    )


def marker(producer: int, *, is_commit: bool, epoch: int = 0) -> bytes:
    return marker_batch(producer_id=producer, producer_epoch=epoch, is_commit=is_commit, timestamp_ms=5)


def append(log: PartitionLog, data: bytes) -> tuple[int, int]:
    stored = log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(log.last_ts_ns + 1), done=lambda: None)
    return stored.base, stored.end


class TransactionsAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(partition_log, "CHECKPOINT_BATCHES", 3)
        self.patch.setattr(partition_log, "SLICE_BATCHES", 1)
        self.patch.setattr(log_state, "SMALL_TABLE_BYTES", 0)
        self.harness = FakeHarness()
        self.log = LogStore(self.harness.disk).create(PID, Offset(10))
        self.rows: list[Row] = []
        self.committed = 10
        self.producers_start = 0

    def teardown(self) -> None:
        self.harness.close()
        self.patch.undo()

    # ------------------------------------------------------------------------------------------- the model
    def ended(self) -> list[tuple[Row, int]]:
        """Markers, each with the first offset of its transaction."""
        first: dict[int, int] = {}
        found = []
        for row in self.rows:
            if row.kind == "data":
                first.setdefault(row.producer, row.base)
            elif row.kind != "plain" and row.producer in first:
                found.append((row, first.pop(row.producer)))
        return found

    def open(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for row in self.rows:
            if row.kind == "data":
                first.setdefault(row.producer, row.base)
            elif row.kind != "plain":
                first.pop(row.producer, None)
        return first

    def add(self, data: bytes, producer: int, kind: str) -> None:
        self.rows.append(Row(*append(self.log, data), producer, kind))

    # ------------------------------------------------------------------------------------------- rules
    @rule(count=st.integers(1, 3), producer=st.integers(1, 3))
    def write(self, count: int, producer: int) -> None:
        """The next transaction begins only once the marker of the last one is committed."""
        markers = [row.base for row, _ in self.ended() if row.producer == producer]
        if markers and markers[-1] >= self.committed:
            self.committed = self.log.appended_end
        self.add(batch(count, producer), producer, "data")

    @rule(count=st.integers(1, 3))
    def write_outside(self, count: int) -> None:
        self.add(batch(count, -1, -1, -1, is_transactional=False), -1, "plain")

    @rule(producer=st.integers(1, 3), is_commit=st.booleans())
    def end(self, producer: int, is_commit: bool) -> None:
        if producer in self.open():
            self.add(marker(producer, is_commit=is_commit), producer, "commit" if is_commit else "abort")

    @rule(back=st.integers(0, 4))
    def commit(self, back: int) -> None:
        ends = [row.end for row in self.rows if row.end > self.committed]
        if len(ends) > back:
            self.committed = ends[-1 - back]

    @rule(back=st.integers(0, 6))
    def truncate(self, back: int) -> None:
        cut = max(self.log.appended_end - back, self.committed)
        self.log.truncate(Offset(cut))
        self.rows = [row for row in self.rows if row.end <= self.log.appended_end]

    @rule(forward=st.integers(0, 8))
    def advance_log_start(self, forward: int) -> None:
        start = Offset(min(self.log.log_start + forward, self.committed))
        self.log.keep_from(max(start, self.log.log_start))  # as a replica does
        self.log.advance_log_start(start)

    @rule(back=st.integers(0, 6))
    def forget_producers(self, back: int) -> None:
        self.producers_start = max(self.producers_start, self.committed - back)
        self.log.forget_producers(Offset(self.producers_start))

    @rule()
    def settle(self) -> None:
        self.harness.settle()

    @rule()
    def reopen(self) -> None:
        self.harness.settle()
        self.log = LogStore(self.harness.reopen()).open_all()[PID]
        self.log.forget_producers(Offset(self.producers_start))  # as a replica does

    # ------------------------------------------------------------------------------------------- checks
    @invariant()
    def what_is_open_is_known(self) -> None:
        assert {p: self.log.producers.open_from(p) for p in (1, 2, 3)} == {p: self.open().get(p) for p in (1, 2, 3)}

    @invariant()
    def the_stable_end_passes_a_transaction_with_its_marker(self) -> None:
        unstable = list(self.open().values())
        unstable += [first for row, first in self.ended() if row.base >= self.committed]
        assert self.log.producers.stable_end(Offset(self.committed)) == min([self.committed, *unstable])

    @invariant()
    def aborted_transactions_are_found_by_range(self) -> None:
        aborted = [(row.base, first, row.producer) for row, first in self.ended() if row.kind == "abort"]
        start, stop = self.log.log_start, self.log.appended_end
        for at in {start, (start + stop) // 2}:
            for end in {at + 1, (at + stop) // 2, stop}:
                found = self.log.aborted.within(Offset(at), Offset(end))
                assert [tuple(a[:3]) for a in found] == [a for a in aborted if a[0] >= at and a[1] < end]


TestTransactionsAgainstList = TransactionsAgainstList.TestCase
TestTransactionsAgainstList.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


# ----------------------------------------------------------------------------------------------- the index
def aborted_log(harness: FakeHarness) -> PartitionLog:
    """Three aborted transactions, and a committed one."""
    log = LogStore(harness.disk).create(PID, Offset(0))
    for producer in (1, 2, 3):
        append(log, batch(2, producer))
    append(log, batch(1, 4))
    for producer in (3, 1, 2):
        append(log, marker(producer, is_commit=False))
    append(log, marker(4, is_commit=True))
    harness.settle()
    return log


def test_a_damaged_or_missing_row_is_found_in_the_log_again() -> None:
    harness = FakeHarness()
    expected = list(aborted_log(harness).aborted)
    assert [a[:3] for a in expected] == [(7, 4, 3), (8, 0, 1), (9, 2, 2)]
    start, stop = times_range(PID, TIME_ABORTED)
    rows = harness.disk.scan(Table.TIMES, start, stop)
    assert len(rows) == 3
    key, value = rows[1]
    for op in (Put(Table.TIMES, key, value[:-1] + b"\x77"), Delete(Table.TIMES, key, key + b"\x00")):
        harness.write(op)
        log = reopened(harness)
        assert list(log.aborted) == expected
        harness.settle()
        assert harness.disk.scan(Table.TIMES, start, stop) == rows


def test_no_committed_reader_is_served_while_damage_hides_what_was_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is missing, and the log from which it would be found has a batch that is damaged with its index row."""
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 8)
    harness = FakeHarness()
    log = aborted_log(harness)
    expected = list(log.aborted)
    (stored,) = log.read(Offset(2), Offset(4), 1)
    start, stop = times_range(PID, TIME_ABORTED)
    lost, _ = harness.disk.scan(Table.TIMES, start, stop)[1]
    index_key, index_value = harness.disk.scan(Table.TIMES, *times_range(PID, TIME_APPEND))[1]
    harness.disk.submit(
        [
            Delete(Table.TIMES, lost, lost + b"\x00"),
            Put(Table.TIMES, index_key, index_value[:-1] + b"\x77"),
            Put(Table.BATCHES, batch_key(PID, Offset(2)), bytes(stored.value)[:-1] + b"\x77"),
        ]
    )
    harness.settle()
    log = reopened(harness)
    with pytest.raises(BatchDamaged) as raised:
        log.check_aborted()
    assert raised.value.offset == 2
    assert list(log.aborted) == [expected[0], expected[2]]
    assert log.replace(stored, index_key, lambda: None)
    harness.settle()
    log.check_aborted()
    assert list(log.aborted) == expected
    assert len(harness.disk.scan(Table.TIMES, start, stop)) == 3


def test_rows_that_wait_to_be_deleted_do_not_stand_for_the_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 4)
    plain = batch(1, -1, -1, -1, is_transactional=False)
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    for data in (batch(2, 1), marker(1, is_commit=False), *[plain] * 7):
        append(log, data)
    for data in (batch(2, 2), marker(2, is_commit=False), *[plain] * 6):
        append(log, data)
    harness.settle()
    expected = list(log.aborted)
    lost, _ = harness.disk.scan(Table.TIMES, *times_range(PID, TIME_ABORTED))[1]
    index_key, index_value = harness.disk.scan(Table.TIMES, *times_range(PID, TIME_APPEND))[2]
    damaged = bytes(log.read(Offset(3), Offset(4), 1)[0].value)[:-1] + b"\x77"
    harness.disk.submit(
        [
            Delete(Table.TIMES, lost, lost + b"\x00"),
            Put(Table.TIMES, index_key, index_value[:-1] + b"\x77"),
            Put(Table.BATCHES, batch_key(PID, Offset(3)), damaged),
        ]
    )
    harness.settle()
    log = reopened(harness)
    harness.settle()
    assert log.aborted_damage is not None
    log.keep_from(Offset(8))
    log.advance_log_start(Offset(8))  # beyond the damage, and beyond a marker whose row is on the disk until later
    log.check_aborted()
    harness.settle()
    log.check_aborted()
    assert list(log.aborted) == expected[1:]


def test_rows_go_with_their_batches() -> None:
    harness = FakeHarness()
    log = aborted_log(harness)
    start, stop = times_range(PID, TIME_ABORTED)
    log.advance_log_start(Offset(8))
    harness.settle()
    assert [parse_aborted_row(k, v).marker for k, v in harness.disk.scan(Table.TIMES, start, stop)] == [8, 9]
    log.truncate(Offset(9))
    harness.settle()
    assert [parse_aborted_row(k, v).marker for k, v in harness.disk.scan(Table.TIMES, start, stop)] == [8]
    assert log.producers.open_from(2) == 2


def test_a_look_up_stops_where_later_markers_belong_to_later_transactions() -> None:
    entries = [Aborted(Offset(n * 10 + 5), Offset(n * 10), ProducerId(1)) for n in range(1_000)]
    index = AbortedTransactions(entries)
    assert [a.first for a in index.within(Offset(17), Offset(31))] == [20, 30]
    with_long = Aborted(Offset(20_000), Offset(25), ProducerId(2))
    index.add(with_long)
    assert [a.first for a in index.within(Offset(17), Offset(31))] == [20, 30, 25]
    lowest = index._lowest
    assert lowest is not None
    assert lowest[:4] == [0, 10, 20, 25]
    assert set(lowest[3:]) == {25}


INDEX = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.sampled_from(["cut", "forget", "put"]), st.integers(0, 40), st.integers(0, 40)),
)


@given(st.lists(INDEX, max_size=30))
def test_a_look_up_finds_what_a_search_through_all_finds(steps: list[tuple[str, int, int]]) -> None:
    index, at = AbortedTransactions([]), 0
    for what, one, other in steps:
        if what == "add":
            at += 1 + one
            index.add(Aborted(Offset(at), Offset(max(0, at - 1 - other)), ProducerId(1)))
        elif what == "cut":
            index.cut(Offset(one))
            at = min(at, one)
        elif what == "forget":
            index.forget_before(Offset(min(one, at)))
        else:
            start, end = sorted((one, other))
            index.put(Offset(start), Offset(end), index.between(Offset(start), Offset(end))[::2])
        entries = list(index)
        for start, end in ((0, 5), (3, 11), (one, one + 1), (0, at + 1)):
            expected = [a for a in entries if a.marker >= start and a.first < end]
            assert index.within(Offset(start), Offset(end)) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(0, 45), st.integers(0, 3))
def test_a_batch_is_aborted_if_a_transaction_of_its_producer_around_it_is(
    steps: list[tuple[int, bool]], base: int, producer: int
) -> None:
    """Each step is an offset: a batch of a producer, or the abort of what it has open."""
    opened: dict[int, int] = {}
    entries: list[Aborted] = []
    for offset, (who, ends) in enumerate(steps):
        if not ends:
            opened.setdefault(who, offset)
        elif who in opened:
            first = opened.pop(who)
            entries.append(Aborted(Offset(offset), Offset(first), ProducerId(who)))
    index = AbortedTransactions(entries)
    around = [a for a in entries if a.producer_id == producer and a.first <= base <= a.marker]
    assert index.covers(ProducerId(producer), Offset(base)) == bool(around)
    assert {a.producer_id for a in index.within(Offset(base), Offset(base + 1))} >= {a.producer_id for a in around}
    index.cut(Offset(0))
    assert not index.covers(ProducerId(producer), Offset(base))


@pytest.mark.parametrize("size", [0, 5, 12, 13])
def test_a_row_of_another_size_is_damage(size: int) -> None:
    key, _ = aborted_row(PID, Aborted(Offset(5), Offset(1), ProducerId(1)))
    with pytest.raises(DataDamaged):
        parse_aborted_row(key, b"x" * size)


# ----------------------------------------------------------------------------------------------- the producers
def fold(*batches: bytes) -> ProducerTable:
    log = LogStore(FakeHarness().disk).create(PID, Offset(0))
    for data in batches:
        append(log, data)
    return log.producers


def test_a_marker_of_a_newer_epoch_fences_and_asks_for_sequence_0() -> None:
    table = fold(batch(1, 1), marker(1, is_commit=False, epoch=1))
    with pytest.raises(SmqError) as fenced:
        table.check(parse_header(batch(1, 1, 0, 1)), Offset(0))
    assert fenced.value.code is ErrorCode.PRODUCER_FENCED
    with pytest.raises(SmqError) as gap:
        table.check(parse_header(batch(1, 1, 1, 1)), Offset(0))
    assert gap.value.code is ErrorCode.OUT_OF_ORDER_SEQUENCE
    assert table.next_sequence(parse_header(batch(1, 1, 1, 0)), Offset(0)) == 0
    assert table.check(parse_header(batch(1, 1, 1, 0)), Offset(0)) is None
    (found,) = table.entries(Offset(0))
    assert (found.producer_epoch, found.last_seq, found.open_from) == (1, -1, -1)
    assert found.ts_ns == 2, "of the marker, as Kafka shows it"


def test_a_marker_of_the_same_epoch_keeps_the_sequence_and_the_duplicates() -> None:
    table = fold(batch(2, 1), marker(1, is_commit=True))
    known = table.check(parse_header(batch(2, 1)), Offset(0))
    assert known is not None
    assert known.base_offset == 0
    assert table.check(parse_header(batch(1, 1, 0, 2)), Offset(0)) is None


def test_a_producer_with_an_open_transaction_is_never_forgotten() -> None:
    table = fold(batch(1, 1), batch(1, 2), marker(2, is_commit=True), batch(1, 3, is_transactional=False))
    table.forget_before(Offset(100))
    assert [p.producer_id for p in table.entries(Offset(100))] == [1]
    assert table.check(parse_header(batch(1, 1, 0, 1)), Offset(100)) is None
    with pytest.raises(SmqError):
        table.check(parse_header(batch(1, 1, 0, 2)), Offset(100))


def test_a_snapshot_keeps_what_is_open_and_what_has_just_ended() -> None:
    table = fold(batch(1, 1), batch(1, 2), batch(1, 3), marker(2, is_commit=True), marker(3, is_commit=False, epoch=1))
    restored = ProducerTable.restore(table.snapshot())
    assert restored == table
    assert (restored.open_from(1), restored.open_from(2), restored.open_from(3)) == (0, None, None)
    assert not restored.has_ended(1, Offset(9))
    assert [restored.has_ended(p, Offset(4)) for p in (2, 3)] == [True, False]
    for end in (3, 4, 5):
        assert restored.stable_end(Offset(end)) == 0


def test_a_marker_without_a_transaction_changes_nothing() -> None:
    data = marker(1, is_commit=False)
    log = LogStore(FakeHarness().disk).create(PID, Offset(0))
    append(log, data)
    assert (len(log.aborted), len(log.producers), LogState(Offset(0)).aborted) == (0, 0, 0)


def test_a_producer_forgotten_between_checkpoints_stays_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint with its open transaction would be the last word about it otherwise, and its control batch lies
    below the next one."""
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 4)
    monkeypatch.setattr(log_state, "SMALL_TABLE_BYTES", 0)
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    append(log, batch(1, 8))  # stays open, so that the table has an entry which does not change
    append(log, batch(1, 1_000, is_transactional=False))
    append(log, batch(1, 1_001, is_transactional=False))
    append(log, batch(1, 7))  # a checkpoint with an open transaction of 7 follows
    _, end = append(log, marker(7, is_commit=True))
    log.forget_producers(Offset(end))
    for sequence in range(3):  # and a checkpoint without 7
        append(log, batch(1, 2_000, sequence=sequence, is_transactional=False))
    append(log, marker(8, is_commit=True))
    harness.settle()
    log = reopened(harness)
    log.forget_producers(Offset(end))
    assert log.producers.open_from(ProducerId(7)) is None
    assert log.producers.stable_end(log.appended_end) == log.appended_end
