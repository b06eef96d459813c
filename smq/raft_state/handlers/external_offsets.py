"""Handlers of offsets without records: AssignOffsets and AdvanceExternalHwms, of topics with storage=external.

Owns which offsets each request received, and which requests are still known. A repeated request gets its first answer
again. A request that may be a forgotten repetition is refused; it never receives other offsets. It must never move
next_offset except forward, by exactly the offsets that it assigns (rule 19). Only `command_table` imports it.
"""

from smq.raft_state.commands import AdvanceExternalHwms, Assignment, AssignOffsets, ExternalAdvance
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Offset, PartitionId, RequestId
from smq.raft_state.invariants import check_offsets
from smq.raft_state.limits import ASSIGN_COUNT_MAX, ASSIGN_ITEMS_MAX, ASSIGNED_MAX, OFFSET_MAX
from smq.raft_state.refusal import Refused, find_external
from smq.raft_state.replies import Applied, ExternalHwm, OffsetsAssigned, Rejected, Results
from smq.raft_state.state import Assigned, ClusterState, PartitionState


def assign_offsets(state: ClusterState, command: AssignOffsets) -> Applied:
    """Item by item, in their order: one caller's mistake costs the others nothing."""
    _check_length(command.items)
    results: list[OffsetsAssigned | ExternalHwm | Rejected] = []
    partitions: dict[PartitionId, PartitionState] = {}  # found so far: most items are of the same few
    for item in command.items:
        try:
            results.append(_assign(state, item, partitions))
        except Refused as refused:
            results.append(refused.rejected)
    return Applied(reply=Results(items=tuple(results)), touched=tuple(partitions))


def _check_length(items: tuple[object, ...]) -> None:
    if len(items) > ASSIGN_ITEMS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"{len(items)} items in one command, at most {ASSIGN_ITEMS_MAX}")


def _assign(state: ClusterState, item: Assignment, partitions: dict[PartitionId, PartitionState]) -> OffsetsAssigned:
    known = state.assigned.get(item.request_id)
    if known is not None:
        return _repeated(known, item)
    partition = partitions.get(item.partition)
    if partition is None:
        partition = partitions[item.partition] = find_external(state, item.partition)
    if not 1 <= item.count <= ASSIGN_COUNT_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"count must be from 1 to {ASSIGN_COUNT_MAX}, not {item.count}")
    _check_is_new(state, partition, item)
    base = partition.next_offset
    if base > OFFSET_MAX - item.count:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"the partition has too few offsets left: they end at {OFFSET_MAX}")
    partition.next_offset = Offset(base + item.count)
    _remember(state, item.request_id, Assigned(item.partition, base, item.count), partitions)
    return OffsetsAssigned(base=base, last=Offset(base + item.count - 1))


def _repeated(known: Assigned, item: Assignment) -> OffsetsAssigned:
    if (known.partition, known.count) != (item.partition, item.count):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"request_id {item.request_id.hex()} was used for {known.count} offsets from {known.base} on; a"
            f" new request needs a new id",
        )
    return OffsetsAssigned(base=known.base, last=Offset(known.base + known.count - 1))


def _check_is_new(state: ClusterState, partition: PartitionState, item: Assignment) -> None:
    """The id is not known. That proves a new request only if every assignment since it was first made is known."""
    if not 0 <= item.not_before <= partition.next_offset:
        raise Refused(
            ErrorCode.INVALID_OFFSET,
            f"not_before must be from 0 to the partition's next offset {partition.next_offset}, not {item.not_before}",
            lo=partition.log_start,
            hi=partition.next_offset,
        )
    forgotten = state.assigned_before.get(item.partition, 0)
    if item.not_before < forgotten:
        raise Refused(
            ErrorCode.REQUEST_EXPIRED,
            f"requests from before offset {forgotten} are no longer known; this one is from {item.not_before}",
        )


def _remember(
    state: ClusterState,
    request_id: RequestId,
    assigned: Assigned,
    partitions: dict[PartitionId, PartitionState],
) -> None:
    state.assigned[request_id] = assigned
    while len(state.assigned) > ASSIGNED_MAX:
        _, oldest = state.assigned.popitem(last=False)
        if oldest.partition in partitions or state.partition(oldest.partition) is not None:
            state.assigned_before[oldest.partition] = Offset(oldest.base + oldest.count)


def advance_external_hwms(state: ClusterState, command: AdvanceExternalHwms) -> Applied:
    """Item by item. An offset at or below the mark changes nothing; the answer is the mark."""
    _check_length(command.items)
    results: list[OffsetsAssigned | ExternalHwm | Rejected] = []
    touched: dict[PartitionId, None] = {}
    for item in command.items:
        try:
            results.append(_advance(state, item, touched))
        except Refused as refused:
            results.append(refused.rejected)
    return Applied(reply=Results(items=tuple(results)), touched=tuple(touched))


def _advance(state: ClusterState, item: ExternalAdvance, touched: dict[PartitionId, None]) -> ExternalHwm:
    partition = find_external(state, item.partition)
    if not 0 <= item.offset <= partition.next_offset:
        raise Refused(
            ErrorCode.INVALID_OFFSET if item.offset < 0 else ErrorCode.OFFSET_OUT_OF_RANGE,
            f"the high water mark can be moved up to the next offset {partition.next_offset}, not to {item.offset}",
            lo=partition.hwm,
            hi=partition.next_offset,
        )
    if item.offset > partition.hwm:
        partition.hwm = item.offset
        check_offsets(partition)
        touched[item.partition] = None
    return ExternalHwm(hwm=partition.hwm)
