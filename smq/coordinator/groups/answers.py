"""From the replicated state of a group to what its members are told.

Owns no state. Only `live` imports it.
"""

from typing import Final

from smq.coordinator.groups.protocols import CONSUMER, metadata_of, subscribed_topics
from smq.coordinator.groups.types import Joined, Synced
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import GroupMember
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import GroupState


def joined(group: GroupState, member_id: str) -> Joined:
    is_leader = group.leader == member_id
    members = [(name, m.member.instance_id, metadata_of(m.member, group.protocol)) for name, m in group.members.items()]
    return Joined(
        code=KafkaError.NONE,
        member_id=member_id,
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        members=tuple(members) if is_leader else (),
    )


def synced(group: GroupState, member_id: str) -> Synced:
    member = group.members.get(member_id)
    if member is None:
        return Synced(code=KafkaError.UNKNOWN_MEMBER_ID)
    return Synced(
        code=KafkaError.NONE,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        assignment=member.assignment,
    )


def subscription(member: GroupMember, group: GroupState) -> object:
    """What of a member's metadata matters to the others: of a consumer its topics, not what it still owns."""
    metadata = metadata_of(member, group.protocol)
    topics = subscribed_topics(metadata) if group.protocol_type == CONSUMER else None
    return topics if topics is not None else metadata


_FAILURES: Final = {
    ErrorCode.NOT_COORDINATOR: KafkaError.NOT_COORDINATOR,
    ErrorCode.SHUTTING_DOWN: KafkaError.NOT_COORDINATOR,
    ErrorCode.LIMIT_EXCEEDED: KafkaError.POLICY_VIOLATION,
    ErrorCode.INVALID_REQUEST: KafkaError.INVALID_GROUP_ID,
}


def code_of_failure(error: SmqError) -> KafkaError:
    """What those are told who wait for a command that failed. Clients take the default as: look for the coordinator
    again, and join."""
    return _FAILURES.get(error.code, KafkaError.COORDINATOR_NOT_AVAILABLE)
