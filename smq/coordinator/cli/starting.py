"""What `smq dev`, `smq cluster`, `smq serve` and `smq health` share: options, the ready file, lines for the operator.

It must never import the server: `smq cluster` runs none, and its nodes start once its own modules are loaded.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from smq.coordinator.cli.cluster_dir import Secure
from smq.coordinator.config.addresses import format_address
from smq.coordinator.config.node_toml import ServerConfig
from smq.coordinator.user_errors import PortTaken
from smq.raft_state.cluster_config import IN_NODE_TOML

_START_ATTEMPTS: Final = 3  # a free port may be taken between its choice and its use, but hardly three times in a row

_PORT_HELP = "of node 1, then +10 per node; 0 picks free ports. Default: as last time, or {}"
grpc_port = click.option("--grpc-port", type=int, help="gRPC port " + _PORT_HELP.format(7401))
http_port = click.option("--http-port", type=int, help="HTTP port " + _PORT_HELP.format(7402))
kafka_port = click.option("--kafka-port", type=int, help="Kafka port " + _PORT_HELP.format(9092))
tls_option = click.option(
    "--tls", is_flag=True, help="Create certificates in the directory and use them. A directory that has TLS keeps it."
)
auth_option = click.option(
    "--auth",
    is_flag=True,
    help="As --tls, and ask clients for a user (`smq user create`). A directory that does keeps it.",
)
config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="SMQ_CONFIG",
    show_envvar=True,
    help="The node's node.toml. Without one, all settings come from the environment.",
)
settings_option = click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help=f"A setting under [settings] of node.toml; may be repeated. Keys: {', '.join(IN_NODE_TOML)}.",
)
ready_file = click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Written (renamed into place) when every node is ready; removed at start.",
)


def secure_maker() -> Secure:
    from smq.coordinator.tls.certificates import secure_cluster  # cryptography is slow to import

    return secure_cluster


def with_other_ports(run: Callable[[bool], int]) -> int:
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


def report_tls(config: ServerConfig, data_dir: Path) -> None:
    if config.tls is not None:
        report(
            f"TLS is on: export SMQ_CLUSTER_DIR={data_dir.absolute()} lets `smq` find the addresses and certificates"
        )
    if config.sasl:
        report(
            "clients must log in, Kafka's by SASL_SSL: `smq user create` and `smq acl grant` work by that certificate"
        )


def addresses_of(config: ServerConfig) -> str:
    kafka = format_address(config.kafka_address) if config.kafka_address is not None else "off"
    return f"gRPC {format_address(config.grpc_address)}, HTTP {format_address(config.http_address)}, Kafka {kafka}"
