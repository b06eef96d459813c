"""Handlers of consumer groups, whose coordinator makes the assignment (KIP-848): UpdateConsumers, AssignConsumers,
ReconcileConsumers.

Owns the epochs of a group and of its members, and the way of each member from what it has to its target: what it is to
give up first, and when another member gets that. So the rule that a partition has one owner is kept here, whatever a
coordinator proposes. `members` removes members. The assignors, the sessions and the patterns of subscriptions are the
coordinator's. `command_table`, the coordinator of groups, what shows groups and the simulation import it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from smq.raft_state.commands import (
    Acknowledgement,
    AssignConsumers,
    ConsumerUpdate,
    Partitions,
    ReconcileConsumers,
    UpdateConsumers,
)
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import (
    change_member,
    check_generation,
    check_group_name,
    find_group,
    make_group,
    next_generation,
    set_members,
)
from smq.raft_state.ids import Generation, TopicId
from smq.raft_state.limits import (
    GROUP_BYTES_MAX,
    GROUP_MEMBERS_MAX,
    MEMBER_BYTES_CLUSTER_MAX,
    MEMBER_TEXT_BYTES_MAX,
    PATTERN_BYTES_MAX,
    SESSION_TIMEOUT_MS_MAX,
    TOPIC_NAME_CHARS_MAX,
)
from smq.raft_state.refusal import Refused, quoted
from smq.raft_state.replies import Applied, Done
from smq.raft_state.state import AWAY_EPOCH, ClusterState, GroupKind, GroupPhase, GroupState, MemberState

_DONE: Final = Applied(reply=Done())
PROTOCOL_TYPE: Final = "consumer"  # of every consumer group, as of the classic groups of consumers


# ----------------------------------------------------------------------------------------------------- partitions
def spread(partitions: Partitions) -> set[tuple[TopicId, int]]:
    """One by one. Used for membership and set operations only: its order never matters."""
    return {(topic_id, i) for topic_id, indexes in partitions for i in indexes}


def gathered(partitions: Iterable[tuple[TopicId, int]]) -> Partitions:
    """Inverse of `spread`."""
    by_topic: dict[TopicId, list[int]] = {}
    for topic_id, index in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(index)
    return tuple((topic_id, tuple(indexes)) for topic_id, indexes in by_topic.items())


# ------------------------------------------------------------------------------------------------- reconciliation
def reconciled(group: GroupState, member: MemberState, said: Acknowledgement) -> MemberState:
    """The member one step further towards its target; the same object if nothing is to be done now.

    It first gives up what is not of its target, in its old epoch. Once it says that it has, it comes to the target's
    epoch, and gets what no other member holds of it; the rest as soon as the others have given it up."""
    if said.is_away:
        return replace(member, epoch=AWAY_EPOCH, previous_epoch=member.epoch, revoking=())
    owned = spread(said.owned)
    epoch = member.epoch
    if member.revoking:
        if not said.says_owned or owned & spread(member.revoking):
            return member
        epoch += 1
    elif (epoch == group.target_epoch and member.assigned == member.target) or epoch == AWAY_EPOCH:
        return member
    assigned, target = spread(member.assigned), spread(member.target)
    revoking = assigned - target
    if revoking and (not said.says_owned or owned & revoking):
        return replace(
            member,
            epoch=epoch,
            previous_epoch=member.epoch,
            assigned=gathered(assigned & target),
            revoking=gathered(revoking),
        )
    mine = (None, member.member.member_id)
    kept = gathered(p for p in target if p in assigned or group.owners.get(p) in mine)
    if not member.revoking and epoch == group.target_epoch and kept == member.assigned:
        return member  # it waits for what others hold
    return replace(member, epoch=group.target_epoch, previous_epoch=member.epoch, assigned=kept, revoking=())


def is_settled(group: GroupState, member: MemberState) -> bool:
    """The member has its target, and nothing else."""
    return not member.revoking and member.epoch == group.target_epoch and member.assigned == member.target


# ------------------------------------------------------------------------------------------------------- handlers
def update_consumers(state: ClusterState, command: UpdateConsumers) -> Applied:
    """Members that are new, or that have changed what they said. A new epoch of the group, unless each of them takes
    the place of a former one that said the same."""
    check_group_name(command.group)
    group = state.groups.get(command.group)
    if group is not None and group.kind is not GroupKind.CONSUMER and group.members:
        raise Refused(
            ErrorCode.INCONSISTENT_PROTOCOL,
            f"group {quoted(group.name)} has {len(group.members)} members of the classic protocol",
        )
    members = dict(group.members) if group is not None else {}
    is_changed = False
    for update in command.updates:
        check_update(update)
        is_changed |= _put(members, update)
    _check_sizes(state, group, members)
    if group is None:
        group = make_group(state, command.group)
    if group.kind is not GroupKind.CONSUMER:
        group.kind, group.protocol, group.leader = GroupKind.CONSUMER, "", ""
        group.target_epoch = Generation(0)
    set_members(state, group, members)
    group.protocol_type = PROTOCOL_TYPE
    group.phase = GroupPhase.STABLE
    if is_changed:
        group.generation = next_generation(group)
    return _DONE


def assign_consumers(state: ClusterState, command: AssignConsumers) -> Applied:
    """Names that are not members are ignored."""
    group = find_group(state, command.group)
    check_generation(group, command.group, command.generation)
    if group.kind is not GroupKind.CONSUMER or not group.members:
        raise Refused(ErrorCode.INCONSISTENT_PROTOCOL, f"group {quoted(group.name)} has no members of this protocol")
    given = dict(command.targets)
    members = {
        name: replace(m, target=given[name]) if name in given and given[name] != m.target else m
        for name, m in group.members.items()
    }
    _check_targets(members)
    # Targets alone change: neither what members have said, which would cost more to measure, nor what they hold.
    assigned = sum(m.assignment_bytes for m in members.values())
    more = assigned - sum(m.assignment_bytes for m in group.members.values())
    if assigned > GROUP_BYTES_MAX:
        text = f"the members' assignments have {assigned} bytes, the limit is {GROUP_BYTES_MAX} per group"
        raise Refused(ErrorCode.LIMIT_EXCEEDED, text)
    _check_cluster_size(state, more)
    if group.target_epoch == group.generation:
        group.generation = next_generation(group)
    group.target_epoch = group.generation
    group.protocol = command.assignor
    state.member_bytes += more
    group.members = members
    return _DONE


def reconcile_consumers(state: ClusterState, command: ReconcileConsumers) -> Applied:
    """What a member says in an epoch that is not its own, nor the one before, is ignored."""
    group = find_group(state, command.group)
    group.members = dict(group.members)
    for said in command.items:
        member = group.members.get(said.member_id)
        if member is not None and said.epoch in (member.epoch, member.previous_epoch):
            change_member(state, group, member, reconciled(group, member, said))
    return _DONE


def _put(members: dict[str, MemberState], update: ConsumerUpdate) -> bool:
    """Whether the group's assignment may have to change with it."""
    new_id, old_id = update.member.member_id, update.replaces
    former = members.get(old_id or new_id)
    if old_id:
        instance_id = update.member.instance_id
        if former is None or not instance_id or former.member.instance_id != instance_id or new_id in members:
            raise Refused(ErrorCode.UNKNOWN_MEMBER, f"{quoted(new_id)} cannot replace {quoted(old_id)}")
        present = replace(former, member=update.member, subscription=update.subscription, epoch=0, previous_epoch=0)
        items = [(new_id if name == old_id else name, m) for name, m in members.items()]
        members.clear()
        members.update(items)
        members[new_id] = present
    elif former is not None:
        members[new_id] = replace(former, member=update.member, subscription=update.subscription)
    else:
        members[new_id] = MemberState(member=update.member, subscription=update.subscription)
    return former is None or replace(former.subscription, rack="") != replace(update.subscription, rack="")


# --------------------------------------------------------------------------------------------------------- checks
def check_update(update: ConsumerUpdate) -> None:
    """Refused if this member could be in no group."""
    member, subscription = update.member, update.subscription
    texts = (member.instance_id, member.client_id, member.client_host, subscription.assignor, subscription.rack)
    if not member.member_id or any(len(t.encode()) > MEMBER_TEXT_BYTES_MAX for t in (member.member_id, *texts)):
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a member's fields have at most {MEMBER_TEXT_BYTES_MAX} bytes")
    if len(subscription.pattern.encode()) > PATTERN_BYTES_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a pattern has at most {PATTERN_BYTES_MAX} bytes")
    if any(not 1 <= len(name) <= TOPIC_NAME_CHARS_MAX for name in (*subscription.topics, *subscription.matched)):
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a topic's name has 1 to {TOPIC_NAME_CHARS_MAX} characters")
    if not 1 <= member.rebalance_timeout_ms <= SESSION_TIMEOUT_MS_MAX or member.protocols:
        raise Refused(ErrorCode.INVALID_REQUEST, f"member {quoted(member.member_id)} is none of a consumer group")


def _check_targets(members: dict[str, MemberState]) -> None:
    """A partition is in one target at most, or two members would wait for it."""
    total = sum(len(indexes) for m in members.values() for _, indexes in m.target)
    seen = set[tuple[TopicId, int]]()
    for m in members.values():
        seen |= spread(m.target)
    if len(seen) != total:
        raise Refused(ErrorCode.INVALID_REQUEST, "a partition is in the targets of two members")


def _check_sizes(state: ClusterState, group: GroupState | None, members: dict[str, MemberState]) -> None:
    if len(members) > GROUP_MEMBERS_MAX:
        raise Refused(ErrorCode.LIMIT_EXCEEDED, f"a group has at most {GROUP_MEMBERS_MAX} members")
    instances = [m.member.instance_id for m in members.values() if m.member.instance_id]
    if len(set(instances)) != len(instances):
        raise Refused(ErrorCode.INVALID_REQUEST, "an instance id is named twice")
    size = sum(m.metadata_bytes for m in members.values())
    assigned = sum(m.assignment_bytes for m in members.values())
    if max(size, assigned) > GROUP_BYTES_MAX:
        text = f"the members have {size} bytes and their assignments {assigned}, the limit is {GROUP_BYTES_MAX} each"
        raise Refused(ErrorCode.LIMIT_EXCEEDED, text)
    before = sum(m.metadata_bytes + m.assignment_bytes for m in group.members.values()) if group is not None else 0
    _check_cluster_size(state, size + assigned - before)


def _check_cluster_size(state: ClusterState, more: int) -> None:
    if state.member_bytes + more > MEMBER_BYTES_CLUSTER_MAX:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"the members of all groups would have more than {MEMBER_BYTES_CLUSTER_MAX} bytes"
        )
