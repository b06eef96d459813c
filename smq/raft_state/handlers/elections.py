"""Handlers of a partition's leadership: ElectLeader and SetMode (rules 11, 20 and 28 of the replication rules).

Owns who may lead: which evidence an election needs, where the new epoch starts, and what becomes of the epochs before
it. A seal says where a log ended when its replica had stopped to acknowledge the epoch. What is committed is on a
majority, so enough seals tell how far that may reach. Only `command_table` imports it.
"""

from smq.raft_state.commands import ElectLeader, SetMode
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, NodeId, Offset
from smq.raft_state.invariants import check_offsets
from smq.raft_state.refusal import Refused, find_node, find_partition
from smq.raft_state.replies import Applied, Done, LeaderElected
from smq.raft_state.seals import commit_floor, seals_needed
from smq.raft_state.state import ClusterState, EpochStart, PartitionState


def elect_leader(state: ClusterState, command: ElectLeader) -> Applied:
    """Rule 11: the next epoch starts where the candidate's log ends, so its tail is kept. In two-round mode it starts
    at the hwm, and records appended beyond it are given up."""
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
    if not partition.two_round and not command.by_leader:
        _check_seals(state, partition, command)
    start = partition.hwm if partition.two_round else command.end
    partition.epoch = Epoch(partition.epoch + 1)
    partition.leader = command.candidate
    partition.leader_incarnation = command.incarnation
    partition.incomplete -= {command.candidate}
    _begin_epoch(partition.history, EpochStart(partition.epoch, start))
    partition.next_offset = start
    check_offsets(partition)
    return Applied(reply=LeaderElected(epoch=partition.epoch, start=start), touched=(command.partition,))


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


def set_mode(state: ClusterState, command: SetMode) -> Applied:
    """Rule 28. The leader has stopped to count before it proposes two-round mode, and counts again once it has applied
    that the mode is left."""
    partition = find_partition(state, command.partition)
    if partition.is_external:
        raise Refused(ErrorCode.WRONG_STORAGE, "a partition of external storage has no replicas")
    if (command.epoch, command.mode_seq) != (partition.epoch, partition.mode_seq):
        raise Refused(
            ErrorCode.STALE_EPOCH,
            f"the partition is in epoch {partition.epoch} and its mode has changed {partition.mode_seq} times,"
            f" not in {command.epoch} and {command.mode_seq}",
        )
    if command.two_round == partition.two_round:
        raise Refused(ErrorCode.INVALID_REQUEST, "the partition is in this mode")
    hwm = max(partition.hwm, command.hwm)
    if command.two_round and hwm < partition.history[-1].start:
        start = partition.history[-1].start
        raise Refused(ErrorCode.INVALID_REQUEST, f"the epoch starts at {start}, and what is known of it ends at {hwm}")
    if not command.two_round and partition.incomplete:
        nodes = ", ".join(str(node) for node in sorted(partition.incomplete))
        raise Refused(ErrorCode.INVALID_REQUEST, f"the replicas on nodes {nodes} have yet to catch up")
    partition.two_round = command.two_round
    partition.mode_seq += 1
    partition.hwm = hwm
    partition.next_offset = max(partition.next_offset, hwm)
    partition.ts_ns = max(partition.ts_ns, command.ts_ns)
    check_offsets(partition)
    return Applied(reply=Done(), touched=(command.partition,))
