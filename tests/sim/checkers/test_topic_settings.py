"""The judges of topics' settings find wrong defaults and repetitions that were refused, and accept what is right."""

import pytest

from chaos_tests.checkers.sends import CLOCKS_APART_NS, EPOCH_NS, TOO_OLD
from tests.sim.checkers.support import Story, anomaly_of, batch


def made(*values: str, seen: str, kind: str = "ok") -> Story:
    """A topic, by these defaults after one another."""
    story = Story()
    for value in values:
        story.op("make", {"name": "t1", "v": value}, kind)
    return story.op("made", {"name": "t1", "n": 1}, "ok", seen=seen)


def refused(*, idem: bool = True, stored_ago_ns: int = 2 * CLOCKS_APART_NS, error: str = TOO_OLD) -> Story:
    story = Story()
    story.now += 10 * CLOCKS_APART_NS
    stored = batch(0, [10], ts=EPOCH_NS + story.now - stored_ago_ns)
    return story.op("send", {"k": "t/0", "v": [10], "acks": -1, "idem": idem}, "info", err=error).final([stored], hwm=1)


FOUND = {
    "wrong-default: none": made("5", seen=""),
    "wrong-default: an older one after a reset": made("5", "7", seen="5"),
    "wrong-default: of another moment": made("5", seen="6"),
    "repeat-refused: it is stored": refused(),
}


@pytest.mark.parametrize("name", FOUND)
def test_anomaly_of_a_setting_is_found(name: str) -> None:
    assert FOUND[name].anomalies() == {anomaly_of(name)}


ALLOWED = {
    "made with its default": made("5", "7", seen="7"),
    "perhaps made": made("5", seen="5", kind="info"),
    "a repetition without a sequence is refused": refused(idem=False),
    "refused before it arrived": refused(stored_ago_ns=0),
    "refused for another reason": refused(error="TIMED_OUT"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_right_is_accepted(name: str) -> None:
    assert ALLOWED[name].anomalies() == set()
