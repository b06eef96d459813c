"""What a request's names mean: topics, partitions, groups, commits, and the position where a reader starts.

Owns which look-ups the services need. It must never say "unknown" by its own decision: the node's `find` decides that,
after a read barrier. Services import it; it knows no wire format.
"""

from collections.abc import Callable

from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.positions import OffsetType, Position, StartRequest, resolve
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId, TopicId
from smq.raft_state.state import ClusterState, GroupState, PartitionState, TopicState
from smq.replication.api import PartitionRange, TimeKind
from smq.replication.lookup import unknown_partition, unknown_topic


async def find_topic(calls: NodeCalls, topic: str, timeout_ms: int) -> TopicState:
    """UNKNOWN_TOPIC if there is none."""
    found = await calls.find(lambda state: state.topics.get(topic), timeout_ms)
    if found is None:
        raise unknown_topic(topic)
    return found


async def find_topic_name(calls: NodeCalls, topic_id: TopicId, timeout_ms: int) -> str | None:
    """The name of the topic with this id; None if there is none."""
    return await calls.find(lambda state: state.topic_names.get(topic_id), timeout_ms)


async def find_partition(calls: NodeCalls, topic: str, partition: int, timeout_ms: int) -> PartitionState:
    """UNKNOWN_TOPIC or UNKNOWN_PARTITION if there is none."""
    found = await calls.find(lambda state: state.partition_of(topic, partition), timeout_ms)
    if found is None:
        raise unknown_partition(calls.node.state, topic, partition)
    return found


async def confirm_unknown(calls: NodeCalls, are_known: Callable[[ClusterState], bool], timeout_ms: int) -> None:
    """For a request with many names: returns once the state says of each whether it is known or unknown. That is
    immediately if all are known, otherwise after one barrier for all of them."""
    await calls.find(lambda state: are_known(state) or None, timeout_ms)


async def find_group(calls: NodeCalls, group: str, timeout_ms: int) -> GroupState:
    """The group as it is after a barrier: members and commits change all the time. UNKNOWN_GROUP if there is none."""
    await calls.barrier(timeout_ms)
    found = calls.node.state.groups.get(group)
    if found is None:
        raise SmqError(ErrorCode.UNKNOWN_GROUP, f"there is no group {group!r}")
    return found


async def committed_offset(calls: NodeCalls, group: str, pid: PartitionId, timeout_ms: int) -> Offset | None:
    """The group's next offset in one partition; None if it has none: it never committed there, or a negative offset."""
    if not group:
        raise SmqError(ErrorCode.INVALID_REQUEST, "RESUME_OR_EARLIEST and RESUME_OR_LATEST need a group")
    try:
        commits = await calls.fetch_offsets(group, [pid], timeout_ms)
    except SmqError as e:
        if e.code is ErrorCode.UNKNOWN_GROUP:
            return None
        raise
    return commits[pid].position if pid in commits else None


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
