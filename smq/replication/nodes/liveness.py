"""Which nodes have been heard, when, what they last said of themselves, and which are taken for dead.

Owns four facts per peer: its last heartbeat (one way is enough for the controller), its last answer to a ping on DATA
(a leader needs both ways; rule 20), whether it is leaving, and the condition of its disk. Judges by them whether a node
is dead. It must never propose anything: the controller fences a dead node, and the balancer moves leaders.
"""

from collections.abc import Callable

from smq.raft_state.ids import Incarnation, NodeId
from smq.raft_state.state import NodeState
from smq.replication.host import StateView
from smq.replication.net.wire import DiskCondition
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Clock
from smq.replication.raft.raft import Raft


class Liveness:
    def __init__(
        self,
        config: NodeConfig,
        *,
        clock: Clock,
        applied: StateView,
        engine: Raft,
        own_disk: Callable[[], DiskCondition],
        is_connected: Callable[[NodeId], bool],
    ) -> None:
        """`own_disk`: the condition of this node's own. `is_connected`: whether a peer has a session for CONTROL."""
        self._config = config
        self._clock = clock
        self._applied = applied
        self._engine = engine
        self._own_disk = own_disk
        self._is_connected = is_connected
        self.is_self_leaving = False  # from the beginning of a drain on
        self._heard: dict[NodeId, tuple[Incarnation, int]] = {}
        self._answered_ns: dict[NodeId, int] = {}
        self._leaving: dict[NodeId, Incarnation] = {}
        self._disks: dict[NodeId, DiskCondition] = {}

    def on_heartbeat(self, peer: NodeId, incarnation: Incarnation, *, is_leaving: bool, disk: DiskCondition) -> None:
        self._heard[peer] = (incarnation, self._clock.monotonic_ns())
        if is_leaving:
            self._leaving[peer] = incarnation
        self._disks[peer] = disk

    def on_answer(self, peer: NodeId) -> None:
        self._answered_ns[peer] = self._clock.monotonic_ns()

    def is_leaving(self, node: NodeId, incarnation: Incarnation) -> bool:
        """Whether this process, of this node or another, is about to end."""
        return self.is_self_leaving if node == self._config.node_id else self._leaving.get(node) == incarnation

    def disk(self, node: NodeId) -> DiskCondition:
        """The condition of the node's disk, as of its last heartbeat."""
        return self._own_disk() if node == self._config.node_id else self._disks.get(node, DiskCondition.FINE)

    def heard_ns(self, peer: NodeId, incarnation: Incarnation) -> int:
        """When this process of the peer was last heard; 0 for never, or for another process."""
        heard = self._heard.get(peer)
        return heard[1] if heard is not None and heard[0] == incarnation else 0

    def is_heard(self, peer: NodeId) -> bool:
        """Whether any process of the peer was heard within the session timeout."""
        heard = self._heard.get(peer)
        within_ns = self._config.session_timeout_ms * 1_000_000
        return heard is not None and self._clock.monotonic_ns() - heard[1] < within_ns

    def is_dead(self, node: NodeState, *, since_ns: int, now_ns: int) -> bool:
        """Whether another node is to be fenced: its process was not heard for the session timeout, counted from
        `since_ns` at the earliest. A node whose connection is gone too has a third of that, and none if it said that it
        leaves."""
        timeout_ms = self._config.session_timeout_ms
        if not self._is_connected(node.node):
            if self.is_leaving(node.node, node.incarnation):
                return True
            timeout_ms //= 3  # seldom a mere pause
        return now_ns - max(self.heard_ns(node.node, node.incarnation), since_ns) > timeout_ms * 1_000_000

    def is_candidate(self, node: NodeId) -> bool:
        """Whether a leadership may be given to another node: it is healthy, its disk writes, and it is not leaving."""
        known = self._applied.state.nodes.get(node)
        if known is None or known.fenced or known.drained or self.is_leaving(node, known.incarnation):
            return False
        return self.disk(node) is not DiskCondition.HANGS and self.is_heard(node)

    def is_fit_to_lead(self, node: NodeId) -> bool:
        """Whether a leadership that an operator wants may be given to this node or another."""
        if self.disk(node) is not DiskCondition.FINE:
            return False
        if node != self._config.node_id:
            return self.is_candidate(node)
        known = self._applied.state.nodes.get(node)
        return known is not None and not known.fenced and not known.drained and not self.is_self_leaving

    def raft_leader(self) -> NodeId | None:
        """While it is heard. If it died with a majority, the engine still names it, because no other is elected."""
        leader = self._engine.leader
        if leader is None or leader == self._config.node_id or self.is_heard(leader):
            return leader
        return None

    def reachable(self) -> frozenset[NodeId]:
        """The peers that answered a ping for records within `leader_isolation_ms`."""
        since_ns = self._clock.monotonic_ns() - self._config.leader_isolation_ms * 1_000_000
        return frozenset(peer for peer, at_ns in self._answered_ns.items() if at_ns > since_ns)
