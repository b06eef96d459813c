"""Handlers of what groups have committed: commits, their deletion and their expiry.

Owns the committed offsets, and when a group exists: from its first offset or member on, until it is deleted or has been
without both for a while. `members` owns its members. Only `command_table` and other handlers import it.
"""

from collections.abc import Set

from smq.raft_state.cluster_config import offsets_retention_ms
from smq.raft_state.commands import CommitOffsets, DeleteGroup, DeleteOffsets, OffsetCommit, StageOffsets
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.fencing import leave_floor
from smq.raft_state.ids import Generation, PartitionId, TopicId
from smq.raft_state.limits import (
    COMMIT_ITEMS_MAX,
    GENERATION_MAX,
    GROUP_NAME_BYTES_MAX,
    METADATA_BYTES_MAX,
    TOPIC_ID_BYTES,
)
from smq.raft_state.refusal import Refused, find_partition, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import ClusterState, CommittedOffset, GroupKind, GroupPhase, GroupState, MemberState, held

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
        _make_room(state)
    group = state.groups[name] = GroupState(name=name, generation=state.generation_floor, changes=state.changes_floor)
    return group


def too_many_groups(state: ClusterState) -> Refused:
    text = f"there are {len(state.groups)} groups, and a cluster has at most {state.groups_max}: delete unused ones"
    return Refused(ErrorCode.LIMIT_EXCEEDED, text)


def _make_room(state: ClusterState) -> None:
    """Drops the group that has been without members for longest, of those without offsets. LIMIT_EXCEEDED if every
    group has offsets or members."""
    unused = min(((g.emptied_ms, g.name) for g in state.groups.values() if g.is_unused), default=None)
    if unused is None:
        raise too_many_groups(state)
    _drop(state, state.groups[unused[1]])


def next_generation(group: GroupState) -> Generation:
    """Starts again at 1 after the largest number that Kafka's protocol can carry."""
    return Generation(group.generation + 1 if group.generation < GENERATION_MAX else 1)


def set_members(state: ClusterState, group: GroupState, members: dict[str, MemberState]) -> None:
    """Makes these the group's members. Costs what has changed: the group may have many that have not."""
    before = group.members
    for name, member in before.items():
        if members.get(name) is not member:
            _count_out(state, group, member)
    for name, member in members.items():
        if before.get(name) is not member:
            _count_in(state, group, member)
    group.members = members
    group.was_unused = False


def change_member(state: ClusterState, group: GroupState, before: MemberState, after: MemberState) -> None:
    """As `set_members`, of one that stays. The caller has made `group.members` another object."""
    _count_out(state, group, before)
    _count_in(state, group, after)
    group.members[after.member.member_id] = after


def _count_out(state: ClusterState, group: GroupState, member: MemberState) -> None:
    state.member_bytes -= member.metadata_bytes + member.assignment_bytes
    for partition in held(member):
        group.owners.pop(partition, None)


def _count_in(state: ClusterState, group: GroupState, member: MemberState) -> None:
    state.member_bytes += member.metadata_bytes + member.assignment_bytes
    group.owners.update(dict.fromkeys(held(member), member.member.member_id))


def _drop(state: ClusterState, group: GroupState) -> None:
    state.generation_floor = max(state.generation_floor, group.generation)
    leave_floor(state, group)
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
    """A member's commit in its own generation, once that is assigned; while a rebalance collects members, the
    generation still holds and takes commits. Or a commit of no member, to a group that has none. A commit without items
    is valid and creates no group.

    A caller without an answer commits again, perhaps at the next coordinator, and goes on from there. Its first command
    must not undo that when it arrives late: the fence refuses it. (In Kafka it is lost with the former coordinator's
    log.)"""
    check_group_name(command.group)
    group = state.groups.get(command.group)
    if command.generation >= 0 or (group is not None and group.members):
        check_committer(group, command)
    return _commit_items(state, command)


def check_committer(group: GroupState | None, command: CommitOffsets | StageOffsets) -> None:
    """Refused unless the group has this member, in this generation, with an assignment; of a consumer group, unless it
    is in this epoch of its own."""
    if group is None:
        raise Refused(ErrorCode.ILLEGAL_GENERATION, f"group {quoted(command.group)} no longer exists")
    if group.members and not command.member_id:
        raise Refused(
            ErrorCode.UNKNOWN_MEMBER,
            f"group {quoted(group.name)} has {len(group.members)} members: only they commit for it",
        )
    member = find_member(group, command.member_id, command.instance_id)
    if group.kind is GroupKind.CONSUMER:
        if command.generation != member.epoch:
            text = f"member {quoted(command.member_id)} is in epoch {member.epoch}, not {command.generation}"
            raise Refused(ErrorCode.ILLEGAL_GENERATION, text)
        return
    check_generation(group, group.name, command.generation)
    if group.phase is GroupPhase.COMPLETING:
        raise Refused(ErrorCode.REBALANCE_IN_PROGRESS, f"generation {group.generation} has no assignment yet")


def check_generation(group: GroupState | None, name: str, expected: Generation) -> None:
    """ILLEGAL_GENERATION if the group is in another one. A group that does not exist is in generation 0."""
    generation = group.generation if group is not None else 0
    if generation != expected:
        raise Refused(
            ErrorCode.ILLEGAL_GENERATION, f"group {quoted(name)} is in generation {generation}, not {expected}"
        )


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


def _commit_items(state: ClusterState, command: CommitOffsets) -> Applied:
    """Creates the group if there is none."""
    items = command.items
    checked_items(state, items)
    if not items:
        return _DONE
    group = state.groups.get(command.group)
    if group is None:
        group = make_group(state, command.group)
    at_ms = max(command.committed_ms, state.expiry_clock_ms)  # a slow clock must not make it expire immediately
    group.offsets.update(newest(state, items, at_ms))
    group.was_unused = False
    return _DONE


def newest(
    state: ClusterState, items: tuple[OffsetCommit, ...], committed_ms: int
) -> dict[PartitionId, CommittedOffset]:
    """These offsets as the latest that have been committed or staged."""
    state.offset_commits += 1
    return {
        item.partition: CommittedOffset(
            offset=item.offset,
            metadata=item.metadata,
            leader_epoch=item.leader_epoch,
            committed_ms=committed_ms,
            order=state.offset_commits,
        )
        for item in items
    }


def checked_items(state: ClusterState, items: tuple[OffsetCommit, ...]) -> None:
    """Refused if one of them cannot be committed, or if there are too many."""
    if len(items) > COMMIT_ITEMS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"{len(items)} offsets in one commit, at most {COMMIT_ITEMS_MAX}")
    seen: set[PartitionId] = set()  # used for membership tests only: its order never matters
    for item in items:
        _check_item(state, item)
        if item.partition in seen:
            raise Refused(ErrorCode.INVALID_REQUEST, "items name the same partition twice")
        seen.add(item.partition)


def _check_item(state: ClusterState, item: OffsetCommit) -> None:
    find_partition(state, item.partition)
    if len(item.metadata.encode()) > METADATA_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, f"metadata must have at most {METADATA_BYTES_MAX} bytes")


# --------------------------------------------------------------------------------------------------- deletion
def delete_group(state: ClusterState, command: DeleteGroup) -> Applied:
    """Removes the group and its offsets, unless it has members."""
    group = find_group(state, command.group)
    if group.members:
        raise Refused(ErrorCode.GROUP_NOT_EMPTY, f"group {quoted(group.name)} has {len(group.members)} members")
    _drop(state, group)
    _forget_staged(state, group.name)
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
    _forget_staged(state, group.name, frozenset(command.partitions))
    return _DONE


def _forget_staged(state: ClusterState, group: str, partitions: Set[PartitionId] | None = None) -> None:
    """What open transactions have staged for a group before its offsets were deleted, as in Kafka: their ends must not
    bring it back. The group stays a part of them."""
    for transaction in state.transactions.values():
        staged = transaction.offsets.get(group, {})
        for pid in [pid for pid in staged if partitions is None or pid in partitions]:
            del staged[pid]
            state.transaction_items -= 1


def forget_topic(state: ClusterState, topic_id: TopicId) -> None:
    """Drops the offsets committed for a deleted topic."""
    for group in state.groups.values():
        for pid in [pid for pid in group.offsets if pid[:TOPIC_ID_BYTES] == topic_id]:
            del group.offsets[pid]


# ----------------------------------------------------------------------------------------------------- expiry
def expire_offsets(state: ClusterState) -> None:
    """The offsets of a group without members expire one retention after its last member left or its last commit,
    whichever was later, by the clock that `expiry` moves.

    A stamp may be ahead of that clock: its coordinator's clock was wrong, or the expiry clock is behind because the
    cluster was down, or began with a wrong clock. It then counts as one retention ahead, so its offsets live for two
    retentions of the expiry clock, which are at least one of real time, and never for ever."""
    now_ms, retention_ms = state.expiry_clock_ms, offsets_retention_ms(state.config)
    if not retention_ms:
        return
    horizon_ms, latest_ms = now_ms - retention_ms, now_ms + retention_ms
    for group in state.groups.values():
        if group.members:
            continue
        if group.emptied_ms > latest_ms:
            group.emptied_ms = latest_ms
            for committed in group.offsets.values():
                committed.committed_ms = min(committed.committed_ms, latest_ms)
        if group.emptied_ms > horizon_ms:
            continue
        for pid, committed in list(group.offsets.items()):
            if committed.committed_ms <= horizon_ms:
                del group.offsets[pid]
            else:
                committed.committed_ms = min(committed.committed_ms, latest_ms)


def start_clock(state: ClusterState) -> None:
    """The clock has begun, at a time that nothing bounds: existing commits count as made then."""
    for group in state.groups.values():
        group.emptied_ms = state.expiry_clock_ms if group.emptied_ms else 0
        for committed in group.offsets.values():
            committed.committed_ms = state.expiry_clock_ms


def drop_unused(state: ClusterState) -> None:
    """Drops the groups that were without offsets and members at the step of the clock before this one, and still are.
    So a group that has just become empty is still described as empty for a while, as in Kafka."""
    for group in list(state.groups.values()):
        if group.was_unused:
            _drop(state, group)
        else:
            group.was_unused = group.is_unused
