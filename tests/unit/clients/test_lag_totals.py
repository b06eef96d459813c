"""The total of a group's lag: an unknown part makes it unknown, and never smaller."""

import pytest

from smq.clients.lag_totals import LagFigures, Total, lags_by_member, total_of
from smq.clients.types import GroupDescription, GroupMember, GroupPosition, GroupSummary

KNOWN = LagFigures(4, 3, 2_048, 90_000)
UNKNOWN = LagFigures(None, None, None, None)
PLACES = {("t", 0): KNOWN, ("t", 1): LagFigures(1, 1, 10, 100_000), ("t", 2): UNKNOWN}


def test_a_total_is_the_sum_and_the_age_of_the_oldest() -> None:
    total = total_of([KNOWN, LagFigures(1, 1, 10, 100_000)])
    assert (total.offsets.value, total.records.value) == (5, 4)
    assert (total.size_bytes.value, total.age_ms.value) == (2_058, 100_000)


@pytest.mark.parametrize("figure", LagFigures._fields)
def test_a_figure_of_which_a_part_is_not_known_is_not_known_and_says_how_much_is(figure: str) -> None:
    total = total_of([KNOWN, KNOWN._replace(**{figure: None})])
    known = getattr(KNOWN, figure)
    assert getattr(total, figure) == Total(known, is_known=False)
    assert getattr(total, figure).value is None
    others = {name: getattr(total, name).is_known for name in LagFigures._fields if name != figure}
    assert all(others.values())


def test_a_total_of_nothing_is_zero_unless_there_is_more() -> None:
    assert total_of([]).age_ms == total_of([]).offsets == Total(0, is_known=True)
    assert total_of([], is_whole=False).offsets == total_of([], is_whole=False).age_ms == Total(0, is_known=False)


def test_a_members_lag_is_that_of_its_partitions_and_one_that_is_gone_counts_nothing() -> None:
    assigned = {"a": [("t", 0), ("t", 1)], "b": iter([("t", 1), ("t", 2)]), "c": [("gone", 0)], "d": []}
    lags = lags_by_member(assigned, PLACES)
    assert {name: lag.offsets for name, lag in lags.items()} == {
        "a": Total(5, is_known=True),
        "b": Total(1, is_known=False),
        "c": Total(0, is_known=True),
        "d": Total(0, is_known=True),
    }


def test_a_partition_that_was_not_looked_at_is_not_known() -> None:
    lags = lags_by_member({"a": [("t", 0)], "b": [("t", 0), ("t", 3)]}, PLACES, is_whole=False)
    assert [lag.offsets for lag in lags.values()] == [Total(4, is_known=True), Total(4, is_known=False)]


def position(partition: int, lag: int | None) -> GroupPosition:
    end = {"log_start": 0, "hwm": 9, "committed_ms": 0, "metadata": "", "is_end_known": lag is not None}
    return GroupPosition(topic="t", partition=partition, offset=1, lag=lag, **end)  # type: ignore[arg-type]  # as above


def description(*lags: int | None) -> GroupDescription:
    """One member has the first partition, another the rest."""
    summary = GroupSummary(name="g", state="Stable", protocol_type="consumer", members=2, generation=1)
    places = [("t", n) for n in range(len(lags))]
    members = [
        GroupMember(member_id=name, instance_id=None, client_id="", client_host="", session_timeout_ms=1, partitions=p)
        for name, p in (("one", tuple(places[:1])), ("rest", tuple(places[1:])))
    ]
    positions = tuple(position(n, lag) for n, lag in enumerate(lags))
    return GroupDescription(summary=summary, protocol="", coordinator=1, members=tuple(members), positions=positions)


def test_a_group_with_a_partition_without_an_answer_has_no_lag_and_not_a_smaller_one() -> None:
    assert description(4, 3).lag == 7
    found = description(4, 3, None)
    assert (found.lag, found.lag_total.offsets.at_least) == (None, 7)
    assert {name: lag.offsets.value for name, lag in found.lags_by_member().items()} == {"one": 4, "rest": None}
