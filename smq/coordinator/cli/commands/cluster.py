"""`smq dev`, `smq cluster` and `smq serve`: starting nodes on this machine.

Owns what is printed, and the ready file. The work is done in server, supervisor and cluster_dir.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from smq.coordinator.addresses import format_address
from smq.coordinator.cli.cluster_dir import NODES_MAX, Ports, Secure, find_nodes, hold_directory, prepare_cluster
from smq.coordinator.cli.common import counted, parse_settings
from smq.coordinator.cli.supervisor import Supervisor, describe_node
from smq.coordinator.config import ServerConfig, check_config, load_config
from smq.coordinator.server import Server, run_server
from smq.coordinator.user_errors import PortTaken
from smq.raft_state.cluster_config import IN_NODE_TOML
from smq.replication.storage.engine import Engine

_START_ATTEMPTS: Final = 3  # a free port may be taken between its choice and its use, but hardly three times in a row
_READY_POLL_S: Final = 0.02
_NODES_DEFAULT: Final = 3

_PORT_HELP = "of node 1, then +10 per node; 0 picks free ports. Default: as last time, or {}"
grpc_port = click.option("--grpc-port", type=int, help="gRPC port " + _PORT_HELP.format(7401))
http_port = click.option("--http-port", type=int, help="HTTP port " + _PORT_HELP.format(7402))
kafka_port = click.option("--kafka-port", type=int, help="Kafka port " + _PORT_HELP.format(9092))
tls_option = click.option(
    "--tls", is_flag=True, help="Create certificates under D/tls and use them. A directory that has TLS keeps it."
)
settings_option = click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help=f"A setting under [settings] of node.toml; may be repeated. Keys: {', '.join(IN_NODE_TOML)}.",
)
engine_option = click.option(
    "--storage-engine",
    type=click.Choice([engine.value for engine in Engine]),
    help="What stores the data. Default: as last time, or lmdb.",
)
ready_file = click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Written (renamed into place) when every node is ready; removed at start.",
)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("smq-data"),
    show_default=True,
    help="Where the node keeps its data.",
)
@click.option("--ephemeral", is_flag=True, help="Keep nothing: delete the data when the node stops.")
@click.option("--verbose", is_flag=True, help="Log what the node does, not only warnings and errors.")
@grpc_port
@http_port
@kafka_port
@engine_option
@settings_option
@tls_option
@ready_file
def dev(
    data_dir: Path,
    ephemeral: bool,
    verbose: bool,
    grpc_port: int | None,
    http_port: int | None,
    kafka_port: int | None,
    storage_engine: str | None,
    settings: tuple[str, ...],
    tls: bool,
    ready_file: Path | None,
) -> None:
    """Runs one node in the foreground, for development.

    Example: smq dev --ephemeral
    """
    ports = Ports(grpc=grpc_port, http=http_port, kafka=kafka_port)
    with contextlib.ExitStack() as stack:
        if ephemeral:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smq-")))
        stack.enter_context(hold_directory(data_dir))
        remove_ready_file(ready_file)
        code = _with_other_ports(
            lambda is_retry: _dev(
                prepare_cluster(
                    data_dir,
                    1,
                    ports,
                    new_peer_ports=is_retry,
                    engine=Engine(storage_engine) if storage_engine else None,
                    settings=parse_settings(settings),
                    secure=_secure() if tls else None,
                    are_ports_checked=True,
                )[0],
                data_dir,
                ready_file,
                logging.INFO if verbose else logging.WARNING,
            )
        )
    raise SystemExit(code)


def _dev(path: Path, data_dir: Path, ready_file: Path | None, log_level: int) -> int:
    config = load_config(path)

    async def announce(server: Server) -> None:
        while not server.node.status().is_ready:  # noqa: ASYNC110 - readiness is a state of the node, not an event
            await asyncio.sleep(_READY_POLL_S)
        report(
            f"smq is ready: gRPC {_grpc(config)}, HTTP {_http(config)}, Kafka {_kafka(config)}, data in {data_dir}; "
            "Ctrl-C stops it"
        )
        _report_tls(config, data_dir)
        write_ready_file(ready_file, [describe_node(config, os.getpid())])

    return run_server(config, on_started=announce, log_level=log_level)


@click.command()
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), help="Number of nodes. Default: as last time, or 3.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where the nodes keep their data: node-1, node-2, ... The same directory is the same cluster.",
)
@grpc_port
@http_port
@kafka_port
@click.option("--racks", default="", help="One per node, such as a,b,c. Kafka clients read in their own rack.")
@engine_option
@settings_option
@tls_option
@ready_file
def cluster(
    nodes: int | None,
    data_dir: Path,
    grpc_port: int | None,
    http_port: int | None,
    kafka_port: int | None,
    racks: str,
    storage_engine: str | None,
    settings: tuple[str, ...],
    tls: bool,
    ready_file: Path | None,
) -> None:
    """Runs a cluster of several node processes on this machine, in the foreground.

    Example: smq cluster --nodes 3 --data-dir D --tls
    """
    ports = Ports(grpc=grpc_port, http=http_port, kafka=kafka_port)
    with hold_directory(data_dir):
        remove_ready_file(ready_file)
        count = nodes or len(find_nodes(data_dir)) or _NODES_DEFAULT

        def start(is_retry: bool) -> int:
            secure = _secure() if tls else None
            named = racks.split(",") if racks else []
            paths = prepare_cluster(
                data_dir,
                count,
                ports,
                new_peer_ports=is_retry,
                racks=named,
                engine=Engine(storage_engine) if storage_engine else None,
                settings=parse_settings(settings),
                secure=secure,
                are_ports_checked=True,
            )
            return asyncio.run(_cluster(paths, data_dir, ready_file))

        code = _with_other_ports(start)
    raise SystemExit(code)


async def _cluster(config_paths: list[Path], data_dir: Path, ready_file: Path | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(config_paths, report)
    stopped = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(supervisor.start())
    await asyncio.wait({stopped, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()  # it stops the nodes that it has started
        await asyncio.wait({starting})
        return 0
    starting.result()
    for child in supervisor.children:
        report(
            f"node {child.config.node_id}: pid {child.pid}, gRPC {_grpc(child.config)}, HTTP {_http(child.config)}, "
            f"Kafka {_kafka(child.config)}, log {child.log_path}"
        )
    report(f"smq is ready: {counted(len(config_paths), 'node')}, data in {data_dir}; Ctrl-C stops them")
    _report_tls(supervisor.children[0].config, data_dir)
    write_ready_file(ready_file, [child.describe() for child in supervisor.children])
    dead = asyncio.create_task(supervisor.wait_all_dead())
    await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
    await supervisor.stop()
    if stop.is_set():
        return 0
    report("no node is left")
    return 1


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="SMQ_CONFIG",
    show_envvar=True,
    help="The node's node.toml. Without one, all settings come from the environment.",
)
@click.option("--insecure", is_flag=True, help="Allow addresses that other machines can reach, without TLS.")
@settings_option
@click.option("--child", is_flag=True, hidden=True, help="Stop when stdin ends: the parent holds its other end.")
def serve(config_path: Path | None, insecure: bool, settings: tuple[str, ...], child: bool) -> None:
    """Runs one node in the foreground from its node.toml. What --set gives takes precedence over variables of the
    environment (SMQ_NODE_ID and so on), and these over the file.

    Example: smq serve --config /etc/smq/node.toml --set rack=a
    """
    # A child's file was written for it, and variables are for one node: those of the parent are not the child's.
    config = load_config(config_path, insecure=insecure, environment={} if child else os.environ)
    config = replace(config, settings=config.settings | parse_settings(settings))
    check_config(config)
    raise SystemExit(run_server(config, is_child=child))


# ------------------------------------------------------------------------------------------------ shared parts
def _secure() -> Secure:
    from smq.coordinator.tls.certificates import secure_cluster  # cryptography is slow to import

    return secure_cluster


def _with_other_ports(run: Callable[[bool], int]) -> int:
    """Runs again with other free ports if one was taken between its choice and its use."""
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            return run(attempt > 1)
        except PortTaken:
            if attempt == _START_ATTEMPTS:
                raise
    raise AssertionError("the loop returns or raises")


def remove_ready_file(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def write_ready_file(path: Path | None, nodes: Sequence[dict[str, object]]) -> None:
    """A reader finds the complete file, or none."""
    if path is not None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"nodes": list(nodes)}) + "\n")
        temporary.replace(path)


def report(line: str) -> None:
    """Prints one line for the operator; stdout is for data."""
    click.echo(line, err=True)


def _report_tls(config: ServerConfig, data_dir: Path) -> None:
    if config.tls is not None:
        report(
            f"TLS is on: export SMQ_CLUSTER_DIR={data_dir.absolute()} lets `smq` find the addresses and certificates"
        )


def _grpc(config: ServerConfig) -> str:
    return format_address(config.grpc_address)


def _http(config: ServerConfig) -> str:
    return format_address(config.http_address)


def _kafka(config: ServerConfig) -> str:
    return format_address(config.kafka_address) if config.kafka_address is not None else "off"
