"""The judge of lag accepts figures that follow from the commit and the log, and finds each one that does not."""

from typing import Any, Self

import pytest

from chaos_tests.keyed import GONE
from tests.sim.checkers.support import Story, batch

NS_PER_MS = 1_000_000
STAMPS = [100 * NS_PER_MS, 110 * NS_PER_MS, 120 * NS_PER_MS]  # append times of the batches
SIZES = [[0, 2, 70], [2, 3, 60], [3, 5, 80]]
NOW_NS = 150 * NS_PER_MS
RIGHT: dict[str, Any] = {
    "o": 1,
    "tag": "a",
    "lo": 0,
    "hwm": 5,
    "known": True,
    "offsets": 4,
    "records": 4,
    "bytes": 210,
    "age": 49,
    "at": NOW_NS,
}


class Lag(Story):
    """Three batches, and a commit at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.send([10, 11], 0).send([12], 2).send([13, 14], 3).commit("a", 1)

    def log(self, *gone: int) -> Self:
        """A read of all three batches; the values at some offsets are gone."""
        values = [GONE if offset in gone else 10 + offset for offset in range(5)]
        found = [batch(b, values[b:e], ts=ts) for (b, e, _), ts in zip(SIZES, STAMPS, strict=True)]
        return self.op("poll", {"k": "t/0", "o": 0, "n": 1}, "ok", b=found, lo=0, hwm=5, s=SIZES)

    def lag(self, function: str = "lag", **other: Any) -> Self:
        reply = RIGHT | other
        if function == "gauge":
            reply = {key: reply[key] for key in ("o", "lo", "hwm", "bytes", "age", "at")}
        return self.op(function, {"g": "g", "k": "t/0", "n": 1}, "ok", **reply)


def told(**other: Any) -> Lag:
    return Lag().lag(**other).log()


def trimmed(*, before: bool, **other: Any) -> Lag:
    """Records below 2 are deleted, before or after the question."""
    story = Lag().log()
    return story.trim(2).lag(**other) if before else story.lag(**other).trim(2)


def retained(*, noted_first: bool) -> Lag:
    """Retention moves the log start to 2 while the node counts; a node notes that before or after the answer."""
    story = Lag().note("retention", records=3, ms=0).log()
    if noted_first:
        return story.local(hwm=5, lo=2, epoch=1).lag(bytes=140, age=40)
    return story.lag(bytes=140, age=40).local(hwm=5, lo=2, epoch=1)


def compacted(**other: Any) -> Lag:
    """Node 1 has shown that the records at 1 and 2 are gone, which a later one replaces."""
    return Lag().note("compaction", keys=1, tombstone_ms=0).log(1, 2).lag(**other)


AFTER_A_TRIM = {"lo": 2, "records": 3, "bytes": 140, "age": 40}


@pytest.mark.parametrize(
    "story",
    [
        told(),
        told(function="gauge"),
        told(known=False, hwm=3, offsets=None, records=None, bytes=None, age=None),
        told(bytes=None, age=None),
        told(at=0, age=0),
        trimmed(before=True, **AFTER_A_TRIM),
        trimmed(before=True, function="gauge", **AFTER_A_TRIM),
        trimmed(before=False),
        retained(noted_first=True),
        compacted(records=None, bytes=120, age=30),
    ],
)
def test_figures_that_follow_from_the_log_are_accepted(story: Lag) -> None:
    assert story.anomalies() == set()


@pytest.mark.parametrize(
    "story",
    [
        told(offsets=5),
        told(records=3),
        told(records=None),
        told(bytes=140),
        told(bytes=0),
        told(bytes=None),
        told(age=48),
        told(age=0),
        told(function="gauge", bytes=80),
        told(function="gauge", age=50),
        told(known=False, hwm=3),
        trimmed(before=True),
        trimmed(before=False, **(AFTER_A_TRIM | {"lo": 0, "records": 4})),
        trimmed(before=True, function="gauge", **(AFTER_A_TRIM | {"bytes": 210})),
        retained(noted_first=False),
        compacted(records=4, bytes=120, age=30),
        compacted(records=None, bytes=0, age=30),
        compacted(records=None, bytes=120, age=49),
        compacted(records=None, bytes=120, age=40),
    ],
)
def test_a_figure_that_does_not_follow_is_found(story: Lag) -> None:
    assert story.anomalies() == {"wrong-lag"}


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (Lag().range(5).lag(hwm=3, offsets=2, records=2, bytes=130).log(), {"stale-hwm"}),
        (Lag().lag(hwm=6, offsets=5, records=5).range(5).log(), {"stale-hwm"}),
        (Lag().commit("b", 3).lag().log(), {"stale-commit", "commit-regression"}),
        (Story().note("backlog", n=1, k="t/0", o=0, size=9, stored=9), set()),
        (Story().note("backlog", n=1, k="t/0", o=0, size=9, stored=8), {"wrong-lag"}),
    ],
    ids=["a known end", "an end above what is committed later", "an older commit", "its size", "another size"],
)
def test_other_ends_commits_and_sizes_than_the_log_has_are_found(story: Story, expected: set[str]) -> None:
    assert story.anomalies() == expected
