"""A run is not judged while a compacted partition awaits a pass: lost segments delay passes, and one needs its time."""

import pytest

from chaos_tests.checkers.compaction import LATE_RECORDS_MAX
from chaos_tests.sim.observer import awaits_a_pass
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionIndex, TopicId, TsNs
from smq.raft_state.state import EpochStart, PartitionState, Segment

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
    part = PartitionState(
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
    assert awaits_a_pass(part) == expected
