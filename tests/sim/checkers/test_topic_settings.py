"""The judges of topics' settings find wrong defaults and repetitions that were refused, and accept what is right."""

from collections.abc import Callable

import pytest

from chaos_tests.checkers.sends import CLOCKS_APART_NS, EPOCH_NS, TOO_OLD
from tests.sim.checkers.test_judge import Story, anomalies, batch


def _made(s: Story, *values: str, seen: str, kind: str = "ok") -> None:
    for value in values:
        s.recorder.add(s.begin("make", name="t1", v=value), kind, "make", {})
    s.recorder.ok(s.begin("made", name="t1", n=1), "made", seen=seen)


def made_without_its_default(s: Story) -> None:
    _made(s, "5", seen="")


def older_default_after_a_reset(s: Story) -> None:
    _made(s, "5", "7", seen="5")


def default_of_another_moment(s: Story) -> None:
    _made(s, "5", seen="6")


def made_with_its_default(s: Story) -> None:
    _made(s, "5", "7", seen="7")


def perhaps_made(s: Story) -> None:
    _made(s, "5", seen="5", kind="info")


def _refused(s: Story, *, idem: bool = True, stored_ago_ns: int = 2 * CLOCKS_APART_NS, error: str = TOO_OLD) -> None:
    s.now += 10 * CLOCKS_APART_NS
    stored = batch(0, [10], ts=EPOCH_NS + s.now - stored_ago_ns)
    s.recorder.info(s.begin("send", k="t/0", v=[10], acks=-1, idem=idem), "send", err=error)
    s.final([stored], hwm=1)


def repeat_is_refused(s: Story) -> None:
    _refused(s)


def repeat_without_a_sequence(s: Story) -> None:
    _refused(s, idem=False)


def refused_before_it_arrived(s: Story) -> None:
    _refused(s, stored_ago_ns=0)


def refused_for_another_reason(s: Story) -> None:
    _refused(s, error="TIMED_OUT")


@pytest.mark.parametrize(
    ("tell", "anomaly"),
    [
        (made_without_its_default, "wrong-default"),
        (older_default_after_a_reset, "wrong-default"),
        (default_of_another_moment, "wrong-default"),
        (repeat_is_refused, "repeat-refused"),
    ],
)
def test_anomaly_of_a_setting_is_found(tell: Callable[[Story], None], anomaly: str) -> None:
    assert anomalies(tell) == {anomaly}


@pytest.mark.parametrize(
    "tell",
    [
        made_with_its_default,
        perhaps_made,
        repeat_without_a_sequence,
        refused_before_it_arrived,
        refused_for_another_reason,
    ],
)
def test_what_is_right_is_accepted(tell: Callable[[Story], None]) -> None:
    assert anomalies(tell) == set()
