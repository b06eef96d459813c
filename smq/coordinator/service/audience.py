"""Which addresses a client gets: those that the nodes advertise for the listener that it came through.

Owns that choice, for gRPC and Kafka alike. A client from outside must never get an address that only the inside can
reach. Services import it.
"""

from dataclasses import dataclass, replace

from smq.raft_state.commands import Listener
from smq.raft_state.errors import SmqError
from smq.raft_state.state import NodeState
from smq.replication.api import NodeApi

OWN = ""  # the node's own addresses, which have no listener's name


def told_of(node: NodeState, listener: str) -> Listener:
    """The node's addresses for clients of a listener; empty ones if the node has no listener of that name."""
    if listener == OWN:
        return Listener(name=OWN, grpc_address=node.grpc_address, kafka_address=node.kafka_address)
    found = (known for known in node.listeners if known.name == listener)
    return next(found, Listener(name=listener, grpc_address="", kafka_address=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Audience:
    """The clients of one listener of this node."""

    node: NodeApi
    listener: str = OWN

    def told(self, error: SmqError) -> SmqError:
        """The same error with the leader's address for these clients. The layers below know only the nodes' own."""
        details = error.details
        if self.listener == OWN or details.leader_address is None or details.leader is None:
            return error
        leader = self.node.state.nodes.get(details.leader)
        address = told_of(leader, self.listener).grpc_address if leader is not None else ""
        return SmqError(error.code, error.message, replace(details, leader_address=address or None))
