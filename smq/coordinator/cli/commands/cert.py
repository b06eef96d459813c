"""`smq cert`: a certificate authority, certificates for nodes and clients, and when certificates expire.

Owns what these commands print. The work is done in `tls.certificates`. `cli.root` loads it when it is used.
"""

import shlex
from datetime import UTC, datetime
from pathlib import Path

import click

from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.config.node_toml import dump_table
from smq.coordinator.tls.certificate_files import OPERATOR, Identity, authority
from smq.coordinator.tls.certificates import CA_DAYS, DAYS, make_authority, make_client, make_node, read_end
from smq.raft_state.ids import NodeId
from smq.replication.net.peer_tls import node_uri

_directory = click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
_days = click.option("--days", type=click.IntRange(min=1), default=DAYS, show_default=True, help="Days it is valid.")


@click.group(cls=CommandGroup)
def cert() -> None:
    """Makes certificates for TLS, signed by an authority of its own.

    The authority's key is stored unencrypted in DIRECTORY/ca: use it for development, or keep the directory offline.
    Certificates of any other authority work as well. A node's certificate must name the node by the URI that
    `smq cert node` prints.
    """


@cert.command("init")
@_directory
@click.option("--days", type=click.IntRange(min=1), default=CA_DAYS, show_default=True, help="Days it is valid.")
def cert_init(directory: Path, days: int) -> None:
    """Makes a new authority in DIRECTORY/ca.

    Example: smq cert init certs
    """
    make_authority(directory, "smq CA", days=days)
    click.echo(f"{authority(directory).ca} signs what `smq cert node` and `smq cert client` make")


@cert.command("node")
@_directory
@click.option("--cluster-id", required=True, help="As in node.toml.")
@click.option("--node", "node_id", type=click.IntRange(1, 2**31 - 1), required=True, help="The node's id.")
@click.option("--host", "hosts", multiple=True, help="Name or address by which clients reach it; may be repeated.")
@_days
def cert_node(directory: Path, cluster_id: str, node_id: int, hosts: tuple[str, ...], days: int) -> None:
    """Makes or renews the certificate of one node, in DIRECTORY/node-N. It always includes the loopback names.

    Example: smq cert node certs --cluster-id prod --node 1 --host node1.example.com
    """
    made = make_node(directory.absolute(), cluster_id=cluster_id, node_id=NodeId(node_id), hosts=hosts, days=days)
    _report(made, f"names {node_uri(cluster_id, NodeId(node_id))} and ")
    click.echo("\n".join(dump_table("tls", {"ca": made.ca, "certificate": made.certificate, "key": made.key})))


@cert.command("client")
@_directory
@click.option("--name", default=OPERATOR, show_default=True, help="The client's name: the certificate's common name.")
@_days
def cert_client(directory: Path, name: str, days: int) -> None:
    """Makes or renews the certificate of a client, in DIRECTORY/client-NAME.

    Example: smq cert client certs --name alice
    """
    made = make_client(directory.absolute(), name, days=days)
    _report(made)
    files = {"CA": made.ca, "CERTIFICATE": made.certificate, "KEY": made.key}
    click.echo("export " + " ".join(f"SMQ_TLS_{name}={shlex.quote(str(path))}" for name, path in files.items()))


@cert.command("show")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def cert_show(files: tuple[Path, ...]) -> None:
    """Shows when certificates expire, the first of each file. Exit code 1 if one has expired.

    Example: smq cert show certs/*/*.crt
    """
    now = datetime.now(UTC)
    has_expired = False
    for path in files:
        end = read_end(path)
        has_expired |= end < now
        left = "expired" if end < now else f"{(end - now).days} days left"
        click.echo(f"{path}  {end:%Y-%m-%d %H:%M} UTC  {left}")
    if has_expired:
        raise SystemExit(1)


def _report(made: Identity, names: str = "") -> None:
    """On stderr: stdout can be pasted anywhere, which is why all paths are absolute."""
    click.echo(f"{made.certificate} {names}is valid until {read_end(made.certificate):%Y-%m-%d %H:%M} UTC", err=True)
