"""Which replica a consumer reads from, and when it is sent back to the leader."""

from dataclasses import replace
from typing import Any

import pytest

from smq.coordinator.kafka.fetch import is_behind, preferred_replica
from smq.raft_state.commands import Listener
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.state import ClusterState
from smq.replication.api import Fetched
from tests.unit.raft_state.support import advance, advances, cluster, elect, pid, register, topic

HWM = 10
ENDS = {2: 10, 3: 12, 4: 11}
RACKS = {1: "a", 2: "b", 3: "b", 4: "b", 5: ""}


def _state(racks: dict[int, str] = RACKS, replicas: int = 5) -> ClusterState:
    """Node 1 leads the only partition, whose records 3 to 9 are there."""
    driver = cluster(0)
    for node, rack in racks.items():
        driver.ok(register(node, kafka=f"host:{node}", rack=rack))
    driver.ok(topic(1, replicas=replicas, start=3))
    driver.ok(elect(pid(1), 0, 1, 3))
    driver.ok(advances(advance(pid(1), 1, HWM)))
    return driver.machine.state


def _preferred(
    state: ClusterState, *, rack: str = "b", offset: int = HWM, ends: dict[int, int] = ENDS, listener: str = ""
) -> NodeId | None:
    part = state.partition(pid(1))
    assert part is not None
    assert part.leader == 1
    reported = {NodeId(n): Offset(end) for n, end in ends.items()}
    return preferred_replica(state, part, reported, hwm=part.hwm, rack=rack, offset=offset, listener=listener)


@pytest.mark.parametrize(
    ("racks", "asked", "preferred"),
    [
        pytest.param(RACKS, {}, 3, id="the follower in the rack that holds most"),
        pytest.param(RACKS, {"rack": ""}, None, id="no rack"),
        pytest.param({1: "a", 2: "", 3: "", 4: "", 5: ""}, {"rack": ""}, None, id="nodes without a rack share none"),
        pytest.param(RACKS, {"rack": "z"}, None, id="a rack without nodes"),
        pytest.param(RACKS, {"rack": "B"}, None, id="another spelling"),
        pytest.param(dict.fromkeys(RACKS, "b"), {}, None, id="the leader's own rack"),
        pytest.param(RACKS, {"offset": 9, "ends": {2: 9, 3: 8, 4: 5}}, 2, id="some lack the offset"),
        pytest.param(RACKS, {"offset": 10, "ends": {2: 9, 3: 8, 4: 5}}, None, id="none has the offset"),
        pytest.param(RACKS, {"ends": {4: 10}}, 4, id="some have not spoken to this leader"),
        pytest.param(RACKS, {"ends": {}}, None, id="none has spoken to this leader"),
        pytest.param(RACKS, {"offset": 3}, 3, id="the first offset"),
        pytest.param(RACKS, {"offset": 2}, None, id="below the first"),
        pytest.param(RACKS, {"offset": -1}, None, id="negative"),
        pytest.param(RACKS, {"offset": HWM + 1}, None, id="beyond the end"),
    ],
)
def test_the_replica_in_the_rack_that_holds_most_is_preferred_if_any_can_serve(
    racks: dict[int, str], asked: dict[str, Any], preferred: int | None
) -> None:
    assert _preferred(_state(racks), **asked) == preferred


def test_among_equals_the_first_replica_is_preferred() -> None:
    state = _state()
    part = state.partition(pid(1))
    assert part is not None
    first = next(n for n in part.replicas if n in ENDS)
    assert _preferred(state, ends=dict.fromkeys(ENDS, 12)) == first


def test_a_fenced_follower_and_one_without_a_listener_are_passed_over() -> None:
    state = _state()
    state.nodes[NodeId(3)].fenced = True
    assert _preferred(state) == 4
    state.nodes[NodeId(4)] = replace(state.nodes[NodeId(4)], kafka_address="")
    assert _preferred(state) == 2


def test_a_node_that_is_no_replica_is_not_preferred() -> None:
    racks = {1: "a", 2: "a", 3: "b"}
    state = _state(racks, replicas=2)
    part = state.partition(pid(1))
    assert part is not None
    assert part.replicas == (1, 2)
    assert _preferred(state, ends={2: 10, 3: 10}) is None


@pytest.mark.parametrize(
    ("readable", "is_ready", "expected"),
    [
        (10, True, False),  # at the end of all that there is
        (10, False, True),  # of all that a node without the cluster knows of
        (7, True, True),  # committed, and not here
        (12, True, False),  # here: the answer had no room for it
        (12, False, False),
    ],
)
def test_a_follower_sends_consumers_that_it_cannot_serve_back_to_the_leader(
    readable: int, is_ready: bool, expected: bool
) -> None:
    hwm = Offset(max(readable, HWM))
    found = Fetched([], Offset(3), hwm, hwm, Offset(readable))
    assert is_behind(found, offset=HWM if readable >= HWM else readable, is_ready=is_ready) is expected


def test_a_replica_that_the_clients_listener_does_not_reach_is_not_preferred() -> None:
    state = _state()
    assert _preferred(state, listener="outside") is None
    outside = Listener(name="outside", grpc_address="", kafka_address="b:1")
    state.nodes[NodeId(2)] = replace(state.nodes[NodeId(2)], listeners=(outside,))
    assert _preferred(state, listener="outside") == 2
