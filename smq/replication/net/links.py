"""Sending to peers: messages encoded onto the network's sessions.

Owns the way out only; the dispatcher owns the way in. It must never queue anything itself: a message that finds no open
session is not sent, and its sender recovers. Every part of a node sends through it.
"""

from collections.abc import Sequence
from typing import Final

from smq.raft_state.ids import NodeId
from smq.replication.net import wire
from smq.replication.ports import Buffer, Channel, Network

_RAFT: Final = bytes((wire.RAFT,))


class Links:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.is_open = network.is_open
        self.backlog_bytes = network.backlog_bytes

    def send(self, peer: NodeId, channel: Channel, message: wire.Message) -> bool:
        """False, and nothing sent, if no session is open."""
        return self._network.send(peer, channel, wire.encode(message))

    def send_raft(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        """A message of the engine, which encodes its own."""
        self._network.send(peer, Channel.CONTROL, [_RAFT, *parts])
