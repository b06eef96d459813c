"""KIP-392: which replica a consumer reads from, and when that replica sends it back to the leader.

Owns the two rules, as pure functions of the replicated state. Neither concerns a client that names no rack. Only
`fetch` imports it.
"""

from collections.abc import Mapping

from smq.coordinator.service.audience import told_of
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import Fetched


def preferred_replica(
    state: ClusterState,
    partition: PartitionState,
    ends: Mapping[NodeId, Offset],
    *,
    hwm: Offset,
    rack: str,
    offset: int,
    listener: str,
) -> NodeId | None:
    """Of the followers in the client's rack that hold `offset`, the one that holds most, as Kafka's
    RackAwareReplicaSelector. None if the leader is as near, or if only the leader can answer (out of range). `ends` are
    the leader's `follower_ends`, and `hwm` is its own. Among equals the first replica wins, so that partitions
    spread."""
    leader = state.nodes.get(partition.leader)
    if not rack or leader is None or leader.rack == rack or not partition.log_start <= offset <= hwm:
        return None
    near = [n for n in partition.replicas if ends.get(n, -1) >= offset and _is_reachable(state, n, rack, listener)]
    return max(near, key=lambda n: ends[n], default=None)


def _is_reachable(state: ClusterState, number: NodeId, rack: str, listener: str) -> bool:
    node = state.nodes.get(number)
    return node is not None and not node.fenced and node.rack == rack and bool(told_of(node, listener).kafka_address)


def is_behind(found: Fetched, *, offset: int, is_ready: bool) -> bool:
    """Whether a follower that found no records cannot know that there are none: it lacks committed records, or it has
    lost the cluster and knows an old high water mark. Its client must not stay with it."""
    return found.readable_end <= offset and (not is_ready or offset < found.hwm)
