"""Handlers of what is known of replicas: CompleteReplicas, MarkIncomplete (rules 18, 22, 23 of the replication rules).

Owns the partitions' sets of incomplete replicas. An incomplete replica may have acknowledged more than its log holds:
its disk was replaced, or damage hides where its log ended. Its seal proves nothing until it has caught up. `nodes` and
`command_table` import it.
"""

from smq.raft_state.commands import CompleteReplica, CompleteReplicas, MarkIncomplete
from smq.raft_state.ids import NodeId, PartitionId
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.raft_state.refusal import find_node
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, PartitionState


def complete_replicas(state: ClusterState, command: CompleteReplicas) -> Applied:
    """Rule 22, item by item."""
    touched: dict[PartitionId, None] = {}
    for item in command.items:
        partition = _find(state, item.partition)
        if partition is not None and _is_current(state, partition, item):
            partition.incomplete -= {item.node}
            touched[item.partition] = None
    return Applied(reply=Done(), touched=tuple(touched))


def _find(state: ClusterState, pid: PartitionId) -> PartitionState | None:
    return state.partition(pid) if len(pid) == PARTITION_ID_BYTES else None


def _is_current(state: ClusterState, partition: PartitionState, item: CompleteReplica) -> bool:
    """The process that has caught up is still the registered one: no later one has lost anything since."""
    is_marked = item.node in partition.incomplete and item.epoch == partition.epoch
    return is_marked and state.nodes[item.node].incarnation == item.incarnation


def mark_incomplete(state: ClusterState, command: MarkIncomplete) -> Applied:
    """Rule 23: refused unless the process is the registered one. Partitions without a replica there are passed over."""
    find_node(state, command.node, command.incarnation)
    found = [_find(state, pid) for pid in command.partitions]
    return Applied(reply=Done(), touched=_mark([p for p in found if p is not None], command.node))


def mark_replaced(state: ClusterState, node: NodeId) -> tuple[PartitionId, ...]:
    """Rule 18: the node has another disk, in all of its partitions. Returns those that have changed."""
    return _mark([p for topic in state.topics.values() for p in topic.partitions], node)


def _mark(partitions: list[PartitionState], node: NodeId) -> tuple[PartitionId, ...]:
    marked = [p for p in partitions if node in p.replicas and node not in p.incomplete]
    for partition in marked:
        partition.incomplete |= {node}
    return tuple(dict.fromkeys(partition.pid for partition in marked))
