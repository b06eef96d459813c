"""The judges of consumers, of their groups and of assigned offsets: what is left out, comes twice or goes back."""

from typing import Self

import pytest

from tests.sim.checkers.support import Story


class Reads(Story):
    """By Kafka consumers, alone and in the group `team`."""

    def consumed(self, *offsets: int) -> Self:
        return self.op("kpoll", {"c": "c1"}, r=[["t/0", offset, offset + 1] for offset in offsets])

    def team_read(self, *offsets: int, assignment: int = 1) -> Self:
        request = {"c": "m1", "g": "team"}
        return self.op("kpoll", request, r=[["t/0", offset, offset] for offset in offsets], by=f"m1/{assignment}")

    def team_commits(self, *offsets: int) -> Self:
        process = self.recorder.new_process()
        for number, offset in enumerate(offsets):
            self.recorder.invoke(process, "commit", g="team", k="t/0", o=offset, tag=f"m-{number}", gen=1)
            self.recorder.ok(process, "commit")
        return self


def assigned(*bases: int) -> Story:
    """Five offsets each time."""
    story = Story()
    for base in bases:
        story.op("assign", {"k": "t/0", "c": 5}, o=base)
    return story


def half_read() -> Reads:
    """The group is to have read all four records; its first assignment has read two."""
    return Reads().send([0, 1, 2, 3], 0, idem=True).team_read(0, 1).note("gdrained", g="team", ends={"t/0": 4})


STORIES: dict[str, tuple[Story, set[str]]] = {
    "assigned one after another": (assigned(0, 5, 10), set()),
    "assigned again": (assigned(0, 3), {"offset-reuse"}),
    "assigned with a gap": (assigned(0, 7), {"offset-gap"}),
    "assigned backwards": (assigned(5, 0), {"nonmonotonic-assign"}),
    "a gap that an unknown outcome explains": (
        assigned(0).op("assign", {"k": "t/0", "c": 5}, "info").op("assign", {"k": "t/0", "c": 5}, o=10),
        set(),
    ),
    "a consumer reads in order": (Reads().consumed(0, 1).consumed(2), set()),
    "a consumer leaves a hole": (Reads().consumed(0, 2), {"poll-skip"}),
    "a consumer reads again": (Reads().consumed(0, 0), {"nonmonotonic-poll"}),
    "a group reads twice across assignments": (half_read().team_read(1, 2, 3, assignment=2), set()),
    "a group leaves a record out": (half_read().team_read(3, assignment=2), {"unread"}),
    "a group's commits go on": (Reads().team_read(*range(9)).team_commits(5, 5, 9), set()),
    "a group's commits go back": (Reads().team_read(*range(9)).team_commits(5, 9, 7), {"commit-regression"}),
    "a group that reads nothing commits what it pleases": (Reads().team_commits(5, 9, 7), set()),
}


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_what_consumers_are_given_is_judged(story: Story, expected: set[str]) -> None:
    assert story.anomalies() == expected
