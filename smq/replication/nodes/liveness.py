"""Which nodes have been heard, when, what they last said of themselves, and which are taken for dead.

Owns four facts per peer: its last heartbeat (one way is enough for the controller), its last answer to a ping on DATA
(a leader needs both ways; rule 20), whether it is leaving, and the condition of its disk. Judges by them whether a node
is dead, by a clock that stops while this node does not run: one that slept has heard no other. It must never propose
anything: the controller fences a dead node, and the balancer moves leaders.
"""

from collections.abc import Callable
from typing import Final

from smq.raft_state.ids import Incarnation, NodeId
from smq.raft_state.state import NodeState
from smq.replication.host import StateView
from smq.replication.net.wire import DiskCondition
from smq.replication.node_config import NodeConfig
from smq.replication.ports import Clock
from smq.replication.raft.raft import Raft
from smq.replication.runtime.heard_time import HeardTime

_NS_PER_MS: Final = 1_000_000
# A node whose connection is gone has this part of the session timeout: that is seldom a pause.
_GONE_SHARE: Final = 3
_GONE_MS_MAX: Final = 500


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
        self._gone_ms = min(config.session_timeout_ms // _GONE_SHARE, _GONE_MS_MAX)
        self._heard_time = HeardTime(clock, self._gone_ms, config.tick_interval_ms)
        self._applied = applied
        self._engine = engine
        self._own_disk = own_disk
        self._is_connected = is_connected
        self.is_self_leaving = False  # from the beginning of a drain on
        self._heard: dict[NodeId, tuple[Incarnation, int]] = {}
        self._answered_ns: dict[NodeId, int] = {}
        self._leaving: dict[NodeId, Incarnation] = {}
        self._disks: dict[NodeId, DiskCondition] = {}

    def now_ns(self) -> int:
        """By the clock of all times here. To be called at each tick, too: what passes between two calls counts only in
        part."""
        return self._heard_time.now_ns()

    def on_heartbeat(self, peer: NodeId, incarnation: Incarnation, *, is_leaving: bool, disk: DiskCondition) -> None:
        self._heard[peer] = (incarnation, self.now_ns())
        if is_leaving:
            self._leaving[peer] = incarnation
        self._disks[peer] = disk

    def on_answer(self, peer: NodeId) -> None:
        self._answered_ns[peer] = self.now_ns()

    def is_leaving(self, node: NodeId, incarnation: Incarnation) -> bool:
        """Whether this process, of this node or another, is about to end."""
        return self.is_self_leaving if node == self._config.node_id else self._leaving.get(node) == incarnation

    def disk(self, node: NodeId) -> DiskCondition:
        """The condition of the node's disk, as of its last heartbeat."""
        return self._own_disk() if node == self._config.node_id else self._disks.get(node, DiskCondition.FINE)

    def heard_ns(self, peer: NodeId, incarnation: Incarnation) -> int:
        """When this process of the peer was last heard, by `now_ns`; 0 for never, or for another process."""
        heard = self._heard.get(peer)
        return heard[1] if heard is not None and heard[0] == incarnation else 0

    def is_heard(self, peer: NodeId) -> bool:
        """Whether any process of the peer was heard within the session timeout."""
        heard = self._heard.get(peer)
        within_ns = self._config.session_timeout_ms * _NS_PER_MS
        return heard is not None and self.now_ns() - heard[1] < within_ns

    def is_dead(self, node: NodeState, *, since_ns: int) -> bool:
        """Whether another node is to be fenced: its process was not heard for the session timeout, counted from
        `since_ns` (of `now_ns`) at the earliest. A node whose connection is gone too has half a second or a third
        of that, and none if it said that it leaves."""
        timeout_ms = self._config.session_timeout_ms
        if not self._is_connected(node.node):
            if self.is_leaving(node.node, node.incarnation):
                return True
            timeout_ms = self._gone_ms
        silent_ns = self.now_ns() - max(self.heard_ns(node.node, node.incarnation), since_ns)
        return silent_ns > timeout_ms * _NS_PER_MS

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
        since_ns = self.now_ns() - self._config.leader_isolation_ms * _NS_PER_MS
        return frozenset(peer for peer, at_ns in self._answered_ns.items() if at_ns > since_ns)
