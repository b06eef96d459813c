"""A node with two ways in: its clients get the addresses of the listener that they came through, and no other."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import uvloop

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.config.node_toml import ListenerConfig
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.service.audience import Audience, told_of
from smq.raft_state.commands import Listener
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import DiskId, Incarnation, NodeId
from smq.raft_state.state import ClusterState, NodeState
from smq.replication.api import NodeApi
from smq.testing.kafka_client import RawKafka
from smq.testing.loops import in_thread
from smq.testing.served import Served, served_node

ANY = ("127.0.0.1", 0)
OUTSIDE = ListenerConfig(
    name="outside",
    grpc_address=ANY,
    grpc_advertised=("grpc.example.org", 443),
    kafka_address=ANY,
    kafka_advertised=("kafka.example.org", 9094),
)


@asynccontextmanager
async def with_topic(directory: Path, **config: Any) -> AsyncIterator[Served]:
    given = {"kafka_address": ANY, "listeners": {"outside": OUTSIDE}, **config}
    async with served_node(directory, **given) as served:
        await served.create("t")
        yield served


@contextmanager
def serve(directory: Path, **config: Any) -> Iterator[tuple[Served, dict[str, str]]]:
    """A node in another thread, and the bound Kafka address of each of its listeners."""
    with in_thread(with_topic(directory, **config), uvloop.new_event_loop) as served:
        server = served.server._kafka
        assert server is not None
        bound = {name: cast(Address, a._listener.getsockname()[:2]) for name, a in server.acceptors.items()}
        yield served, {name: format_address(address) for name, address in bound.items()}


def described(raw: RawKafka) -> dict[str, set[tuple[str, int]]]:
    """Every address that Kafka's protocol tells, by the kind of answer."""
    topics = [{"topic_id": bytes(16), "name": "t"}]
    metadata = raw.call(ApiKey.METADATA, 12, topics=topics)
    coordinator = raw.call(ApiKey.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["g"])
    cluster = raw.call(ApiKey.DESCRIBE_CLUSTER, 1, endpoint_type=1)
    found: dict[str, list[Struct]] = {
        "metadata": metadata["brokers"],
        "coordinator": coordinator["coordinators"],
        "cluster": cluster["brokers"],
    }
    assert metadata["topics"][0]["partitions"][0]["leader_id"] == 1
    assert metadata["controller_id"] == 1
    return {kind: {(b["host"], b["port"]) for b in brokers} for kind, brokers in found.items()}


def test_kafka_clients_are_told_the_addresses_of_their_listener(tmp_path: Path) -> None:
    with serve(tmp_path, kafka_advertised=("node-1.internal", 9092)) as (_, addresses):
        told = {}
        for listener in ("", "outside"):
            raw = RawKafka(addresses[listener])
            told[listener] = described(raw)
            raw.close()
    assert all(found == {("kafka.example.org", 9094)} for found in told["outside"].values())
    assert all(found == {("node-1.internal", 9092)} for found in told[""].values())


async def test_grpc_clients_are_told_the_addresses_of_their_listener(tmp_path: Path) -> None:
    async with served_node(tmp_path, grpc_advertised=("node-1.internal", 7401), listeners={"outside": OUTSIDE}) as node:
        own = await node.admin.DescribeCluster(pb.DescribeClusterRequest())
        assert (own.nodes[0].grpc_address, own.nodes[0].kafka_address) == ("node-1.internal:7401", "")
        async with grpc.aio.insecure_channel(format_address(node.server._grpc.bound["outside"])) as channel:
            outside = await smq_pb2_grpc.AdminStub(channel).DescribeCluster(pb.DescribeClusterRequest())
        assert outside.nodes[0].grpc_address == "grpc.example.org:443"
        assert outside.nodes[0].kafka_address == "kafka.example.org:9094"


async def test_sessions_are_the_nodes_and_not_of_one_listener(tmp_path: Path) -> None:
    async with served_node(tmp_path, listeners={"outside": OUTSIDE}) as node:
        await node.create("t")
        start = pb.StartPublishSessionRequest(session_id="s", topic="t")
        async with grpc.aio.insecure_channel(format_address(node.server._grpc.bound["outside"])) as channel:
            await smq_pb2_grpc.AgentStub(channel).StartPublishSession(start)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.agent.StartPublishSession(start)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_a_leader_without_the_listener_is_none_for_its_clients(tmp_path: Path) -> None:
    with serve(tmp_path) as (node, addresses):
        node.server.node.state.nodes[NodeId(1)].listeners = ()
        raw = RawKafka(addresses["outside"])
        answer = raw.call(ApiKey.METADATA, 12, topics=[{"topic_id": bytes(16), "name": "t"}])
        raw.close()
        assert answer["brokers"] == []
        (partition,) = answer["topics"][0]["partitions"]
        assert (partition["error_code"], partition["leader_id"]) == (KafkaError.LEADER_NOT_AVAILABLE, -1)


# -------------------------------------------------------------------------------------------- hints in errors
def _node(listeners: tuple[Listener, ...]) -> NodeState:
    return NodeState(
        node=NodeId(2),
        incarnation=Incarnation(1),
        disk=DiskId(bytes(16)),
        grpc_address="node-2:7401",
        http_address="",
        kafka_address="node-2:9092",
        fenced=False,
        listeners=listeners,
    )


@pytest.mark.parametrize(
    ("listener", "expected"), [("", "node-2:7401"), ("outside", "203.0.113.2:443"), ("partner", None)]
)
def test_an_error_names_the_leader_by_the_address_of_the_clients_listener(listener: str, expected: str | None) -> None:
    class Api:
        state = ClusterState()

    Api.state.nodes[NodeId(2)] = _node((Listener(name="outside", grpc_address="203.0.113.2:443", kafka_address=""),))
    audience = Audience(node=cast(NodeApi, Api()), listener=listener)
    details = ErrorDetails(leader=NodeId(2), leader_address="node-2:7401")
    detail = detail_from_error(audience.told(SmqError(ErrorCode.NOT_LEADER, "not here", details)))
    assert detail.leader == 2
    assert (detail.leader_address if detail.HasField("leader_address") else None) == expected


def test_an_unknown_listener_has_no_addresses() -> None:
    assert told_of(_node(()), "outside") == Listener(name="outside", grpc_address="", kafka_address="")
    assert told_of(_node(()), "").kafka_address == "node-2:9092"
