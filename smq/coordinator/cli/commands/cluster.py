"""`smq cluster`: starting nodes as processes on this machine.

Owns what is printed. The work is done in supervisor and cluster_dir. It must never import the server, as `starting`.
"""

import asyncio
import signal
from pathlib import Path
from typing import Final

import click

from smq.coordinator.cli.cluster_dir import NODES_MAX, Ports, find_nodes, hold_directory, prepare_cluster
from smq.coordinator.cli.common import counted, parse_settings
from smq.coordinator.cli.starting import (
    addresses_of,
    auth_option,
    grpc_port,
    http_port,
    kafka_port,
    ready_file,
    remove_ready_file,
    report,
    report_tls,
    secure_maker,
    settings_option,
    tls_option,
    with_other_ports,
    write_ready_file,
)
from smq.coordinator.cli.supervisor import Supervisor
from smq.coordinator.config.node_toml import PASSWORD_MECHANISMS

_NODES_DEFAULT: Final = 3


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
@settings_option
@tls_option
@auth_option
@ready_file
def cluster(
    nodes: int | None,
    data_dir: Path,
    grpc_port: int | None,
    http_port: int | None,
    kafka_port: int | None,
    racks: str,
    settings: tuple[str, ...],
    tls: bool,
    auth: bool,
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
            secure = secure_maker() if tls or auth else None
            named = racks.split(",") if racks else []
            paths = prepare_cluster(
                data_dir,
                count,
                ports,
                new_peer_ports=is_retry,
                racks=named,
                settings=parse_settings(settings),
                secure=secure,
                sasl=PASSWORD_MECHANISMS if auth else None,
                are_ports_checked=True,
            )
            return asyncio.run(_cluster(paths, data_dir, ready_file))

        code = with_other_ports(start)
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
        report(f"node {child.config.node_id}: pid {child.pid}, {addresses_of(child.config)}, log {child.log_path}")
    report(f"smq is ready: {counted(len(config_paths), 'node')}, data in {data_dir}; Ctrl-C stops them")
    report_tls(supervisor.children[0].config, data_dir)
    write_ready_file(ready_file, [child.describe() for child in supervisor.children])
    dead = asyncio.create_task(supervisor.wait_all_dead())
    await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
    await supervisor.stop()
    if stop.is_set():
        return 0
    report("no node is left")
    return 1
