"""A node's port that asks for users: what is served before, during and after a login, over a real socket."""

import asyncio
import dataclasses
import json
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smq.clients import scram
from smq.clients.scram import BY_NAME
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ListenerConfig, ServerConfig, write_config
from smq.coordinator.kafka.acts import outcome
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.handlers import HANDLERS
from smq.coordinator.limits import SASL_REQUEST_BYTES_MAX
from smq.raft_state.commands import AlterAcls, AlterUser, Command, CreateTopic, DeleteUser, ScramCredential
from smq.raft_state.handlers.acls import Operation, Permission
from smq.raft_state.ids import TopicId
from smq.raft_state.state import ClusterState
from smq.replication.storage.directory import USER_FILE
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import run_cli, wait_for
from smq.testing.served import PATIENCE_S, Served, serving
from tests.unit.coordinator.kafka.test_sasl import final_message
from tests.unit.raft_state.support import acl

ANY = ("127.0.0.1", 0)
MECHANISM = BY_NAME["SCRAM-SHA-256"]
OUTSIDE = ListenerConfig(name="outside", kafka_address=ANY, sasl=("SCRAM-SHA-256",))
SOON_S = 1.0  # within which a revoked user's connections end


def keys(password: str) -> tuple[ScramCredential, ...]:
    return tuple(
        ScramCredential(
            mechanism=k.mechanism.number,
            iterations=k.iterations,
            salt=k.salt,
            stored_key=k.stored_key,
            server_key=k.server_key,
        )
        for k in scram.new_keys(password)
    )


class Port:
    """The ports of a node, and its users, from a thread."""

    def __init__(self, served: Served, loop: asyncio.AbstractEventLoop) -> None:
        self._served, self._loop = served, loop
        server = served.server._kafka
        assert server is not None
        self._bound = {name: format_address(a._listener.getsockname()[:2]) for name, a in server.acceptors.items()}

    def address(self, listener: str) -> str:
        return self._bound[listener]

    def connect(self, listener: str = "outside") -> RawKafka:
        return RawKafka(self.address(listener))

    @property
    def config(self) -> ServerConfig:
        return self._served.server._config

    @property
    def state(self) -> ClusterState:
        return self._served.server.node.state

    def change(self, command: Command) -> None:
        async def propose() -> None:
            done = asyncio.Event()
            self._served.server.node.propose(command, 5_000, lambda _: done.set())
            await done.wait()

        asyncio.run_coroutine_threadsafe(propose(), self._loop).result(PATIENCE_S)


def with_port(tmp_path: Path, scenario: Callable[[Port], None], *, is_new: bool = True, **config: Any) -> None:
    """A node with the super user alice, whose password is "pencil"; or one that is there already."""

    async def body(served: Served) -> None:
        port = Port(served, asyncio.get_running_loop())
        if not is_new:
            await asyncio.to_thread(scenario, port)
            return
        await asyncio.to_thread(port.change, AlterUser(name="alice", set_=keys("pencil"), decoy_secret=b"d" * 32))
        topic_id = TopicId(b"t" * 16)
        topic = CreateTopic(name="t", topic_id=topic_id, partition_count=1, replication_factor=1, created_ms=0)
        await asyncio.to_thread(port.change, topic)
        await asyncio.to_thread(scenario, port)

    fields: dict[str, Any] = {"kafka_address": ANY, "listeners": {"outside": OUTSIDE}, "super_users": ("alice",)}
    serving(tmp_path, body, **(fields | config))


def log_in(raw: RawKafka, name: str = "alice", password: str = "pencil") -> KafkaError:
    assert raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism=MECHANISM.name)["error_code"] == KafkaError.NONE
    first = f"n,,n={name},r=abc".encode()
    answer = raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=first)
    final = final_message(MECHANISM, password, first, bytes(answer["auth_bytes"]))
    return KafkaError(raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=final)["error_code"])


def header(key: int, version: int = 0) -> bytes:
    return struct.pack(">hhih", key, version, 1, -1)


def create(name: str) -> dict[str, Any]:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return {"topics": [topic], "timeout_ms": 1_000, "validate_only": False}


def test_a_user_gets_in_and_is_served(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw = port.connect()
        for _ in range(2):
            assert raw.call(ApiKey.API_VERSIONS, 3, client_software_name="x", client_software_version="1")
        assert log_in(raw) is KafkaError.NONE
        assert raw.call(ApiKey.METADATA, 12, topics=None)["topics"][0]["name"] == "t"
        assert log_in(raw) is KafkaError.NONE  # again (KIP-368)
        assert raw.call(ApiKey.METADATA, 12, topics=None)["topics"][0]["name"] == "t"

    with_port(tmp_path, scenario)


@pytest.mark.parametrize("is_after_handshake", [False, True])
def test_nothing_is_served_before_a_user_is_proven(tmp_path: Path, is_after_handshake: bool) -> None:
    keys_ = [key for key in ApiKey if key not in (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)]
    frames = [header(key) for key in (*keys_, 99, -1)]  # cut short: they are refused by their key, unparsed
    frames += [b"", b"\0", header(ApiKey.SASL_HANDSHAKE, 0) + b"\0\1x", bytes(SASL_REQUEST_BYTES_MAX + 1)]
    if is_after_handshake:
        frames.append(header(ApiKey.API_VERSIONS))

    def scenario(port: Port) -> None:
        for frame in frames:
            raw = port.connect()
            if is_after_handshake:
                raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism=MECHANISM.name)
            raw.send_frame(frame)
            assert raw.is_closed_by_node(), frame[:10]
            raw.close()
        raw = port.connect()  # of a request that is too large the size is enough
        raw.socket.sendall(struct.pack(">i", SASL_REQUEST_BYTES_MAX + 1))
        assert raw.is_closed_by_node()

    with_port(tmp_path, scenario)


def test_a_refused_login_is_the_last_answer_and_what_was_sent_behind_it_is_not_done(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        for name, password in (("alice", "wrong"), ("stranger", "pencil")):
            raw = port.connect()
            raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism=MECHANISM.name)
            first = f"n,,n={name},r=abc".encode()
            answer = raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=first)
            final = final_message(MECHANISM, password, first, bytes(answer["auth_bytes"]))
            raw.send(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=final)
            raw.send(ApiKey.CREATE_TOPICS, 7, **create("smuggled"))
            _, refused = raw.receive(ApiKey.SASL_AUTHENTICATE, 2)
            assert refused["error_code"] == KafkaError.SASL_AUTHENTICATION_FAILED
            assert raw.is_closed_by_node()
        raw = port.connect()
        answer = raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism="PLAIN")
        assert answer == {"error_code": KafkaError.UNSUPPORTED_SASL_MECHANISM, "mechanisms": [MECHANISM.name]}
        assert raw.is_closed_by_node()
        assert set(port.state.topics) == {"t"}

    with_port(tmp_path, scenario)


def test_requests_that_are_sent_with_the_last_token_wait_for_the_verdict(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw = port.connect()
        raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism=MECHANISM.name)
        first = b"n,,n=alice,r=abc"
        answer = raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=first)
        final = final_message(MECHANISM, "pencil", first, bytes(answer["auth_bytes"]))
        raw.send(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=final)
        raw.send(ApiKey.CREATE_TOPICS, 7, **create("wanted"))
        assert raw.receive(ApiKey.SASL_AUTHENTICATE, 2)[1]["error_code"] == KafkaError.NONE
        assert raw.receive(ApiKey.CREATE_TOPICS, 7)[1]["topics"][0]["error_code"] == KafkaError.NONE

    with_port(tmp_path, scenario)


def test_a_lost_password_is_set_again_without_a_login_and_the_last_administrator_stays(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"

    def bootstrap(name: str, password: str) -> str:
        done = run_cli("user", "bootstrap", name, "--config", str(file), input=password)
        assert password not in done.stdout + done.stderr
        return done.stderr or done.stdout

    def before(port: Port) -> None:
        write_config(dataclasses.replace(port.config, insecure=True), file)
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        both = [{"name": "alice", "mechanism": mechanism} for mechanism in (1, 2)]
        answer = raw.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=both, upsertions=[])["results"][0]
        assert answer["error_code"] == KafkaError.INVALID_REQUEST
        assert "the last of the super users" in answer["error_message"]
        assert "alice" in port.state.users

    def after(port: Port) -> None:
        wait_for("the password to be set", lambda: not left.exists())
        assert log_in(port.connect()) is KafkaError.SASL_AUTHENTICATION_FAILED
        assert log_in(port.connect(), password="found again") is KafkaError.NONE

    with_port(tmp_path, before)
    assert "'bob' is not one of super_users (alice)" in bootstrap("bob", "x" * 20)
    assert "sets the password of alice when it next starts" in bootstrap("alice", "found again")
    (left,) = tmp_path.rglob(USER_FILE)
    assert left.stat().st_mode & 0o777 == 0o600
    assert b"found again" not in left.read_bytes()
    with_port(tmp_path, after, is_new=False)
    wrong = left.with_name(USER_FILE)
    wrong.write_bytes(b"\xff" * 100)
    with_port(tmp_path, lambda port: None, is_new=False)  # a damaged file keeps no node from its start
    assert wrong.exists()


@pytest.mark.parametrize("change", [DeleteUser(name="alice"), AlterUser(name="alice", set_=keys("other"))])
def test_the_open_connections_of_a_revoked_user_end(tmp_path: Path, change: AlterUser | DeleteUser) -> None:
    def scenario(port: Port) -> None:
        idle, polling, other = port.connect(), port.connect(), port.connect("")
        for raw in (idle, polling):
            assert log_in(raw) is KafkaError.NONE
        parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]
        fields = {"max_wait_ms": 20_000, "min_bytes": 1, "max_bytes": 1 << 20}
        polling.send(ApiKey.FETCH, 11, replica_id=-1, topics=[{"topic": "t", "partitions": parts}], **fields)
        began = time.monotonic()
        port.change(change)
        assert idle.is_closed_by_node()
        assert polling.is_closed_by_node()
        assert time.monotonic() - began < 15  # before the poll ends; the bound is SOON_S on a machine with time
        assert other.call(ApiKey.METADATA, 12, topics=None)["topics"]
        assert log_in(port.connect()) is KafkaError.SASL_AUTHENTICATION_FAILED

    with_port(tmp_path, scenario)


def test_a_session_ends_unless_the_user_is_proven_again(tmp_path: Path) -> None:
    listener = ListenerConfig(name="outside", kafka_address=ANY, sasl=("SCRAM-SHA-256",), sasl_session_ms=300)

    def scenario(port: Port) -> None:
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        time.sleep(0.4)
        assert log_in(raw) is KafkaError.NONE  # late, and allowed
        time.sleep(0.4)
        raw.send(ApiKey.METADATA, 12, topics=None)
        assert raw.is_closed_by_node()

    with_port(tmp_path, scenario, listeners={"outside": listener})


def test_a_listener_that_asks_for_no_user_says_so(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw = port.connect("")
        assert raw.call(ApiKey.SASL_HANDSHAKE, 1, mechanism="PLAIN")["error_code"] == KafkaError.ILLEGAL_SASL_STATE
        answer = raw.call(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=b"\0alice\0pencil")
        assert answer["error_code"] == KafkaError.ILLEGAL_SASL_STATE
        assert raw.call(ApiKey.METADATA, 12, topics=None)["topics"]

    with_port(tmp_path, scenario)


# ------------------------------------------------------------------------------------------------------- rights
DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED


def seen(raw: RawKafka) -> list[str]:
    return [topic["name"] for topic in raw.call(ApiKey.METADATA, 12, topics=None)["topics"]]


def test_a_user_may_do_what_the_rules_say_and_nothing_before(tmp_path: Path) -> None:
    read, write = acl("t", Operation.READ), acl("t", Operation.WRITE)

    def scenario(port: Port) -> None:
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        assert raw.call(ApiKey.DESCRIBE_CLUSTER, 1, endpoint_type=1)["brokers"]
        assert seen(raw) == []
        named = raw.call(ApiKey.METADATA, 12, topics=[{"name": n, "topic_id": bytes(16)} for n in ("t", "none")])
        assert [topic["error_code"] for topic in named["topics"]] == [DENIED, DENIED]  # there or not
        assert named["brokers"]
        assert raw.produce("t", batch(b"x"))["error_code"] == DENIED
        assert raw.fetch("t", 0)["error_code"] == DENIED
        assert raw.call(ApiKey.CREATE_TOPICS, 7, **create("mine"))["topics"][0]["error_code"] == DENIED
        mine = [{"name": "alice", "mechanism": 1}]
        refused = raw.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=mine, upsertions=[])["results"][0]
        assert refused["error_code"] == KafkaError.CLUSTER_AUTHORIZATION_FAILED
        port.change(AlterAcls(add=(read,)))
        assert seen(raw) == ["t"]
        assert raw.fetch("t", 0)["error_code"] == KafkaError.NONE
        assert raw.produce("t", batch(b"x"))["error_code"] == DENIED
        port.change(AlterAcls(add=(write,)))
        assert raw.produce("t", batch(b"x"))["error_code"] == KafkaError.NONE
        assert raw.fetch("t", 0)["records"]
        port.change(AlterAcls(add=(acl("", Operation.ALL, Permission.DENY)._replace(name="t"),)))
        assert seen(raw) == []
        assert raw.produce("t", batch(b"x"))["error_code"] == DENIED
        assert set(port.state.topics) == {"t"}
        assert "alice" in port.state.users

    with_port(tmp_path, scenario, super_users=())


def test_a_rule_that_no_address_matches_is_refused(tmp_path: Path) -> None:
    fields = {"resource_type": 2, "resource_pattern_type": 3, "resource_name": "t", "principal": "User:bob"}
    deny = fields | {"operation": Operation.READ, "permission_type": Permission.DENY}
    hosts = ("10.0.0.0/8", "client.example.org", "0:0:0:0:0:0:0:1", "*")

    def scenario(port: Port) -> None:
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        answer = raw.call(ApiKey.CREATE_ACLS, 3, creations=[deny | {"host": host} for host in hosts])
        wrong = KafkaError.INVALID_REQUEST
        assert [row["error_code"] for row in answer["results"]] == [wrong, wrong, KafkaError.NONE, KafkaError.NONE]
        assert {rule.host for rule in port.state.acls} == set(hosts[2:])

    with_port(tmp_path, scenario)


def test_a_right_that_ends_while_a_fetch_waits_ends_the_fetch(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        port.change(AlterAcls(add=(acl("t", Operation.READ),)))
        raw, other = port.connect(), port.connect("")
        assert log_in(raw) is KafkaError.NONE
        parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]
        fields = {"max_wait_ms": 20_000, "min_bytes": 1, "max_bytes": 1 << 20}
        raw.send(ApiKey.FETCH, 11, replica_id=-1, topics=[{"topic": "t", "partitions": parts}], **fields)
        time.sleep(0.3)  # for the node to have it
        port.change(AlterAcls(remove=(acl("t", Operation.READ),)))
        assert other.produce("t", batch(b"secret"))["error_code"] == KafkaError.NONE
        _, answer = raw.receive(ApiKey.FETCH, 11)
        (found,) = answer["responses"][0]["partitions"]
        assert (found["error_code"], found["records"] or b"") == (DENIED, b"")

    with_port(tmp_path, scenario, super_users=())


def test_a_request_that_waits_for_its_turn_is_judged_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    async def slow(_gateway: Any, _version: int, _request: Any) -> dict[str, Any]:
        await asyncio.to_thread(release.wait, PATIENCE_S)
        return {"throttle_time_ms": 0, "error_code": 0, "groups": []}

    monkeypatch.setitem(HANDLERS, ApiKey.LIST_GROUPS, slow)
    rule = acl("mine", Operation.CREATE)

    def scenario(port: Port) -> None:
        port.change(AlterAcls(add=(rule,)))
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        raw.send(ApiKey.LIST_GROUPS, 4, states_filter=[])
        raw.send(ApiKey.CREATE_TOPICS, 7, **create("mine"))
        time.sleep(0.3)  # for the node to have both
        port.change(AlterAcls(remove=(rule,)))
        release.set()
        raw.receive(ApiKey.LIST_GROUPS, 4)
        assert raw.receive(ApiKey.CREATE_TOPICS, 7)[1]["topics"][0]["error_code"] == DENIED
        assert set(port.state.topics) == {"t"}

    with_port(tmp_path, scenario, super_users=())


def test_a_producer_without_acknowledgements_learns_of_a_refusal_by_the_end(tmp_path: Path) -> None:
    def scenario(port: Port) -> None:
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        data = [{"name": "t", "partition_data": [{"index": 0, "records": [batch(b"x")]}]}]
        raw.send(ApiKey.PRODUCE, 9, acks=0, timeout_ms=1_000, topic_data=data)
        assert raw.is_closed_by_node()
        assert port.connect("").fetch("t", 0)["records"] in (None, b"", [])

    with_port(tmp_path, scenario, super_users=())


# -------------------------------------------------------------------------------------------------------- audit
def test_acts_and_refusals_are_in_the_audit_log_without_secrets(tmp_path: Path) -> None:
    salted = b"salted-password-of-32-bytes-....".ljust(32)
    credential = {"name": "eve", "mechanism": 1, "iterations": 4_096, "salt": b"salt", "salted_password": salted}

    def scenario(port: Port) -> None:
        port.change(AlterAcls(add=(acl("mine", Operation.CREATE),)))
        raw = port.connect()
        assert log_in(port.connect(), password="wrong") is KafkaError.SASL_AUTHENTICATION_FAILED
        assert log_in(raw) is KafkaError.NONE
        both = {"topics": [*create("mine")["topics"], *create("other")["topics"]]}
        raw.call(ApiKey.CREATE_TOPICS, 7, **(create("mine") | both))
        raw.call(ApiKey.CREATE_TOPICS, 7, **create("other"))
        raw.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=[credential])
        raw.fetch("t", 0)
        raw.fetch("t", 0)
        open_ = port.connect("")
        open_.create_topic("mine", num_partitions=1, replication_factor=1)
        open_.call(ApiKey.CREATE_TOPICS, 7, **(create("dry") | {"validate_only": True}))
        configs = [("retention.ms", "1000"), ("ssl.keystore.password", "key-password")]
        broker = {"resource_type": 4, "resource_name": "", "configs": [{"name": n, "value": v} for n, v in configs]}
        open_.call(ApiKey.ALTER_CONFIGS, 2, resources=[broker])
        open_.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=[credential])

    with_port(tmp_path, scenario, super_users=())
    text = (tmp_path / "data" / "audit.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert [(line["user"], line["listener"], line["act"], line["result"]) for line in found] == [
        ("", "outside", "SaslAuthenticate", "refused"),
        ("alice", "outside", "CreateTopics", "refused"),
        ("alice", "outside", "CreateTopics", "refused"),
        ("alice", "outside", "AlterUserScramCredentials", "refused"),
        ("alice", "outside", "Fetch", "refused"),
        ("", "", "CreateTopics", "failed"),
        ("", "", "AlterConfigs", "failed"),
        ("", "", "AlterUserScramCredentials", "done"),
    ]
    assert found[1]["on"] == ["mine", "other"]
    assert found[1]["errors"] == {"other": "TOPIC_AUTHORIZATION_FAILED"}
    assert found[5]["errors"] == {"mine": "TOPIC_ALREADY_EXISTS"}
    assert found[6]["on"] == ["4  retention.ms=1000", "4  ssl.keystore.password"]
    assert found[7]["on"] == ["upsertions eve"]
    rows = [{"name": "mine", "error_code": 0}, {"name": "other", "error_code": KafkaError.TOPIC_AUTHORIZATION_FAILED}]
    assert outcome({"topics": rows}) == (found[1]["errors"], True, True)  # the line of what was done may not be lost
    assert not [
        secret
        for secret in ("pencil", "wrong password", "key-password", "salted-password", salted.hex())
        if secret in text
    ]


def test_an_act_whose_client_goes_away_is_in_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    async def slow(_gateway: Any, _version: int, _request: Any) -> dict[str, Any]:
        begun.set()
        await asyncio.sleep(PATIENCE_S)
        return {}

    monkeypatch.setitem(HANDLERS, ApiKey.CREATE_TOPICS, slow)

    def scenario(port: Port) -> None:
        raw = port.connect()
        assert log_in(raw) is KafkaError.NONE
        raw.send(ApiKey.CREATE_TOPICS, 7, **create("mine"))
        assert begun.wait(PATIENCE_S)
        raw.close()
        wait_for("a line", (tmp_path / "data" / "audit.jsonl").exists)

    with_port(tmp_path, scenario)
    line = json.loads((tmp_path / "data" / "audit.jsonl").read_text())
    assert (line["user"], line["act"], line["on"], line["result"]) == ("alice", "CreateTopics", ["mine"], "unknown")
