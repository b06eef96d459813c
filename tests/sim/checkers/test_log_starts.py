"""The judges of log starts find what is gone without a reason, and what is there although a client has deleted it."""

import pytest

from tests.sim.checkers.support import LOG, Story

STORIES = {
    "more is gone than was asked for": (Story().send_log().trim(1).final(LOG[1:], hwm=3, lo=2), {"lost-write"}),
    "a deletion is forgotten": (Story().send_log().trim(2).range(3, lo=1).final(LOG[1:], hwm=3, lo=2), {"stale-hwm"}),
    "it ends inside a batch": (Story().send_log().trim(1).final(LOG, hwm=3, lo=1), set()),
}


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_log_starts_without_a_reason_are_found(story: Story, expected: set[str]) -> None:
    assert story.anomalies() == expected
