"""Handlers of what groups have committed: commits, their deletion and their expiry.

Owns the committed offsets, and when a group exists: while it has offsets or members. `members` owns its members. Only
`registry`, `members`, `expiry` and `topics` import it.
"""

from smq.raft_state.cluster_config import offsets_retention_ms
from smq.raft_state.commands import CommitOffsets, DeleteGroup, DeleteOffsets, OffsetCommit
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Generation, PartitionId, TopicId
from smq.raft_state.limits import (
    COMMIT_ITEMS_MAX,
    GENERATION_MAX,
    GROUP_NAME_BYTES_MAX,
    METADATA_BYTES_MAX,
    OFFSET_MAX,
    TOPIC_ID_BYTES,
)
from smq.raft_state.refusal import Refused, find_partition, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, CommittedOffset, GroupState, MemberState

_DONE = Applied(reply=Done())


# -------------------------------------------------------------------------------------------------- existence
def find_group(state: ClusterState, name: str) -> GroupState:
    """UNKNOWN_GROUP if there is none."""
    group = state.groups.get(name)
    if group is None:
        raise Refused(ErrorCode.UNKNOWN_GROUP, f"there is no group {quoted(name)}")
    return group


def make_group(state: ClusterState, name: str) -> GroupState:
    """An empty group, to which the caller must give offsets or members. LIMIT_EXCEEDED, INVALID_REQUEST."""
    check_group_name(name)
    if len(state.groups) >= state.groups_max:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"there are {len(state.groups)} groups, which is the limit (groups_max)"
        )
    group = state.groups[name] = GroupState(name=name, generation=state.generation_floor)
    return group


def next_generation(group: GroupState) -> Generation:
    """Starts again at 1 after the largest number that Kafka's protocol can carry."""
    return Generation(group.generation + 1 if group.generation < GENERATION_MAX else 1)


def drop_if_unused(state: ClusterState, group: GroupState) -> None:
    """Removes a group that has neither offsets nor members."""
    if not group.offsets and not group.members:
        _drop(state, group)


def _drop(state: ClusterState, group: GroupState) -> None:
    state.generation_floor = max(state.generation_floor, group.generation)
    del state.groups[group.name]


def check_group_name(name: str) -> None:
    """INVALID_REQUEST if this cannot be the name of a group."""
    # Not str.isprintable(): it follows the Unicode tables of the Python version, and nodes may differ in that.
    if not 1 <= len(name.encode()) <= GROUP_NAME_BYTES_MAX or any(c < " " or c == "\x7f" for c in name):
        raise Refused(
            ErrorCode.INVALID_REQUEST,
            f"group must have 1 to {GROUP_NAME_BYTES_MAX} bytes without control characters, not {quoted(name)}",
        )


# ---------------------------------------------------------------------------------------------------- commits
def commit_offsets(state: ClusterState, command: CommitOffsets) -> Applied:
    """All items or none. A commit without items is valid and creates no group."""
    check_group_name(command.group)
    group = state.groups.get(command.group)
    if group is not None and group.members:
        raise Refused(
            ErrorCode.UNKNOWN_MEMBER,
            f"group {quoted(group.name)} has {len(group.members)} members: only they commit for it",
        )
    return commit_items(state, command.group, command.items, command.committed_ms)


def find_member(group: GroupState, member_id: str, instance_id: str) -> MemberState:
    """UNKNOWN_MEMBER, or FENCED_INSTANCE if another member has this instance id."""
    if instance_id:
        owner = group.static_member(instance_id)
        if owner is not None and owner.member.member_id != member_id:
            raise Refused(ErrorCode.FENCED_INSTANCE, f"instance {quoted(instance_id)} now belongs to another member")
    member = group.members.get(member_id)
    if member is None or member.member.instance_id != (instance_id or member.member.instance_id):
        raise Refused(ErrorCode.UNKNOWN_MEMBER, f"group {quoted(group.name)} has no member {quoted(member_id)}")
    return member


def commit_items(state: ClusterState, name: str, items: tuple[OffsetCommit, ...], committed_ms: int) -> Applied:
    """All items or none; creates the group if there is none. The handler has checked that the caller may commit."""
    if len(items) > COMMIT_ITEMS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"{len(items)} offsets in one commit, at most {COMMIT_ITEMS_MAX}")
    seen: set[PartitionId] = set()  # used for membership tests only: its order never matters
    for item in items:
        _check_item(state, item)
        if item.partition in seen:
            raise Refused(ErrorCode.INVALID_REQUEST, "items name the same partition twice")
        seen.add(item.partition)
    if not items:
        return _DONE
    group = state.groups.get(name)
    if group is None:
        group = make_group(state, name)
    at_ms = max(committed_ms, state.expiry_clock_ms)  # a slow clock must not make it expire immediately
    for item in items:
        group.offsets[item.partition] = CommittedOffset(offset=item.offset, metadata=item.metadata, committed_ms=at_ms)
    return _DONE


def _check_item(state: ClusterState, item: OffsetCommit) -> None:
    find_partition(state, item.partition)
    if not 0 <= item.offset <= OFFSET_MAX:
        raise Refused(ErrorCode.INVALID_OFFSET, f"a committed offset must be from 0 to {OFFSET_MAX}, not {item.offset}")
    if len(item.metadata.encode()) > METADATA_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"metadata must have at most {METADATA_BYTES_MAX} bytes")


# --------------------------------------------------------------------------------------------------- deletion
def delete_group(state: ClusterState, command: DeleteGroup) -> Applied:
    """Removes the group and its offsets, unless it has members."""
    group = find_group(state, command.group)
    if group.members:
        raise Refused(ErrorCode.GROUP_NOT_EMPTY, f"group {quoted(group.name)} has {len(group.members)} members")
    _drop(state, group)
    return _DONE


def delete_offsets(state: ClusterState, command: DeleteOffsets) -> Applied:
    """Partitions without a commit are ignored."""
    group = find_group(state, command.group)
    if command.generation != group.generation:
        raise Refused(
            ErrorCode.ILLEGAL_GENERATION,
            f"group {quoted(group.name)} is in generation {group.generation}: look at its subscriptions again",
        )
    for pid in command.partitions:
        group.offsets.pop(pid, None)
    drop_if_unused(state, group)
    return _DONE


def forget_topic(state: ClusterState, topic_id: TopicId) -> None:
    """Drops the offsets committed for a deleted topic, and groups that have nothing left."""
    for group in list(state.groups.values()):
        for pid in [pid for pid in group.offsets if pid[:TOPIC_ID_BYTES] == topic_id]:
            del group.offsets[pid]
        drop_if_unused(state, group)


# ----------------------------------------------------------------------------------------------------- expiry
def expire_offsets(state: ClusterState) -> None:
    """The offsets of a group without members expire one retention after its last member left or its last commit,
    whichever was later, by the clock that `expiry` moves."""
    retention_ms = offsets_retention_ms(state.config)
    if not retention_ms:
        return
    horizon_ms = state.expiry_clock_ms - retention_ms
    for group in list(state.groups.values()):
        if group.members or group.emptied_ms > horizon_ms:
            continue
        for pid in [pid for pid, committed in group.offsets.items() if committed.committed_ms <= horizon_ms]:
            del group.offsets[pid]
        drop_if_unused(state, group)


def start_clock(state: ClusterState) -> None:
    """The clock has begun, at a time that nothing bounds: existing commits count as made then."""
    for group in state.groups.values():
        for committed in group.offsets.values():
            committed.committed_ms = max(committed.committed_ms, state.expiry_clock_ms)
