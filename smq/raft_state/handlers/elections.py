"""Handlers of leadership: ElectLeader, CompleteReplicas, MarkIncomplete (rules 11, 18, 20, 22 and 23 of replication).

Owns which evidence an election needs, where the new epoch starts, and what becomes of the epochs before it. A seal says
where a log ended when its replica had stopped to acknowledge the epoch. What is committed is on a majority, so enough
seals tell how far that may reach. Owns the partitions' sets of incomplete replicas, too: such a replica may have
acknowledged more than its log holds, since its disk was replaced, or damage hides where its log ended. Its seal proves
nothing until it has caught up. Apply checks elections by `seals_needed` and `commit_floor`, and the controller chooses
candidates by them.
"""

from collections.abc import Iterable

from smq.raft_state.commands import CompleteReplica, CompleteReplicas, ElectLeader, MarkIncomplete
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.raft_state.invariants import check_offsets
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.raft_state.refusal import Refused, find_node, find_partition
from smq.raft_state.replies import Applied, Done, LeaderElected
from smq.raft_state.state import ClusterState, EpochStart, PartitionState


def majority_of(replicas: int) -> int:
    return replicas // 2 + 1


def seals_needed(replicas: int) -> int:
    """How many sealed replicas leave no majority that could still commit anything."""
    return replicas - majority_of(replicas) + 1


def commit_floor(ends: Iterable[Offset], replicas: int) -> Offset:
    """The end of the longest log that a majority may have, if every replica without a seal counts as having all.
    There must be at least `seals_needed` ends."""
    known = sorted(ends, reverse=True)
    return known[majority_of(replicas) - (replicas - len(known)) - 1]


def elect_leader(state: ClusterState, command: ElectLeader) -> Applied:
    """Rule 11: the next epoch starts where the candidate's log ends, so its tail is kept."""
    partition = find_partition(state, command.partition)
    if command.expected_epoch != partition.epoch:
        raise Refused(
            ErrorCode.STALE_EPOCH, f"the partition is in epoch {partition.epoch}, not {command.expected_epoch}"
        )
    if command.candidate not in partition.replicas:
        raise Refused(ErrorCode.ELECTION_REJECTED, f"node {command.candidate} is no replica of the partition")
    node = find_node(state, command.candidate, command.incarnation)
    if node.fenced:
        raise Refused(ErrorCode.ELECTION_REJECTED, f"node {command.candidate} is fenced")
    _check_reaches(command, partition.hwm, "the high water mark")
    if not command.by_leader:
        _check_seals(state, partition, command)
    partition.epoch = Epoch(partition.epoch + 1)
    partition.leader = command.candidate
    partition.leader_incarnation = command.incarnation
    partition.incomplete -= {command.candidate}
    _begin_epoch(partition.history, EpochStart(partition.epoch, command.end))
    partition.next_offset = command.end
    if partition.is_opening and command.end == partition.hwm:
        # Whatever a mirror has written is below. The ids of the other cluster's producers mean others here.
        partition.producers_start = partition.hwm
        partition.producer_marks.clear()
        partition.is_opening = False
    check_offsets(partition)
    return Applied(reply=LeaderElected(epoch=partition.epoch, start=command.end), touched=(command.partition,))


def _check_reaches(command: ElectLeader, at_least: Offset, what: str) -> None:
    if command.end < at_least:
        raise Refused(
            ErrorCode.ELECTION_REJECTED,
            f"the log of node {command.candidate} ends at {command.end}, below {what} {at_least}",
        )


def _check_seals(state: ClusterState, partition: PartitionState, command: ElectLeader) -> None:
    """A seal counts if its replica is complete, and still the process that promised it."""
    ends: dict[NodeId, Offset] = {}
    for seal in command.seals:
        is_replica = seal.node in partition.replicas and seal.node not in partition.incomplete
        if is_replica and state.nodes[seal.node].incarnation == seal.incarnation:
            ends[seal.node] = max(seal.end, ends.get(seal.node, seal.end))
    count = len(partition.replicas)
    if len(ends) < seals_needed(count):
        raise Refused(
            ErrorCode.ELECTION_REJECTED,
            f"{len(ends)} complete replicas have sealed epoch {partition.epoch}, not {seals_needed(count)}",
        )
    _check_reaches(command, commit_floor(ends.values(), count), "what may be committed,")


def _begin_epoch(history: list[EpochStart], beginning: EpochStart) -> None:
    """An older epoch that starts above the new one never committed anything: it ends where it starts from now on, as
    does one that starts at the same offset. Rule 20: such an epoch holds nothing, so nothing is right in it and it is
    dropped. Then the history has one entry per epoch with records, however many elections there are. The oldest entry
    stays: it is empty only while the log start has never moved."""
    while len(history) > 1 and history[-1].start >= beginning.start:
        history.pop()
    history.append(beginning)


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
