"""`smq group ...` on the groups of real Kafka clients: lag, and changes of their offsets while they run or rest."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from smq.clients import SyncAdmin
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli
from tests.kafka.members import ConfluentMember, drive
from tests.kafka.test_groups import RECORDS, places, write

NewTopic = Callable[..., str]


@pytest.fixture
def smq(cluster: Cluster) -> Callable[..., CompletedProcess[str]]:
    addresses = ",".join(node.grpc for node in cluster.nodes.values())
    return lambda *arguments: run_cli("group", *map(str, arguments), "--bootstrap", addresses)


def test_offsets_of_a_running_group_are_shown_and_not_changed_and_those_of_a_resting_one_are(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic, smq: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    topic, group = new_topic(2), "tools"
    name = f"kafka-cg-{group}"
    write(bootstrap, topic, 2)
    member = ConfluentMember(bootstrap, group, [topic])
    drive("it reads all", [member], lambda: len(member.seen) >= 2 * RECORDS and member.assigned() == places((topic, 2)))
    member.commit()
    write(bootstrap, topic, 2, first=RECORDS, count=3)

    described = json.loads(smq("describe", name, "--json").stdout)
    assert (described["lag"], len(described["members"])) == (6, 1)
    assert described["lag_bytes"] > 0
    assert described["lag_ms"] >= 0
    assert smq("describe", name, "--fail-above", "2").returncode == 3
    assert smq("describe", name, "--fail-above", "3").returncode == 0

    refused = smq("reset-offsets", name, "--all-topics", "--to-earliest", "--execute")
    assert refused.returncode == 1
    assert described["members"][0]["member_id"] in refused.stderr
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        with pytest.raises(SmqError) as raced:  # as if the member had joined after the look
            admin.commit_offsets(name, {(topic, 0): 0})
        assert raced.value.code is ErrorCode.UNKNOWN_MEMBER
    subscribed = smq("delete-offsets", name, "--all-topics", "--execute")
    assert (subscribed.returncode, "GROUP_SUBSCRIBED" in subscribed.stderr) == (1, True)
    member.close()

    saved = tmp_path / "offsets.json"
    assert smq("export", name, "--output", saved).returncode == 0
    reset = smq("reset-offsets", name, "--topic", f"{topic}:0", "--shift-by", "-5", "--execute")
    assert reset.returncode == 0, reset.stderr
    assert committed(smq, name) == {0: RECORDS - 5, 1: RECORDS}
    again = ConfluentMember(bootstrap, group, [topic])
    drive("it reads again what was reset, and what is new", [again], lambda: len(again.seen) >= 5 + 6)
    again.close()
    assert sorted(again.seen) == [
        *((topic, 0, offset) for offset in range(RECORDS - 5, RECORDS + 3)),
        *((topic, 1, offset) for offset in range(RECORDS, RECORDS + 3)),
    ]
    assert smq("import", name, saved, "--execute").returncode == 0
    assert committed(smq, name) == {0: RECORDS, 1: RECORDS}
    assert smq("delete-offsets", name, "--topic", f"{topic}:1", "--execute").returncode == 0
    assert committed(smq, name) == {0: RECORDS}


def committed(smq: Callable[..., CompletedProcess[str]], name: str) -> dict[int, int]:
    document: dict[str, Any] = json.loads(smq("describe", name, "--json").stdout)
    return {p["partition"]: p["offset"] for p in document["positions"] if p["offset"] is not None}
