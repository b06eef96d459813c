"""`smq cluster --auth`: the operator's certificate makes the first user, and a deleted user is out on every node."""

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smq.clients import AuthenticationFailed, Login, NotAuthorized, SyncAdmin, SyncConsumer, SyncProducer, Tls
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.tls.certificate_files import client_identity
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import run_cli, wait_for

PASSWORD = "a long secret"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made.start("--auth")
    finally:
        made.stop()


def connect(cluster: Cluster, node: int) -> RawKafka:
    raw = RawKafka(cluster.nodes[node].kafka)
    context = ssl.create_default_context(cafile=client_identity(cluster.directory / "tls").ca)
    raw.socket = context.wrap_socket(raw.socket, server_hostname="127.0.0.1")
    return raw


def log_in(raw: RawKafka) -> KafkaError:
    raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism="PLAIN")
    answer = raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=f"\0alice\0{PASSWORD}".encode())
    return KafkaError(answer["error_code"])


def logged_in(cluster: Cluster, node: int) -> RawKafka:
    """Once the node has applied the command that made the user."""
    found: list[RawKafka] = []

    def is_in() -> bool:
        found.append(connect(cluster, node))
        return log_in(found[-1]) is KafkaError.NONE

    wait_for(f"node {node} to know the user", is_in)
    return found[-1]


def test_a_user_is_made_with_the_operators_certificate_and_deleted_on_every_node(guarded: Cluster) -> None:
    environment_without = {k: v for k, v in os.environ.items() if not k.startswith("SMQ_")}
    environment = environment_without | {"SMQ_CLUSTER_DIR": str(guarded.directory)}

    def smq(*arguments: str, **options: Any) -> str:
        done = run_cli(*arguments, env=environment, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "smq user create" in guarded.log.read_text()
    without = connect(guarded, 1)
    without.send(ApiKey.METADATA, 12, topics=None)
    assert without.is_closed_by_node()
    smq("user", "create", "alice", input=PASSWORD)
    inside = [logged_in(guarded, node) for node in guarded.nodes]
    for raw in inside:
        assert raw.call(ApiKey.METADATA, 12, topics=None)["brokers"]
    smq("topic", "create", "orders", "--partitions", "1")
    smq("acl", "grant", "alice", "all", "topic", "orders")
    tls = Tls(ca=client_identity(guarded.directory / "tls").ca)
    with SyncProducer(guarded.nodes[2].grpc, tls=tls, login=Login(user="alice", password=PASSWORD)) as producer:
        producer.send("orders", b"v").result()
        with pytest.raises(NotAuthorized):
            producer.send("payments", b"v").result()
    with SyncConsumer(guarded.nodes[3].grpc, tls=tls, login=Login(user="alice", password=PASSWORD)) as consumer:
        consumer.assign([("orders", 0)], "earliest")
        assert next(iter(consumer)).value == b"v"
        alice = environment_without | {"SMQ_PROFILE": str(guarded.root / "mine" / "profile")}
        reach = ("--bootstrap", guarded.nodes[1].grpc, "--tls-ca", str(tls.ca))
        assert run_cli("login", "alice", *reach, env=alice, input="wrong").returncode != 0
        assert not (guarded.root / "mine").exists()
        assert run_cli("login", "alice", *reach, env=alice, input=PASSWORD).returncode == 0
        assert (guarded.root / "mine" / "profile").stat().st_mode & 0o777 == 0o600
        listed = run_cli("topic", "list", "--json", env=alice)
        assert [topic["name"] for topic in json.loads(listed.stdout)] == ["orders"]
        assert "NOT_AUTHORIZED" in run_cli("user", "list", env=alice).stderr
        assert run_cli("logout", env=alice).returncode == 0
        smq("user", "delete", "alice", "--yes")
        with pytest.raises(AuthenticationFailed):
            next(iter(consumer))
    with pytest.raises(AuthenticationFailed), SyncAdmin(guarded.nodes[1].grpc, tls=tls) as admin:
        admin.list_users()
    for raw in inside:
        assert raw.is_closed_by_node()
    assert log_in(connect(guarded, 1)) is KafkaError.SASL_AUTHENTICATION_FAILED
    for path in guarded.root.rglob("*"):  # logs, journals, stores
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path
