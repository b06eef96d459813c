"""smq's own tools for transactions: `smq txn`, the admin client and the metrics, with a Kafka producer that hangs."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator

import confluent_kafka
import grpc
import pytest

from smq.clients import SyncAdmin
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.cluster import Cluster
from smq.testing.node_process import CLI, wait_for
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import fresh
from tests.kafka.transactions.test_clients import await_read, transactional

NewTopic = Callable[..., str]


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[SyncAdmin]:
    with SyncAdmin([node.grpc for node in cluster.nodes.values()]) as admin:
        yield admin


def smq(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return run_smq(cluster, "txn", *words)


def run_smq(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, *words, "--bootstrap", cluster.nodes[1].grpc]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_a_hanging_transaction_is_seen_and_aborted(
    cluster: Cluster, admin: SyncAdmin, bootstrap: str, new_topic: NewTopic
) -> None:
    topic, name = new_topic(2), fresh("hangs")
    producer = transactional(bootstrap, name)
    producer.begin_transaction()
    producer.produce(topic, b"never", partition=1)
    assert producer.flush(PATIENCE_S) == 0
    (seen,) = [t for t in json.loads(smq(cluster, "list", "--json").stdout) if t["transactional_id"] == name]
    assert (seen["state"], seen["producer_epoch"], seen["timeout_ms"]) == ("Ongoing", 0, 60_000)
    described = smq(cluster, "describe", name)
    assert described.returncode == 0, described.stderr
    assert f"{name}: Ongoing, producer {seen['producer_id']} in epoch 0, coordinated by node" in described.stdout
    assert topic in described.stdout
    found = admin.describe_transaction(name)
    assert (found.partitions, found.groups) == (((topic, 1),), ())

    aborted = smq(cluster, "abort", name)
    assert (aborted.returncode, aborted.stdout) == (0, f"aborted the transaction of {name}\n"), aborted.stderr
    repeated = smq(cluster, "abort", name, "--json")
    assert json.loads(repeated.stdout) == {"transactional_id": name, "aborted": True}, repeated.stderr
    admin.abort_transaction(name)
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(PATIENCE_S)
    await_read(bootstrap, topic, [], partitions=2)
    wait_for(
        "the marker is written", lambda: admin.describe_transaction(name).summary.state == "CompleteAbort", PATIENCE_S
    )


def test_consume_shows_what_is_not_committed_if_it_is_told_to(
    cluster: Cluster, bootstrap: str, new_topic: NewTopic
) -> None:
    topic = new_topic()
    producer = transactional(bootstrap, fresh("tx"))
    for value, is_open in ((b"aborted", False), (b"open", True)):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        assert producer.flush(PATIENCE_S) == 0
        if not is_open:
            producer.abort_transaction(PATIENCE_S)

    def consumed(*words: str) -> list[str]:
        done = run_smq(cluster, "consume", topic, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    uncommitted = ("--isolation", "read_uncommitted")
    wait_for("the open record", lambda: consumed(*uncommitted) == ["aborted", "open"], PATIENCE_S)
    assert consumed() == consumed("--isolation", "read_committed") == []
    assert consumed("--offset", "-1", *uncommitted) == ["open"]
    assert consumed("-f", "-n", "2", *uncommitted) == ["aborted", "open"]
    refused = run_smq(cluster, "consume", topic, "--isolation", "dirty")
    assert (refused.returncode, "read_committed" in refused.stderr) == (2, True)
    producer.commit_transaction(PATIENCE_S)
    wait_for("the committed record", lambda: consumed() == ["open"], PATIENCE_S)


def test_apps_that_commit_batches_are_listed(cluster: Cluster, admin: SyncAdmin) -> None:
    name = fresh("app")
    assert name not in smq(cluster, "apps").stdout
    with grpc.insecure_channel(cluster.nodes[1].grpc) as channel:
        for number in (4, 5, 3):
            smq_pb2_grpc.TransactionsStub(channel).CommitBatch(pb.CommitBatchRequest(app=name, batch_id=number))
    (found,) = [app for app in admin.list_apps() if app.app == name]
    (shown,) = [app for app in json.loads(smq(cluster, "apps", "--json").stdout) if app["app"] == name]
    assert found.batch_id == shown["batch_id"] == 5
    assert found.expires_ms is not None
    assert found.idle_ms + found.expires_ms == 90 * 24 * 3_600_000
    (line,) = [line for line in smq(cluster, "apps").stdout.splitlines() if line.startswith(name)]
    assert re.fullmatch(rf"{name} +5 +\d+ s +(90 d 0 h|89 d 23 h)", line.rstrip()), line
    with urllib.request.urlopen(f"http://{cluster.nodes[2].http}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    assert int(float(re.findall(r"^smq_cluster_apps (\S+)$", metrics, re.MULTILINE)[0])) >= 1
    assert "\nsmq_cluster_apps_max 10000.0\n" in metrics


def test_what_is_not_there_is_an_error_with_the_reason(cluster: Cluster, admin: SyncAdmin, bootstrap: str) -> None:
    for failed in (smq(cluster, "describe", "none"), smq(cluster, "abort", "none")):
        assert failed.returncode != 0
        assert "UNKNOWN_TRANSACTIONAL_ID: there is no transactional id 'none'" in failed.stderr
    name = fresh("idle")
    transactional(bootstrap, name)
    with pytest.raises(SmqError) as refused:
        admin.abort_transaction(name)
    assert refused.value.code is ErrorCode.INVALID_TRANSACTION_STATE
    assert {t.transactional_id: t.state for t in admin.list_transactions()}[name] == "Empty"


def test_the_metrics_show_the_transactions(cluster: Cluster, bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = transactional(bootstrap, fresh("slow"), **{"transaction.timeout.ms": 20_000})  # a step each 5 s
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(topic, b"open", partition=0)
    assert producer.flush(PATIENCE_S) == 0

    def values() -> dict[str, float]:
        url = f"http://{cluster.nodes[cluster.wait_leader(topic, 0)].http}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    place = f'{{topic="{topic}",partition="0"}}'
    wait_for("the record is committed", lambda: values()[f"smq_partition_high_water_mark{place}"] == 3, PATIENCE_S)
    found = values()
    assert found[f"smq_partition_last_stable_offset{place}"] == 0
    assert found[f"smq_partition_lso_lag{place}"] == 3
    assert found["smq_cluster_transactional_ids"] >= 1
    wait_for("its age", lambda: values()["smq_cluster_oldest_transaction_seconds"] > 0, PATIENCE_S)
    producer.commit_transaction(PATIENCE_S)
    wait_for("it is stable", lambda: values()[f"smq_partition_last_stable_offset{place}"] == 4, PATIENCE_S)
    assert values()[f"smq_partition_lso_lag{place}"] == 0
