"""`smq dev` and `smq serve`: a node in this process.

Owns what they print. The work is done in server and cluster_dir.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from smq.coordinator.cli.cluster_dir import Ports, hold_directory, prepare_cluster
from smq.coordinator.cli.common import parse_settings
from smq.coordinator.cli.starting import (
    addresses_of,
    config_option,
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
from smq.coordinator.cli.supervisor import describe_node
from smq.coordinator.config.environment import strangers
from smq.coordinator.config.node_toml import check_config, known_keys, load_config
from smq.coordinator.server.composition import Server, run_server

_READY_POLL_S: Final = 0.02


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
        code = with_other_ports(
            lambda is_retry: _dev(
                prepare_cluster(
                    data_dir,
                    1,
                    ports,
                    new_peer_ports=is_retry,
                    settings=parse_settings(settings),
                    secure=secure_maker() if tls else None,
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
        report(f"smq is ready: {addresses_of(config)}, data in {data_dir}; Ctrl-C stops it")
        report(
            "records are kept until a topic's retention.ms or retention.bytes says otherwise, which none does at first"
        )
        report_tls(config, data_dir)
        write_ready_file(ready_file, [describe_node(config, os.getpid())])

    return run_server(config, on_started=announce, first_start=True, log_level=log_level)


@click.command()
@config_option
@click.option("--insecure", is_flag=True, help="Allow addresses that other machines can reach, without TLS.")
@settings_option
@click.option(
    "--first-start",
    is_flag=True,
    help="Begin a new cluster if all nodes are there and their data directories are empty; otherwise no effect.",
)
@click.option("--child", is_flag=True, hidden=True, help="Stop when stdin ends: the parent holds its other end.")
def serve(config_path: Path | None, insecure: bool, settings: tuple[str, ...], first_start: bool, child: bool) -> None:
    """Runs one node in the foreground from its node.toml. Variables of the environment (SMQ_NODE_ID and so on)
    take precedence over the file, and --set over both, for the keys of [settings] alone.

    Example: smq serve --config /etc/smq/node.toml --set num.partitions=6
    """
    # A child's file was written for it, and variables are for one node: those of the parent are not the child's.
    environment: Mapping[str, str] = {} if child else os.environ
    config = load_config(config_path, insecure=insecure, environment=environment)
    config = replace(config, settings=config.settings | parse_settings(settings))
    check_config(config)
    unknown = strangers(environment, known_keys())
    raise SystemExit(run_server(config, is_child=child, first_start=first_start, strangers=unknown))
