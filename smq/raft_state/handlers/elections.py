"""The handler of a partition's leadership: ElectLeader (rules 11 and 20 of the replication rules).

Owns who may lead: which evidence an election needs, where the new epoch starts, and what becomes of the epochs before
it. A seal says where a log ended when its replica had stopped to acknowledge the epoch. What is committed is on a
majority, so enough seals tell how far that may reach. Only `command_table` imports it.
"""

from smq.raft_state.commands import ElectLeader
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, NodeId, Offset
from smq.raft_state.invariants import check_offsets
from smq.raft_state.refusal import Refused, find_node, find_partition
from smq.raft_state.replies import Applied, LeaderElected
from smq.raft_state.seals import commit_floor, seals_needed
from smq.raft_state.state import ClusterState, EpochStart, PartitionState


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
