"""Changes of a group's offsets that come back after a later one, in hand-made histories."""

from typing import Self

import pytest

from tests.sim.checkers.support import Story


class Changes(Story):
    """Of the group's offsets, by commits and by transactions."""

    def stage(self, off: int) -> Self:
        """A transaction that has staged this offset; it ends under that name."""
        self.begin(str(off), "txn", id="tx", v={"l/0": [off]}, off=off)
        return self.op("stage", {"g": "g", "k": "t/0", "o": off, "tag": str(off)})

    def done(self, off: int, out: str = "commit") -> Self:
        return self.end(str(off), "ok", out=out)


FOUND = {
    "an abandoned commit after a newer one": Changes()
    .commit("lost", 7, kind="info")
    .commit("a", 1)
    .fetch("a", 1)
    .fetch("lost", 7),
    "an abandoned commit that undoes a deletion": Changes()
    .commit("lost", 7, kind="info")
    .forget_group()
    .fetch("", -1)
    .fetch("lost", 7),
    "an acknowledged commit that undoes a deletion": Changes().commit("a", 7).forget_group().fetch("a", 7),
    "an abandoned deletion of a newer commit": Changes()
    .commit("a", 1)
    .forget_group("info")
    .commit("b", 2)
    .fetch("b", 2)
    .fetch("", -1),
    "a transaction that replaces a newer commit": Changes().stage(100).commit("a", 200).done(100).fetch("100", 100),
    "a transaction that replaces a newer one": Changes().stage(100).stage(200).done(200).done(100).fetch("100", 100),
    "a transaction that undoes a deletion": Changes().stage(100).forget_group().done(100).fetch("100", 100),
    "a committed transaction without its offset": Changes().commit("a", 1).stage(100).done(100).fetch("a", 1),
}


@pytest.mark.parametrize("name", FOUND)
def test_change_that_comes_back_is_reported(name: str) -> None:
    assert "commit-regression" in FOUND[name].anomalies()


def unknown_commit_that_took_effect_after_its_client_gave_up() -> Changes:
    story = Changes().begin("a", "commit", g="g", k="t/0", o=1, tag="a").commit("lost", 7, kind="info")
    # The first began before the client of the other gave up.
    return story.fetch("", -1).fetch("lost", 7).end("a").fetch("a", 1)


def deletion_that_overlaps_a_commit() -> Changes:
    story = Changes().commit("a", 1).begin("deletion", "gdelete", g="g").commit("b", 2).fetch("b", 2).end("deletion")
    return story.fetch("", -1).commit("c", 3).forget_group("info").fetch("c", 3).fetch("", -1)


def transactions_and_commits_in_order() -> Changes:
    story = Changes().stage(100).stage(150).fetch("", -1).commit("a", 200).done(100).fetch("a", 200)
    story.stage(300).fetch("a", 200).done(300).fetch("300", 300)
    story.end("150", "info").stage(400).done(400, "abort").fetch("300", 300)
    return story.stage(500).end("500", "info").fetch("500", 500)  # it was committed


@pytest.mark.parametrize(
    "story",
    [
        unknown_commit_that_took_effect_after_its_client_gave_up(),
        deletion_that_overlaps_a_commit(),
        transactions_and_commits_in_order(),
    ],
    ids=["unknown", "overlapping", "in order"],
)
def test_change_that_overlaps_another_may_come_after_it(story: Changes) -> None:
    assert story.anomalies() == set()
