"""Which nodes hold a new partition, and who leads it first.

Owns the placement rule: deterministic, even within the topic first (its load is what moves together), even over the
cluster second, nodes that are fenced or drained last. Never moves a replica that is there. Only `topics` imports it.
"""

from collections import Counter
from collections.abc import Iterable

from smq.raft_state.ids import NO_NODE, Epoch, Incarnation, NodeId, Offset, PartitionIndex, TopicId, TsNs
from smq.raft_state.state import ClusterState, EpochStart, NodeState, PartitionState


class _Load:
    """How many replicas and preferred leaderships each node has; how often a node is next in line after another."""

    __slots__ = ("heirs", "leaders", "replicas")

    def __init__(self, partitions: Iterable[PartitionState] = ()) -> None:
        self.replicas: Counter[NodeId] = Counter()
        self.leaders: Counter[NodeId] = Counter()
        self.heirs: Counter[tuple[NodeId, NodeId]] = Counter()
        for partition in partitions:
            self.add(partition.replicas)

    def add(self, replicas: tuple[NodeId, ...]) -> None:
        if not replicas:
            return
        self.replicas.update(replicas)
        self.leaders[replicas[0]] += 1
        if len(replicas) > 1:
            self.heirs[replicas[0], replicas[1]] += 1


def place(
    state: ClusterState, existing: list[PartitionState], count: int, replication_factor: int
) -> list[tuple[NodeId, ...]]:
    """Replica sets of `count` further partitions of a topic that has `existing` ones. The first is preferred leader.

    The caller has checked that there are at least `replication_factor` nodes.
    """
    if replication_factor == 0:
        return [()] * count
    topic = _Load(existing)
    cluster = _Load(partition for other in state.topics.values() for partition in other.partitions)
    placed = []
    for _ in range(count):
        replicas = _choose(state, topic, cluster, replication_factor)
        topic.add(replicas)
        cluster.add(replicas)
        placed.append(replicas)
    return placed


def _choose(state: ClusterState, topic: _Load, cluster: _Load, replication_factor: int) -> tuple[NodeId, ...]:
    nodes = state.nodes

    def as_leader(node: NodeId) -> tuple[object, ...]:
        return (
            _is_spared(nodes[node]),
            topic.leaders[node],
            cluster.leaders[node],
            topic.replicas[node],
            cluster.replicas[node],
            node,
        )

    leader = min(nodes, key=as_leader)

    def as_follower(node: NodeId) -> tuple[object, ...]:
        return (
            _is_spared(nodes[node]),
            topic.replicas[node],
            topic.heirs[leader, node],  # so that a dead leader's partitions spread over the others
            cluster.replicas[node],
            cluster.heirs[leader, node],
            node,
        )

    followers = sorted((node for node in nodes if node != leader), key=as_follower)
    return (leader, *followers[: replication_factor - 1])


def _is_spared(node: NodeState) -> bool:
    return node.fenced or node.drained


def new_partition(
    state: ClusterState, topic_id: TopicId, index: int, replicas: tuple[NodeId, ...], start: Offset
) -> PartitionState:
    """An empty partition in epoch 0, led by its first replica that is neither fenced nor drained, else by the first
    that is not fenced, else by the first. Without replicas (external storage) by nobody."""
    order = sorted(replicas, key=lambda node: (state.nodes[node].fenced, state.nodes[node].drained))
    leader = order[0] if order else NO_NODE
    return PartitionState(
        topic_id=topic_id,
        index=PartitionIndex(index),
        replicas=replicas,
        leader=leader,
        leader_incarnation=state.nodes[leader].incarnation if replicas else Incarnation(0),
        epoch=Epoch(0),
        history=[EpochStart(Epoch(0), start)],
        next_offset=start,
        hwm=start,
        log_start=start,
        ts_ns=TsNs(0),
    )
