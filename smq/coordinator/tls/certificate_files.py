"""Where certificates are in a directory that `smq cert` or `smq cluster --tls` made.

Owns only the names: D/ca, D/node-N and D/client-NAME, each with ca.crt, tls.crt and tls.key, as in Kubernetes. It reads
nothing, and is light: every command imports it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smq.raft_state.ids import NodeId

OPERATOR: Final = "admin"  # the client whose certificate `smq` uses on a cluster of this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The files of one node, client or authority."""

    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.directory / "tls.crt"

    @property
    def key(self) -> Path:
        return self.directory / "tls.key"


def authority(directory: Path) -> Identity:
    return Identity(directory=directory / "ca")


def node_identity(directory: Path, node_id: NodeId) -> Identity:
    return Identity(directory=directory / f"node-{node_id}")


def client_identity(directory: Path, name: str = OPERATOR) -> Identity:
    return Identity(directory=directory / f"client-{name}")


def tls_dir(cluster_directory: Path) -> Path:
    """The certificates of a directory of `smq cluster`."""
    return cluster_directory.absolute() / "tls"
