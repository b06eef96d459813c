"""The group part of the Admin service: list, describe, delete a group or some of its offsets.

Owns no state: each answer is read from the replicated state after a barrier. `grpc.admin` extends it.
"""

import time
from functools import partial
from typing import Final

from smq.clients.lag import LagTotal, lags_by_member, total_of
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.groups.protocols import subscriptions
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, request_id_of
from smq.coordinator.limits import COMMIT_ITEMS_MAX
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_lag import PHASES, GroupPosition, Lag, assigned_partitions, lags_of, positions
from smq.coordinator.service.lookup import find_group, find_partition
from smq.coordinator.service.requests import check_count
from smq.coordinator.service.turns import Turns
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST
from smq.raft_state.state import GroupState
from smq.replication.api import NodeApi

DELETE_ATTEMPTS: Final = 3  # the members of a group seldom change twice within one call


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
        assigned = {
            m.member.member_id: sorted(assigned_partitions(group, m.assignment)) for m in group.members.values()
        }
        for m in group.members.values():
            out.members.append(
                pb.GroupMemberInfo(
                    member_id=m.member.member_id,
                    instance_id=m.member.instance_id or None,
                    client_id=m.member.client_id,
                    client_host=m.member.client_host,
                    session_timeout_ms=m.member.session_timeout_ms,
                    assignment=m.assignment,
                    partitions=[pb.TopicPartition(topic=t, partition=p) for t, p in assigned[m.member.member_id]],
                )
            )
        places = [at async for at in Turns().over(positions(state, group))]
        lags = await lags_of(self._calls, places, timeout_ms, with_sizes=request.with_sizes, now_ns=time.time_ns())
        async for at, lag in Turns().over(zip(places, lags, strict=True)):
            out.offsets.append(_offset(at, lag))
        figures = {(at.topic, int(at.part.index)): lag.figures for at, lag in zip(places, lags, strict=True)}
        by_member = lags_by_member(assigned, figures)
        for info in out.members:
            info.lag.CopyFrom(_total(by_member[info.member_id]))
        out.lag.CopyFrom(_total(total_of(figures.values())))
        return out

    @guarded
    async def DeleteGroup(self, request: pb.DeleteGroupRequest, context: Context) -> pb.DeleteGroupResponse:
        request_id, timeout_ms = request_id_of(request.request_id), deadline_ms(request.timeout_ms, context)
        await self._calls.change(
            lambda done: self._groups.delete_group(request.group, request_id, timeout_ms, done), timeout_ms
        )
        return pb.DeleteGroupResponse()

    @guarded
    async def DeleteOffsets(self, request: pb.DeleteOffsetsRequest, context: Context) -> pb.DeleteOffsetsResponse:
        check_count("partitions", request.partitions, COMMIT_ITEMS_MAX)
        request_id, timeout_ms = request_id_of(request.request_id), deadline_ms(request.timeout_ms, context)
        group = await find_group(self._calls, request.group, timeout_ms)
        pids = tuple(
            [(await find_partition(self._calls, p.topic, p.partition, timeout_ms)).pid for p in request.partitions]
        )
        for attempt in range(DELETE_ATTEMPTS):
            _check_not_subscribed(group, {p.topic for p in request.partitions})
            begin = partial(self._groups.delete_offsets, group.name, group.generation, pids, request_id, timeout_ms)
            try:
                await self._calls.change(begin, timeout_ms)
                return pb.DeleteOffsetsResponse()
            except SmqError as e:
                if e.code is not ErrorCode.ILLEGAL_GENERATION or attempt + 1 == DELETE_ATTEMPTS:
                    raise
            # The members have changed. The refusal is remembered under the id, so the next attempt has none.
            request_id, group = NO_REQUEST, await find_group(self._calls, request.group, timeout_ms)
        raise AssertionError("the last attempt returns or raises")


def _check_not_subscribed(group: GroupState, topics: set[str]) -> None:
    subscribed = subscriptions(group)
    if subscribed is None:
        message = f"group {group.name!r} has members that are no consumers: what they read is not known"
        raise SmqError(ErrorCode.GROUP_NOT_EMPTY, message)
    if still_read := sorted(topics & subscribed):
        names = ", ".join(repr(topic) for topic in still_read[:5])
        raise SmqError(ErrorCode.GROUP_SUBSCRIBED, f"members of group {group.name!r} subscribe to {names}")


def _offset(at: GroupPosition, lag: Lag) -> pb.GroupOffset:
    committed = at.committed
    return pb.GroupOffset(
        topic=at.topic,
        partition=at.part.index,
        offset=committed.position if committed is not None else None,
        log_start=lag.log_start,
        hwm=lag.end,
        lag=lag.offsets,
        end_unknown=not lag.is_end_known,
        committed_ms=committed.committed_ms if committed is not None else 0,
        metadata=committed.metadata if committed is not None else "",
        lag_records=lag.records,
        lag_bytes=lag.size_bytes,
        lag_ms=lag.age_ms,
    )


def _total(total: LagTotal) -> pb.GroupLag:
    return pb.GroupLag(
        lag=total.offsets.value,
        lag_records=total.records.value,
        lag_bytes=total.size_bytes.value,
        lag_ms=total.age_ms.value,
        lag_at_least=total.offsets.at_least,
    )


def _summary(group: GroupState) -> pb.GroupSummary:
    return pb.GroupSummary(
        group=group.name,
        state=PHASES[group.phase],
        protocol_type=group.protocol_type,
        members=len(group.members),
        generation=group.generation,
    )
