"""One real node with its real gRPC, Kafka and HTTP services, in the test's own event loop, on free ports.

Owns the start and end of that node, and short ways to call it. It has no peers: a lone voter elects itself within
milliseconds. For clusters, and for faults of processes, use smq.testing.cluster.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

from smq.clients.errors import ERROR_METADATA_KEY
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.server.composition import Server
from smq.raft_state.ids import NodeId
from smq.records import NewRecord, encode_batch

PATIENCE_S = 30  # after which a hanging test fails; nothing is measured by it


@dataclass
class Served:
    """A running node, and stubs of its gRPC services."""

    server: Server
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.agent: Any = smq_pb2_grpc.AgentStub(self.channel)
        self.broker: Any = smq_pb2_grpc.BrokerStub(self.channel)
        self.groups: Any = smq_pb2_grpc.GroupsStub(self.channel)
        self.transactions: Any = smq_pb2_grpc.TransactionsStub(self.channel)
        self.admin: Any = smq_pb2_grpc.AdminStub(self.channel)

    async def create(self, name: str = "t", partitions: int = 1, **kwargs: Any) -> None:
        """Creates a topic and waits until its partitions have leaders."""
        await self.admin.CreateTopic(pb.CreateTopicRequest(name=name, partition_count=partitions, **kwargs))
        await self.wait_leaders(name)

    async def wait_leaders(self, name: str = "t") -> None:
        """Returns once every partition has a leader. After a restart that takes an election."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                info = await self.admin.DescribeCluster(pb.DescribeClusterRequest(topics=[name], linearizable=True))
                if all(p.leader_available for p in info.topics[0].partitions):
                    return
                await asyncio.sleep(0)

    async def publish(
        self, *requests: pb.PublishRecordRequest, is_mirror: bool = False
    ) -> list[pb.PublishRecordResponse]:
        """Sends all requests on one stream; its answers in the order of their correlation ids."""

        async def send() -> AsyncIterator[pb.PublishRecordRequest]:
            for request in requests:
                yield request

        async with asyncio.timeout(PATIENCE_S):
            call = self.agent.MirrorRecord if is_mirror else self.agent.PublishRecord
            answers = [answer async for answer in call(send())]
        return sorted(answers, key=lambda a: a.correlation_id)

    async def fill(self, counts: Iterable[int], topic: str = "t", partition: int = 0) -> None:
        """Publishes one batch for each count, of this many records. Values count up from b"0" by offset."""
        requests, next_value = [], 0
        for i, count in enumerate(counts):
            values = [b"%d" % v for v in range(next_value, next_value + count)]
            requests.append(publish_request(values, topic=topic, partition=partition, correlation_id=i))
            next_value += count
        for answer in await self.publish(*requests):
            assert not answer.HasField("error"), answer

    async def subscribe(self, **init: Any) -> list[pb.SubscribeRecordResponse]:
        """All responses of a subscription to topic "t" that ends by itself."""
        fields = {"subscription_id": secrets.token_hex(4), "topic": "t", "partition": 0, **init}
        request = pb.SubscribeRecordRequest(init=pb.SubscribeInit(**fields))

        async def send() -> AsyncIterator[pb.SubscribeRecordRequest]:
            yield request

        async with asyncio.timeout(PATIENCE_S):
            return [response async for response in self.agent.SubscribeRecord(send())]


def publish_request(values: Iterable[bytes], **fields: Any) -> pb.PublishRecordRequest:
    """A request to publish one encoded batch of these values, to topic "t" unless `fields` name another."""
    batch = encode_batch(NewRecord(key=b"k", value=v, timestamp_ms=1_000 + i) for i, v in enumerate(values))
    return pb.PublishRecordRequest(**{"partition": 0, "topic": "t", **fields}, batch=batch)


async def fails(call: Awaitable[Any]) -> pb.ErrorDetail:
    """The detail of the error with which the call ends; AssertionError if it succeeds."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await call
    except grpc.aio.AioRpcError as error:
        metadata: dict[str, Any] = dict(iter(error.trailing_metadata() or ()))  # type: ignore[arg-type] # stubs: not pairs
        return pb.ErrorDetail.FromString(metadata[ERROR_METADATA_KEY])
    raise AssertionError(f"the call succeeded: {answer}")


@asynccontextmanager
async def served_node(directory: Path, **config: Any) -> AsyncIterator[Served]:
    """A node that is ready, with its data under `directory`; the same directory again is the same node.

    `config` holds fields of ServerConfig.
    """
    server = Server(node_config(directory, **config), first_start=True)
    await server.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not server.node.status().is_ready:  # noqa: ASYNC110 - readiness is a state, not an event
                await asyncio.sleep(0)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        # Windows do not grow by measurement: a client that does not read holds its stream up on any machine.
        options.append(("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(format_address(server.grpc_address), options=options) as channel:
            yield Served(server, channel)
    finally:
        await server.stop()


def serving(directory: Path, body: Callable[[Served], Coroutine[None, None, None]], **config: Any) -> None:
    """Runs `body` with a `served_node`, on the event loop that a node has in production."""

    async def test() -> None:
        async with served_node(directory, **config) as served:
            await body(served)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def node_config(directory: Path, **changes: Any) -> ServerConfig:
    """The configuration of a cluster of one node with data under `directory`, and with `changes`."""
    (port,) = free_ports(1)
    fields: dict[str, Any] = {
        "node_id": NodeId(1),
        "cluster_id": "c",
        "data_dir": directory / "data",
        "peers": {NodeId(1): ("127.0.0.1", port)},
        # A lone voter need not wait for any heartbeat.
        "tuning": {"election_timeout_min_ms": 20, "election_timeout_max_ms": 40, "raft_heartbeat_ms": 5},
        **changes,
    }
    return ServerConfig(**fields)
