"""Handlers of a group's members: FormGeneration, AssignMembers, RemoveMembers, ReplaceMember.

Owns the members of a generation, the protocol that they share, and their assignments. Every change names the
generation that its proposer saw, besides what `fencing` checks. So if two nodes both believe that they coordinate a
group, only one can change anything, and nothing twice. Sessions are not replicated: the coordinator decides which
members have timed out. Only `command_table` imports it.
"""

from smq.raft_state.commands import (
    AssignMembers,
    FormGeneration,
    GroupMember,
    RemoveMembers,
    ReplaceMember,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import (
    check_generation,
    check_group_name,
    find_group,
    find_member,
    make_group,
    next_generation,
    set_members,
)
from smq.raft_state.ids import Generation
from smq.raft_state.limits import (
    GROUP_BYTES_MAX,
    GROUP_MEMBERS_MAX,
    MEMBER_BYTES_CLUSTER_MAX,
    MEMBER_PROTOCOLS_MAX,
    MEMBER_TEXT_BYTES_MAX,
    SESSION_TIMEOUT_MS_MAX,
)
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done, GenerationFormed
from smq.raft_state.state import ClusterState, GroupKind, GroupPhase, GroupState, MemberState, members_bytes

_DONE = Applied(reply=Done())


def form_generation(state: ClusterState, command: FormGeneration) -> Applied:
    """The next generation, without assignments yet."""
    check_group_name(command.group)
    group = state.groups.get(command.group)
    check_generation(group, command.group, command.expected_generation)
    if group is not None and group.kind is GroupKind.CONSUMER and group.members:
        raise Refused(
            ErrorCode.INCONSISTENT_PROTOCOL,
            f"group {quoted(group.name)} has {len(group.members)} members of the consumer protocol",
        )
    _check_members(command)
    members = {m.member_id: MemberState(member=m) for m in command.members}
    _check_size(state, group, members)
    if group is None:
        group = make_group(state, command.group)
    set_members(state, group, members)
    group.generation = next_generation(group)
    group.phase = GroupPhase.COMPLETING
    group.kind, group.target_epoch = GroupKind.CLASSIC, Generation(0)
    group.protocol_type = command.protocol_type
    group.protocol = command.protocol
    group.leader = command.leader
    return Applied(reply=GenerationFormed(generation=group.generation))


def assign_members(state: ClusterState, command: AssignMembers) -> Applied:
    """Once per generation. Names that are not members are ignored, as in Kafka."""
    group = find_group(state, command.group)
    check_generation(group, command.group, command.generation)
    if group.phase is not GroupPhase.COMPLETING:
        raise Refused(
            ErrorCode.REBALANCE_IN_PROGRESS,
            f"generation {group.generation} is {group.phase.name}: it takes no assignment",
        )
    given = dict(command.assignments)
    members = {name: MemberState(member=m.member, assignment=given.get(name, b"")) for name, m in group.members.items()}
    size = sum(len(m.assignment) for m in members.values())
    if size > GROUP_BYTES_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"the group's assignments have {size} bytes, the limit is {GROUP_BYTES_MAX}"
        )
    _check_size(state, group, members)
    set_members(state, group, members)
    group.phase = GroupPhase.STABLE
    return _DONE


def remove_members(state: ClusterState, command: RemoveMembers) -> Applied:
    """Member ids that the group does not have are ignored. What a member of a consumer group had is free, and its next
    epoch assigns it."""
    group = find_group(state, command.group)
    check_generation(group, command.group, command.generation)
    remaining = {name: m for name, m in group.members.items() if name not in command.member_ids}
    if len(remaining) == len(group.members):
        return _DONE
    set_members(state, group, remaining)
    if remaining and group.kind is GroupKind.CONSUMER:
        group.generation = next_generation(group)
        return _DONE
    if remaining:
        # In the replicated state, because the next coordinator must know that these members have to rebalance.
        group.phase = GroupPhase.PREPARING
        return _DONE
    group.generation = next_generation(group)
    group.phase = GroupPhase.EMPTY
    group.protocol = group.leader = ""
    group.emptied_ms = max(command.removed_ms, state.expiry_clock_ms)
    return _DONE


def replace_member(state: ClusterState, command: ReplaceMember) -> Applied:
    """The new member takes the old one's place in the order and its assignment, in the same generation."""
    group = find_group(state, command.group)
    old = find_member(group, command.old_member_id, command.member.instance_id)
    new_id = command.member.member_id
    if not command.member.instance_id or new_id in group.members:
        raise Refused(ErrorCode.INVALID_REQUEST, f"{quoted(new_id)} cannot replace {quoted(command.old_member_id)}")
    _check_member(command.member, group.protocol)
    new = MemberState(member=command.member, assignment=old.assignment)
    members = {
        (new_id if name == command.old_member_id else name): (new if name == command.old_member_id else member)
        for name, member in group.members.items()
    }
    _check_size(state, group, members)
    set_members(state, group, members)
    if group.leader == command.old_member_id:
        group.leader = new_id
    return _DONE


# ----------------------------------------------------------------------------------------------------- checks
def _check_members(command: FormGeneration) -> None:
    members = command.members
    if not 1 <= len(members) <= GROUP_MEMBERS_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"a generation must have 1 to {GROUP_MEMBERS_MAX} members, not {len(members)}"
        )
    for text in (command.protocol_type, command.protocol):
        _check_text("a protocol", text)
    ids, instances = {m.member_id for m in members}, [m.instance_id for m in members if m.instance_id]
    if len(ids) != len(members) or len(set(instances)) != len(instances):
        raise Refused(ErrorCode.INVALID_REQUEST, "a member is named twice")
    if command.leader not in ids:
        raise Refused(ErrorCode.INVALID_REQUEST, f"the leader {quoted(command.leader)} is no member")
    for member in members:
        _check_member(member, command.protocol)


def _check_member(member: GroupMember, protocol: str) -> None:
    _check_text("a member's id", member.member_id)
    for text in (member.instance_id, member.client_id, member.client_host, *(name for name, _ in member.protocols)):
        if text:
            _check_text("a member's field", text)
    if len(member.protocols) > MEMBER_PROTOCOLS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a member has at most {MEMBER_PROTOCOLS_MAX} protocols")
    if all(name != protocol for name, _ in member.protocols):
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"member {quoted(member.member_id)} does not support protocol {quoted(protocol)}"
        )
    for timeout_ms in (member.session_timeout_ms, member.rebalance_timeout_ms):
        if not 1 <= timeout_ms <= SESSION_TIMEOUT_MS_MAX:
            raise Refused(
                ErrorCode.INVALID_REQUEST,
                f"a member's timeout must be from 1 to {SESSION_TIMEOUT_MS_MAX} ms, not {timeout_ms}",
            )


def _check_text(what: str, text: str) -> None:
    if not 1 <= len(text.encode()) <= MEMBER_TEXT_BYTES_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"{what} must have 1 to {MEMBER_TEXT_BYTES_MAX} bytes")


def _check_size(state: ClusterState, group: GroupState | None, members: dict[str, MemberState]) -> None:
    size = sum(m.metadata_bytes for m in members.values())
    if size > GROUP_BYTES_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"the members' names and metadata have {size} bytes, the limit is {GROUP_BYTES_MAX} per group",
        )
    total = state.member_bytes + members_bytes(members) - (members_bytes(group.members) if group is not None else 0)
    if total > MEMBER_BYTES_CLUSTER_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"the members of all groups would have {total} bytes, the limit is {MEMBER_BYTES_CLUSTER_MAX}",
        )
