"""Balancing leaderships while all nodes are healthy: to the preferred replicas, and off drained nodes.

Owns the pace: a few handovers at a time, and none to a node that has only just come back; the more often it went, the
longer it waits. It only asks the leaders to hand over (they refuse if it would hurt), and never elects. The controller
runs it while this node leads Raft. An operator's request for one hand-over is made here too, at any node.
"""

from collections.abc import Iterator
from typing import Final

from smq.raft_state.ids import Incarnation, NodeId, PartitionId
from smq.raft_state.state import NodeState, PartitionState
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.nodes.liveness import Liveness
from smq.replication.partition.replicas import Replicas
from smq.replication.ports import Channel

TRANSFERS_MAX: Final = 64  # leaderships per round: each move costs its partition a short pause
SCAN_NS: Final = 1_000_000_000  # between two scans of all partitions
PACE_NS: Final = 250_000_000  # between two rounds while there is more to move
RAFT_RETRY_NS: Final = 10_000_000_000  # between two attempts of a drained node to hand over Raft
REQUEST_NS: Final = 5_000_000_000  # between two requests to the same leader to hand over the same partition
WAIT_FACTOR_MAX: Final = 16  # a node that keeps coming and going waits up to this many rebalance intervals


def is_heard(host: Host, liveness: Liveness, node: NodeState) -> bool:
    """Whether this process of the node was heard within the last heartbeats."""
    if node.node == host.node_id:
        return node.incarnation == host.incarnation
    heard_ns = liveness.heard_ns(node.node, node.incarnation)
    return heard_ns > 0 and liveness.now_ns() - heard_ns < 4 * host.config.heartbeat_interval_ms * 1_000_000


def request_transfer(host: Host, replicas: Replicas, part: PartitionState, target: NodeId) -> bool:
    """Asks the partition's leader, which may be another node, to hand over. False if it has no live leader: then an
    election is due."""
    leader = host.state.nodes.get(part.leader)
    if leader is None or leader.fenced or leader.incarnation != part.leader_incarnation:
        return False
    if part.leader == host.node_id:
        replicas.transfer(part.pid, part.epoch, target)
    else:
        host.links.send(part.leader, Channel.CONTROL, wire.Transfer(part.pid, part.epoch, target))
    return True


def request_preferred_leader(host: Host, replicas: Replicas, liveness: Liveness, partition: PartitionId) -> bool:
    """As NodeApi says."""
    part = host.state.partition(partition)
    if part is None or not liveness.is_fit_to_lead(part.replicas[0]):
        return False
    if part.leader != part.replicas[0]:
        request_transfer(host, replicas, part, part.replicas[0])
    return True


class _Health:
    """Since when a node has been healthy, and how long it must stay so before it gets its leaderships back."""

    __slots__ = ("incarnation", "losses", "since_ns")

    def __init__(self) -> None:
        self.incarnation = Incarnation(-1)
        self.since_ns: int | None = None
        self.losses = 0  # how often it went, until it has been healthy for long

    def observe(self, incarnation: Incarnation, is_healthy: bool, now_ns: int, interval_ns: int) -> None:
        if is_healthy and self.since_ns is not None and incarnation == self.incarnation:
            if now_ns - self.since_ns > WAIT_FACTOR_MAX * interval_ns:
                self.losses = 0
            return
        if self.since_ns is not None:  # it was healthy, and no longer is, or is another process
            self.losses += 1
        self.incarnation = incarnation
        self.since_ns = now_ns if is_healthy else None

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
        self._raft_attempts = 0
        self._health: dict[NodeId, _Health] = {}  # one per node
        self._requested_ns: dict[PartitionId, int] = {}  # bounded by the partitions; entries expire

    @property
    def _interval_ns(self) -> int:
        return self._host.config.rebalance_interval_ms * 1_000_000

    def start(self, now_ns: int) -> None:
        """This node has begun to lead Raft."""
        self._next_ns = now_ns + self._interval_ns
        self._health.clear()
        self._requested_ns.clear()

    def expedite(self) -> None:
        self._next_ns = 0

    def on_tick(self, now_ns: int) -> None:
        for node in self._host.state.nodes.values():
            is_healthy = not node.fenced and not self._is_leaving(node) and is_heard(self._host, self._liveness, node)
            is_healthy = is_healthy and self._liveness.disk(node.node) is wire.DiskCondition.FINE
            health = self._health.setdefault(node.node, _Health())
            health.observe(node.incarnation, is_healthy, now_ns, self._interval_ns)
        self._leave_raft(now_ns)
        if now_ns < self._next_ns:
            return
        self._requested_ns = {pid: at_ns for pid, at_ns in self._requested_ns.items() if now_ns - at_ns < REQUEST_NS}
        moved = sum(self._request(part, target, now_ns) for part, target in self._moves(now_ns))
        self._next_ns = now_ns + (PACE_NS if moved else SCAN_NS)

    def _is_leaving(self, node: NodeState) -> bool:
        return self._liveness.is_leaving(node.node, node.incarnation)

    def _moves(self, now_ns: int) -> Iterator[tuple[PartitionState, NodeId]]:
        """Up to TRANSFERS_MAX partitions that another node should lead."""
        nodes = self._host.state.nodes
        drained = {n.node for n in nodes.values() if n.drained}
        healthy = [n for n, health in self._health.items() if health.since_ns is not None and n not in drained]
        settled = {n for n in healthy if self._health[n].is_settled(now_ns, self._interval_ns)}
        left = TRANSFERS_MAX
        for topic in self._host.state.topics.values():
            for part in topic.partitions:
                if part.is_external:
                    break  # and so are all of this topic
                if part.leader == part.replicas[0] and part.leader not in drained:
                    continue
                target = self._target(part, drained, healthy, settled)
                if target is not None and part.pid not in self._requested_ns:
                    yield part, target
                    left -= 1
                    if not left:
                        return

    def _target(
        self, part: PartitionState, drained: set[NodeId], healthy: list[NodeId], settled: set[NodeId]
    ) -> NodeId | None:
        """The preferred replica once it has been healthy for a while; off a drained node, any healthy replica."""
        if part.replicas[0] in settled and part.leader != part.replicas[0]:
            return part.replicas[0]
        if part.leader in drained:
            return next((node for node in part.replicas if node in healthy), None)
        return None

    def _request(self, part: PartitionState, target: NodeId, now_ns: int) -> bool:
        is_requested = request_transfer(self._host, self._replicas, part, target)
        if is_requested:
            self._requested_ns[part.pid] = now_ns
        return is_requested

    def _leave_raft(self, now_ns: int) -> None:
        """A drained node does not lead Raft while another can, nor one whose disk hangs: its copy of an entry does not
        count. Tried rarely: proposals have to wait for it."""
        nodes = self._host.state.nodes
        me = nodes.get(self._host.node_id)
        if me is None or now_ns < self._raft_next_ns:
            return
        if not me.drained and self._liveness.disk(me.node) is not wire.DiskCondition.HANGS:
            return
        self._raft_next_ns = now_ns + RAFT_RETRY_NS
        healthy = sorted(node for node, health in self._health.items() if health.since_ns is not None)
        successors = [node for node in healthy if not nodes[node].drained and node != me.node]
        if successors:  # each in turn: the first may be unable to take over
            self._host.engine.transfer_leadership(successors[self._raft_attempts % len(successors)])
            self._raft_attempts += 1
