"""The judge of batches finds each anomaly in the shortest story of it, and accepts what may happen."""

from collections.abc import Callable

import pytest

from tests.sim.checkers.test_judge import Story, anomalies
from tests.sim.checkers.test_transactions import poll


def attempt(s: Story, values: list[int], kind: str = "ok", *, number: int = 0, replay: bool = False) -> None:
    process = s.begin("batch", app="app", id=number, v=values)
    s.recorder.add(process, kind, "batch", {"replay": replay} if kind == "ok" else {"err": "NOT_COMMITTED"})


def final(s: Story, *values: int) -> None:
    """Of one partition with three replicas."""
    for node in (1, 2, 3):
        poll(s, "l/0", 0, 99, *enumerate(values), node=node, final=True)


def half_visible(s: Story) -> None:
    attempt(s, [1, 2])
    final(s, 1)


def twice_visible(s: Story) -> None:
    attempt(s, [1, 2])
    attempt(s, [1, 2], replay=True)
    final(s, 1, 2, 1, 2)


def twice_new(s: Story) -> None:
    attempt(s, [1, 2])
    attempt(s, [1, 2])


def committed_and_gone(s: Story) -> None:
    attempt(s, [1, 2], replay=True)
    final(s)


def other_values_dropped_and_answered_as_done(s: Story) -> None:
    attempt(s, [1, 2])
    attempt(s, [3, 4], replay=True)
    final(s, 1, 2)


def two_plans_visible(s: Story) -> None:
    attempt(s, [1, 2], "info")
    attempt(s, [3, 4])
    final(s, 1, 2, 3, 4)


def never_committed_and_visible(s: Story) -> None:
    attempt(s, [1, 2], "fail")
    final(s, 1, 2)


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (half_visible, "torn-batch"),
        (twice_visible, "repeated-batch"),
        (twice_new, "repeated-batch"),
        (committed_and_gone, "lost-batch"),
        (never_committed_and_visible, "aborted-read"),
        (other_values_dropped_and_answered_as_done, "lost-batch"),
        (two_plans_visible, "repeated-batch"),
    ],
)
def test_anomaly_of_batches_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomaly in anomalies(tell)


def everything_in_order(s: Story) -> None:
    attempt(s, [1, 2], "fail")
    attempt(s, [1, 2], "info")
    attempt(s, [1, 2], replay=True)
    attempt(s, [3], "info", number=1)  # it was committed
    attempt(s, [4], "info", number=2)  # it was not
    attempt(s, [5, 6], "fail", number=2)
    attempt(s, [7], number=3)
    attempt(s, [8, 9], "fail", number=3)  # it is refused: the checkpoint had lost what the batch was
    final(s, 1, 3, 2, 7)


def test_what_may_happen_is_accepted() -> None:
    assert anomalies(everything_in_order) == set()
