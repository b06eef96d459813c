"""`smq health` and `smq first-start`: what a container learns from the node of its own settings, and asks of it."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from click.testing import CliRunner, Result

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.cli.root import cli
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import HttpConfig, ServerConfig, TlsConfig, write_config
from smq.coordinator.server.composition import Server
from smq.raft_state.ids import NodeId
from smq.replication.storage.directory import FIRST_START_FILE
from smq.testing.served import fails, node_config, served_node
from tests.unit.coordinator.tls.authorities import Authorities, authorities, config_of

__all__ = ("authorities",)  # a fixture
Health = Callable[..., Result]
Ask = Callable[..., Awaitable[Result]]


@pytest.fixture
def health(tmp_path: Path) -> Health:
    """The command, with its settings in a file."""

    def run(config: ServerConfig, *arguments: str, command: str = "health", **env: str) -> Result:
        path = tmp_path / "node.toml"
        write_config(config, path)
        return CliRunner().invoke(cli, [command, "--config", str(path), *arguments], env=env)

    return run


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return node_config(tmp_path, http_address=("127.0.0.1", *free_ports(1)))


@asynccontextmanager
async def with_node(directory: Path, config: ServerConfig, health: Health) -> AsyncIterator[Ask]:
    async def ask(*arguments: str, config: ServerConfig = config, **env: str) -> Result:
        return await asyncio.to_thread(health, config, *arguments, **env)

    changes = {name: getattr(config, name) for name in ("http_address", "http_advertised", "http", "tls", "insecure")}
    async with served_node(directory, **changes):
        yield ask


async def test_a_node_that_runs_and_is_ready_ends_the_command_with_0(
    tmp_path: Path, config: ServerConfig, health: Health
) -> None:
    async with with_node(tmp_path, config, health) as ask:
        done = await ask()
        assert (done.exit_code, done.stdout) == (0, "node 1 is running\n")
        assert (await ask("--ready")).stdout == "node 1 is ready\n"
        assert json.loads((await ask("--ready", "--json")).stdout) == {"node": 1, "state": "ready"}
        (other,) = free_ports(1)
        refused = await ask(SMQ_HTTP_ADDRESS=f"127.0.0.1:{other}")  # a variable wins, as for `smq serve`
        assert (refused.exit_code, f"127.0.0.1:{other}" in refused.stderr) == (1, True)


async def test_a_port_that_listens_on_every_address_is_asked_on_this_machine(
    tmp_path: Path, config: ServerConfig, health: Health
) -> None:
    for host in ("0.0.0.0", "::"):
        everywhere = replace(config, http_address=(host, config.http_address[1]), insecure=True)
        everywhere = replace(everywhere, http_advertised=("127.0.0.1", config.http_address[1]))
        async with with_node(tmp_path / host, everywhere, health) as ask:
            assert (await ask("--ready")).exit_code == 0


@pytest.mark.parametrize("rule", [HttpConfig(), HttpConfig(probes="anyone")], ids=["clients", "anyone"])
async def test_a_node_with_tls_is_asked_over_tls_by_its_own_name(
    authorities: Authorities, tmp_path: Path, config: ServerConfig, health: Health, rule: HttpConfig
) -> None:
    def tls_of(node: int, **kwargs: Any) -> TlsConfig:
        return config_of(authorities.node(node, **kwargs))

    async with with_node(tmp_path, replace(config, tls=tls_of(1), http=rule), health) as ask:
        for question in ((), ("--ready",)):
            assert (await ask(*question)).exit_code == 0
        second = replace(config, node_id=NodeId(2), peers={NodeId(2): ("127.0.0.1", 1)}, tls=tls_of(2))
        refused = await ask(config=second)
        assert (refused.exit_code, "smq://c/nodes/1 answers at" in refused.stderr) == (1, True)
        strange = await ask(config=replace(config, tls=config_of(authorities.stranger())))
        assert (strange.exit_code, "does not answer" in strange.stderr) == (1, True)
        plain = await ask(config=replace(config, tls=None))
        assert (plain.exit_code, "does not answer" in plain.stderr) == (1, True)
        lost = replace(tls_of(1), key=tmp_path / "none")
        missing = await ask(config=replace(config, tls=lost))
        assert (missing.exit_code, "are not a certificate and its key" in missing.stderr) == (1, True)


async def test_another_node_at_the_address_is_named(tmp_path: Path, config: ServerConfig, health: Health) -> None:
    async with with_node(tmp_path, config, health) as ask:
        refused = await ask(config=replace(config, node_id=NodeId(2), peers={NodeId(2): ("127.0.0.1", 1)}))
        assert (refused.exit_code, "node 1 answers at" in refused.stderr) == (1, True)


def test_a_node_without_a_majority_runs_and_is_not_ready(config: ServerConfig, health: Health) -> None:
    alone = replace(config, peers=config.peers | {NodeId(n): ("127.0.0.1", free_ports(1)[0]) for n in (2, 3)})

    async def ask() -> None:
        server = Server(alone)
        await server.start()
        try:
            assert (await asyncio.to_thread(health, alone)).exit_code == 0
            refused = await asyncio.to_thread(health, alone, "--ready")
        finally:
            await server.stop()
        assert refused.exit_code == 1
        assert refused.stderr == (
            "smq: node 1 is not ready: the node belongs to no cluster yet: the data directory is empty: nodes 2, 3 are "
            "not connected, and a cluster begins with all of its nodes\n"
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


def test_a_first_start_is_asked_for_once_and_the_command_waits_for_the_cluster(
    config: ServerConfig, health: Health
) -> None:
    wanted = config.data_dir / FIRST_START_FILE

    async def ask() -> None:
        server = Server(config)
        await server.start()
        async with grpc.aio.insecure_channel(format_address(server.grpc_address)) as channel:
            admin: Any = smq_pb2_grpc.AdminStub(channel)
            refused = await fails(admin.DescribeCluster(pb.DescribeClusterRequest()))
        assert (refused.name, "run `smq first-start`" in refused.message) == ("NODE_NOT_READY", True)
        began = await asyncio.to_thread(health, config, command="first-start")
        birth = server.node.status().birth.hex()
        assert f"node 1 belongs to a cluster now: birth {birth}\n" in began.stdout
        async with asyncio.timeout(30):
            while wanted.exists():  # noqa: ASYNC110 - a file, without an event
                await asyncio.sleep(0.01)
        again = await asyncio.to_thread(health, config, command="first-start")
        assert f"node 1 belonged to a cluster already: birth {birth}\n" in again.stdout
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())
    late = health(config, "--timeout", "0.1", command="first-start")
    assert (late.exit_code, "does not answer" in late.stderr) == (1, True)


def test_a_node_that_is_not_there_or_says_nothing_ends_the_command_with_1(config: ServerConfig, health: Health) -> None:
    refused = health(config, "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stderr)["error"]["code"] == "UNREACHABLE"
    with closing(socket.create_server(config.http_address)):
        silent = health(config, "--timeout", "0.05")
    assert (silent.exit_code, "nothing within 0.05 s" in silent.stderr) == (1, True)


def test_a_port_that_nobody_knows_is_an_error_in_one_line(config: ServerConfig, health: Health) -> None:
    refused = health(replace(config, http_address=("127.0.0.1", 0)))
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "http_address has port 0" in refused.stderr
