"""The Groups service: members of groups that are no Kafka clients.

Owns the way from the requests' fields to the group's coordinator, and the error of each outcome.
`service.group_members` owns the waits. When a member rebalances, and when it is removed, is the same for both ports.
Only the composition root imports it.
"""

from typing import Final

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.member_requests import Identity, Join, Joined, Outcome, Sync
from smq.coordinator.grpc.gate import host_of
from smq.coordinator.grpc.required import member_of
from smq.coordinator.grpc.service import Context, Service, guarded
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_members import Memberships, has_repeated_protocol, rebalance_timeout_of, shown_name
from smq.coordinator.service.request_checks import check_group
from smq.raft_state.commands import GroupMember
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import NodeApi

OUTCOME_ERRORS: Final[dict[Outcome, ErrorCode]] = {
    Outcome.REBALANCING: ErrorCode.REBALANCE_IN_PROGRESS,
    Outcome.UNKNOWN_MEMBER: ErrorCode.UNKNOWN_MEMBER,
    Outcome.FENCED_INSTANCE: ErrorCode.FENCED_INSTANCE,
    Outcome.WRONG_GENERATION: ErrorCode.ILLEGAL_GENERATION,
    Outcome.PROTOCOL_MISMATCH: ErrorCode.INCONSISTENT_PROTOCOL,
    Outcome.GROUP_FULL: ErrorCode.LIMIT_EXCEEDED,
    Outcome.TOO_MANY_GROUPS: ErrorCode.LIMIT_EXCEEDED,
    Outcome.LIMIT_EXCEEDED: ErrorCode.LIMIT_EXCEEDED,
    Outcome.TOO_MANY_NEW_GROUPS: ErrorCode.OVERLOADED,
    Outcome.QUEUE_FULL: ErrorCode.OVERLOADED,
    Outcome.BAD_SESSION_TIMEOUT: ErrorCode.INVALID_REQUEST,
    Outcome.BAD_MEMBER: ErrorCode.INVALID_REQUEST,
    Outcome.BAD_GROUP: ErrorCode.INVALID_REQUEST,
    Outcome.NOT_COORDINATOR: ErrorCode.NOT_COORDINATOR,
    Outcome.NOT_READY: ErrorCode.NODE_NOT_READY,
    Outcome.UNCERTAIN: ErrorCode.TIMED_OUT,
    Outcome.NO_CONSUMER_GROUP: ErrorCode.INCONSISTENT_PROTOCOL,  # it has one, and this member is of the other protocol
}


class GroupService(Service, smq_pb2_grpc.GroupsServicer):
    def __init__(self, node: NodeApi, groups: GroupCoordinator) -> None:
        self.audience = Audience(node=node)
        self._groups = groups
        self._members = Memberships(NodeCalls(node), groups)

    @guarded
    async def JoinGroup(self, request: pb.JoinGroupRequest, context: Context) -> pb.JoinGroupResponse:
        check_group(request.group)
        member = GroupMember(
            member_id=request.member_id,
            instance_id=request.instance_id,
            client_id=shown_name(request.client_id),
            client_host=shown_name(host_of(context.peer())),
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=rebalance_timeout_of(request.rebalance_timeout_ms, request.session_timeout_ms),
            protocols=tuple((p.name, p.metadata) for p in request.protocols),
        )
        if has_repeated_protocol(member):
            raise SmqError(ErrorCode.INVALID_REQUEST, "a protocol is named twice")
        joined = await self._members.join(
            Join(
                group=request.group,
                member=member,
                protocol_type=request.protocol_type,
                takes_id_first=True,
                can_skip_assignment=True,
            )
        )
        if joined.outcome is Outcome.ID_RESERVED:
            return pb.JoinGroupResponse(member_id=joined.member_id)
        self._check(request.group, joined.outcome)
        return _to_pb(joined)

    @guarded
    async def SyncGroup(self, request: pb.SyncGroupRequest, _context: Context) -> pb.SyncGroupResponse:
        check_group(request.group)
        who, generation = member_of(request.member)
        synced = await self._members.sync(
            Sync(
                group=request.group,
                who=who,
                generation=generation,
                protocol_type=request.protocol_type,
                protocol=request.protocol,
                assignments=tuple((a.member_id, a.assignment) for a in request.assignments),
            )
        )
        self._check(request.group, synced.outcome)
        return pb.SyncGroupResponse(assignment=synced.assignment)

    @guarded
    async def Heartbeat(self, request: pb.HeartbeatRequest, _context: Context) -> pb.HeartbeatResponse:
        check_group(request.group)
        who, generation = member_of(request.member)
        outcome = self._members.heartbeat(request.group, who, generation)
        if outcome is not Outcome.REBALANCING:
            self._check(request.group, outcome)
        return pb.HeartbeatResponse(rebalancing=outcome is Outcome.REBALANCING)

    @guarded
    async def LeaveGroup(self, request: pb.LeaveGroupRequest, _context: Context) -> pb.LeaveGroupResponse:
        check_group(request.group)
        who = Identity(member_id=request.member_id, instance_id=request.instance_id)
        (outcome,) = await self._members.leave(request.group, [who])
        self._check(request.group, outcome)
        return pb.LeaveGroupResponse()

    def _check(self, group: str, outcome: Outcome) -> None:
        """Raises the error of an outcome that is none of success. A coordinator that has moved is named."""
        if outcome is Outcome.OK:
            return
        code = OUTCOME_ERRORS[outcome]
        if code in (ErrorCode.NOT_COORDINATOR, ErrorCode.NODE_NOT_READY) and (error := self._groups.refuse(group)):
            raise error
        raise SmqError(code, f"group {group!r}: {outcome.value}")


def _to_pb(joined: Joined) -> pb.JoinGroupResponse:
    return pb.JoinGroupResponse(
        member_id=joined.member_id,
        generation=joined.generation,
        protocol=joined.protocol,
        leader=joined.leader,
        skip_assignment=joined.skip_assignment,
        members=[
            pb.JoinedMember(member_id=member_id, instance_id=instance_id, metadata=metadata)
            for member_id, instance_id, metadata in joined.members
        ],
    )
