"""What a request's names mean: topics, partitions, groups, commits, and the position where a reader starts.

Owns the rule that a service says "unknown" only after a read barrier: the topic may have been created through
another node, and not be applied here yet. Services import it; it knows no wire format.
"""

from collections.abc import Callable
from typing import TypeVar

from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.positions import OffsetType, Position, StartRequest, resolve
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import ClusterState, GroupState, PartitionState, TopicState
from smq.replication.api import PartitionRange, TimeKind

T = TypeVar("T")


async def find_confirmed(calls: NodeCalls, find: Callable[[ClusterState], T | None], timeout_ms: int) -> T | None:
    """What `find` returns for the replicated state; None only if it still finds nothing after a barrier."""
    found = find(calls.node.state)
    if found is None:
        await calls.barrier(timeout_ms)
        found = find(calls.node.state)
    return found


async def find_topic(calls: NodeCalls, topic: str, timeout_ms: int) -> TopicState:
    """UNKNOWN_TOPIC only if a barrier has confirmed it."""
    found = await find_confirmed(calls, lambda state: state.topics.get(topic), timeout_ms)
    if found is None:
        raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
    return found


async def find_partition(calls: NodeCalls, topic: str, partition: int, timeout_ms: int) -> PartitionState:
    """UNKNOWN_TOPIC or UNKNOWN_PARTITION only if a barrier has confirmed it."""
    found = await find_topic(calls, topic, timeout_ms)
    if partition >= len(found.partitions):
        grown = await find_confirmed(calls, lambda state: _with_partition(state, topic, partition), timeout_ms)
        found = grown or await find_topic(calls, topic, timeout_ms)
    if not 0 <= partition < len(found.partitions):
        raise SmqError(
            ErrorCode.UNKNOWN_PARTITION,
            f"topic {topic!r} has partitions 0 to {len(found.partitions) - 1}, there is no partition {partition}",
        )
    return found.partitions[partition]


def _with_partition(state: ClusterState, topic: str, partition: int) -> TopicState | None:
    found = state.topics.get(topic)
    return found if found is not None and partition < len(found.partitions) else None


async def find_group(calls: NodeCalls, group: str, timeout_ms: int) -> GroupState:
    """The group as it is after a barrier: members and commits change all the time. UNKNOWN_GROUP if there is none."""
    await calls.barrier(timeout_ms)
    found = calls.node.state.groups.get(group)
    if found is None:
        raise SmqError(ErrorCode.UNKNOWN_GROUP, f"there is no group {group!r}")
    return found


async def committed_offset(calls: NodeCalls, group: str, pid: PartitionId, timeout_ms: int) -> Offset | None:
    """The group's next offset in one partition; None if it has never committed there."""
    if not group:
        raise SmqError(ErrorCode.INVALID_REQUEST, "RESUME_OR_EARLIEST and RESUME_OR_LATEST need a group")
    try:
        commits = await calls.fetch_offsets(group, [pid], timeout_ms)
    except SmqError as e:
        if e.code is ErrorCode.UNKNOWN_GROUP:
            return None
        raise
    return commits[pid][0] if pid in commits else None


async def start_position(
    calls: NodeCalls,
    topic: str,
    partition: int,
    type_: OffsetType,
    *,
    value: int,
    group: str,
    reset_if_gone: bool,
    timeout_ms: int,
) -> tuple[Position, PartitionRange]:
    """Looks up what the offset type needs, then resolves the position. `hi` is the last stable offset: readers here
    are read-committed."""
    committed = found_time = None
    state = await find_partition(calls, topic, partition, timeout_ms)
    if type_.needs_commit:
        committed = await committed_offset(calls, group, state.pid, timeout_ms)
    if type_.needs_time:
        found = await calls.offset_for_time(topic, partition, TimeKind.TS_NS, value, timeout_ms)
        found_time = found.offset if found.ts_ns >= 0 else None
    # The range is read last, so that it is never older than what is compared with it.
    range_ = await calls.partition_range(topic, partition, timeout_ms)
    start = StartRequest(
        type=type_, value=value, committed=committed, time_offset=found_time, reset_if_gone=reset_if_gone
    )
    return resolve(start, range_.log_start, range_.lso), range_


async def timestamp_position(
    calls: NodeCalls, topic: str, partition: int, timestamp_ms: int, timeout_ms: int
) -> tuple[Position, PartitionRange]:
    """First record whose create time is at or after `timestamp_ms`; the end if there is none."""
    await find_partition(calls, topic, partition, timeout_ms)
    found = await calls.offset_for_time(topic, partition, TimeKind.TIMESTAMP_MS, timestamp_ms, timeout_ms)
    range_ = await calls.partition_range(topic, partition, timeout_ms)
    if found.timestamp_ms < 0:
        return Position(range_.lso), range_
    return Position(Offset(min(max(found.offset, range_.log_start), range_.lso))), range_
