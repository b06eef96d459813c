"""What the checks of a start find ends the server, as a refusal that the operator is to act on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.server import composition as server_module
from smq.coordinator.server import self_check
from smq.coordinator.server.composition import Server
from smq.coordinator.server.self_check import FAR_MS
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId
from smq.raft_state.replies import Reply
from smq.replication.net.tcp import TcpNetwork
from smq.replication.nodes.identity import StartRefused
from smq.testing.served import PATIENCE_S, node_config
from tests.unit.raft_state.support import register
from tests.unit.replication.net.test_tcp import Recorder

ONE, TWO, THREE = NodeId(1), NodeId(2), NodeId(3)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the server would have ended its process with."""
    errors: list[BaseException] = []
    monkeypatch.setattr(server_module, "die", errors.append)
    monkeypatch.setattr(self_check, "_CHECK_S", 0.001)
    return errors


def running(config: ServerConfig, body: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(config, first_start=True)
        await server.start()
        try:
            await body(server)
        finally:
            await server.stop()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - states, without an event
            await asyncio.sleep(0.005)


async def refusal(ended: list[BaseException]) -> str:
    await until(lambda: bool(ended))
    assert isinstance(ended[0], StartRefused)
    return str(ended[0])


def test_a_clock_that_the_other_nodes_contradict_ends_the_server(tmp_path: Path, ended: list[BaseException]) -> None:
    peers = {node: ("127.0.0.1", port) for node, port in zip((ONE, TWO, THREE), free_ports(3), strict=True)}

    async def body(_: Server) -> None:
        others = [
            TcpNetwork(loop=asyncio.get_running_loop(), node_id=node, cluster_id="c", peers=peers)
            for node in (ONE, TWO)
        ]
        for other in others:
            other._wall_ms = lambda: time.time_ns() // 1_000_000 + 3 * FAR_MS
            other.start(Recorder())
        said = await refusal(ended)
        assert "this machine's clock is 3.0 days behind those of nodes 1 and 2: set it" in said
        for other in others:
            other.close()

    running(node_config(tmp_path, node_id=THREE, peers=peers), body)


def test_an_address_that_another_node_advertises_ends_the_server(tmp_path: Path, ended: list[BaseException]) -> None:
    config = node_config(tmp_path, grpc_advertised=("broker.example.org", 7401))

    async def register_the_other(server: Server) -> None:
        await until(lambda: server.node.is_ready)
        answered: asyncio.Future[Reply | SmqError] = asyncio.get_running_loop().create_future()
        other = register(TWO, address="broker.example.org:7401")
        server.node.propose(other, PATIENCE_S * 1_000, answered.set_result)
        assert not isinstance(await answered, SmqError)
        assert ended == []

    async def body(_: Server) -> None:
        said = await refusal(ended)
        assert "node 2 advertises broker.example.org:7401 (gRPC), and so does this node 1: give each node" in said

    running(config, register_the_other)
    running(config, body)


def test_a_peer_that_holds_another_process_for_the_node_ends_the_server(
    tmp_path: Path, ended: list[BaseException]
) -> None:
    home, elsewhere, other = (("127.0.0.1", port) for port in free_ports(3))
    peers = {ONE: home, TWO: other}

    async def body(_: Server) -> None:
        node, peer = (
            TcpNetwork(loop=asyncio.get_running_loop(), node_id=known, cluster_id="c", peers=peers)
            for known in (ONE, TWO)
        )
        node.start(Recorder())
        peer.start(Recorder())
        said = await refusal(ended)
        assert f"node 2 refuses this process of node 1: another process is node 1, at 127.0.0.1:{home[1]}" in said
        node.close()
        peer.close()

    running(node_config(tmp_path, peers={ONE: elsewhere, TWO: other}), body)
