"""Who a TLS peer is: node identities in certificates, and the contexts that a network port is given.

Owns the name of a node in a certificate and its check. It reads no files and knows no sockets: the composition root
makes the contexts. `smq.replication.net.tcp` and the coordinator import it.

A node's certificate names it by the URI `smq://CLUSTER_ID/nodes/ID` among its subject alternative names. The host's
name says where a node runs, and may change; the URI says which node it is, and a peer may speak as no other.
"""

import ssl
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import quote

from smq.raft_state.ids import NodeId

_SCHEME: Final = "smq://"


class PeerContexts(Protocol):
    """What both sides of a connection between nodes use. Read anew for every connection, so that renewed
    certificates take effect without a restart."""

    @property
    def listening(self) -> ssl.SSLContext: ...

    @property
    def dialling(self) -> ssl.SSLContext: ...


def node_uri(cluster_id: str, node_id: NodeId) -> str:
    """The name of one node of one cluster."""
    return f"{_SCHEME}{quote(cluster_id, safe='')}/nodes/{node_id}"


def uris_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The URIs that a verified certificate (as `SSLObject.getpeercert` gives it) speaks for; none without one."""
    names = certificate.get("subjectAltName", ()) if certificate else ()
    return tuple(value for kind, value in names if kind == "URI")
