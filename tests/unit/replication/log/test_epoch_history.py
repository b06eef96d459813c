"""Rule 20: a history without the epochs that hold no records gives every verdict that the whole history gives."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from smq.coordinator.kafka.cluster_view import epoch_at
from smq.coordinator.kafka.log_offsets import end_of_epoch
from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.ids import Epoch, Offset, PartitionId
from smq.raft_state.state import EpochStart, PartitionState
from smq.replication.log.lineage import EpochRun, verified_end
from smq.replication.partition.waiters import epoch_end_of
from tests.unit.raft_state.support import advance, advances, cluster, elect, pid, topic

STEPS = st.lists(st.tuples(st.sampled_from(["advance", "elect", "elect", "trim"]), st.integers(0, 4)), max_size=30)
RUNS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 6)), max_size=6)
PID: PartitionId = pid(1)


def both_histories(steps: list[tuple[str, int]]) -> tuple[PartitionState, list[EpochStart]]:
    """A partition after these steps, and the history that it would have with every epoch in it."""
    driver = cluster(3)
    driver.ok(topic(1, replicas=3))
    part = driver.partition(PID)
    whole = list(part.history)
    for kind, n in steps:
        if kind == "advance":
            driver.ok(advances(advance(PID, part.epoch, hwm=part.hwm + n)))
        elif kind == "elect":
            driver.ok(elect(PID, part.epoch, candidate=n % 3 + 1, end=part.hwm))
            whole.append(EpochStart(part.epoch, part.hwm))
        elif part.log_start + n <= part.hwm and n:
            driver.ok(AdvanceLogStart(partition=PID, offset=Offset(part.log_start + n)))
            while len(whole) > 1 and whole[1].start < part.log_start:
                whole.pop(0)
    return part, whole


def log_of(runs: list[tuple[int, int, int]], log_start: Offset) -> list[EpochRun]:
    """Runs from the log start on, with holes now and then, in any order of epochs."""
    log, at = [], int(log_start)
    for epoch, hole, length in runs:
        start = at + (hole if hole > 2 else 0)
        log.append(EpochRun(Epoch(epoch), Offset(start), Offset(start + length)))
        at = start + length
    return log


@given(STEPS, RUNS)
def test_a_log_is_judged_as_by_the_whole_history(
    steps: list[tuple[str, int]], runs: list[tuple[int, int, int]]
) -> None:
    part, whole = both_histories(steps)
    log = log_of(runs, part.log_start)
    end = log[-1].end if log else part.log_start
    assert verified_end(log, part.log_start, end, part.history) == verified_end(log, part.log_start, end, whole)


@given(STEPS)
def test_producers_are_settled_as_by_the_whole_history(steps: list[tuple[str, int]]) -> None:
    part, whole = both_histories(steps)
    kept, full = (_epoch_ends(history, part.epoch) for history in (part.history, whole))
    assert kept == full


def _epoch_ends(history: list[EpochStart], newest: Epoch) -> list[Offset | None]:
    part: Any = SimpleNamespace(history=history)
    return [epoch_end_of(part, Epoch(e)) for e in range(newest + 2)]


@given(STEPS)
def test_kafka_learns_the_epoch_before_a_dropped_one_and_its_end(steps: list[tuple[str, int]]) -> None:
    """As Kafka answers for an epoch that it does not know: the largest one below it that it knows, and where that
    ended, which is where the dropped one started and ended. The record at an offset keeps its epoch."""
    part, whole = both_histories(steps)
    full: Any = SimpleNamespace(epoch=part.epoch, history=whole, next_offset=part.next_offset)
    kept = {entry.epoch for entry in part.history}
    for epoch in range(part.epoch + 1):
        known, end = end_of_epoch(part, epoch, part.next_offset)
        assert end == end_of_epoch(full, epoch, part.next_offset)[1]
        if epoch >= whole[0].epoch:
            assert known == max(e for e in kept if e <= epoch)
    for offset in range(part.log_start, part.hwm + 1):
        assert epoch_at(part, offset) == epoch_at(full, offset)


@given(STEPS)
def test_there_is_one_entry_per_epoch_with_records_and_the_two_ends(steps: list[tuple[str, int]]) -> None:
    part, whole = both_histories(steps)
    ends = [entry.start for entry in whole[1:]]
    with_records = sum(start.start < end for start, end in zip(whole, ends, strict=False))
    assert len(part.history) <= with_records + 2
    assert part.history[0] == whole[0]
    assert part.history[-1] == whole[-1]
