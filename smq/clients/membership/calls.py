"""One member's calls to its group's coordinator.

Owns the requests, how long each waits, and where the coordinator was last found. What the coordinator refuses is not
repeated here: `member` decides. It must never keep what a member is. Only `member` imports it.
"""

from collections.abc import Mapping
from typing import Final

import grpc

from smq.clients.channels import NodeStubs
from smq.clients.cluster import CallFn, ClusterClient, T
from smq.clients.errors import build, error_from_rpc
from smq.clients.membership.options import MemberSettings
from smq.clients.membership.protocol import PROTOCOL_TYPE
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError

CLIENT_ID: Final = "smq-python"
CALL_SHARES: Final = 3  # attempts within one session timeout: a node that hangs does not cost a member its session
RETRY_MS: Final = 5_000.0  # of a join or a sync; then `member` learns of it, and asks again
WAIT_GRACE_S: Final = 5.0  # beyond the rebalance timeout, by which the coordinator has answered


class GroupCalls:
    """Every method raises SmqError; after one that is retriable, the coordinator may be found a while later."""

    def __init__(self, cluster: ClusterClient, group: str, settings: MemberSettings) -> None:
        self._cluster = cluster
        self._group = group
        self._settings = settings
        self._coordinator: str | None = None

    async def join(self, member_id: str, protocols: Mapping[str, bytes]) -> pb.JoinGroupResponse:
        """Without a generation if the member only has an id now. Waits for the other members."""
        request = build(
            pb.JoinGroupRequest,
            group=self._group,
            member_id=member_id,
            instance_id=self._settings.instance_id,
            client_id=CLIENT_ID,
            session_timeout_ms=self._settings.session_timeout_ms,
            rebalance_timeout_ms=self._settings.max_poll_interval_ms,
            protocol_type=PROTOCOL_TYPE,
            protocols=[pb.GroupProtocol(name=name, metadata=data) for name, data in protocols.items()],
        )

        async def run(node: NodeStubs, _node_ms: int, _call_s: float) -> pb.JoinGroupResponse:
            return await node.groups.JoinGroup(request, timeout=self._wait_s)

        return await self._call(run, RETRY_MS)

    async def sync(self, member: pb.GroupMember, protocol: str, assignments: Mapping[str, bytes]) -> bytes:
        """The member's assignment. Waits for the leader's."""
        request = build(
            pb.SyncGroupRequest,
            group=self._group,
            member=member,
            protocol_type=PROTOCOL_TYPE,
            protocol=protocol,
            assignments=[pb.MemberAssignment(member_id=m, assignment=data) for m, data in assignments.items()],
        )

        async def run(node: NodeStubs, _node_ms: int, _call_s: float) -> pb.SyncGroupResponse:
            return await node.groups.SyncGroup(request, timeout=self._wait_s)

        return (await self._call(run, RETRY_MS)).assignment

    @property
    def _wait_s(self) -> float:
        """Of a join or a sync, which wait for other members. The channel's keepalive notices a node that hangs."""
        return self._settings.max_poll_interval_ms / 1000.0 + WAIT_GRACE_S

    async def heartbeat(self, member: pb.GroupMember) -> bool:
        """Whether the group rebalances."""
        request = build(pb.HeartbeatRequest, group=self._group, member=member)

        async def run(node: NodeStubs, _node_ms: int, call_s: float) -> pb.HeartbeatResponse:
            return await node.groups.Heartbeat(request, timeout=call_s)

        return (await self._call(run, self._settings.session_timeout_ms)).rebalancing

    async def leave(self, member_id: str, timeout_ms: float) -> None:
        request = build(pb.LeaveGroupRequest, group=self._group, member_id=member_id)

        async def run(node: NodeStubs, _node_ms: int, call_s: float) -> pb.LeaveGroupResponse:
            return await node.groups.LeaveGroup(request, timeout=call_s)

        await self._call(run, timeout_ms)

    async def _call(self, run: CallFn[T], timeout_ms: float) -> T:
        async def tracked(node: NodeStubs, node_ms: int, call_s: float) -> T | SmqError:
            self._coordinator = None
            try:
                answer = await run(node, node_ms, call_s)
            except grpc.RpcError as e:
                error = error_from_rpc(e, node.address)
                if error.code is not ErrorCode.REBALANCE_IN_PROGRESS:
                    raise error from e
                return error  # retriable, but not by the same request
            self._coordinator = node.address
            return answer

        answer = await self._cluster.call(
            tracked, timeout_ms=timeout_ms, candidates=self._candidates, attempt_ms=timeout_ms / CALL_SHARES
        )
        if isinstance(answer, SmqError):
            raise answer
        return answer

    def _candidates(self) -> list[str]:
        return [self._coordinator] if self._coordinator is not None else self._cluster.any_node()
