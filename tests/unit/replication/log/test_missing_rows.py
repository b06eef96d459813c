"""Logs of which rows are missing, not damaged: no CRC fails, and yet they have held more."""

from smq.raft_state.ids import Offset
from smq.replication.log.codec import TIME_APPEND, batch_key, times_range
from smq.replication.log.store import LogStore
from smq.replication.ports import Delete, Put, Table
from tests.unit.replication.log.test_store import PID, append, lose_row
from tests.unit.replication.storage.support import Harness


def test_a_log_whose_last_batches_are_missing_with_some_of_their_rows_has_a_damaged_tail(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(5):
        append(log)
    harness.disk.submit([Delete(Table.BATCHES, batch_key(PID, 2), batch_key(PID, 5))])
    harness.settle()
    lose_row(harness, 3)
    log = LogStore(harness.reopen()).open_all()[PID]
    assert log.appended_end == 3, "the row of the batch at 2 is there"
    assert "offset 3" in str(log.tail_damage)


def test_a_damaged_index_row_after_the_last_batch_names_none(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(2):
        append(log)
    harness.settle()
    start, stop = times_range(PID, TIME_APPEND)
    row, value = harness.disk.scan(Table.TIMES, start, stop, reverse=True, limit=1)[0]
    harness.disk.submit([Put(Table.TIMES, row[:-9] + b"\xff" + row[-8:], value)])
    harness.settle()
    log = LogStore(harness.reopen()).open_all()[PID]
    assert (log.appended_end, log.tail_damage, log.damaged_batches) == (2, None, set())


def test_nothing_of_a_lost_log_is_written_before_it_is_cut(harness: Harness) -> None:
    log = LogStore(harness.disk).lost(PID, Offset(7))
    harness.settle()
    assert LogStore(harness.reopen()).open_all() == {}
    assert (log.appended_end, log.has_producers, log.tail_damage is None) == (7, False, False)
    log = LogStore(harness.disk).lost(PID, Offset(7))
    log.truncate(log.appended_end)
    log = LogStore(harness.reopen()).open_all()[PID]
    assert (log.log_start, log.appended_end, log.has_producers, log.tail_damage) == (7, 7, False, None)
