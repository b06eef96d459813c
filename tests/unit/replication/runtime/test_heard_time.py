"""The clock by which a node measures silence, on machines with enough processor time and with too little."""

import pytest

from smq.replication.runtime.heard_time import HeardTime
from smq.testing.virtual.clock import NS_PER_MS, Scheduler
from tests.unit.replication.support import process_clock

SILENCE_MS, TICK_MS = 1_000, 20


@pytest.mark.parametrize(
    ("late_ms", "counted_ms"),
    [
        (0, 6_000),
        (2 * TICK_MS, 6_000),  # as late as a busy loop may be
        (5 * TICK_MS, 3_000),  # half of the time between two looks
        (8 * TICK_MS, 2_000),
    ],
)
def test_the_later_a_node_is_the_less_silence_counts(late_ms: int, counted_ms: int) -> None:
    scheduler = Scheduler()
    heard_time = HeardTime(process_clock(scheduler), SILENCE_MS, TICK_MS)
    began_ns = heard_time.now_ns()
    for _ in range(6_000 // (TICK_MS + late_ms)):
        scheduler.run_for_ms(TICK_MS + late_ms)
        heard_time.now_ns()
    counted = (heard_time.now_ns() - began_ns) / NS_PER_MS
    assert counted == pytest.approx(counted_ms, rel=0.02)
