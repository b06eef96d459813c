"""A node's advertised addresses: unreachable ones are reported, and those of another node end the process."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.config.addresses import Address, format_address
from smq.coordinator.config.node_toml import ListenerConfig, ServerConfig, told
from smq.coordinator.server import self_check
from smq.coordinator.server.composition import Server
from smq.coordinator.server.self_check import Reach, SelfCheck
from smq.coordinator.user_errors import StartError
from smq.raft_state.commands import Listener
from smq.raft_state.ids import DiskId, Incarnation, NodeId
from smq.raft_state.state import ClusterState, NodeState
from smq.replication.api import NodeApi
from smq.replication.net.listening import bind_listener
from smq.testing.served import node_config, served_node


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_CHECK_S", 0.001)
    monkeypatch.setattr(self_check, "_AGAIN_S", 0.001)


def node(number: int, *, incarnation: int = 1, kafka: str = "", http: str = "", outside: str = "") -> NodeState:
    return NodeState(
        node=NodeId(number),
        incarnation=Incarnation(incarnation),
        disk=DiskId(bytes(16)),
        grpc_address=f"g{number}:1",
        http_address=http,
        kafka_address=kafka,
        fenced=False,
        listeners=(Listener(name="outside", grpc_address="", kafka_address=outside),) if outside else (),
    )


def checked(
    *nodes: NodeState,
    reach: Reach | None = None,
    hosts: tuple[str, ...] = ("n1", "n2"),
    peers: Mapping[NodeId, Address] | None = None,
) -> tuple[SelfCheck, ClusterState, list[str]]:
    """The check of the first of these nodes, its state, and what it has ended its process with. `hosts`: of [peers]."""
    state, ended = ClusterState(), list[str]()
    state.nodes = {n.node: n for n in nodes}
    api = SimpleNamespace(node_id=nodes[0].node, state=state, status=lambda: SimpleNamespace(is_ready=True))
    peers = peers or {NodeId(number): (host, 7400 + number) for number, host in enumerate(hosts, 1)}
    return SelfCheck(cast(NodeApi, api), peers, reach or {}, ended.append), state, ended


def shared_by(configs: Iterable[ServerConfig]) -> list[str]:
    """Why nodes with these configurations would end, and what they would warn of."""
    nodes = []
    for config in configs:
        own, *named = config.ways_in
        others = [
            Listener(name=way.name, grpc_address=_of(way, "gRPC"), kafka_address=_of(way, "Kafka")) for way in named
        ]
        state = node(config.node_id, incarnation=config.node_id, kafka=_of(own, "Kafka"))
        http = format_address(told(config.http_address, config.http_advertised))
        nodes.append(replace(state, grpc_address=_of(own, "gRPC"), http_address=http, listeners=tuple(others)))
    found = []
    for me in nodes:
        check, _, _ = checked(me, *(other for other in nodes if other is not me), peers=config.peers)
        found += [*filter(None, [check._duplicate()]), *check.warnings()]
    return found


def _of(way: ListenerConfig, kind: str) -> str:
    found = (told(address, advertised) for key, address, advertised in way.ports if f"{kind.lower()}_" in key)
    return next(map(format_address, found), "")


def twin_of(*nodes: NodeState) -> str:
    """The reason with which the first node's process ends; empty if it goes on."""

    async def run() -> str:
        check, _, ended = checked(*nodes)
        check.start()
        await asyncio.gather(*check._tasks)
        return ended[0] if ended else ""

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("mine", "others", "says"),
    [
        ({"kafka": "a:1"}, {"kafka": "a:1"}, "node 2 advertises a:1 (Kafka), and so does this node 1"),
        ({"outside": "a:1"}, {"outside": "a:1"}, "(Kafka outside)"),
        ({"http": "a:1"}, {"http": "a:1"}, "(HTTP)"),
        ({"kafka": "a:1"}, {"outside": "a:1"}, "(Kafka outside)"),
        ({"kafka": "a:1"}, {"kafka": "a:2"}, ""),
        ({"kafka": ""}, {"kafka": ""}, ""),
    ],
)
def test_the_later_of_two_nodes_with_one_address_ends(mine: dict[str, str], others: dict[str, str], says: str) -> None:
    found = twin_of(node(1, incarnation=2, **mine), node(2, incarnation=1, **others))
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
@pytest.mark.parametrize(
    ("hosts", "is_one_machine"),
    [
        (("n1.example.org", "n2.example.org"), False),
        (("10.0.0.1", "10.0.0.2"), False),
        (("n1.example.org", "n1.example.org"), True),
        (("127.0.0.1", "127.0.0.1"), True),
        (("localhost", "127.0.0.1"), True),
    ],
)
def test_a_loopback_address_is_each_machines_own(host: str, hosts: tuple[str, str], is_one_machine: bool) -> None:
    """By the walk-through of three machines, all advertise HTTP on 127.0.0.1:7402. Clients that got such an address
    would find each node under it, so there it is a warning."""
    for kind in ("http", "kafka"):
        nodes = node(1, incarnation=2, **{kind: f"{host}:1"}), node(2, incarnation=1, **{kind: f"{host}:1"})

        async def run(*nodes: NodeState) -> tuple[list[str], list[str]]:
            check, _, ended = checked(*nodes, hosts=hosts)
            check.start()
            await asyncio.gather(*check._tasks)
            return ended, check.warnings()

        ended, warnings = asyncio.run(run(*nodes))
        assert bool(ended) is is_one_machine
        assert [f"{host}:1 (Kafka)" in warning for warning in warnings] == [True] * (kind == "kafka" and not ended)


def test_the_earlier_of_two_nodes_with_one_address_stays() -> None:
    assert twin_of(node(1, incarnation=1, kafka="a:1"), node(2, incarnation=2, kafka="a:1")) == ""


def test_the_address_of_a_fenced_node_is_free() -> None:
    gone = node(2, kafka="a:1")
    gone.fenced = True
    assert twin_of(node(1, incarnation=2, kafka="a:1"), gone) == ""


async def test_a_node_that_is_fenced_soon_is_no_twin() -> None:
    gone = node(2, kafka="a:1")
    check, _, ended = checked(node(1, incarnation=2, kafka="a:1"), gone)
    check.start()
    await asyncio.sleep(0.005)
    gone.fenced = True
    await asyncio.gather(*check._tasks)
    assert ended == []


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a state of the check, not an event
            await asyncio.sleep(0.001)


async def test_an_unreachable_address_is_a_warning_until_it_is_reached() -> None:
    (port,) = free_ports(1)

    reach = {"kafka_advertised": (("127.0.0.1", port), None), "grpc_advertised": (("name.invalid", 1), None)}
    check, _, ended = checked(node(1), reach=reach)
    check.start()
    await _until(lambda: len(check.warnings()) == 2)
    assert f"127.0.0.1:{port}, which it advertises as kafka_advertised" in check.warnings()[1]
    assert "name.invalid:1, which it advertises as grpc_advertised" in check.warnings()[0]
    listener = bind_listener("127.0.0.1", port)
    await _until(lambda: len(check.warnings()) == 1)
    listener.close()
    check.stop()
    assert ended == []


async def test_warnings_of_the_check_are_in_the_status_of_the_node(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    async with served_node(tmp_path, grpc_advertised=("127.0.0.1", port)) as served:
        await _until(lambda: bool(served.server._self_check.warnings()))
        status = await served.admin.NodeStatus(pb.NodeStatusRequest())
        assert any("grpc_advertised" in warning for warning in status.warnings)


async def test_a_second_process_of_a_node_is_refused_at_its_start(tmp_path: Path) -> None:
    first, second, other = free_ports(3)
    peers = {NodeId(1): ("127.0.0.1", first), NodeId(2): ("127.0.0.1", other)}
    server = Server(node_config(tmp_path / "first", peers=peers))
    await server.start()
    twin = Server(node_config(tmp_path / "second", peers=peers, nodes_address=("127.0.0.1", second)))
    with pytest.raises(StartError, match=r"another process runs as node 1 of this cluster, at 127\.0\.0\.1"):
        await twin.start()
    assert not (tmp_path / "second").exists()  # a refused start leaves nothing behind
    await server.stop()
