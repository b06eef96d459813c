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


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("0:0:0:0:0:0:0:1", "::1"),  # as Java writes it
        ("FE80::1", "fe80::1%eth0"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_is_denied_however_the_rule_writes_it(written: str, host: str) -> None:
    state = ClusterState(acls=tuple(sorted([rule(), deny(host=written)])))
    authorizer = Authorizer(lambda: state, ())
    assert not authorizer.may("alice", host, READ, Resource.TOPIC, "orders")
    assert authorizer.may("alice", "10.0.0.9", READ, Resource.TOPIC, "orders")


def test_names_as_long_as_a_request_are_not_kept() -> None:
    authorizer = Authorizer(ClusterState, ())
    names = [str(number) * 100_000 for number in range(8)]
    assert not any(authorizer.may("alice", HOST, READ, Resource.TOPIC, name) for name in names)
    assert sum(len(key[-1]) for key in authorizer._decided) == 0


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


@pytest.mark.parametrize(
    ("denied", "is_found"),
    [
        (deny(WRITE, name="*"), False),
        (deny(WRITE, name="*", user="*"), False),
        (deny(ALL, name="x", **PREFIX), False),
        (deny(WRITE, name="xy", **PREFIX), True),
        (deny(WRITE, name="x"), True),  # one name of many
        (deny(WRITE, name="*", host="10.0.0.2"), True),
        (deny(READ, name="*"), True),
    ],
)
def test_a_right_to_some_name_may_be_denied_for_all_of_them(denied: Acl, is_found: bool) -> None:
    state = ClusterState(acls=tuple(sorted([rule(WRITE, name="x", **PREFIX), denied])))
    assert Authorizer(lambda: state, ()).may_any("alice", HOST, WRITE, Resource.TOPIC) is is_found
