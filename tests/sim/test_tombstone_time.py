"""How long simulated tombstones must stay: one clock stamps them, and another, a second ahead, may end their time."""

import pytest

from chaos_tests.sim.run import WALL_OFFSET_MS_MAX, Simulation
from chaos_tests.sim.scenario import find


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
