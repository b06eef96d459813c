"""From the replicated state of a group to the answers that its members get.

Owns no state. Pure; `memory` and the actions import it.
"""

from collections.abc import Callable
from dataclasses import replace

from smq.coordinator.groups.outcomes import Outcome
from smq.coordinator.groups.protocols import (
    CONSUMER,
    assigned_indexes,
    chosen,
    metadata_of,
    subscribed_topics,
    subscriptions,
)
from smq.coordinator.groups.types import Joined, Synced
from smq.raft_state.commands import GroupMember
from smq.raft_state.state import GroupPhase, GroupState


def joined(group: GroupState, member_id: str) -> Joined:
    is_leader = group.leader == member_id
    members = [(name, m.member.instance_id, metadata_of(m.member, group.protocol)) for name, m in group.members.items()]
    return Joined(
        outcome=Outcome.OK,
        member_id=member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(members) if is_leader else (),
    )


def joined_as_former(
    group: GroupState,
    member: GroupMember,
    former: GroupMember,
    *,
    can_skip: bool,
    partition_count: Callable[[str], int],
) -> Joined | None:
    """The answer to a static member that is back and has taken its former self's place. None if the group must
    rebalance for it. `partition_count` is of a topic, 0 if it does not exist."""
    if group.phase is not GroupPhase.STABLE or subscription(former, group) != subscription(member, group):
        return None
    if chosen([m.member for m in group.members.values()]) != group.protocol:
        return None
    if is_partition_free(group, partition_count):
        return None
    answer = joined(group, member.member_id)
    if answer.leader != member.member_id:
        return answer
    if can_skip:
        return replace(answer, skip_assignment=True)
    # An older client would compute an assignment if the answer named it as the leader: it names its former id.
    return replace(answer, leader=former.member_id, members=())


def synced(group: GroupState, member_id: str) -> Synced:
    member = group.members.get(member_id)
    if member is None:
        return Synced(outcome=Outcome.UNKNOWN_MEMBER)
    return Synced(
        outcome=Outcome.OK,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        assignment=member.assignment,
    )


def subscription(member: GroupMember, group: GroupState) -> object:
    """The part of a member's metadata that matters to the others: a consumer's topics, not what it still owns."""
    metadata = metadata_of(member, group.protocol)
    topics = subscribed_topics(metadata) if group.protocol_type == CONSUMER else None
    return topics if topics is not None else metadata


def is_partition_free(group: GroupState, partition_count: Callable[[str], int]) -> bool:
    """Whether a partition of the subscribed topics has no member. The next generation is to assign it, and only the
    former process may have known that: as a cooperative member that was to give a partition up and join again, or as a
    leader that was to see its topic grow. False if the group's bytes do not say what is subscribed or assigned."""
    topics = subscriptions(group)
    if not topics:
        return False
    assigned: dict[str, set[int]] = {topic: set() for topic in topics}
    for m in group.members.values():
        found = assigned_indexes(m.assignment)
        if found is None:
            return False
        for topic, indexes in found:
            if topic in assigned:
                assigned[topic].update(indexes)
    return not all(indexes.issuperset(range(partition_count(topic))) for topic, indexes in assigned.items())
