"""A cluster under TLS as an operator runs it: `smq cluster --tls`, the commands on it, renewal, and Kafka clients."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from smq.coordinator.tls.certificate_files import Identity, client_identity, node_identity
from smq.raft_state.ids import NodeId
from smq.testing.cluster import Cluster
from smq.testing.node_process import run_cli, wait_for

Smq = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("tls"))
    try:
        yield made.start("--tls")
    finally:
        made.stop()


@pytest.fixture
def operator(secure: Cluster) -> Identity:
    return client_identity(secure.root / "data" / "tls")


@pytest.fixture
def smq(secure: Cluster) -> Smq:
    """`smq ...` with the cluster's directory in the environment, and nothing else."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SMQ_")}
    environment["SMQ_CLUSTER_DIR"] = str(secure.root / "data")

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_cli(*arguments, env=environment, **options)

    return call


def test_the_directory_is_all_that_the_commands_need(smq: Smq) -> None:
    for command in (["topic", "create", "cli"], ["produce", "cli"]):
        done = smq(*command, input="one\ntwo\n")
        assert done.returncode == 0, done.stderr
    assert "cli" in smq("topic", "list").stdout
    assert smq("consume", "cli").stdout == "one\ntwo\n"
    status = smq("status")
    assert status.returncode == 0, status.stdout
    assert status.stdout.count("TLS certificate of node") == 3


def test_files_may_be_named_one_by_one(secure: Cluster, operator: Identity) -> None:
    files = ["--tls-certificate", str(operator.certificate), "--tls-key", str(operator.key)]
    done = run_cli("topic", "list", "--bootstrap", secure.nodes[2].grpc, "--tls-ca", str(operator.ca), *files)
    assert done.returncode == 0, done.stderr


def test_a_command_without_tls_gets_an_error_that_says_the_node_requires_it(secure: Cluster) -> None:
    done = run_cli("topic", "list", "--bootstrap", secure.nodes[1].grpc)
    assert done.returncode == 1
    assert "without TLS" in done.stderr
    assert "--cluster-dir" in done.stderr


def test_a_command_with_another_authority_gets_an_error_that_says_so(secure: Cluster, tmp_path: Path) -> None:
    assert run_cli("cert", "init", str(tmp_path)).returncode == 0
    ca = str(tmp_path / "ca" / "ca.crt")
    done = run_cli("topic", "list", "--bootstrap", secure.nodes[1].grpc, "--tls-ca", ca)
    assert done.returncode == 1
    assert "over TLS" in done.stderr
    assert "--tls-ca" in done.stderr
    # gRPC would write a line on both sides for each handshake: strangers could fill a node's disk.
    assert "ssl_transport" not in done.stderr + secure.nodes[1].log.read_text()


def test_kafka_clients_read_and_write_over_tls(secure: Cluster, operator: Identity) -> None:
    config = {
        "bootstrap.servers": ",".join(node.kafka for node in secure.nodes.values()),
        "security.protocol": "SSL",
        "ssl.ca.location": str(operator.ca),
        "ssl.certificate.location": str(operator.certificate),
        "ssl.key.location": str(operator.key),
    }
    producer = Producer(config)
    producer.produce("kafka-tls", b"over TLS")
    assert producer.flush(30) == 0
    consumer = Consumer({**config, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("kafka-tls", 0, 0)])
    assert wait_for("the record", lambda: _next_value(consumer)) == b"over TLS"
    consumer.close()


def _next_value(consumer: Consumer) -> bytes | None:
    message = consumer.poll(1)
    return message.value() if message is not None and message.error() is None else None


def test_a_renewed_certificate_is_used_without_a_restart_and_after_one(secure: Cluster, smq: Smq) -> None:
    def ends() -> dict[int, int]:
        status = json.loads(smq("status", "--json").stdout)
        return {n["node"]: n["status"]["certificate_ends_ms"] for n in status["nodes"] if n["status"]}

    before = ends()
    home = secure.root / "data" / "tls"
    cluster_id = json.loads(smq("status", "--json").stdout)["cluster_id"]
    for node in (1, 2):
        made = run_cli("cert", "node", str(home), "--cluster-id", cluster_id, "--node", str(node), "--days", "30")
        assert made.returncode == 0, made.stderr
    shown = run_cli("cert", "show", str(node_identity(home, NodeId(1)).certificate))
    assert shown.returncode == 0
    assert " 29 days left" in shown.stdout
    os.kill(secure.nodes[1].pid, signal.SIGHUP)  # takes effect immediately; node 2 finds out by itself
    wait_for("nodes 1 and 2 use the new ones", lambda: (e := ends())[1] < before[1] and e[2] < before[2])
    secure.kill(2)
    secure.run(2)
    wait_for("node 2 is back among its peers", lambda: smq("status").returncode == 0)
    assert ends()[2] < before[2], "the new one is what it starts with"
