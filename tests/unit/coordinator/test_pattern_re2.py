"""What a client's pattern may cost the node, whose event loop it is matched on."""

import time

import pytest

from smq.coordinator.pattern_re2 import InvalidPattern, matcher
from smq.raft_state.limits import PATTERN_BYTES_MAX


@pytest.mark.parametrize("pattern", ["(x?)" * 2_000 + "x" * 100, "(a?b?)" * 1_300 + "c", "(.*x.{60}|.*b.{60})" * 10])
def test_a_hostile_pattern_costs_no_more_than_its_length(pattern: str) -> None:
    """Against a plain one of the same length: with captures it was ten thousand times as much."""

    def took(pattern: str) -> float:
        matches, began = matcher(pattern), time.process_time()
        for name in ("x" * 200, "xb" * 100):
            matches(name)
        return time.process_time() - began

    assert took(pattern) < 1_000 * max(took("a" * len(pattern)), 0.0001)


def test_hundreds_of_names_fit_and_what_is_longer_is_refused() -> None:
    names = [f"orders-{number:03}" for number in range(700)]
    matches = matcher("|".join(names))
    assert all(map(matches, names))
    assert not matches("orders-700")
    for pattern in ("a" * (PATTERN_BYTES_MAX + 1), "(" * 4_000_000, "((a{1,100}){1,100}){1,100}", "(a"):
        with pytest.raises(InvalidPattern):
            matcher(pattern)
