"""JoinGroup, SyncGroup, Heartbeat and LeaveGroup: from Kafka's fields to the group's coordinator and back.

Owns the differences between versions: the fields that an old one lacks, and the answers that it cannot read. JoinGroup
and SyncGroup begin in their turn and then wait outside it. So the other members of a group do not hold up the requests
that a client sends after them on the same connection.
"""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.member_requests import Identity, Join, Joined, Outcome, Sync, Synced
from smq.coordinator.kafka.cluster_view import PREFIX, is_group
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import OUTCOME_CODES, KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.service.group_members import has_repeated_protocol, rebalance_timeout_of, shown_name
from smq.raft_state.commands import GroupMember

_ID_FIRST_VERSION: Final = 4  # of JoinGroup: KIP-394
_SKIP_VERSION: Final = 9  # of JoinGroup: KIP-814
_PROTOCOL_TYPE_VERSION: Final = 7  # of JoinGroup: the answer may have no protocol
_NAMED_PROTOCOL_VERSION: Final = 5  # of SyncGroup: the request names its protocol
_BATCH_VERSION: Final = 3  # of LeaveGroup


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request, as DescribeGroups will show it."""

    client_id: str
    host: str


# -------------------------------------------------------------------------------------------------------- joining
def join_group(gateway: Gateway, version: int, request: Struct, client: Client) -> Awaitable[Struct]:
    """Begins to join immediately. The awaitable is the answer once the generation has formed."""
    session_ms = request["session_timeout_ms"]
    member = GroupMember(
        member_id=request["member_id"],
        instance_id=request["group_instance_id"] or "",
        client_id=shown_name(client.client_id),
        client_host=shown_name(client.host),
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=rebalance_timeout_of(request["rebalance_timeout_ms"], session_ms),
        protocols=tuple((p["name"], bytes(p["metadata"])) for p in request["protocols"]),
    )
    code = _refusal(request["group_id"], member)
    if code is not KafkaError.NONE:
        return _refused(_join_response(code, Joined(outcome=Outcome.BAD_MEMBER, member_id=member.member_id), version))
    requested = Join(
        group=PREFIX + request["group_id"],
        member=member,
        protocol_type=request["protocol_type"],
        takes_id_first=version >= _ID_FIRST_VERSION,
        can_skip_assignment=version >= _SKIP_VERSION,
    )
    return _joined(gateway.memberships.join(requested), version)


async def _refused(response: Struct) -> Struct:
    """For a request that the coordinator is not asked about."""
    return response


def _refusal(group: str, member: GroupMember) -> KafkaError:
    if not is_group(group):
        return KafkaError.INVALID_GROUP_ID
    return KafkaError.INVALID_REQUEST if has_repeated_protocol(member) else KafkaError.NONE


async def _joined(answer: Awaitable[Joined], version: int) -> Struct:
    joined = await answer
    return _join_response(OUTCOME_CODES[joined.outcome], joined, version)


def _join_response(code: KafkaError, joined: Joined, version: int) -> Struct:
    is_ok = code is KafkaError.NONE
    nothing = None if version >= _PROTOCOL_TYPE_VERSION else ""
    return {
        "throttle_time_ms": 0,
        "error_code": code,
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type if is_ok else None,
        "protocol_name": joined.protocol if is_ok else nothing,
        "leader": joined.leader,
        "skip_assignment": joined.skip_assignment,
        "member_id": joined.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": instance_id or None, "metadata": metadata}
            for member_id, instance_id, metadata in joined.members
        ],
    }


# -------------------------------------------------------------------------------------------------------- syncing
def sync_group(gateway: Gateway, version: int, request: Struct, _client: Client) -> Awaitable[Struct]:
    """Begins immediately. The awaitable is the answer once the leader has given the assignment."""
    if not is_group(request["group_id"]):
        return _refused(_sync_response(KafkaError.INVALID_GROUP_ID, Synced(outcome=Outcome.BAD_GROUP)))
    is_named = version >= _NAMED_PROTOCOL_VERSION
    requested = Sync(
        group=PREFIX + request["group_id"],
        who=Identity(member_id=request["member_id"], instance_id=request["group_instance_id"] or ""),
        generation=request["generation_id"],
        protocol_type=request["protocol_type"] if is_named else None,
        protocol=request["protocol_name"] if is_named else None,
        assignments=tuple((a["member_id"], bytes(a["assignment"])) for a in request["assignments"]),
    )
    return _synced(gateway.memberships.sync(requested))


async def _synced(answer: Awaitable[Synced]) -> Struct:
    synced = await answer
    return _sync_response(OUTCOME_CODES[synced.outcome], synced)


def _sync_response(code: KafkaError, synced: Synced) -> Struct:
    is_ok = code is KafkaError.NONE
    return {
        "throttle_time_ms": 0,
        "error_code": code,
        "protocol_type": synced.protocol_type if is_ok else None,
        "protocol_name": synced.protocol if is_ok else None,
        "assignment": synced.assignment,
    }


# --------------------------------------------------------------------------------------------- staying and leaving
async def heartbeat(gateway: Gateway, _version: int, request: Struct) -> Struct:
    code = KafkaError.INVALID_GROUP_ID
    if is_group(request["group_id"]):
        who = Identity(member_id=request["member_id"], instance_id=request["group_instance_id"] or "")
        outcome = gateway.memberships.heartbeat(PREFIX + request["group_id"], who, request["generation_id"])
        code = OUTCOME_CODES[outcome]
    return {"throttle_time_ms": 0, "error_code": code}


async def leave_group(gateway: Gateway, version: int, request: Struct) -> Struct:
    """From version 3 on for several members, each with an error of its own."""
    named = request["members"] if version >= _BATCH_VERSION else [request]
    leaving = [
        Identity(member_id=m["member_id"], instance_id=(m.get("group_instance_id") if m is not request else "") or "")
        for m in named
    ]
    codes = [KafkaError.INVALID_GROUP_ID] * len(leaving)
    if is_group(request["group_id"]):
        codes = [OUTCOME_CODES[o] for o in await gateway.memberships.leave(PREFIX + request["group_id"], leaving)]
    if version < _BATCH_VERSION:
        return {"throttle_time_ms": 0, "error_code": codes[0], "members": []}
    overall = next((code for code in codes if code in _WHOLE_REQUEST), KafkaError.NONE)
    members = [
        {"member_id": who.member_id, "group_instance_id": who.instance_id or None, "error_code": code}
        for who, code in zip(leaving, codes, strict=True)
    ]
    return {
        "throttle_time_ms": 0,
        "error_code": overall,
        "members": members if overall is KafkaError.NONE else [],
    }


_WHOLE_REQUEST: Final = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.INVALID_GROUP_ID,
    KafkaError.POLICY_VIOLATION,
)
