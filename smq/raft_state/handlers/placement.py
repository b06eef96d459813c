"""Which nodes hold a new partition, and which of them leads it first.

Owns the placement rule. It is deterministic. It balances within the topic first (a topic's load moves together), then
over the cluster, and uses fenced or drained nodes last. It must never move an existing replica. Only `topics` imports
it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from smq.raft_state.ids import NO_NODE, Epoch, Incarnation, NodeId, Offset, PartitionIndex, TopicId, TsNs
from smq.raft_state.state import ClusterState, EpochStart, NodeState, PartitionState


class _Load:
    """How many replicas and preferred leaderships each node has; how often a node is first follower of another."""

    __slots__ = ("first_followers", "leaders", "replicas")

    def __init__(self, partitions: Iterable[PartitionState] = ()) -> None:
        self.replicas: defaultdict[NodeId, int] = defaultdict(int)
        self.leaders: defaultdict[NodeId, int] = defaultdict(int)
        self.first_followers: defaultdict[tuple[NodeId, NodeId], int] = defaultdict(int)
        # There may be 100,000 partitions, on a few sets of replicas.
        for replicas, count in Counter(partition.replicas for partition in partitions).items():
            self.add(replicas, count)

    def add(self, replicas: tuple[NodeId, ...], count: int = 1) -> None:
        if not replicas:
            return
        for node in replicas:
            self.replicas[node] += count
        self.leaders[replicas[0]] += count
        if len(replicas) > 1:
            self.first_followers[replicas[0], replicas[1]] += count


def place(
    state: ClusterState, existing: list[PartitionState], count: int, replication_factor: int
) -> list[tuple[NodeId, ...]]:
    """Replica sets of `count` more partitions of a topic that has `existing` ones. The first replica is the preferred
    leader.

    The caller has checked that there are at least `replication_factor` nodes.
    """
    if replication_factor == 0:
        return [()] * count
    topic = _Load(existing)
    cluster = _Load(partition for other in state.topics.values() for partition in other.partitions)
    last_choice = {node.node: _is_last_choice(node) for node in state.nodes.values()}
    placed = []
    for _ in range(count):
        replicas = _choose(last_choice, topic, cluster, replication_factor)
        topic.add(replicas)
        cluster.add(replicas)
        placed.append(replicas)
    return placed


def _choose(
    last_choice: dict[NodeId, bool], topic: _Load, cluster: _Load, replication_factor: int
) -> tuple[NodeId, ...]:
    def as_leader(node: NodeId) -> tuple[object, ...]:
        return (
            last_choice[node],
            topic.leaders[node],
            cluster.leaders[node],
            topic.replicas[node],
            cluster.replicas[node],
            node,
        )

    leader = min(last_choice, key=as_leader)

    def as_follower(node: NodeId) -> tuple[object, ...]:
        return (
            last_choice[node],
            topic.replicas[node],
            topic.first_followers[leader, node],  # so that a dead leader's partitions spread over the others
            cluster.replicas[node],
            cluster.first_followers[leader, node],
            node,
        )

    followers = sorted((node for node in last_choice if node != leader), key=as_follower)
    return (leader, *followers[: replication_factor - 1])


def _is_last_choice(node: NodeState) -> bool:
    return node.fenced or node.drained


def new_partitions(
    state: ClusterState, topic_id: TopicId, first: int, placed: list[tuple[NodeId, ...]], start: Offset
) -> list[PartitionState]:
    """Empty partitions in epoch 0 on these replicas, from index `first` on. There may be 10,000."""
    epoch, ts_ns, beginning = Epoch(0), TsNs(0), EpochStart(Epoch(0), start)
    leaders = {replicas: _first_leader(state, replicas) for replicas in set(placed)}
    return [
        PartitionState(
            topic_id=topic_id,
            index=PartitionIndex(index),
            replicas=replicas,
            leader=leaders[replicas][0],
            leader_incarnation=leaders[replicas][1],
            epoch=epoch,
            history=[beginning],
            next_offset=start,
            hwm=start,
            log_start=start,
            ts_ns=ts_ns,
            producers_start=start,
        )
        for index, replicas in enumerate(placed, first)
    ]


def _first_leader(state: ClusterState, replicas: tuple[NodeId, ...]) -> tuple[NodeId, Incarnation]:
    """The first replica that is neither fenced nor drained, otherwise the first that is not fenced, otherwise the
    first. Partitions without replicas (external storage) have no leader."""
    if not replicas:
        return NO_NODE, Incarnation(0)
    leader = min(replicas, key=lambda node: (state.nodes[node].fenced, state.nodes[node].drained))
    return leader, state.nodes[leader].incarnation
