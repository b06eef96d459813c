"""Logs of which rows are missing, not damaged: no CRC fails, and yet they have held more."""

import pytest

from smq.raft_state.ids import Offset
from smq.replication.log.producers import ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import TIME_APPEND, batch_key, times_range
from smq.replication.ports import Delete, Put, Table
from tests.unit.replication.log.support import PID, append, log_of, lose_batches, lose_row, reopened
from tests.unit.replication.storage.support import FakeHarness, Harness


def test_a_log_whose_last_batches_are_missing_with_some_of_their_rows_has_a_damaged_tail(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(5):
        append(log)
    harness.write(Delete(Table.BATCHES, batch_key(PID, 2), batch_key(PID, 5)))
    lose_row(harness, 3)
    log = reopened(harness)
    assert log.appended_end == 3, "the row of the batch at 2 is there"
    assert "offset 3" in str(log.tail_damage)


def test_a_damaged_index_row_after_the_last_batch_names_none(harness: Harness) -> None:
    log = log_of(harness, 2)
    start, stop = times_range(PID, TIME_APPEND)
    row, value = harness.disk.scan(Table.TIMES, start, stop, reverse=True, limit=1)[0]
    harness.write(Put(Table.TIMES, row[:-9] + b"\xff" + row[-8:], value))
    log = reopened(harness)
    assert (log.appended_end, log.tail_damage, log.damaged_batches) == (2, None, set())


def test_nothing_of_a_lost_log_is_written_before_it_is_cut(harness: Harness) -> None:
    log = LogStore(harness.disk).lost(PID, Offset(7))
    harness.settle()
    assert LogStore(harness.reopen()).open_all() == {}
    assert (log.appended_end, log.has_producers, log.tail_damage is None) == (7, False, False)
    log = LogStore(harness.disk).lost(PID, Offset(7))
    log.truncate(log.appended_end)
    log = reopened(harness)
    assert (log.log_start, log.appended_end, log.has_producers, log.tail_damage) == (7, 7, False, None)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("cut", "end"), [(5, 4), (4, 4), (3, 2), (2, 2), (1, 0)])
def test_a_cut_at_missing_batches_keeps_what_is_before_them(
    harness: Harness, cut: int, end: int, *, is_known: bool
) -> None:
    """Batches of two records, at 0, 2 and 4; those from 2 on are missing. Only a restart finds that out."""
    log = log_of(harness, 3, 2)
    log.release_tail()
    lose_batches(harness, 2, 4)
    if is_known:
        log = reopened(harness)
        assert log.damaged_batches == {2, 4}
    assert log.truncate(Offset(cut))
    harness.settle()
    assert (log.appended_end, log.tail_damage) == (end, None)
    assert reopened(harness).appended_end == end


def test_a_cut_inside_a_batch_that_nothing_describes_says_that_there_was_more(harness: Harness) -> None:
    log = log_of(harness, 3, 2)
    log.release_tail()
    lose_batches(harness, 2)
    lose_row(harness, 2)
    assert not log.truncate(Offset(3))
    assert log.appended_end == 2
    assert "both the batch and its index row" in str(log.tail_damage)


def test_the_producers_before_a_missing_batch_include_those_of_the_batch_before_it(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for producer_id in range(3):
        append(log, 2, producer=(producer_id, 0, 0))
    harness.settle()
    log.release_tail()
    lose_batches(harness, 2)
    found = ProducerTable.restore(log.producers_at(Offset(3)))
    assert len(found) == 1, "that of the batch at 0"


def test_the_only_batch_is_repaired_although_it_is_missing_and_holds_the_log_start(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = append(log, 3)
    harness.settle()
    log.advance_log_start(Offset(1))
    harness.settle()
    lose_batches(harness, 0)
    log = reopened(harness)
    assert (log.appended_end, log.damaged_batches) == (3, {0})
    assert log.replace(stored, None, lambda: None)
    harness.settle()
    assert log.damaged_batches == set()
    assert [batch.base for batch in log.read(Offset(1), Offset(3), 1000)] == [0]


@pytest.mark.parametrize("log_start", [2, 3])
def test_a_cut_after_a_first_batch_that_nothing_describes_says_so(harness: Harness, log_start: int) -> None:
    """Batches of two records from 0 on. That at 2 is missing with its row; the log start is its base, or inside it."""
    log = log_of(harness, 4, 2)
    log.release_tail()
    log.keep_from(Offset(log_start))
    log.advance_log_start(Offset(log_start))
    harness.settle()
    lose_batches(harness, 2)
    lose_row(harness, 2)
    assert not log.truncate(Offset(6))
    assert log.tail_damage is not None
    again = reopened(harness)
    assert again.tail_damage is not None, "the disk keeps what is behind the damage"
    assert again.truncate(again.appended_end)
    harness.settle()
    assert reopened(harness).tail_damage is None


def test_a_first_batch_that_holds_the_log_start_is_held_once_it_is_on_the_disk(harness: Harness) -> None:
    other = FakeHarness()
    stored = append(LogStore(other.disk).create(PID, Offset(0)), 3)
    log = LogStore(harness.disk).create(PID, Offset(1))
    log.append_stored([stored], lambda: None)
    assert (log.appended_end, log.holds(Offset(0)), log.holds(Offset(1))) == (3, False, False)
    harness.settle()
    assert (log.durable_end, log.holds(Offset(0)), log.holds(Offset(1))) == (3, True, True)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_cut_to_the_log_start_over_lost_batches_below_it_asks_for_producers(harness: Harness, lost: int) -> None:
    """Both batches below the log start are still there, and one of them with its row is not."""
    log = LogStore(harness.disk).create(PID, Offset(0))
    for producer_id in range(3):
        append(log, 2, producer=(producer_id, 0, 0))
    harness.settle()
    log.release_tail()
    log.keep_from(Offset(0))
    log.advance_log_start(Offset(4))
    lose_batches(harness, lost)
    lose_row(harness, lost)
    assert log.truncate(Offset(4))
    harness.settle()
    assert (log.appended_end, log.has_producers) == (4, False)
    assert not reopened(harness).has_producers
