"""Tables of many producers on disk: checkpoints with changes only, what they continue, and their damage."""

import random

import pytest

from smq.raft_state.ids import Epoch, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.records import parse_header
from smq.replication.log import log_state as log_state
from smq.replication.log import partition_log
from smq.replication.log.log_state import checkpoint_key
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.ports import Op, Put, Table
from tests.unit.replication.log.support import PID, append, flipped, fold, reopened, replace
from tests.unit.replication.storage.support import FakeHarness, Harness

PRODUCERS = 20_000
KNOWN = TsNs(1)


def large_table(count: int = PRODUCERS) -> bytes:
    table = ProducerTable()
    for p in range(count):
        cached = CachedBatch(Epoch(0), Offset(0), Offset(1), Sequence(0), Sequence(0), KNOWN)
        table.note(ProducerId(p), ProducerEpoch(0), cached)
    return table.snapshot()


def log_with_a_large_table(harness: Harness, count: int = PRODUCERS) -> PartitionLog:
    log = LogStore(harness.disk).create(PID, Offset(100), has_producers=False)
    log.adopt_producers(large_table(count))
    harness.settle()
    return log


class Watched:
    """Counts the bytes of checkpoints that are written."""

    def __init__(self, harness: FakeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        submit = harness.fake.submit

        def watched(ops: list[Op], *done: object) -> None:
            self.sizes += [len(op.value) for op in ops if isinstance(op, Put) and op.table is Table.CHECKPOINTS]
            submit(ops, *done)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(harness.fake, "submit", watched)


def test_a_checkpoint_writes_what_has_changed_and_not_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 50)
    harness = FakeHarness()
    log = log_with_a_large_table(harness)
    watched = Watched(harness, monkeypatch)
    for i in range(1_000):
        append(log, producer=(i % 10, 0, 1 + i // 10))
    harness.settle()
    assert len(watched.sizes) == 20
    assert max(watched.sizes) < 3_000
    assert log.producers.size_bytes > 800_000


def test_deletions_from_the_front_do_not_write_the_whole_table_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = FakeHarness()
    log = log_with_a_large_table(harness)
    for i in range(200):
        append(log, producer=(i % 10, 0, 1 + i // 10))
    harness.settle()
    watched = Watched(harness, monkeypatch)
    for offset in range(110, 300, 10):
        log.advance_log_start(Offset(offset))
        harness.settle()
    assert len(watched.sizes) >= 38, "the row of the partition and the base, each time"
    assert max(watched.sizes) < 3_000
    again = reopened(harness)
    assert again.producers == log.producers


def test_all_in_all_checkpoints_write_at_most_about_twice_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 100)
    monkeypatch.setattr(log_state, "SMALL_TABLE_BYTES", 0)
    harness = FakeHarness()
    log = log_with_a_large_table(harness, 2_000)
    watched = Watched(harness, monkeypatch)
    for i in range(8_000):
        append(log, producer=(i % 2_000, 0, 1 + i // 2_000))
    harness.settle()
    changed = 8_000 * 43 + sum(2_000 * 32 * k for k in range(1, 5))  # every producer each 2,000 batches, ever larger
    assert sum(watched.sizes) < 2 * changed + 1_000_000
    again = reopened(harness)
    assert again.producers == log.producers


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_checkpoints_deletions_truncations_and_restarts_gives_the_same_table(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 5)
    monkeypatch.setattr(log_state, "SMALL_TABLE_BYTES", 0)
    monkeypatch.setattr(log_state, "CHAIN_ROWS_MAX", 6)
    rng = random.Random(seed)
    harness = FakeHarness(seed)
    known = large_table(40)
    log = log_with_a_large_table(harness, 40)
    model: list[tuple[int, bytes, TsNs]] = []  # every batch so far: end, header's bytes, time
    for step in range(120):
        for _ in range(rng.randrange(8)):
            stored = append(log, producer=(rng.randrange(60), 0, step), epoch=step)
            model.append((stored.end, bytes(stored.batch), stored.ts_ns))
        what = rng.randrange(5)
        if what == 0:
            cut = max(log.log_start, log.appended_end - rng.randrange(12))
            log.truncate(Offset(cut))
            model = [row for row in model if row[0] <= cut]
        elif what == 1:
            start = Offset(min(log.appended_end, log.log_start + rng.randrange(10)))
            log.keep_from(start)  # as a replica does
            log.advance_log_start(start)
        elif what == 2:
            harness.settle()
            log = reopened(harness)
        elif what == 3:
            harness.settle()
        expected = ProducerTable.restore(known)
        for _, header, ts_ns in model:
            fold(expected, parse_header(header), ts_ns)
        assert log.producers == expected
        assert log.tail_damage is None


def test_a_damaged_checkpoint_that_others_continue_costs_nothing_but_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 10)
    harness = FakeHarness()
    log = log_with_a_large_table(harness)
    for i in range(50):
        append(log, producer=(i % 10, 0, 1 + i // 10))
    harness.settle()
    key = checkpoint_key(PID, 120)
    row = harness.disk.get(Table.CHECKPOINTS, key)
    assert row is not None
    replace(harness, Table.CHECKPOINTS, key, flipped(row, 99))
    again = reopened(harness)
    assert again.producers == log.producers
    assert again.appended_end == 150


def test_a_damaged_checkpoint_that_the_base_continues_is_replaced_before_it_is_needed() -> None:
    harness = FakeHarness()
    log = log_with_a_large_table(harness)
    for i in range(50):
        append(log, producer=(i % 10, 0, 1 + i // 10))
    harness.settle()
    log.advance_log_start(Offset(120))
    harness.settle()
    oldest = checkpoint_key(PID, 100)
    row = harness.disk.get(Table.CHECKPOINTS, oldest)
    assert row is not None, "the base at 120 holds the changes since"
    replace(harness, Table.CHECKPOINTS, oldest, flipped(row, 99))
    log.rewrite_checkpoint(oldest)
    harness.settle()
    assert harness.disk.get(Table.CHECKPOINTS, oldest) is None
    again = reopened(harness)
    assert again.tail_damage is None
    assert again.producers == log.producers
