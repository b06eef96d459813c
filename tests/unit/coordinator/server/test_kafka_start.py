"""When a real node's Kafka port opens: its first answer must show all that was committed before the node began."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator import limits
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import format_address
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.server.composition import Server
from smq.coordinator.user_errors import PortTaken
from smq.raft_state.ids import NodeId
from smq.testing.kafka_client import RawKafka
from smq.testing.served import PATIENCE_S, node_config

ANY = ("127.0.0.1", 0)
IDS = (ONE, TWO, THREE) = (NodeId(1), NodeId(2), NodeId(3))


class Trio:
    """Three nodes in this loop. Each start is a new process of the node, as far as the others can tell."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peers = {node: ("127.0.0.1", port) for node, port in zip(IDS, free_ports(3), strict=True)}
        self.running: dict[NodeId, Server] = {}

    async def start(self, *nodes: NodeId, **config: Any) -> None:
        for node in nodes:
            place, tuning = self.directory / str(node), dict[str, int]()
            fields = {"node_id": node, "peers": self.peers, "tuning": tuning, "kafka_address": ANY, **config}
            server = Server(node_config(place, **fields), first_start=True)
            await server.start()
            self.running[node] = server

    async def stop(self, *nodes: NodeId) -> None:
        await asyncio.gather(*(self.running.pop(node).stop() for node in nodes))

    async def ask(self, node: NodeId, name: str, request: Any) -> None:
        async with grpc.aio.insecure_channel(format_address(self.running[node].grpc_address)) as channel:
            admin: Any = smq_pb2_grpc.AdminStub(channel)
            await getattr(admin, name)(request, wait_for_ready=True)

    async def ready(self, *nodes: NodeId) -> None:
        await until(lambda: all(self.running[node].node.is_ready for node in nodes))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - states, without an event
            await asyncio.sleep(0.001)


def address_of(server: Server) -> str:
    assert server.kafka_address is not None
    return format_address(server.kafka_address)


def first_metadata(address: str) -> Struct:
    """The answer about all topics on the first connection that is accepted."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            raw = RawKafka(address)
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_s, "the port stays closed"
            time.sleep(0.001)
            continue
        try:
            return raw.call(ApiKey.METADATA, 12, topics=None)
        finally:
            raw.close()


def topics_of(metadata: Struct) -> dict[str, int]:
    return {topic["name"]: len(topic["partitions"]) for topic in metadata["topics"]}


async def test_the_port_of_a_node_that_starts_without_its_quorum_opens_with_the_state_of_the_quorum(
    tmp_path: Path,
) -> None:
    trio = Trio(tmp_path)
    await trio.start(*IDS)
    await trio.ready(*IDS)
    await trio.ask(TWO, "CreateTopic", pb.CreateTopicRequest(name="old", partition_count=1))
    await until(lambda: "old" in trio.running[ONE].node.state.topics)
    await trio.stop(ONE)
    await trio.ask(TWO, "CreateTopic", pb.CreateTopicRequest(name="new", partition_count=1))
    await trio.ask(TWO, "AddPartitions", pb.AddPartitionsRequest(name="old", partition_count=3))
    await trio.stop(TWO, THREE)

    await trio.start(ONE)
    address = address_of(trio.running[ONE])
    await until(lambda: trio.running[ONE].node.is_running)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(RawKafka, address)
    asked = asyncio.create_task(asyncio.to_thread(first_metadata, address))
    await trio.start(TWO)
    found = await asked
    assert topics_of(found) == {"old": 3, "new": 1}
    assert ONE in {broker["node_id"] for broker in found["brokers"]}

    await trio.stop(TWO)  # the port stays open without a quorum, too
    await until(lambda: not trio.running[ONE].node.is_ready)
    assert topics_of(await asyncio.to_thread(first_metadata, address)) == {"old": 3, "new": 1}
    await trio.stop(ONE)


async def test_a_new_node_names_itself_in_its_first_metadata_and_is_ready_only_with_an_open_port(
    tmp_path: Path,
) -> None:
    server = Server(node_config(tmp_path, kafka_address=ANY), first_start=True)
    await server.start()
    asked = asyncio.create_task(asyncio.to_thread(first_metadata, address_of(server)))
    await until(lambda: server.node.is_ready)
    (await asyncio.to_thread(RawKafka, address_of(server))).close()
    assert [broker["node_id"] for broker in (await asked)["brokers"]] == [1]
    await server.stop()


async def test_a_closed_port_is_taken_all_the_same(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    address = ("127.0.0.1", *free_ports(1))
    await trio.start(ONE, kafka_address=address)
    with pytest.raises(PortTaken, match="for Kafka"):
        await trio.start(TWO, kafka_address=address)
    await trio.stop(ONE)


async def test_a_node_whose_port_stays_closed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KAFKA_NOTICE_S", 0.001)

    trio = Trio(tmp_path)
    with capture_logs() as logged:
        await trio.start(ONE)
        await until(lambda: any(line["event"] == "kafka_closed" for line in logged))
        await trio.stop(ONE)
