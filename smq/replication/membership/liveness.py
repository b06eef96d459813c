"""Who has been heard of, and when.

Owns four facts a peer: the last heartbeat of each process (for the controller, one way is enough) and the last
answer to a ping on the DATA channel (for a leader, who needs both ways; rule 20); and which have said that they are
leaving, or that their disks are full. Holds no judgement.
"""

from smq.raft_state.ids import Incarnation, NodeId
from smq.replication.ports import Clock


class Liveness:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[NodeId, tuple[Incarnation, int]] = {}
        self._answered_ns: dict[NodeId, int] = {}
        self._leaving: dict[NodeId, Incarnation] = {}
        self._full: set[NodeId] = set()

    def on_heartbeat(self, peer: NodeId, incarnation: Incarnation, *, is_leaving: bool, is_full: bool) -> None:
        self._heard[peer] = (incarnation, self._clock.monotonic_ns())
        if is_leaving:
            self._leaving[peer] = incarnation
        if is_full:
            self._full.add(peer)
        else:
            self._full.discard(peer)

    def is_leaving(self, peer: NodeId, incarnation: Incarnation) -> bool:
        """Whether this process of the peer has said that it will end."""
        return self._leaving.get(peer) == incarnation

    def is_full(self, peer: NodeId) -> bool:
        """Whether its disk had no room for records when it was last heard of."""
        return peer in self._full

    def on_answer(self, peer: NodeId) -> None:
        self._answered_ns[peer] = self._clock.monotonic_ns()

    def heard_ns(self, peer: NodeId, incarnation: Incarnation) -> int:
        """When this process of the peer was last heard of; 0 for never, or for another process."""
        heard = self._heard.get(peer)
        return heard[1] if heard is not None and heard[0] == incarnation else 0

    def is_heard(self, peer: NodeId, within_ms: int) -> bool:
        """Whether any process of the peer was heard of recently."""
        heard = self._heard.get(peer)
        return heard is not None and self._clock.monotonic_ns() - heard[1] < within_ms * 1_000_000

    def answering(self, within_ms: int) -> frozenset[NodeId]:
        """The peers that answered a ping recently."""
        since_ns = self._clock.monotonic_ns() - within_ms * 1_000_000
        return frozenset(peer for peer, at_ns in self._answered_ns.items() if at_ns > since_ns)
