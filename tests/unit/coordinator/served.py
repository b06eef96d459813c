"""One real node with its real gRPC and HTTP services, in the test's own loop, on free ports."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config import ServerConfig, format_address
from smq.coordinator.grpc.errors import ERROR_METADATA_KEY
from smq.coordinator.server import Server
from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch

PATIENCE_S = 30  # a hang is a failure; nothing is measured with it


@dataclass
class Served:
    """What a test talks to."""

    server: Server
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.agent: Any = smq_pb2_grpc.AgentStub(self.channel)
        self.broker: Any = smq_pb2_grpc.BrokerStub(self.channel)
        self.admin: Any = smq_pb2_grpc.AdminStub(self.channel)

    async def create(self, name: str = "t", partitions: int = 1, **kwargs: Any) -> None:
        """Creates a topic and waits until its partitions have leaders."""
        await self.admin.CreateTopic(pb.CreateTopicRequest(name=name, partition_count=partitions, **kwargs))
        await self.wait_leaders(name)

    async def wait_leaders(self, name: str = "t") -> None:
        """Until every partition has a leader: after a restart that takes an election."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                info = await self.admin.DescribeCluster(pb.DescribeClusterRequest(topics=[name], linearizable=True))
                if all(p.leader_available for p in info.topics[0].partitions):
                    return
                await asyncio.sleep(0)

    async def publish(self, *requests: pb.PublishRecordRequest) -> list[pb.PublishRecordResponse]:
        """All of one stream's answers, by correlation id."""

        async def send() -> AsyncIterator[pb.PublishRecordRequest]:
            for request in requests:
                yield request

        async with asyncio.timeout(PATIENCE_S):
            answers = [answer async for answer in self.agent.PublishRecord(send())]
        return sorted(answers, key=lambda a: a.correlation_id)

    async def fill(self, counts: Iterable[int], topic: str = "t", partition: int = 0) -> None:
        """Publishes one batch of each count of records, valued b"0", b"1", ... in order of their offsets from 0."""
        requests, next_value = [], 0
        for i, count in enumerate(counts):
            values = [b"%d" % v for v in range(next_value, next_value + count)]
            requests.append(raw(values, topic=topic, partition=partition, correlation_id=i))
            next_value += count
        for answer in await self.publish(*requests):
            assert not answer.HasField("error"), answer

    async def subscribe(self, **init: Any) -> list[pb.SubscribeRecordResponse]:
        """All responses of a subscription that ends by itself."""
        fields = {"subscription_id": secrets.token_hex(4), "topic": "t", **init}
        request = pb.SubscribeRecordRequest(init=pb.SubscribeInit(**fields))

        async def send() -> AsyncIterator[pb.SubscribeRecordRequest]:
            yield request

        async with asyncio.timeout(PATIENCE_S):
            return [response async for response in self.agent.SubscribeRecord(send())]


def raw(values: Iterable[bytes], **fields: Any) -> pb.PublishRecordRequest:
    """A request with a batch that the client has encoded."""
    batch = encode_batch(NewRecord(key=b"k", value=v, timestamp_ms=1_000 + i) for i, v in enumerate(values))
    return pb.PublishRecordRequest(**{"topic": "t", **fields}, batch=batch)


async def fails(call: Any) -> pb.ErrorDetail:
    """The detail of the error with which the call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as e:
        async with asyncio.timeout(PATIENCE_S):
            await call
    metadata: dict[str, Any] = dict(iter(e.value.trailing_metadata() or ()))  # type: ignore[arg-type] # stubs: not pairs
    return pb.ErrorDetail.FromString(metadata[ERROR_METADATA_KEY])


def serving(tmp_path: Path, body: Callable[[Served], Coroutine[None, None, None]], **config: Any) -> None:
    """Runs `body` against a fresh node whose data is in `tmp_path`; the same path again is the same node."""

    async def test() -> None:
        server = Server(node_config(tmp_path, **config))
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            while not server.node.status().is_ready:  # noqa: ASYNC110 - readiness is a state, not an event
                await asyncio.sleep(0)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(format_address(server.grpc_address), options=options) as channel:
            try:
                await body(Served(server, channel))
            finally:
                await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def node_config(tmp_path: Path, **changes: Any) -> ServerConfig:
    (port,) = free_ports(1)
    fields: dict[str, Any] = {
        "node_id": NodeId(1),
        "cluster_id": "c",
        "data_dir": tmp_path / "data",
        "peers": {NodeId(1): ("127.0.0.1", port)},
        # A single voter need not wait for heartbeats.
        "tuning": {"election_timeout_min_ms": 20, "election_timeout_max_ms": 40, "raft_heartbeat_ms": 5},
        **changes,
    }
    return ServerConfig(**fields)
