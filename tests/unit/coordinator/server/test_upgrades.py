"""A real node whose data a newer smq wrote: it waits and says so, serves nothing, and works again once upgraded."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from chaos_tests.sim.levels import LEVEL_TWO, Note, level_two
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.server.composition import Server
from smq.raft_state.errors import ErrorCode
from smq.raft_state.replies import Done
from smq.replication.node_config import NodeConfig
from smq.testing.served import PATIENCE_S, Served, fails, node_config, served_node


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The level that the smq knows which is started next: one entry, for tests to change."""
    level, original = [LEVEL_TWO], ServerConfig.node_config

    def of_level(self: ServerConfig, **addresses: Any) -> NodeConfig:
        return replace(original(self, **addresses), feature_level_known=level[0])

    monkeypatch.setattr(ServerConfig, "node_config", of_level)
    with level_two():
        yield level


async def _wait(server: Server, is_so: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so(server.node):  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.01)


async def _use_level_two(directory: Path) -> None:
    """The newer smq raises the level, and writes what only it knows."""
    async with served_node(directory) as served:
        await served.create()
        await served.fill([3])
        await _wait(served.server, lambda node: node.state.feature_level == LEVEL_TWO)
        done = asyncio.get_running_loop().create_future()
        served.server.node.propose(Note(text="x"), 5_000, done.set_result)
        assert await done == Done()


async def _get(server: Server, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.http_address[1]}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_an_older_smq_waits_says_so_and_serves_nothing_until_it_is_upgraded(
    tmp_path: Path, known: list[int]
) -> None:
    await _use_level_two(tmp_path)
    known[0] = 1
    server = Server(node_config(tmp_path, kafka_address=("127.0.0.1", 0)))
    await server.start()
    await _wait(server, lambda node: node.waiting)
    await asyncio.sleep(0.2)  # whatever else it might still begin
    await _check_waiting(server)
    await server.stop()
    known[0] = LEVEL_TWO
    async with served_node(tmp_path) as served:
        await _check_intact(served)


async def _check_waiting(server: Server) -> None:
    reason = f"feature level {LEVEL_TWO}; this smq knows feature levels up to 1: run a newer smq on this node"
    assert reason in server.node.waiting
    status, text = await _get(server, "/readyz")
    assert (status, "the node waits for an upgrade" in text, reason in text) == (503, True, True)
    assert (await _get(server, "/healthz"))[0] == 200
    metrics = (await _get(server, "/metrics"))[1]
    assert "smq_node_waits_for_upgrade 1.0" in metrics
    assert "smq_node_ready 0.0" in metrics
    async with grpc.aio.insecure_channel(format_address(server.grpc_address)) as channel:
        admin: Any = smq_pb2_grpc.AdminStub(channel)
        broker: Any = smq_pb2_grpc.BrokerStub(channel)
        for call in (
            admin.CreateTopic(pb.CreateTopicRequest(name="new", partition_count=1)),
            admin.DescribeCluster(pb.DescribeClusterRequest()),
            admin.DescribeCluster(pb.DescribeClusterRequest(linearizable=True)),
            broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(topic="t", partition=0)),
        ):
            detail = await fails(call)
            assert detail.code == ErrorCode.UPGRADE_NEEDED.number
            assert reason in detail.message
        own = await admin.NodeStatus(pb.NodeStatusRequest())
        assert not own.is_ready
        assert not own.HasField("raft_leader")
        assert any("waits for an upgrade" in warning for warning in own.warnings)
    network: Any = server.node._network
    assert network._handler is None  # it dials no peer either
    node = server.node.config
    assert server.kafka_address is not None
    for address in (server.kafka_address, node.peers[node.node_id]):  # nor does it hear another node
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)


async def _check_intact(served: Served) -> None:
    await served.wait_leaders()
    got = await served.broker.GetPartitionRangeInfo(pb.GetPartitionRangeInfoRequest(topic="t", partition=0))
    assert got.hwm == 3
    assert served.server.node.state.feature_level == LEVEL_TWO


async def test_a_node_that_an_operator_holds_back_is_refused_once_the_cluster_is_above(
    tmp_path: Path, known: list[int]
) -> None:
    """It would understand everything, but a cluster never goes back."""

    await _use_level_two(tmp_path)
    server = Server(node_config(tmp_path, tuning={"feature_level_max": 1}), first_start=True)
    await server.start()
    await _wait(server, lambda node: node.waiting)
    assert "feature_level_max" in server.node.waiting
    await server.stop()


async def test_the_level_is_held_back_by_a_setting(tmp_path: Path, known: list[int]) -> None:
    async with served_node(tmp_path, tuning={"feature_level_max": 1}) as served:
        done = asyncio.get_running_loop().create_future()
        served.server.node.propose(Note(text="x"), 5_000, done.set_result)
        error = await done
        assert error.code is ErrorCode.FEATURE_NOT_ENABLED
        assert served.server.node.state.feature_level == 1
        described = await served.admin.DescribeCluster(pb.DescribeClusterRequest())
        assert (described.feature_level, described.nodes[0].feature_level) == (1, 1)
