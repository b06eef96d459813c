"""The cluster's start, and nodes: registration, fencing, stale incarnations."""

from dataclasses import replace
from typing import Any

import pytest

from smq.raft_state.commands import (
    AdvanceLogStart,
    AllocateProducerId,
    Barrier,
    Command,
    DeleteTopic,
    FenceNode,
    Listener,
    RegisterNode,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import DiskId, Incarnation, NodeId, Offset
from smq.raft_state.limits import LIMIT_CAP, NODES_MAX, RACK_BYTES_MAX, REPLIES_CAP, default_init
from smq.raft_state.replies import Done, TopicCreated
from tests.unit.raft_state.support import (
    Driver,
    advances,
    aged,
    cluster,
    commit,
    did,
    elect,
    listener,
    pid,
    register,
    retention,
    rid,
    tid,
    topic,
)


def fence(node: int, incarnation: int = 1) -> FenceNode:
    return FenceNode(node=NodeId(node), incarnation=Incarnation(incarnation))


def unfence(node: int, incarnation: int = 1) -> UnfenceNode:
    return UnfenceNode(node=NodeId(node), incarnation=Incarnation(incarnation))


@pytest.fixture
def driver() -> Driver:
    return cluster()


@pytest.mark.parametrize(
    "command",
    [
        register(1),
        fence(1),
        unfence(1),
        topic(1),
        DeleteTopic(name="t1"),
        elect(pid(1), 0, 1, 0),
        advances(),
        AdvanceLogStart(partition=pid(1), offset=Offset(0)),
        retention(),
        AllocateProducerId(),
        commit("g"),
    ],
    ids=lambda command: type(command).__name__,
)
def test_before_init_every_command_but_barrier_is_not_ready(command: Command) -> None:
    driver = Driver()
    driver.refused(command, ErrorCode.NODE_NOT_READY)
    assert driver.ok(Barrier()) == Done()


def test_request_from_before_init_is_not_counted_and_takes_effect_when_it_is_repeated() -> None:
    driver = Driver()
    request = replace(topic(1, replicas=1), request_id=rid(1))
    for _ in range(2):
        driver.refused(aged(0, request), ErrorCode.NODE_NOT_READY)
    driver.ok(default_init("c"))
    driver.ok(register(1))
    assert driver.ok(aged(0, request)) == TopicCreated(topic_id=tid(1))


def test_second_init_is_already_initialized(driver: Driver) -> None:
    driver.refused(default_init("other"), ErrorCode.ALREADY_INITIALIZED)
    assert driver.machine.state.cluster_id == "test"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cluster_id", ""),
        ("cluster_id", "x" * 65),
        ("topics_max", 0),
        ("partitions_max", LIMIT_CAP + 1),
        ("groups_max", -1),
        ("replies_max", REPLIES_CAP + 1),
    ],
)
def test_init_with_an_impossible_limit_is_an_invalid_request(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: value}
    reply = Driver().refused(replace(default_init("c"), **fields), ErrorCode.INVALID_REQUEST)
    assert field in reply.message


def test_higher_incarnation_replaces_the_node_and_unfences_it(driver: Driver) -> None:
    driver.ok(fence(2))
    driver.ok(register(2, incarnation=9, address="new:1"))
    node = driver.machine.state.nodes[NodeId(2)]
    assert (node.incarnation, node.grpc_address, node.fenced) == (9, "new:1", False)


def test_same_registration_again_is_a_retry_and_unfences(driver: Driver) -> None:
    driver.ok(fence(2))
    assert driver.ok(register(2)) == Done()
    assert not driver.machine.state.nodes[NodeId(2)].fenced


def test_rule_18_a_higher_incarnation_on_another_disk_replaces_the_disk(driver: Driver) -> None:
    driver.ok(register(2, incarnation=9, disk=77))
    assert driver.machine.state.nodes[NodeId(2)].disk == did(77)
    assert driver.machine.state.nodes[NodeId(1)].disk == did(1)


def test_rule_18_the_same_incarnation_on_another_disk_is_a_stale_incarnation(driver: Driver) -> None:
    driver.refused(register(2, disk=77), ErrorCode.STALE_INCARNATION)
    assert driver.machine.state.nodes[NodeId(2)].disk == did(2)


@pytest.mark.parametrize(("incarnation", "address"), [(4, "host:1"), (5, "elsewhere:1")])
def test_registration_that_is_not_newer_is_a_stale_incarnation(driver: Driver, incarnation: int, address: str) -> None:
    driver.ok(register(2, incarnation=5))
    driver.refused(register(2, incarnation=incarnation, address=address), ErrorCode.STALE_INCARNATION)


def test_more_nodes_than_the_bound_is_limit_exceeded() -> None:
    driver = cluster(NODES_MAX)
    driver.refused(register(NODES_MAX + 1), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(register(NODES_MAX, incarnation=2))


@pytest.mark.parametrize("command", [fence(7), unfence(7)], ids=["fence", "unfence"])
def test_fencing_of_an_unknown_node_is_rejected(command: Command) -> None:
    cluster().refused(command, ErrorCode.UNKNOWN_NODE)
    assert "`smq node list`" in ErrorCode.UNKNOWN_NODE.advice


@pytest.mark.parametrize("command", [fence(1, 2), unfence(1, 2)], ids=["fence", "unfence"])
def test_fencing_of_another_incarnation_is_rejected(command: Command) -> None:
    """A late fence must not affect the process that has started since."""
    cluster().refused(command, ErrorCode.STALE_INCARNATION)


def test_fencing_twice_has_the_effect_of_fencing_once(driver: Driver) -> None:
    steps: list[tuple[Command, bool]] = [(fence(1), True)] * 2 + [(unfence(1), False)] * 2
    for command, expected in steps:
        assert driver.ok(command) == Done()
        assert driver.machine.state.nodes[NodeId(1)].fenced is expected


def test_rack_is_kept_and_moves_with_the_next_process_only() -> None:
    driver = cluster(0)
    driver.ok(register(1, rack="a"))
    driver.ok(register(1, rack="a"))  # a retry
    driver.refused(register(1, rack="b"), ErrorCode.STALE_INCARNATION)
    assert driver.machine.state.nodes[NodeId(1)].rack == "a"
    driver.ok(register(1, incarnation=2, rack="b"))
    assert driver.machine.state.nodes[NodeId(1)].rack == "b"


def test_rack_may_have_as_many_bytes_as_the_bound() -> None:
    cluster(0).ok(register(1, rack="x" * RACK_BYTES_MAX))


def test_registration_keeps_the_named_listeners(driver: Driver) -> None:
    driver.ok(register(2, incarnation=9, listeners=(listener("inside"), listener("outside"))))
    assert driver.machine.state.nodes[NodeId(2)].listeners == (listener("inside"), listener("outside"))
    driver.ok(register(2, incarnation=10))
    assert driver.machine.state.nodes[NodeId(2)].listeners == ()


def with_listeners(*listeners: Listener) -> RegisterNode:
    return register(2, incarnation=9, listeners=listeners)


BAD_REGISTRATIONS = [
    (register(0), "node"),
    *((replace(register(4), disk=DiskId(bytes(size))), "disk must have 16 bytes") for size in (0, 15, 17)),
    (register(4, address="h" * 301), "grpc_address"),
    (register(4, rack="ü" * (RACK_BYTES_MAX // 2 + 1)), "rack"),
    (with_listeners(listener("b"), listener("a")), "different names, in order"),
    (with_listeners(listener("a"), listener("a")), "different names, in order"),
    (with_listeners(listener("")), "1 to 32 bytes"),
    (with_listeners(listener("ü" * 17)), "1 to 32 bytes"),
    (with_listeners(replace(listener("a"), kafka_address="h" * 301)), "at most 300 bytes"),
    (with_listeners(replace(listener("a"), grpc_address="h" * 301)), "at most 300 bytes"),
    (with_listeners(*(listener(f"l{n}") for n in range(9))), "8 named listeners"),
]


@pytest.mark.parametrize(("command", "reason"), BAD_REGISTRATIONS)
def test_an_impossible_registration_is_refused(driver: Driver, command: RegisterNode, reason: str) -> None:
    assert reason in driver.refused(command, ErrorCode.INVALID_REQUEST).message


def test_same_incarnation_with_other_listeners_is_no_retry(driver: Driver) -> None:
    driver.refused(register(2, listeners=(listener("a"),)), ErrorCode.STALE_INCARNATION)
