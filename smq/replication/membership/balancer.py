"""Who should lead what while everybody is well: leaderships go to the preferred replicas, and off drained nodes.

Owns the pace: a few hand-overs at a time, and none to a node that has only just come back, the less so the more often
it went. It only asks the leaders to hand over (they refuse where it would hurt), and never elects. Used by the
controller, which runs it while this node leads Raft.
"""

from collections.abc import Iterator
from typing import Final

from smq.raft_state.ids import Incarnation, NodeId, PartitionId
from smq.raft_state.state import NodeState, PartitionState
from smq.replication.host import Host
from smq.replication.membership.liveness import Liveness
from smq.replication.net import wire
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Channel

TRANSFERS_MAX: Final = 64  # leaderships moved in one round: each costs its partition a short pause
LOOK_NS: Final = 1_000_000_000  # between two looks at all partitions
PACE_NS: Final = 250_000_000  # between two rounds while there is more to move
RAFT_AGAIN_NS: Final = 10_000_000_000  # between two attempts of a drained node to hand Raft over
ASKED_NS: Final = 5_000_000_000  # a leader that did not hand over when asked is not asked again for this long
WAIT_FACTOR_MAX: Final = 16  # a node that keeps coming and going waits up to so many rebalance intervals


def is_heard(host: Host, liveness: Liveness, node: NodeState, now_ns: int) -> bool:
    """Whether this process of the node was heard of within the last beats."""
    if node.node == host.node_id:
        return node.incarnation == host.incarnation
    heard_ns = liveness.heard_ns(node.node, node.incarnation)
    return heard_ns > 0 and now_ns - heard_ns < 4 * host.config.heartbeat_interval_ms * 1_000_000


class _Health:
    """Since when a node has been well, and how long it must have been before it is given leaderships back."""

    __slots__ = ("incarnation", "losses", "since_ns")

    def __init__(self) -> None:
        self.incarnation = Incarnation(-1)
        self.since_ns: int | None = None
        self.losses = 0  # how often it went, until it has been well for long

    def see(self, incarnation: Incarnation, is_well: bool, now_ns: int, interval_ns: int) -> None:
        if is_well and self.since_ns is not None and incarnation == self.incarnation:
            if now_ns - self.since_ns > WAIT_FACTOR_MAX * interval_ns:
                self.losses = 0
            return
        if self.since_ns is not None:  # it was well, and is not any more, or is another process
            self.losses += 1
        self.incarnation = incarnation
        self.since_ns = now_ns if is_well else None

    def is_settled(self, now_ns: int, interval_ns: int) -> bool:
        factor = min(2 ** max(self.losses - 1, 0), WAIT_FACTOR_MAX)
        return self.since_ns is not None and now_ns - self.since_ns >= factor * interval_ns


class Balancer:
    def __init__(self, host: Host, liveness: Liveness, replicas: Replicas) -> None:
        self._host = host
        self._liveness = liveness
        self._replicas = replicas
        self._next_ns = 0
        self._raft_next_ns = 0
        self._health: dict[NodeId, _Health] = {}  # one a node
        self._asked: dict[PartitionId, int] = {}  # when; bounded by the partitions, and emptied as time passes

    @property
    def _interval_ns(self) -> int:
        return self._host.config.rebalance_interval_ms * 1_000_000

    def start(self, now_ns: int) -> None:
        """This node has begun to lead Raft."""
        self._next_ns = now_ns + self._interval_ns
        self._health.clear()
        self._asked.clear()

    def hurry(self) -> None:
        self._next_ns = 0

    def on_tick(self, now_ns: int) -> None:
        for node in self._host.state.nodes.values():
            is_well = (
                not node.fenced and not self._is_leaving(node) and is_heard(self._host, self._liveness, node, now_ns)
            )
            is_well = is_well and not self._liveness.is_full(node.node)
            health = self._health.setdefault(node.node, _Health())
            health.see(node.incarnation, is_well, now_ns, self._interval_ns)
        if now_ns < self._next_ns:
            return
        self._asked = {pid: at_ns for pid, at_ns in self._asked.items() if now_ns - at_ns < ASKED_NS}
        moved = sum(self._ask(part, target, now_ns) for part, target in self._moves(now_ns))
        self._next_ns = now_ns + (PACE_NS if moved else LOOK_NS)
        self._leave_raft(now_ns)

    def _is_leaving(self, node: NodeState) -> bool:
        return self._liveness.is_leaving(node.node, node.incarnation)

    def _moves(self, now_ns: int) -> Iterator[tuple[PartitionState, NodeId]]:
        """Up to TRANSFERS_MAX partitions that another node should lead."""
        nodes = self._host.state.nodes
        drained = {n.node for n in nodes.values() if n.drained}
        well = [n for n, health in self._health.items() if health.since_ns is not None and n not in drained]
        settled = {n for n in well if self._health[n].is_settled(now_ns, self._interval_ns)}
        left = TRANSFERS_MAX
        for topic in self._host.state.topics.values():
            for part in topic.partitions:
                if part.is_external:
                    break  # as all of this topic
                if part.leader == part.replicas[0] and part.leader not in drained:
                    continue
                target = self._target(part, drained, well, settled)
                if target is not None and part.pid not in self._asked:
                    yield part, target
                    left -= 1
                    if not left:
                        return

    def _target(
        self, part: PartitionState, drained: set[NodeId], well: list[NodeId], settled: set[NodeId]
    ) -> NodeId | None:
        """The preferred replica, once it has been well for a while; off a drained node, whichever is well."""
        if part.replicas[0] in settled and part.leader != part.replicas[0]:
            return part.replicas[0]
        if part.leader in drained:
            return next((node for node in part.replicas if node in well), None)
        return None

    def _ask(self, part: PartitionState, target: NodeId, now_ns: int) -> bool:
        leader = self._host.state.nodes.get(part.leader)
        if leader is None or leader.fenced or leader.incarnation != part.leader_incarnation:
            return False  # an election is due, not a hand-over
        self._asked[part.pid] = now_ns
        if part.leader == self._host.node_id:
            self._replicas.transfer(part.pid, part.epoch, target)
        else:
            self._host.links.send(part.leader, Channel.CONTROL, wire.Transfer(part.pid, part.epoch, target))
        return True

    def _leave_raft(self, now_ns: int) -> None:
        """A drained node does not lead Raft either, while another can. Tried seldom: proposals have to wait for it."""
        nodes = self._host.state.nodes
        me = nodes.get(self._host.node_id)
        if me is None or not me.drained or now_ns < self._raft_next_ns:
            return
        self._raft_next_ns = now_ns + RAFT_AGAIN_NS
        for node, health in self._health.items():
            if health.since_ns is not None and not nodes[node].drained and node != me.node:
                self._host.engine.transfer_leadership(node)
                return
