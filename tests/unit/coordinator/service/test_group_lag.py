"""A group as an operator sees it: assignments that parse or do not, lag that is never negative, and which groups
have series."""

import struct
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.coordinator.groups.protocols import subscribed_topics
from smq.coordinator.service import lag_monitor
from smq.coordinator.service.group_lag import assigned_partitions, positions
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import Offset
from smq.raft_state.state import ClusterState, GroupState, MemberState
from tests.unit.raft_state.support import advance, advances, assign_members, cluster, commit, form, member, pid, topic


def assignment(*topics: tuple[str, tuple[int, ...]]) -> bytes:
    """As consumers write it: version, topics with their partitions, user data."""
    out = struct.pack(">hi", 1, len(topics))
    for name, parts in topics:
        out += struct.pack(f">h{len(name)}si{len(parts)}i", len(name), name.encode(), len(parts), *parts)
    return out + struct.pack(">i", -1)


def consumers() -> GroupState:
    return GroupState(name="g", protocol_type="consumer")


def found(group: GroupState, data: bytes) -> list[tuple[str, int]]:
    return assigned_partitions(ClusterState(), group, MemberState(member=member("m"), assignment=data))


def test_assignment_of_a_consumer_names_its_partitions() -> None:
    data = assignment(("a", (0, 2)), ("bb", ()), ("c", (1,)))
    assert found(consumers(), data) == [("a", 0), ("a", 2), ("c", 1)]
    assert found(GroupState(name="g", protocol_type="connect"), data) == []


@given(st.binary(max_size=60))
def test_bytes_that_are_no_assignment_or_subscription_are_none_and_never_an_error(data: bytes) -> None:
    found(consumers(), data)
    subscribed_topics(data)


@given(st.data())
def test_assignment_cut_anywhere_is_not_taken_for_a_whole_one(data: st.DataObject) -> None:
    whole = assignment(("topic", (0, 1, 2)))
    cut = data.draw(st.integers(0, len(whole) - 5))
    assert found(consumers(), whole[:cut]) == []


def test_lag_is_up_to_the_hwm_never_negative_and_from_the_log_start_without_a_commit() -> None:
    driver = cluster(kafka=True)
    driver.ok(topic(1, "t", partitions=4))
    driver.ok(advances(*(advance(pid(1, p), 0, hwm=10) for p in range(3))))
    driver.ok(commit("g", (pid(1, 0), 4), (pid(1, 1), 99)))
    epoch = coordinator_of(driver.machine.state, "g").epoch
    driver.ok(form("g", epoch, 0, member("m")))
    driver.ok(assign_members("g", epoch, 1, m=assignment(("t", (1, 2)), ("gone", (0,)))))
    found = [
        (at.topic, at.part.index, at.lag_at(Offset(3), at.part.hwm))
        for at in positions(driver.machine.state, driver.machine.state.groups["g"])
    ]
    assert found == [("t", 0, 6), ("t", 1, 0), ("t", 2, 7)]


def test_each_coordinators_first_groups_have_series_whichever_node_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"g{number:02}" for number in range(20)]
    driver = cluster(kafka=True)
    driver.ok(topic(1, "t"))
    driver.ok(advances(advance(pid(1, 0), 0, hwm=10)))
    for name in reversed(names):
        driver.ok(commit(name, (pid(1, 0), 4)))
    monkeypatch.setattr(lag_monitor, "METRICS_GROUPS_MAX", 3)
    node = SimpleNamespace(state=driver.machine.state)
    found = list(lag_monitor.shown_groups(node))
    assert [name for name, _, _ in found] == names
    of_node = defaultdict(list)
    for name, owner, is_shown in found:
        assert owner == coordinator_of(driver.machine.state, name).node
        of_node[owner].append(is_shown)
    assert len(of_node) > 1
    for flags in of_node.values():
        assert flags == [True] * 3 + [False] * (len(flags) - 3)
