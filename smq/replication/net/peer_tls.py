"""The identity of a TLS peer: node names in certificates, and the TLS contexts of a network port.

Owns the name of a node in a certificate. It reads no files and knows no sockets: the composition root makes the
contexts. The rest of this package and the coordinator import it.

A node's certificate names it by the URI `smq://CLUSTER_ID/nodes/ID` among its subject alternative names. The host name
says where a node runs, and may change; the URI says which node it is, and a peer may not speak as any other.
"""

import ssl
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import quote

from smq.raft_state.ids import NodeId

_SCHEME: Final = "smq://"


class PeerContexts(Protocol):
    """The contexts for both sides of a connection between nodes. Read again for every connection, so that renewed
    certificates take effect without a restart."""

    @property
    def listening(self) -> ssl.SSLContext: ...

    @property
    def dialling(self) -> ssl.SSLContext: ...


def node_uri(cluster_id: str, node_id: NodeId) -> str:
    """The name of one node of one cluster."""
    return f"{_SCHEME}{quote(cluster_id, safe='')}/nodes/{node_id}"


def uris_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The URIs in a verified certificate (as `SSLObject.getpeercert` returns it); none without a certificate."""
    names = certificate.get("subjectAltName", ()) if certificate else ()
    return tuple(value for kind, value in names if kind == "URI")
