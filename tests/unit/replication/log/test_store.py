"""Logs by scenario: recovery, damage, missing rows, truncation while the disk lags behind, deletion from the front."""

from collections.abc import Callable
from typing import cast

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import NewRecord, encode_batch, parse_header, validate_produced
from smq.replication.log import partition_log
from smq.replication.log.lineage import EpochRun
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import (
    TIME_APPEND,
    BatchDamaged,
    StoredValue,
    batch_key,
    build_value,
    parse_value,
    times_range,
)
from smq.replication.node_config import TAIL_BYTES_KEPT
from smq.replication.ports import DataDamaged, Delete, Put, Table
from tests.unit.replication.log.support import (
    ALL,
    OTHER,
    PID,
    append,
    flip_batch,
    flipped,
    log_of,
    lose_batches,
    lose_row,
    nothing,
    reopened,
    replace,
    rows,
)
from tests.unit.replication.storage.support import FakeHarness, Harness, make_batch


# ---------------------------------------------------------------------------------------------------------------- store
# Logs by scenario: recovery, damage, truncation while the disk lags behind, deletion from the front.
# ---------------------------------------------------------------------------------------------- recovery
def test_after_150_records_and_a_restart_the_next_offset_is_150(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 100)
    log = log_of(harness, 150)
    log = reopened(harness)
    assert (log.appended_end, log.durable_end) == (150, 150)
    assert append(log).base == 150


def test_50_records_without_a_checkpoint_are_recovered(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(50):
        append(log)
    assert reopened(harness).appended_end == 50


def test_recovery_reads_only_batches_after_the_last_checkpoint(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 10)
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log) for _ in range(25)]
    harness.settle()
    flip_batch(harness, stored[19], 300)
    log = reopened(harness)
    assert log.tail_damage is None  # offset 19 lies before the checkpoint at 20 and was not read
    with pytest.raises(DataDamaged, match="offset 19"):
        log.read(Offset(19), ALL, 1)


def test_partitions_recover_independently(harness: Harness) -> None:
    store = LogStore(harness.disk)
    a, b = store.create(PID, Offset(0)), store.create(OTHER, Offset(1 << 41))
    append(a, 3)
    append(b, 4)
    append(a, 2)
    logs = LogStore(harness.reopen()).open_all()
    assert {pid: log.appended_end for pid, log in logs.items()} == {PID: 5, OTHER: (1 << 41) + 4}


def test_an_empty_disk_has_no_partitions(harness: Harness) -> None:
    assert LogStore(harness.disk).open_all() == {}


# ------------------------------------------------------------------------------------------------ bytes
def test_the_stored_value_is_the_object_given_to_the_disk_and_holds_the_producers_bytes() -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(7))
    data = encode_batch([NewRecord(b"k", b"v", 5, [("h", None)])], codec="zstd")
    stored = log.append(data, validate_produced(data), epoch=Epoch(3), ts_ns=TsNs(9), done=nothing)
    harness.settle()
    assert harness.disk.get(Table.BATCHES, batch_key(PID, 7)) is stored.value
    header = validate_produced(stored.batch)
    assert (header.base_offset, header.epoch) == (7, 3)
    assert stored.batch[16:] == data[16:]


def test_any_flipped_bit_of_a_stored_batch_is_detected() -> None:
    data = make_batch(2)
    stored = parse_value(PID, build_value(PID, data, parse_header(data), Offset(5), Epoch(1), TsNs(7)))
    for bit in range(len(stored.value) * 8):
        with pytest.raises(DataDamaged):
            parse_value(PID, flipped(stored.value, bit))


def test_damage_names_partition_and_offset_and_is_never_served(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 5, payload=bytes(TAIL_BYTES_KEPT // 2)) for _ in range(4)]
    harness.settle()
    flip_batch(harness, stored[1], 1000)
    assert log.read(Offset(0), ALL, 1 << 30) == [stored[0]], "batches before it are served"
    with pytest.raises(BatchDamaged, match=r"partition 000102030405060708090a0b0c0d0e0f-\d+, offset 5") as raised:
        log.read(Offset(7), ALL, 1 << 30)
    assert (raised.value.pid, raised.value.offset) == (PID, 5)


def test_a_batch_under_the_wrong_key_is_damage(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    value = append(log).value
    harness.settle()
    append(log)
    harness.settle()
    replace(harness, Table.BATCHES, batch_key(PID, 1), value)
    lose_row(harness, 1)
    log = reopened(harness)
    assert log.appended_end == 1
    assert "offset 1" in str(log.tail_damage)


def test_a_missing_batch_is_damage(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(5):
        append(log)
    harness.write(Delete(Table.BATCHES, batch_key(PID, 2), batch_key(PID, 3)))
    lose_row(harness, 2)
    log = reopened(harness)
    assert log.appended_end == 2
    assert "offset 2" in str(log.tail_damage)


def test_a_log_with_a_damaged_tail_takes_no_append_until_it_is_cut_there(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 2) for _ in range(5)]
    harness.settle()
    flip_batch(harness, stored[2], 500)
    lose_row(harness, 4)
    log = reopened(harness)
    assert (log.appended_end, log.durable_end) == (4, 4)
    with pytest.raises(DataDamaged, match="offset 4"):
        append(log)
    log.truncate(log.appended_end)
    assert log.tail_damage is None
    for value in stored[2:4]:  # again, from another replica
        log.append_stored([value], nothing)
    log = reopened(harness)
    assert (log.appended_end, log.tail_damage) == (8, None)  # the batch at 8, after the damage, was cut too
    assert log.read(Offset(0), ALL, 1 << 30) == stored[:4]


def test_a_damaged_first_batch_leaves_an_empty_log_that_can_be_repaired(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 4) for _ in range(3)]
    log.advance_log_start(Offset(6))
    harness.settle()
    flip_batch(harness, stored[1], 500)
    lose_row(harness, 4)
    log = reopened(harness)
    assert (log.log_start, log.appended_end) == (6, 6)
    assert log.tail_damage is not None
    log.truncate(log.appended_end)
    log.append_stored([stored[1]], nothing)
    log = reopened(harness)
    assert (log.log_start, log.appended_end, log.tail_damage) == (6, 8, None)


@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
@pytest.mark.parametrize("which", [0, 2, 4, 3, 5], ids=["first", "middle", "last", "two in a row", "the last two"])
def test_a_damaged_batch_after_the_checkpoint_is_known_by_its_row_and_can_be_repaired(
    harness: Harness, which: int, is_missing: bool
) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 2, producer=(1, 0, 2 * i)) for i in range(5)]
    harness.settle()
    damaged = {3: stored[2:4], 5: stored[3:]}.get(which) or [stored[which]]
    for value in damaged:
        if is_missing:
            harness.disk.submit([Delete(Table.BATCHES, batch_key(PID, value.base), batch_key(PID, value.end))])
        else:
            replace(harness, Table.BATCHES, batch_key(PID, value.base), flipped(value.value, 700))
    recovered = reopened(harness)
    assert recovered.tail_damage is None
    assert (recovered.appended_end, recovered.damaged_batches) == (10, {value.base for value in damaged})
    assert (recovered.runs, recovered.producers, recovered.last_ts_ns) == (log.runs, log.producers, log.last_ts_ns)
    for value in damaged:
        assert recovered.replace(value, None, nothing)
    harness.settle()
    assert recovered.damaged_batches == set()
    assert recovered.read(Offset(0), ALL, 1 << 30) == stored


def test_only_the_same_batch_replaces_a_damaged_one(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 2) for _ in range(3)]
    harness.settle()
    flip_batch(harness, stored[1], 700)
    store = LogStore(harness.reopen())
    log = store.open_all()[PID]
    other = make_batch(2)
    wrong = [
        # of another epoch
        parse_value(PID, build_value(PID, other, parse_header(other), Offset(2), Epoch(9), stored[1].ts_ns)),
        parse_value(PID, build_value(PID, other, parse_header(other), Offset(6), Epoch(1), TsNs(99))),  # beyond the end
    ]
    assert [log.replace(value, None, nothing) for value in wrong] == [False, False]
    log.truncate(Offset(2))
    assert not log.replace(stored[1], None, nothing), "it is not part of the log any more"
    new = append(log, 2)
    assert not log.replace(new, None, nothing), "its own write is in flight"
    harness.settle()
    assert log.replace(new, None, nothing)
    store.drop(log)
    assert not log.replace(new, None, nothing), "nothing is put into a log that is being deleted"


def test_a_damaged_checkpoint_only_means_more_to_read(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 4)
    log = log_of(harness, 10, producer=1)
    key, row = harness.disk.scan(Table.CHECKPOINTS, PID, PID + b"\xff", reverse=True, limit=1)[0]
    replace(harness, Table.CHECKPOINTS, key, flipped(row, 77))
    recovered = reopened(harness)
    assert (recovered.appended_end, recovered.tail_damage) == (10, None)
    assert recovered.producers == log.producers
    assert recovered.runs == [EpochRun(Epoch(1), Offset(0), Offset(10))]


@pytest.mark.parametrize("which", [0, 1], ids=["partition row", "first checkpoint"])
def test_without_its_first_rows_a_log_counts_as_empty_until_repaired(harness: Harness, which: int) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    append(log, 3)
    harness.settle()
    key, row = harness.disk.scan(Table.CHECKPOINTS, PID, PID + b"\xff")[which]
    replace(harness, Table.CHECKPOINTS, key, flipped(row, 9))
    log = reopened(harness)
    assert (log.appended_end, log.read(Offset(0), ALL, 100)) == (0, [])
    with pytest.raises(DataDamaged, match="checkpoints"):
        append(log)
    log.truncate(Offset(0))
    append(log, 2)
    log = reopened(harness)
    assert (log.appended_end, log.tail_damage) == (2, None)


def test_a_damaged_index_row_is_detected(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    append(log)
    harness.settle()
    key, row = harness.disk.scan(Table.TIMES, PID, PID + b"\x01", limit=1)[0]
    replace(harness, Table.TIMES, key, flipped(row, 60))
    with pytest.raises(DataDamaged, match="table times"):
        log.find_ts_ns(0)


# ------------------------------------------------------------------------------------------- truncation
def test_truncation_withdraws_pending_appends_and_never_reports_them() -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    data = make_batch(2)
    done: list[int] = []
    for i in range(3):
        log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(2 * i + 1), done=lambda i=i: done.append(i))  # type: ignore[misc]  # default binds i
    generation = log.generation
    log.truncate(Offset(3))  # inside the second batch: it goes whole
    assert (log.appended_end, log.generation) == (2, generation + 1)
    log.append(data, parse_header(data), epoch=Epoch(2), ts_ns=TsNs(9), done=lambda: done.append(9))
    harness.settle()
    assert done == [0, 9]
    assert log.durable_end == 4
    assert log.runs == [EpochRun(Epoch(1), Offset(0), Offset(2)), EpochRun(Epoch(2), Offset(2), Offset(4))]


def test_a_checkpoint_of_the_truncated_log_is_not_used_for_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(3):
        append(log)
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 1)
    append(log, producer=(1, 0, 0))  # with it a checkpoint at 4, which knows producer 1
    harness.settle()
    assert len(harness.disk.scan_keys(Table.CHECKPOINTS, PID + b"\x01", PID + b"\x02")) == 2
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 100)
    log.truncate(Offset(2))  # not on disk yet: the checkpoint at 4 is still there
    for _ in range(4):
        append(log, epoch=2)
    log.truncate(Offset(5))
    assert len(log.producers) == 0
    assert log.runs == [EpochRun(Epoch(1), Offset(0), Offset(2)), EpochRun(Epoch(2), Offset(2), Offset(5))]


def test_largest_create_time_is_that_of_the_remaining_records_below_the_end(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    assert log.find_timestamp(log.create_ms_max(ALL)) is None
    for created in (100, 50, 60, 40, 120):
        append(log, created_ms=created)
    harness.settle()
    assert [log.create_ms_max(Offset(end)) for end in (1, 3, 4, 5)] == [100, 100, 100, 120]
    log.advance_log_start(Offset(1))
    harness.settle()
    assert [log.create_ms_max(Offset(end)) for end in (2, 3, 4, 5)] == [50, 60, 60, 120]
    log.advance_log_start(Offset(5))
    assert log.find_timestamp(log.create_ms_max(ALL)) is None


def test_a_log_start_beyond_durable_end_counts_as_durable_up_to_there() -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    for _ in range(3):
        append(log, 2)
    log.advance_log_start(Offset(3))
    assert (log.durable_end, log.appended_end) == (2, 6)
    assert [s.base for s in log.read(Offset(3), ALL, 1 << 20)] == [2, 4]
    harness.settle()
    assert log.durable_end == 6


# ------------------------------------------------------------------------------------- refusals and bounds
def test_appends_that_do_not_fit_are_refused(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(10))

    def stored(base: int, count: int, ts_ns: int) -> StoredValue:
        data = make_batch(count)
        return parse_value(PID, build_value(PID, data, parse_header(data), Offset(base), Epoch(1), TsNs(ts_ns)))

    for base in (5, 7, 11):  # 7..10 ends at log_start and does not contain it
        with pytest.raises(ValueError, match="does not contain"):
            log.append_stored([stored(base, 3, 5)], nothing)
    log.append_stored([stored(9, 3, 5)], nothing)
    for base in (11, 13):
        with pytest.raises(ValueError, match="does not follow"):
            log.append_stored([stored(base, 3, 9)], nothing)
    with pytest.raises(ValueError, match="does not exceed"):
        log.append_stored([stored(12, 3, 5)], nothing)
    data = make_batch()
    with pytest.raises(ValueError, match="does not exceed"):
        log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(5), done=nothing)
    harness.settle()
    assert [s.base for s in log.read(Offset(10), ALL, 1 << 20)] == [9]


def test_a_dropped_partition_leaves_nothing_and_takes_no_append(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log, other = store.create(PID, Offset(0)), store.create(OTHER, Offset(0))
    done: list[int] = []
    data = make_batch()
    log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=TsNs(1), done=lambda: done.append(1))
    append(other)
    store.drop(log)
    with pytest.raises(ValueError, match="dropped"):
        append(log)
    harness.settle()
    assert done == []
    store = LogStore(harness.reopen())
    assert set(store.open_all()) == {OTHER}
    assert store.create(PID, Offset(3)).appended_end == 3
    harness.settle()
    store.drop(PID)
    store.drop(OTHER)
    harness.settle()
    assert rows(harness) == 0


def test_durable_batches_do_not_stay_in_memory_beyond_the_budget(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log = store.create(PID, Offset(0))
    for _ in range(40):
        append(log, payload=bytes(TAIL_BYTES_KEPT // 8))
    harness.settle()
    held = sum(len(s.value) for s in cast("list[StoredValue]", log._tail))
    assert 0 < held <= TAIL_BYTES_KEPT
    assert len(log.read(Offset(0), ALL, 1 << 30)) + len(log.read(log._tail[0].base, ALL, 1 << 30)) >= 40


def test_retention_leaves_no_more_rows_than_batches_need(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 5)
    log = LogStore(harness.disk).create(PID, Offset(0))
    for i in range(200):
        append(log, created_ms=i)
        log.advance_log_start(Offset(max(0, i - 9)))
    harness.settle()
    assert rows(harness) <= 3 * 11 + 5  # batches, two kinds of times, and a few checkpoints


def test_a_batch_that_contains_log_start_is_found_by_time_before_it_is_durable_again() -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(10))
    data = make_batch(3, created_ms=50)
    stored = parse_value(PID, build_value(PID, data, parse_header(data), Offset(9), Epoch(1), TsNs(5)))
    log.append_stored([stored], nothing)
    harness.settle()
    log.truncate(Offset(11))
    log.append_stored([stored], nothing)
    for _ in range(20):
        for found in (log.find_timestamp(50), log.find_ts_ns(5)):
            assert found is not None
            assert (found.base, found.end) == (9, 12)
        harness.clock.step()
    assert log.durable_end == 12


def test_a_checkpoint_whose_key_belongs_to_no_partition_is_deleted(harness: Harness) -> None:
    append(LogStore(harness.disk).create(PID, Offset(0)), 3)
    harness.settle()
    replace(harness, Table.CHECKPOINTS, PID[:7], b"what a damaged page makes of a row")
    logs = LogStore(harness.reopen()).open_all()
    harness.settle()
    assert [log.appended_end for log in logs.values()] == [3]
    assert harness.disk.get(Table.CHECKPOINTS, PID[:7]) is None


# -------------------------------------------------------------------------------------- reads off the loop
def durable_log(harness: FakeHarness) -> PartitionLog:
    return log_of(harness, 3, payload=b"old", tail_bytes_kept=0)


def slow_read(harness: FakeHarness, log: PartitionLog, offset: int) -> list[object]:
    """A read that takes place after everything that is submitted meanwhile."""
    harness.disk.stall_reads(10_000)
    answers: list[object] = []
    assert log.read_memory(Offset(offset), ALL, 1 << 20) is None
    assert log.read_later(Offset(offset), ALL, 1 << 20, answers.append)
    return answers


def test_a_slow_read_finds_what_was_durable_when_it_began() -> None:
    harness = FakeHarness()
    log = durable_log(harness)
    before = log.read(Offset(0), ALL, 1 << 20)
    answers = slow_read(harness, log, 1)
    append(log, payload=b"new")
    harness.settle()
    assert answers == [before[1:]]


def written_again(log: PartitionLog) -> None:
    log.truncate(Offset(1))
    append(log, payload=b"new", epoch=2)


@pytest.mark.parametrize(
    "change",
    [written_again, lambda log: log.advance_log_start(Offset(2)), PartitionLog.drop],
    ids=["written again", "below a log start that has moved", "dropped"],
)
def test_a_slow_read_of_what_has_changed_meanwhile_is_no_damage_and_looks_again(
    change: Callable[[PartitionLog], None],
) -> None:
    harness = FakeHarness()
    log = durable_log(harness)
    answers = slow_read(harness, log, 1)
    change(log)
    harness.settle()
    assert answers == [None]


def test_a_slow_read_of_an_unreadable_batch_is_its_damage_and_ends_before_a_later_one() -> None:
    harness = FakeHarness()
    log = durable_log(harness)
    rows = harness.disk.image.tables[Table.BATCHES]
    rows[rows.keys()[1]] = b""
    first, second = slow_read(harness, log, 0), slow_read(harness, log, 1)
    harness.settle()
    assert [s.base for s in first[0]] == [0]  # type: ignore[attr-defined]  # a list of batches
    assert isinstance(second[0], BatchDamaged)
    assert second[0].offset == 1


# --------------------------------------------------------------------------------------------------------- missing rows
# Logs of which rows are missing, not damaged: no CRC fails, and yet they have held more.
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


# -------------------------------------------------------------------------------------------------------- append stored
# A follower's append: all batches of a message are one submission, and truncation may leave the first of them.
def test_the_batches_of_one_submission_that_a_cut_leaves_become_durable(harness: Harness) -> None:
    leader = LogStore(harness.disk).create(PID, Offset(0))
    values = [append(leader, 2) for _ in range(4)]
    leader.truncate(Offset(0))
    reports: list[Offset] = []
    leader.append_stored(values, lambda: reports.append(leader.durable_end))
    leader.truncate(Offset(4))
    assert (leader.appended_end, leader.durable_end) == (4, 0)
    harness.settle()
    assert (leader.durable_end, reports) == (4, [4])
    leader.append_stored(values[2:], lambda: reports.append(leader.durable_end))
    leader.truncate(Offset(4))  # nothing of it is left, so nothing is reported
    harness.settle()
    assert (leader.durable_end, reports) == (4, [4])
    log = reopened(harness)
    assert log.read(Offset(0), ALL, 1 << 30) == values[:2]


def test_batches_that_do_not_follow_one_another_are_refused_as_a_whole(harness: Harness) -> None:
    log = LogStore(harness.disk).create(PID, Offset(0))
    first, second, third = [append(log, 2) for _ in range(3)]
    log.truncate(Offset(0))
    seen = harness.disk.submitted_seq
    for wrong in ([first, third], [first, first], [first, second._replace(ts_ns=first.ts_ns)]):
        with pytest.raises(ValueError, match="does not"):
            log.append_stored(wrong, nothing)
        assert (log.appended_end, harness.disk.submitted_seq) == (0, seen)
    log.append_stored([first, second, third], nothing)
    assert (log.appended_end, harness.disk.submitted_seq) == (6, seen + 1)


# --------------------------------------------------------------------------------------------------------------- budget
# What all logs of a node hold in memory together: which of them give room.
def test_partitions_that_rest_leave_the_memory_to_one_at_work(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 4 * TAIL_BYTES_KEPT
    monkeypatch.setattr(partition_log, "TAIL_BYTES_NODE_MAX", bound)
    store = LogStore(harness.disk)
    resting = [store.create(PartitionId(bytes([number]) * 20), Offset(0)) for number in range(6)]
    for log in resting:
        append(log, payload=bytes(TAIL_BYTES_KEPT - 1_000))
        harness.settle()
    at_work = store.create(PID, Offset(0))
    for _ in range(8):
        append(at_work, payload=bytes(TAIL_BYTES_KEPT // 4))
        harness.settle()
    assert sum(len(s.value) for s in at_work._tail) > TAIL_BYTES_KEPT // 2
    assert store.budget.used == sum(len(s.value) for log in [*resting, at_work] for s in log._tail) <= bound
    assert [bool(log._tail) for log in resting] == [False] * 3 + [True] * 3, "those that have rested longest go first"
    assert len(resting[0].read(Offset(0), ALL, 1 << 30)) == 1
    store.drop(resting[5])
    assert store.budget.used == sum(len(s.value) for log in [*resting[:5], at_work] for s in log._tail)
