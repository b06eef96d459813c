"""Checks of a request that need no node."""

import pytest

from smq.coordinator.limits import TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX
from smq.coordinator.service.request_checks import timeout_of
from smq.raft_state.errors import SmqError


@pytest.mark.parametrize(
    ("requested", "remaining", "expected"),
    [
        (0, None, TIMEOUT_MS_DEFAULT),
        (5, None, 5),
        (2**31 - 1, None, TIMEOUT_MS_MAX),
        (5000, 1200.7, 1200),
        (100, 1200.0, 100),
        (0, -50.0, 1),
    ],
)
def test_the_clients_own_deadline_bounds_the_timeout(requested: int, remaining: float | None, expected: int) -> None:
    assert timeout_of(requested, remaining) == expected


def test_a_negative_timeout_is_refused() -> None:
    with pytest.raises(SmqError, match="timeout_ms"):
        timeout_of(-1)
