"""The judges of log starts find what is gone without a reason, and what is there although a client has deleted it."""

from collections.abc import Callable

import pytest

from tests.sim.checkers.test_judge import LOG, Story, anomalies


def _deleted(s: Story, end: int) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.recorder.ok(s.begin("trim", k="t/0", o=end), "trim")


def more_is_gone_than_was_asked_for(s: Story) -> None:
    _deleted(s, 1)
    s.final(LOG[1:], hwm=3, lo=2)


def a_deletion_is_forgotten(s: Story) -> None:
    _deleted(s, 2)
    s.range(3, lo=1)
    s.final(LOG[1:], hwm=3, lo=2)


def deleted_inside_a_batch(s: Story) -> None:
    _deleted(s, 1)
    s.final(LOG, hwm=3, lo=1)


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (more_is_gone_than_was_asked_for, {"lost-write"}),
        (a_deletion_is_forgotten, {"stale-hwm"}),
        (deleted_inside_a_batch, set()),
    ],
)
def test_log_starts_without_a_reason_are_found(tell: Callable[[Story], None], expected: set[str]) -> None:
    assert anomalies(tell) == expected
