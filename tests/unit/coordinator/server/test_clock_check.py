"""A clock that is days off: refused at a start if a majority agrees, a warning otherwise."""

import pytest

from smq.coordinator.server.self_check import FAR_MS, ClockCheck
from smq.raft_state.ids import NodeId

TWO, THREE = NodeId(2), NodeId(3)
YEARS_MS = 50 * 365 * FAR_MS


def checked(nodes: int = 3) -> tuple[ClockCheck, list[str], list[float]]:
    ended, now_s = list[str](), [0.0]
    return ClockCheck(nodes, ended.append, lambda: now_s[0]), ended, now_s


@pytest.mark.parametrize(("ahead_ms", "way"), [(YEARS_MS, "behind"), (-YEARS_MS, "ahead of")])
def test_a_start_with_a_clock_that_a_majority_contradicts_is_refused(ahead_ms: int, way: str) -> None:
    check, ended, _ = checked()
    check.note(TWO, ahead_ms)
    assert ended == []
    check.note(THREE, ahead_ms + 1_000)
    assert f"this machine's clock is 18,250.0 days {way} those of nodes 2 and 3: set it" in ended[0]


def test_one_node_with_a_wrong_clock_ends_no_other() -> None:
    check, ended, _ = checked()
    check.note(TWO, YEARS_MS)
    check.note(THREE, 5)
    assert ended == []
    assert check.warnings() == [
        "the clock of node 2 is 1,576,800,000 s ahead of this node's: let both follow a time server"
    ]


def test_two_nodes_that_contradict_each_other_end_nobody() -> None:
    check, ended, _ = checked()
    check.note(TWO, YEARS_MS)
    check.note(THREE, -YEARS_MS)
    assert ended == []


def test_a_running_node_is_not_ended_by_clocks_that_are_set() -> None:
    check, ended, now_s = checked()
    now_s[0] = 61.0
    check.note(TWO, YEARS_MS)
    check.note(THREE, YEARS_MS)
    assert ended == []
    assert len(check.warnings()) == 2


def test_an_hour_is_a_warning_and_a_second_is_nothing() -> None:
    check, ended, _ = checked()
    check.note(TWO, -3_600_000)
    check.note(THREE, 1_000)
    assert ended == []
    (warning,) = check.warnings()
    assert "node 2 is 3,600 s behind" in warning


def test_a_majority_of_five_nodes_is_three() -> None:
    check, ended, _ = checked(5)
    for peer in (2, 3):
        check.note(NodeId(peer), YEARS_MS)
    assert ended == []
    check.note(NodeId(4), YEARS_MS)
    assert len(ended) == 1
