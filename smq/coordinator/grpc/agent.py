"""The Agent service: publishing sessions, PublishRecord and SubscribeRecord.

Owns the registries of sessions and the node-wide publishing budget. The streams themselves live in `grpc.publish` and
`grpc.subscribe`. Only the composition root imports it.
"""

import time
from collections.abc import AsyncIterable
from functools import partial

from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.grpc.authorization import may_subscribe
from smq.coordinator.grpc.open_streams import PublishSession, PublishSessions, StreamCounts, Subscriptions
from smq.coordinator.grpc.publish import PublishStream
from smq.coordinator.grpc.record_chunks import Reading
from smq.coordinator.grpc.required import check_fields
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, request_id_of
from smq.coordinator.grpc.subscribe import SubscribeStream
from smq.coordinator.limits import PUBLISH_INFLIGHT_BYTES_PER_NODE_MAX, PUBLISH_STREAMS_PER_CONNECTION_MAX
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.byte_budget import ByteBudget
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import find_topic
from smq.coordinator.service.reader_memory import ReaderMemory
from smq.raft_state.commands import AllocateProducerId
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.topic_config import batch_rules
from smq.replication.api import NodeApi


class AgentService(Service, smq_pb2_grpc.AgentServicer):
    def __init__(self, node: NodeApi, *, request_bytes_max: int) -> None:
        self.audience = Audience(node=node)
        self._request_bytes_max = request_bytes_max
        self._streams = StreamCounts("publishing", PUBLISH_STREAMS_PER_CONNECTION_MAX)
        self._calls = NodeCalls(node)
        self._sessions = PublishSessions()
        self._subscriptions = Subscriptions()
        self._memory = ReaderMemory[Reading]()
        self._budget = ByteBudget(PUBLISH_INFLIGHT_BYTES_PER_NODE_MAX)

    @guarded
    async def StartPublishSession(
        self, request: pb.StartPublishSessionRequest, context: Context
    ) -> pb.StartPublishSessionResponse:
        timeout_ms = deadline_ms(0, context)
        topic = await find_topic(self._calls, request.topic, timeout_ms)
        user = self.gate.caller(context).user
        session = self._sessions.reserve(request.session_id, request.request_id, user)
        if session is None:
            try:
                session = await self._open(request, user, timeout_ms)
                self._sessions.open(session)
            except BaseException:  # also if cancelled: the id stays reserved until it is released
                self._sessions.release(request.session_id)
                raise
        return pb.StartPublishSessionResponse(
            producer_id=session.producer_id,
            producer_epoch=session.producer_epoch,
            topic_id=topic.topic_id,
            partition_count=len(topic.partitions),
            batch_bytes_max=batch_rules(topic.config).bytes_max,
        )

    async def _open(self, request: pb.StartPublishSessionRequest, user: str, timeout_ms: int) -> PublishSession:
        request_id = request_id_of(request.request_id)
        if request.resume:
            check_fields(request, ("producer_id", "producer_epoch"))
        command = (
            AllocateProducerId(
                request_id=request_id,
                producer_id=ProducerId(request.producer_id),
                producer_epoch=ProducerEpoch(request.producer_epoch),
            )
            if request.resume
            else AllocateProducerId(request_id=request_id)
        )
        reply = await self._calls.propose(command, timeout_ms)
        if not isinstance(reply, ProducerIdAllocated):
            raise SmqError(ErrorCode.INTERNAL, f"unexpected reply {type(reply).__name__}")
        return PublishSession(
            session_id=request.session_id,
            user=user,
            topic=request.topic,
            producer_id=reply.producer_id,
            producer_epoch=reply.producer_epoch,
            request_id=request.request_id,
        )

    @guarded
    async def ClosePublishSession(
        self, request: pb.ClosePublishSessionRequest, context: Context
    ) -> pb.ClosePublishSessionResponse:
        self._sessions.close(request.session_id, self.gate.caller(context).user)
        return pb.ClosePublishSessionResponse()

    @guarded
    async def PublishRecord(  # type: ignore[override] # a coroutine that writes to the context, as grpc.aio allows
        self, request: AsyncIterable[pb.PublishRecordRequest], context: Context
    ) -> None:
        await self._publish(request, context, is_mirror=False)

    @guarded
    async def MirrorRecord(  # type: ignore[override] # as above
        self, request: AsyncIterable[pb.PublishRecordRequest], context: Context
    ) -> None:
        await self._publish(request, context, is_mirror=True)

    async def _publish(
        self, requests: AsyncIterable[pb.PublishRecordRequest], context: Context, *, is_mirror: bool
    ) -> None:
        stream = PublishStream(
            self._calls,
            self._sessions,
            self._budget,
            _wall_ms,
            context,
            request_bytes_max=self._request_bytes_max,
            audience=self.audience,
            is_mirror=is_mirror,
            caller=self.gate.caller(context),
        )
        with self._streams.one_more(context.peer()):
            await stream.run(requests)

    @guarded
    async def SubscribeRecord(  # type: ignore[override] # as above
        self, request: AsyncIterable[pb.SubscribeRecordRequest], context: Context
    ) -> None:
        requests = aiter(request)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "init":
            raise SmqError(ErrorCode.INVALID_REQUEST, "the first message of a subscription must be init")
        caller, check = self.gate.caller(context), partial(may_subscribe, self.gate.caller(context), first.init)
        check()
        self._subscriptions.open(first.init.subscription_id)
        try:
            with self.gate.watched(caller, check, is_sure=True):
                await SubscribeStream(self._calls, first.init, context, self._memory).run(requests)
        finally:
            self._subscriptions.close(first.init.subscription_id)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
