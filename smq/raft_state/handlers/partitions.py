"""Handlers of partitions' offsets: AdvanceHwms, AdvanceLogStart, ApplyRetention (rules 9 and 14 of replication).

Owns what these commands move, and the invariant log_start <= hwm <= next_offset. Elections are in `elections`.
Only `command_table` imports it.
"""

from smq.raft_state.commands import AdvanceHwms, AdvanceLogStart, ApplyRetention, HwmAdvance
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.compaction import forget_segments
from smq.raft_state.ids import Offset, PartitionId, TopicId
from smq.raft_state.invariants import check_offsets
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.raft_state.refusal import Refused, find_partition
from smq.raft_state.replies import Applied, Done, HwmsAdvanced
from smq.raft_state.state import ClusterState, EpochStart, PartitionState
from smq.raft_state.topic_config import retention


def advance_hwms(state: ClusterState, command: AdvanceHwms) -> Applied:
    """Rule 9, item by item: an item of another epoch, or of a deleted partition, changes nothing."""
    accepted = []
    touched: dict[PartitionId, None] = {}
    for item in command.items:
        partition = state.partition(item.partition) if len(item.partition) == PARTITION_ID_BYTES else None
        is_current = partition is not None and partition.epoch == item.epoch and not partition.is_external
        accepted.append(is_current)
        if partition is not None and is_current and _advance(partition, item):
            check_offsets(partition)
            touched[item.partition] = None
    return Applied(reply=HwmsAdvanced(accepted=tuple(accepted)), touched=tuple(touched))


def _advance(partition: PartitionState, item: HwmAdvance) -> bool:
    """Takes the maximum of each; true if that changed anything."""
    before = partition.hwm, partition.next_offset, partition.ts_ns
    partition.hwm = max(partition.hwm, item.hwm)
    partition.next_offset = max(partition.next_offset, item.next_offset, partition.hwm)
    partition.ts_ns = max(partition.ts_ns, item.ts_ns)
    return before != (partition.hwm, partition.next_offset, partition.ts_ns)


def advance_log_start(state: ClusterState, command: AdvanceLogStart) -> Applied:
    """Rule 14: the log start moves up to `offset`, never beyond the hwm and never back."""
    partition = find_partition(state, command.partition)
    if command.offset < 0:
        raise Refused(
            ErrorCode.INVALID_OFFSET,
            f"offset must be from 0 to the high water mark {partition.hwm}, not {command.offset}",
            lo=partition.log_start,
            hi=partition.hwm,
        )
    if command.offset > partition.hwm:
        raise Refused(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"the log cannot start at {command.offset}: its high water mark is {partition.hwm}",
            lo=partition.log_start,
            hi=partition.hwm,
        )
    if command.offset <= partition.log_start:
        return Applied(reply=Done())
    _move_log_start(partition, command.offset)
    return Applied(reply=Done(), touched=(command.partition,))


def apply_retention(state: ClusterState, command: ApplyRetention) -> Applied:
    """Rule 14, item by item. What is not to go any more, since an operator has changed the limits, stays."""
    limits: dict[TopicId, tuple[int, int, int] | None] = {}
    touched: dict[PartitionId, None] = {}
    for item in command.items:
        partition = state.partition(item.partition) if len(item.partition) == PARTITION_ID_BYTES else None
        if partition is None or partition.is_external:
            continue
        if partition.topic_id not in limits:
            limits[partition.topic_id] = _limits(state, partition.topic_id)
        is_current = partition.epoch == item.epoch and limits[partition.topic_id] == item.limits
        if is_current and partition.log_start < item.offset <= partition.hwm:
            _move_log_start(partition, item.offset)
            touched[item.partition] = None
    return Applied(reply=Done(), touched=tuple(touched))


def _limits(state: ClusterState, topic: TopicId) -> tuple[int, int, int] | None:
    kept = retention(state.topics[state.topic_names[topic]].config)
    return kept.numbers if kept is not None else None


def _move_log_start(partition: PartitionState, offset: Offset) -> None:
    partition.log_start = offset
    _prune(partition.history, offset)
    forget_segments(partition)
    check_offsets(partition)


def _prune(history: list[EpochStart], log_start: Offset) -> None:
    """Rule 20: drops epochs that end below the log start. The current one has no end, so it stays. So does the one that
    ends at the log start: a log that has not moved there yet is judged by it, and has its producers if it is right."""
    keep = 0
    while keep + 1 < len(history) and history[keep + 1].start < log_start:
        keep += 1
    del history[:keep]
