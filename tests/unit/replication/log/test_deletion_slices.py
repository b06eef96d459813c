"""Large deletions go in slices, are visible immediately, and continue after a restart."""

from functools import partial

import pytest

from smq.raft_state.ids import Offset
from smq.raft_state.topic_config import Retention
from smq.replication.log import deletion, partition_log
from smq.replication.log.reader import LogReader, Retained
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import batch_key
from smq.replication.ports import Delete, Op, Table
from tests.unit.replication.log.support import ALL, OTHER, PID, append, flipped, log_of, reopened, replace, rows
from tests.unit.replication.storage.support import FakeHarness, Harness


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (partition_log, deletion):
        monkeypatch.setattr(module, "SLICE_BATCHES", 3)
        monkeypatch.setattr(module, "BLIND_BATCHES", 2)


ALL_KEYS = b"\xff" * 40


def test_a_dropped_partition_is_deleted_in_slices_and_leaves_nothing(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log, other = store.create(PID, Offset(0)), store.create(OTHER, Offset(0))
    append(other, 2)
    harness.settle()
    before = rows(harness)
    for _ in range(10):
        append(log, 2)
    harness.settle()
    store.drop(log)
    harness.settle()
    assert rows(harness) == before - 2  # the two checkpoint rows of the dropped one
    assert harness.disk.scan_keys(Table.META, b"dropped/", b"dropped0") == []
    assert [v.end for v in other.read(Offset(0), ALL, 1 << 20)] == [2]


def test_a_partition_dropped_before_its_first_batches_are_durable_leaves_nothing(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log = store.create(PID, Offset(0))
    for _ in range(2):
        append(log, 2)
    store.drop(log)
    harness.settle()
    assert rows(harness) == 0


def test_an_interrupted_drop_continues_after_a_restart_and_the_partition_stays_gone(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log = log_of(harness, 10, 2, store=store)
    store.drop(log)
    store._dropped._left.clear()  # the process dies here
    harness.settle()
    assert 0 < len(harness.disk.scan_keys(Table.BATCHES, b"", ALL_KEYS)) < 10
    again = LogStore(harness.reopen())
    assert again.open_all() == {}
    harness.settle()
    assert rows(harness) == 0
    assert harness.disk.scan_keys(Table.META, b"dropped/", b"dropped0") == []


def test_a_dropped_partition_with_damaged_index_rows_is_deleted_all_the_same(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log = log_of(harness, 7, 2, store=store)
    for key, row in harness.disk.scan(Table.TIMES, PID, PID + b"\x01")[2:4]:
        replace(harness, Table.TIMES, key, flipped(row, 77))
    store.drop(log)
    harness.settle()
    assert rows(harness) == 0


def test_a_partition_created_again_during_the_deletion_of_the_old_one_keeps_its_records(harness: Harness) -> None:
    store = LogStore(harness.disk)
    log = log_of(harness, 10, 2, store=store)
    store.drop(log)
    log = store.create(PID, Offset(5))
    stored = [append(log, 2) for _ in range(4)]
    harness.settle()
    assert log.read(Offset(5), ALL, 1 << 20) == stored
    recovered = reopened(harness)
    assert recovered.read(Offset(5), ALL, 1 << 20) == stored


def test_an_interrupted_move_of_log_start_continues_after_a_restart() -> None:
    harness = FakeHarness()
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = [append(log, 2) for _ in range(20)]
    harness.settle()
    log.advance_log_start(Offset(30))
    log.is_dropped = True  # no slice follows the first: the process dies
    harness.settle()
    assert len(harness.disk.scan_keys(Table.BATCHES, b"", ALL_KEYS)) == 17
    recovered = reopened(harness)
    assert recovered.read(Offset(30), ALL, 1 << 20) == stored[15:]
    assert recovered.read(Offset(29), ALL, 1 << 20) == []
    harness.settle()
    assert len(harness.disk.scan_keys(Table.BATCHES, b"", ALL_KEYS)) == 17, "the replica says what may go"
    recovered.keep_from(Offset(30))
    harness.settle()
    assert len(harness.disk.scan_keys(Table.BATCHES, b"", ALL_KEYS)) == 5
    assert append(recovered).base == 40


def test_no_slice_deletes_more_than_its_share_of_batches() -> None:
    harness = FakeHarness()
    log = log_of(harness, 20, 2)
    seen: list[Delete] = []
    submit = harness.fake.submit

    def spy(ops: list[Op], done: object = None) -> int:
        seen.extend(op for op in ops if isinstance(op, Delete) and op.table is Table.BATCHES)
        return submit(ops, done)  # type: ignore[arg-type]  # passed on as it is

    harness.fake.submit = spy  # type: ignore[method-assign, assignment]  # looked at on its way
    log.advance_log_start(Offset(30))
    harness.settle()
    ends = [int.from_bytes(op.stop[-8:], "big") for op in seen]
    assert ends == [6, 12, 18, 24, 30]


def test_a_log_cut_past_lost_batches_below_its_start_is_empty_and_asks_for_producers(harness: Harness) -> None:
    """It must not end below its start: no replica could send it anything there. The disk keeps all until the others
    know of the damage (rule 23)."""
    log = log_of(harness, 20, 2, producer=1)
    log = reopened(harness)  # nothing of it is in memory
    for table in (Table.BATCHES, Table.TIMES):
        key, value = harness.disk.scan(table, PID, PID + b"\xff" * 20)[10]
        replace(harness, table, key, flipped(value, 77))
    log.keep_from(Offset(31))
    log.advance_log_start(Offset(31))
    assert not log.truncate(Offset(36))
    assert (log.log_start, log.appended_end, log.has_producers) == (31, 31, False)
    harness.settle()
    again = reopened(harness)
    assert (again.log_start, again.appended_end, again.has_producers) == (31, 31, False)
    assert again.tail_damage is not None
    again.truncate(again.appended_end)
    harness.settle()
    assert rows(harness) == 2
    again = reopened(harness)
    assert (again.log_start, again.appended_end, again.has_producers) == (31, 31, False)


def test_a_look_up_by_create_time_skips_batches_that_wait_to_be_deleted(harness: Harness) -> None:
    """Its rows name the largest time so far: later batches with an older time have no row."""
    log = LogStore(harness.disk).create(PID, Offset(0))
    for i in range(20):
        append(log, 2, created_ms=10 if i < 3 else 100 if i < 10 else 50)  # the first slice leaves the late ones
    harness.settle()
    log.advance_log_start(Offset(21))
    found = log.find_timestamp(40)
    assert found is not None
    assert (found.base, found.end) == (20, 22)
    assert log.find_timestamp(60) is None


def test_a_log_cut_below_its_start_keeps_the_producers_of_batches_that_wait_to_be_deleted(harness: Harness) -> None:
    log = log_of(harness, 20, 2, producer=1)
    log.advance_log_start(Offset(30))
    at_start = log.producers_at(Offset(30))
    log.truncate(Offset(20))
    assert (log.log_start, log.appended_end, log.has_producers) == (30, 30, True)
    assert log.producers.snapshot() == at_start
    harness.settle()
    again = reopened(harness)
    assert (again.appended_end, again.producers.snapshot()) == (30, at_start)


@pytest.mark.parametrize("damaged", range(10))
def test_a_damaged_index_row_of_a_deleted_batch_keeps_no_batch_on_disk(harness: Harness, damaged: int) -> None:
    log = log_of(harness, 10, 2, tail_bytes_kept=0)
    key, row = harness.disk.scan(Table.TIMES, PID, PID + b"\x01", limit=10)[damaged]
    replace(harness, Table.TIMES, key, flipped(row, 60))
    log.advance_log_start(Offset(14))
    harness.settle()
    assert len(harness.disk.scan_keys(Table.BATCHES, b"", ALL_KEYS)) == 3
    again = reopened(harness)
    assert [v.base for v in again.read(Offset(14), ALL, 1 << 20)] == [14, 16, 18]


def _retained_while_trimmed(seed: int, start: int, moved_to: int) -> int | None:
    """Where a look-up finds that the log of 20 batches starts once only the bytes of 5 are kept, if the log start moves
    meanwhile. None: the look-up is to be made again."""
    harness = FakeHarness(seed)
    log = LogStore(harness.disk, tail_bytes_kept=0).create(PID, Offset(0))
    for _ in range(20):
        append(log, 2, created_ms=10)
    limits = Retention(bytes=log.size_bytes // 4)
    harness.settle()
    log.advance_log_start(Offset(2))
    harness.settle()  # what has gone was created no earlier than what is left, so a trim leaves no look-up void
    log.advance_log_start(Offset(start))
    found: list[object] = []
    find = partial(LogReader.retained_start, end=Offset(40), stop=Offset(40), limits=limits, now_ms=0)
    log.look_up(find, found.append)
    log.advance_log_start(Offset(moved_to))
    harness.settle()
    (answer,) = found
    assert answer is None or isinstance(answer, Retained)
    return answer.start if answer is not None else None


@pytest.mark.parametrize("checkpoint_batches", [4, 1024])
def test_what_bytes_retain_is_not_less_if_a_trim_overtakes_the_look_up(
    checkpoint_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", checkpoint_batches)
    assert {_retained_while_trimmed(seed, 2, 12) for seed in range(40)} == {None, 30}
    assert {_retained_while_trimmed(seed, 20, 20) for seed in range(40)} == {30}, "below the log start none counts"


def test_a_batch_that_is_damaged_at_the_log_start_may_go_by_bytes(harness: Harness) -> None:
    """Only index rows are read, so no repair has to come first: there may be no other replica."""
    log = log_of(harness, 20, 2, tail_bytes_kept=0)
    ((key, value),) = harness.disk.scan(Table.BATCHES, b"", batch_key(PID, 1))
    replace(harness, Table.BATCHES, key, flipped(value, 8 * len(value) - 1))
    limits = Retention(bytes=log.size_bytes // 4)
    assert log.retained_start(Offset(40), Offset(40), limits, 0).start == 30
