"""`smq quota`: whose they are, in words."""

import json

import pytest

from smq.testing.fake.cluster import FakeCluster
from tests.unit.coordinator.cli.conftest import Smq


def test_quotas_are_set_listed_and_removed(smq: Smq, cluster: FakeCluster) -> None:
    assert "no quotas" in smq("quota", "list").stdout
    for arguments, said in (
        (("producer_byte_rate=1024", "request_percentage=12.5", "--user", "alice"), "user alice"),
        (("consumer_byte_rate=7", "--user", "*", "--client-id", "job"), "each user with client id job"),
        (("connection_creation_rate=5", "--ip", "*"), "each address"),
    ):
        assert smq("quota", "set", *arguments).stdout.strip().endswith(f" of {said}")
    shown = json.loads(smq("quota", "list", "--json").stdout)
    assert shown[0] == {"user": "alice", "client_id": None, "ip": None, "key": "producer_byte_rate", "value": 1024.0}
    assert [(row["user"], row["client_id"], row["ip"]) for row in shown[2:]] == [("*", "job", None), (None, None, "*")]
    assert "12.5" in smq("quota", "list").stdout
    removed = smq("quota", "unset", "producer_byte_rate", "request_percentage", "--user", "alice")
    assert removed.stdout.strip() == "removed producer_byte_rate, request_percentage of user alice"
    assert [quota.value for quota in cluster.quotas] == [7, 5]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("set", "producer_byte_rate=1"), "name whose quota it is"),
        (("unset", "producer_byte_rate", "--user", ""), "name whose quota it is"),
        (("set", "producer_byte_rate=x", "--user", "u"), "a quota is a number"),
        (("set", "producer_byte_rate=nan", "--user", "u"), "a quota is above 0"),
        (("set", "producer_byte_rate=0", "--user", "u"), "`smq quota unset` removes one"),
        (("set", "producer_byte_rate", "--user", "u"), "write KEY=VALUE"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused(smq: Smq, arguments: tuple[str, ...], reason: str) -> None:
    refused = smq("quota", *arguments)
    assert refused.exit_code == 2
    assert reason in refused.stderr
