"""The group part of the Admin service: list, describe, delete.

Owns no state: each answer is read from the replicated state after a barrier. `grpc.admin` extends it.
"""

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.view import PHASES, assigned_partitions, positions
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, request_id_of
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.lookup import find_group, known_ranges
from smq.coordinator.service.turns import Turns
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.state import GroupState
from smq.replication.api import NodeApi


class GroupAdmin(Service, smq_pb2_grpc.AdminServicer):
    def __init__(self, node: NodeApi, groups: GroupCoordinator) -> None:
        self.audience = Audience(node=node)
        self._calls = NodeCalls(node)
        self._groups = groups

    @guarded
    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        await self._calls.barrier(deadline_ms(request.timeout_ms, context))
        groups = self._calls.node.state.groups
        return pb.ListGroupsResponse(groups=[_summary(group) for _, group in sorted(groups.items())])

    @guarded
    async def DescribeGroup(self, request: pb.DescribeGroupRequest, context: Context) -> pb.DescribeGroupResponse:
        timeout_ms = deadline_ms(request.timeout_ms, context)
        group = await find_group(self._calls, request.group, timeout_ms)
        state = self._calls.node.state
        slot = coordinator_of(state, group.name)
        out = pb.DescribeGroupResponse(
            group=_summary(group), protocol=group.protocol, coordinator=slot.node if slot.node else None
        )
        for m in group.members.values():
            parts = sorted(assigned_partitions(group, m.assignment))
            out.members.append(
                pb.GroupMemberInfo(
                    member_id=m.member.member_id,
                    instance_id=m.member.instance_id or None,
                    client_id=m.member.client_id,
                    client_host=m.member.client_host,
                    session_timeout_ms=m.member.session_timeout_ms,
                    assignment=m.assignment,
                    partitions=[pb.TopicPartition(topic=topic, partition=index) for topic, index in parts],
                )
            )
        places = [at async for at in Turns().over(positions(state, group))]
        # The ends are asked for last, so that none is older than what is compared with it.
        ends = await known_ranges(self._calls, [(at.topic, at.part.index) for at in places], timeout_ms)
        async for at in Turns().over(places):
            committed, end = at.committed, ends.get((at.topic, at.part.index))
            out.offsets.append(
                pb.GroupOffset(
                    topic=at.topic,
                    partition=at.part.index,
                    offset=committed.position if committed is not None else None,
                    log_start=end.log_start if end is not None else at.part.log_start,
                    hwm=end.hwm if end is not None else self._calls.node.known_hwm(at.part),
                    lag=at.lag_at(end.hwm) if end is not None else None,
                    end_unknown=end is None,
                    committed_ms=committed.committed_ms if committed is not None else 0,
                    metadata=committed.metadata if committed is not None else "",
                )
            )
        return out

    @guarded
    async def DeleteGroup(self, request: pb.DeleteGroupRequest, context: Context) -> pb.DeleteGroupResponse:
        request_id, timeout_ms = request_id_of(request.request_id), deadline_ms(request.timeout_ms, context)
        await self._calls.change(
            lambda done: self._groups.delete_group(request.group, request_id, timeout_ms, done), timeout_ms
        )
        return pb.DeleteGroupResponse()


def _summary(group: GroupState) -> pb.GroupSummary:
    return pb.GroupSummary(
        group=group.name,
        state=PHASES[group.phase],
        protocol_type=group.protocol_type,
        members=len(group.members),
        generation=group.generation,
    )
