"""The judge of lag accepts figures that follow from the commit and the log, and finds each one that does not."""

from collections.abc import Callable
from typing import Any

import pytest

from chaos_tests.keyed import GONE
from tests.sim.checkers.test_judge import Story, anomalies, batch

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


def log(s: Story, *, gone: tuple[int, ...] = (), lo: int = 0, node: int = 1, final: bool = False) -> None:
    """A read of all three batches; the values at some offsets are gone."""
    values = [GONE if offset in gone else 10 + offset for offset in range(5)]
    found = [batch(b, values[b:e], ts=ts) for (b, e, _), ts in zip(SIZES, STAMPS, strict=True) if e > lo]
    request = {"k": "t/0", "o": lo, "n": node} | ({"final": True} if final else {})
    s.recorder.ok(s.begin("poll", **request), "poll", b=found, lo=lo, hwm=5, s=[row for row in SIZES if row[1] > lo])


def begun(s: Story) -> None:
    s.send([10, 11], 0)
    s.send([12], 2)
    s.send([13, 14], 3)
    s.commit("a", 1)


def lag(s: Story, function: str = "lag", **other: Any) -> None:
    reply = RIGHT | other
    if function == "gauge":
        reply = {key: reply[key] for key in ("o", "lo", "hwm", "bytes", "age", "at")}
    s.recorder.ok(s.begin(function, g="g", k="t/0", n=1), function, **reply)


def told(**other: Any) -> Callable[[Story], None]:
    def tell(s: Story) -> None:
        begun(s)
        lag(s, **other)
        log(s)

    return tell


def trimmed(*, before: bool, **other: Any) -> Callable[[Story], None]:
    """Records below 2 are deleted, before or after the question."""

    def tell(s: Story) -> None:
        begun(s)
        log(s)
        for is_trim in (before, not before):
            if is_trim:
                s.recorder.ok(s.begin("trim", k="t/0", o=2), "trim")
            else:
                lag(s, **other)

    return tell


def retained(*, noted_first: bool) -> Callable[[Story], None]:
    """Retention moves the log start to 2 while the node counts; a node notes that before or after the answer."""

    def tell(s: Story) -> None:
        def note() -> None:
            s.note("local", n=1, inc=1, i=9, k="t/0", hwm=5, lo=2, epoch=1, clock=0)

        s.note("retention", records=3, ms=0)
        begun(s)
        log(s)
        if noted_first:
            note()
        lag(s, bytes=140, age=40)
        if not noted_first:
            note()

    return tell


def compacted(**other: Any) -> Callable[[Story], None]:
    """Node 1 has shown that the records at 1 and 2 are gone, which a later one replaces."""

    def tell(s: Story) -> None:
        s.note("compaction", keys=1, tombstone_ms=0)
        begun(s)
        log(s, gone=(1, 2))
        lag(s, **other)

    return tell


AFTER_A_TRIM = {"lo": 2, "records": 3, "bytes": 140, "age": 40}


@pytest.mark.parametrize(
    "tell",
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
def test_figures_that_follow_from_the_log_are_accepted(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()


@pytest.mark.parametrize(
    "tell",
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
def test_a_figure_that_does_not_follow_is_found(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == {"wrong-lag"}


def test_an_end_that_was_known_to_be_higher_is_found() -> None:
    def tell(s: Story) -> None:
        begun(s)
        s.range(5)
        lag(s, hwm=3, offsets=2, records=2, bytes=130)
        log(s)

    assert anomalies(tell) == {"stale-hwm"}


def test_an_end_above_what_is_committed_later_is_found() -> None:
    def tell(s: Story) -> None:
        begun(s)
        lag(s, hwm=6, offsets=5, records=5)
        s.range(5)
        log(s)

    assert anomalies(tell) == {"stale-hwm"}


def test_a_lag_from_an_older_commit_is_found() -> None:
    def tell(s: Story) -> None:
        begun(s)
        s.commit("b", 3)
        lag(s)
        log(s)

    assert anomalies(tell) == {"stale-commit", "commit-regression"}


def test_a_size_that_the_log_of_a_node_does_not_have_is_found() -> None:
    assert anomalies(lambda s: s.note("backlog", n=1, k="t/0", o=0, size=9, stored=9)) == set()
    assert anomalies(lambda s: s.note("backlog", n=1, k="t/0", o=0, size=9, stored=8)) == {"wrong-lag"}
