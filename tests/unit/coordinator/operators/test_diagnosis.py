"""What `smq status` and `smq doctor` say of a cluster, what of it is bad, and what a bundle holds."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smq.clients.types import (
    ClusterDescription,
    NodeDescription,
    NodeEvent,
    NodeStatus,
    PartitionDescription,
    TopicDescription,
)
from smq.coordinator.cli.commands.doctor import without_secrets
from smq.coordinator.cli.root import cli
from smq.coordinator.operators.diagnosis import Answer, Look, findings
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.runner import cluster_in_thread

NOW = 1_800_000_000_000
DAY = 86_400_000
SILENT = SmqError(ErrorCode.UNREACHABLE, "no node answers")


def status(node: int) -> NodeStatus:
    return NodeStatus(
        node=node,
        incarnation=1,
        is_ready=True,
        raft_leader=1,
        raft_term=1,
        applied_index=1,
        commit_index=1,
        digest="",
        replicas=(),
        now_ms=NOW,
        version="1",
        disk_free_bytes=50,
        disk_total_bytes=100,
    )


def look(**changed: dict[str, Any] | SmqError) -> Look:
    """Three nodes, and partition t/0 on all of them. `n2=...` changes the status of node 2, or is its error."""
    nodes, answers = [], {}
    for node in (1, 2, 3):
        change = changed.get(f"n{node}", {})
        found = change if isinstance(change, SmqError) else replace(status(node), **change)
        answers[node] = Answer(asked_ms=NOW - 10, received_ms=NOW + 10, status=found)
        nodes.append(
            NodeDescription(
                node=node,
                grpc_address=f"n{node}:1",
                http_address="",
                kafka_address="",
                fenced=isinstance(change, SmqError),
                incarnation=1,
                drained=False,
                rack="",
                feature_level=1,
            )
        )
    partition = PartitionDescription(
        partition=0, leader=1, leader_available=True, epoch=1, replicas=(1, 2, 3), log_start=0, hwm=0, next_offset=0
    )
    topic = TopicDescription(
        name="t", topic_id=b"", replication_factor=3, config={}, created_ms=0, partitions=(partition,)
    )
    cluster = ClusterDescription(cluster_id="c", raft_leader=1, nodes=tuple(nodes), topics=(topic,), feature_level=1)
    return Look(cluster=cluster, answers=answers)


def elected(count: int) -> tuple[NodeEvent, ...]:
    return tuple(NodeEvent(at_ms=NOW - 60_000, kind="raft", text=f"node {n} leads") for n in range(count))


LOST: dict[str, Any] = {"raft_leader": None, "is_ready": False}


@pytest.mark.parametrize(
    ("seen", "checks", "says"),
    [
        (look(), [], ""),
        (look(n2=SILENT), ["nodes", "partitions"], "no replica to spare: if one more node stops, writes stop there"),
        (look(n2=SILENT, n3=SILENT), ["nodes", "nodes", "partitions"], "fewer replicas than a majority"),
        (look(n1=LOST, n2=SILENT, n3=SILENT), ["quorum", "nodes", "nodes"], "1 of 3 nodes answer, and 2 must run"),
        (look(n3={"is_ready": False}), ["nodes"], "node 3 runs and is not ready: it is still joining"),
        (look(n1={"warnings": ("the disk is full: delete 12 MiB",)}), ["warnings"], "node 1: the disk is full"),
        (look(n2={"disk_free_bytes": 9}), ["disks"], "node 2 has 9 B of 100 B free"),
        (look(n2={"certificate_ends_ms": NOW + 13 * DAY + 20}), ["certificates"], "ends on 2027-01-28, in 13 days"),
        (look(n2={"certificate_ends_ms": NOW + 15 * DAY}), [], ""),
        (look(n2={"now_ms": NOW + 1_011}), ["clocks"], "the clock of node 2 is 1.0 s ahead of this one"),
        (look(n2={"now_ms": NOW - 1_012}), ["clocks"], "the clock of node 2 is 1.0 s behind this one"),
        (look(n2={"now_ms": NOW + 1_000}), [], ""),
        (look(n1={"events": elected(6)}), ["elections"], "changed 6 times in the last hour; the last change: node 5"),
    ],
)
def test_each_fault_is_found_with_what_it_puts_at_risk(seen: Look, checks: list[str], says: str) -> None:
    found = findings(seen)
    assert [f.check for f in found if f.is_bad] == checks
    assert any(says in f.text for f in found) or not says
    assert all(f.next for f in found if f.is_bad and f.check != "warnings")


def test_before_the_first_quorum_it_says_what_it_waits_for() -> None:
    empty = look()
    seen = Look(cluster=replace(empty.cluster, nodes=(), topics=()), answers={})
    assert [f.text for f in findings(seen)] == [
        "no node has joined yet: a majority of the nodes must run and reach each other first"
    ]


def test_what_is_good_to_know_is_not_bad() -> None:
    seen = look(n1={"events": elected(1)}, n2={"version": "2"})
    assert [(f.check, f.is_bad) for f in findings(seen)] == [("versions", False), ("elections", False)]
    assert "smq 1 on nodes 1, 3; smq 2 on node 2" in findings(seen)[0].text


def test_the_bundle_has_everything_but_secrets(tmp_path: Path) -> None:
    config, bundle = tmp_path / "node.toml", tmp_path / "smq.tar.gz"
    config.write_text('node_id = 1\ntoken_file = "/etc/t"\npassword = "hunter2"\n')
    with cluster_in_thread(2, t=1) as cluster:
        environment = {"SMQ_BOOTSTRAP": cluster.servers}
        arguments = ["doctor", "--bundle", str(bundle), "--file", str(config)]
        done = CliRunner(env=environment).invoke(cli, arguments)
        assert (done.exit_code, "nothing is wrong" in done.output) == (0, True), done.output
        cluster.call(cluster.nodes[2].stop())
        failed = CliRunner(env=environment).invoke(cli, ["doctor", "--json"])
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["is_well"] is False
    with tarfile.open(bundle) as archive:
        parts = {m.name.removeprefix("smq-doctor/"): archive.extractfile(m) for m in archive.getmembers()}
        held = {name: file.read().decode() for name, file in parts.items() if file is not None}
    assert held.keys() == {"doctor.json", "cluster.json", "nodes.json", "settings.json", "files/1-node.toml"}
    assert "hunter2" not in "".join(held.values())
    assert "node_id = 1" in held["files/1-node.toml"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (b"a = 1\n", b"a = 1\n"),
        (b'x_password: "a b"\nb\n', b"x_password: [removed]\nb\n"),
        (b'"token": "abc"\n', b'"token": [removed]\n'),
        (b"-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nrest", b"[removed: a private key]\nrest"),
        (b"-----BEGIN RSA PRIVATE KEY-----\nabc", b"[removed: a private key]"),
    ],
)
def test_secrets_are_removed(text: bytes, left: bytes) -> None:
    assert without_secrets(text) == left
