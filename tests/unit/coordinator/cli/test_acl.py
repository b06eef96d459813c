"""`smq acl`: rules in words, and what decides."""

import json

import pytest

from smq.testing.fake.cluster import FakeCluster
from tests.unit.coordinator.cli.conftest import Smq


def test_rules_are_granted_tested_listed_and_revoked(smq: Smq, cluster: FakeCluster) -> None:
    assert "no rules" in smq("acl", "list").stdout
    advice = "no: no rule allows it; grant it with `smq acl grant alice read topic orders`"
    assert smq("acl", "test", "alice", "read", "topic", "orders").stdout.strip() == advice
    for arguments, said in (
        (("alice", "read", "topic", "orders"), "alice may read topic orders"),
        (("alice", "all", "cluster"), "alice may all cluster kafka-cluster"),
        (("*", "write", "topic", "pay", "--prefix", "--deny"), "every user may not write topic pay..."),
        (("bob", "read", "group", "*", "--host", "10.0.0.1"), "bob may read every group from 10.0.0.1"),
    ):
        assert smq("acl", "grant", *arguments).stdout.strip() == f"added: {said}"
    assert smq("acl", "test", "alice", "read", "topic", "orders").stdout.strip() == "yes: alice may read topic orders"
    shown = json.loads(smq("acl", "list", "--json").stdout)
    assert len(shown) == 4
    assert shown[0] == {
        "user": "alice",
        "operation": "read",
        "resource": "topic",
        "name": "orders",
        "pattern": "literal",
        "permission": "allow",
        "host": "*",
    }
    assert "pay..." in smq("acl", "list").stdout
    assert json.loads(smq("acl", "test", "bob", "read", "group", "*", "--json").stdout)["is_allowed"] is True
    removed = smq("acl", "revoke", "alice", "read", "topic", "orders", "--json")
    assert json.loads(removed.stdout)["removed"] == shown[0]
    assert "no such rule" in smq("acl", "revoke", "alice", "read", "topic", "orders").stdout
    assert len(cluster.acls) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("alice", "fly", "topic", "t"), "'fly' is not one of"),
        (("alice", "read", "planet", "t"), "'planet' is not one of"),
        (("alice", "read", "topic"), "name the topic, or * for all"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(smq: Smq, arguments: tuple[str, ...], reason: str) -> None:
    for command in ("grant", "revoke", "test"):
        refused = smq("acl", command, *arguments)
        assert refused.exit_code == 2
        assert reason in refused.stderr
