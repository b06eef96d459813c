"""A run is not judged while a compacted partition awaits a pass: lost segments delay passes, and one needs its time."""

import pytest

from chaos_tests.checkers.compaction import LATE_RECORDS_MAX
from chaos_tests.sim.observer import awaits_a_pass, count_awaited
from chaos_tests.sim.run import GIVE_UP_MS_MAX, SETTLE_MS_MAX, WALL_OFFSET_MS_MAX, Simulation
from chaos_tests.sim.scenario import find
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionIndex, TopicId, TsNs
from smq.raft_state.state import EpochStart, PartitionState, Segment
from smq.replication.log.segments import HeldSegments
from smq.testing.virtual.clock import NS_PER_MS

HWM = 2 * LATE_RECORDS_MAX
CLEAN = Segment(Offset(0), b"d")
RESET = Segment(Offset(1), b"e", is_dirty=True)  # older bytes took the place of lost ones


@pytest.mark.parametrize(
    ("segments", "compacted_end", "log_start", "expected"),
    [
        ([CLEAN], HWM, 0, False),
        ([CLEAN, RESET], HWM, 0, True),
        ([CLEAN], HWM - LATE_RECORDS_MAX, 0, False),  # the probes, and what was sent just before
        ([CLEAN], HWM - LATE_RECORDS_MAX - 1, 0, True),
        ([], 0, 0, True),
        ([], 0, HWM, False),  # all of it is deleted
    ],
)
def test_a_pass_is_awaited_while_much_is_not_compacted(
    segments: list[Segment], compacted_end: int, log_start: int, *, expected: bool
) -> None:
    assert awaits_a_pass(_partition(segments, compacted_end, log_start)) == expected


def _partition(segments: list[Segment], compacted_end: int, log_start: int = 0) -> PartitionState:
    return PartitionState(
        topic_id=TopicId(bytes(16)),
        index=PartitionIndex(0),
        replicas=(NodeId(1), NodeId(2), NodeId(3)),
        leader=NodeId(1),
        leader_incarnation=Incarnation(1),
        epoch=Epoch(1),
        history=[EpochStart(Epoch(1), Offset(0))],
        next_offset=Offset(HWM),
        hwm=Offset(HWM),
        log_start=Offset(log_start),
        ts_ns=TsNs(0),
        segments=segments,
        compacted_end=Offset(compacted_end),
    )


def test_a_segment_that_no_log_holds_is_awaited() -> None:
    part, held = _partition([CLEAN, Segment(Offset(4), b"e"), Segment(Offset(8), b"f")], HWM), HeldSegments()
    held.put(Offset(4), Offset(8), b"e")
    assert count_awaited(part, [held, HeldSegments()]) == 2
    held.put(Offset(0), Offset(4), b"d")
    held.put(Offset(8), Offset(HWM), b"f")
    assert count_awaited(part, [HeldSegments(), held]) == 0
    part.segments[2] = RESET._replace(start=Offset(8), digest=b"f")
    assert count_awaited(part, [held]) == 1


@pytest.mark.parametrize(
    ("lost", "took_ms", "settles"),
    [
        (0, SETTLE_MS_MAX - 1_000, True),
        (0, SETTLE_MS_MAX + 1_000, False),
        (12, 12 * 3_600, True),  # as seed 1400610 of ended_transactions took for each of four
        (12, SETTLE_MS_MAX + 12 * GIVE_UP_MS_MAX + 1_000, False),
    ],
)
def test_lost_segments_prolong_the_wait_for_agreement(
    monkeypatch: pytest.MonkeyPatch, lost: int, took_ms: float, *, settles: bool
) -> None:
    run = Simulation(find("ended_transactions"), 1)
    monkeypatch.setattr(run.observer, "awaited_segments", lambda pids: lost)
    monkeypatch.setattr(
        Simulation, "_disagreement", lambda self: "not yet" if self.scheduler.now_ns < took_ms * NS_PER_MS else None
    )
    assert run._settle("converged") == settles


# ------------------------------------------------------------------------------------------------------ tombstone time
# How long simulated tombstones must stay: one clock stamps them, and another, a second ahead, may end their time.
@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("compaction", 5_000 - 2 * WALL_OFFSET_MS_MAX),
        ("calm+compaction", 4_000 - 2 * WALL_OFFSET_MS_MAX),
        ("clocks+compaction", 0),  # they jump
        ("calm", None),
    ],
)
def test_the_clocks_of_two_nodes_bound_the_time_of_a_tombstone(scenario: str, expected: int | None) -> None:
    run = Simulation(find(scenario), 1)
    assert run._boot()
    noted = [event["tombstone_ms"] for event in run.recorder.events if event["f"] == "compaction"]
    assert noted == ([] if expected is None else [expected])
