"""What a user may do, by Kafka's rules."""

from typing import Any

import pytest

from smq.coordinator.service.authorizer import Authorizer
from smq.raft_state.commands import Acl
from smq.raft_state.handlers.acls import Operation, Pattern, Permission, Resource
from smq.raft_state.state import ClusterState

HOST = "10.0.0.1"
READ, WRITE, DESCRIBE, ALL = Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.ALL


def rule(operation: Operation = READ, name: str = "orders", user: str = "alice", **other: Any) -> Acl:
    fields: dict[str, Any] = {
        "resource": Resource.TOPIC,
        "pattern": Pattern.LITERAL,
        "host": "*",
        "permission": Permission.ALLOW,
        "principal": f"User:{user}",
    }
    return Acl(**(fields | {"operation": operation, "name": name} | other))


def deny(operation: Operation = READ, name: str = "orders", user: str = "alice", **other: Any) -> Acl:
    return rule(operation, name, user, permission=Permission.DENY, **other)


PREFIX: dict[str, Any] = {"pattern": Pattern.PREFIXED}


@pytest.mark.parametrize(
    ("rules", "operation", "is_allowed"),
    [
        ([], READ, False),
        ([rule()], READ, True),
        ([rule()], WRITE, False),
        ([rule()], DESCRIBE, True),
        ([rule(WRITE)], DESCRIBE, True),
        ([rule(DESCRIBE)], READ, False),
        ([rule(ALL)], WRITE, True),
        ([rule(user="*")], READ, True),
        ([rule(user="bob")], READ, False),
        ([rule(user="alic")], READ, False),
        ([rule(name="*")], READ, True),
        ([rule(name="order")], READ, False),
        ([rule(name="ord", **PREFIX)], READ, True),
        ([rule(name="orders", **PREFIX)], READ, True),
        ([rule(name="orders2", **PREFIX)], READ, False),
        ([rule(name="*", **PREFIX)], READ, False),  # a prefix is a prefix
        ([rule(host=HOST)], READ, True),
        ([rule(host="10.0.0.2")], READ, False),
        ([rule(resource=Resource.GROUP)], READ, False),
        ([rule(), deny()], READ, False),
        ([rule(ALL), deny()], READ, False),
        ([rule(), deny(ALL)], READ, False),
        ([rule(), deny(name="*")], READ, False),
        ([rule(), deny(name="o", **PREFIX)], READ, False),
        ([rule(), deny(user="*")], READ, False),
        ([rule(name="*", user="*"), deny(host=HOST)], READ, False),
        ([rule(), deny(host="10.0.0.2")], READ, True),
        ([rule(), deny(WRITE)], READ, True),
        ([rule(), deny(READ)], DESCRIBE, True),  # a right to see is not denied by that
        ([rule(), deny(DESCRIBE)], DESCRIBE, False),
        ([rule(Operation.ALTER_CONFIGS)], Operation.DESCRIBE_CONFIGS, True),
        ([deny(user="root")], READ, False),
    ],
)
def test_rules_decide_as_in_kafka(rules: list[Acl], operation: Operation, is_allowed: bool) -> None:
    state = ClusterState(acls=tuple(sorted(rules)))
    authorizer = Authorizer(lambda: state, ("root",))
    for _ in range(2):  # the second time from memory
        assert authorizer.may("alice", HOST, operation, Resource.TOPIC, "orders") is is_allowed
    assert authorizer.may("root", HOST, operation, Resource.TOPIC, "orders")
    assert authorizer.why("alice", HOST, operation, Resource.TOPIC, "orders")[0] is is_allowed


def test_a_change_of_the_rules_is_in_force_with_the_next_decision() -> None:
    state = ClusterState()
    authorizer = Authorizer(lambda: state, ())

    def may() -> bool:
        return authorizer.may("alice", HOST, READ, Resource.TOPIC, "orders")

    assert not may()
    for rules, is_allowed in (((rule(),), True), ((rule(), deny()), False), ((rule(),), True), ((), False)):
        state.acls = tuple(sorted(rules))
        assert may() is is_allowed
    state = ClusterState(acls=(rule(),))  # of a snapshot
    assert may()


def test_a_right_to_some_name_is_found() -> None:
    state = ClusterState(acls=(rule(WRITE, name="x", **PREFIX),))
    authorizer = Authorizer(lambda: state, ("root",))
    found = [authorizer.may_any(user, HOST, WRITE, Resource.TOPIC) for user in ("alice", "bob", "root")]
    assert found == [True, False, True]
    assert not authorizer.may_any("alice", HOST, READ, Resource.TOPIC)
