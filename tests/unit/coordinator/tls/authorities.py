"""Certificates of all kinds that a test needs: good ones, and every kind that an intruder may try."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

from smq.coordinator.config.node_toml import TlsConfig
from smq.coordinator.tls.certificate_files import Identity
from smq.coordinator.tls.certificates import make_authority, make_client, make_node
from smq.coordinator.tls.contexts import NodeTls
from smq.raft_state.ids import NodeId

CLUSTER_ID = "c"


@dataclass(frozen=True, kw_only=True)
class Authorities:
    """`ours` is trusted, `other` is not. The directories hold what `smq cert` makes."""

    ours: Path
    other: Path

    def node(self, node_id: int, *, cluster_id: str = CLUSTER_ID, days: int = 30) -> Identity:
        """A fresh certificate of ours in a directory of its own."""
        return make_node(self.ours, cluster_id=cluster_id, node_id=NodeId(node_id), hosts=(), days=days)

    def client(self, name: str = "admin", *, days: int = 30) -> Identity:
        return make_client(self.ours, name, days=days)

    def stranger(self, node_id: int = 1) -> Identity:
        """Names a node of this cluster, but is signed by an untrusted authority. It trusts ours."""
        made = make_node(self.other, cluster_id=CLUSTER_ID, node_id=NodeId(node_id), hosts=())
        made.ca.write_bytes((self.ours / "ca" / "ca.crt").read_bytes())
        return made


def config_of(identity: Identity, *, client_certificates: bool = True) -> TlsConfig:
    return TlsConfig(
        ca=identity.ca, certificate=identity.certificate, key=identity.key, client_certificates=client_certificates
    )


def node_tls(identity: Identity, node_id: int) -> NodeTls:
    return NodeTls(config_of(identity), cluster_id=CLUSTER_ID, node_id=NodeId(node_id))


def dialling(identity: Identity | None) -> ssl.SSLContext:
    """For a client that connects, with or without a certificate, and does not check the server's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if identity is not None:
        context.load_cert_chain(identity.certificate, identity.key)
    return context


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    made = Authorities(ours=tmp_path_factory.mktemp("ours"), other=tmp_path_factory.mktemp("other"))
    make_authority(made.ours, "ours")
    make_authority(made.other, "other")
    return made
