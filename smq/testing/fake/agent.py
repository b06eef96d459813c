"""The fake cluster's agent service: publishing.

Owns how a batch is answered: refused, appended and committed, or lost with its leader. `runner` registers it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import AgentServicer
from smq.raft_state.errors import ErrorCode, SmqError
from smq.testing.fake.cluster import BATCH_BYTES_MAX, Context, FakeNode, answering
from smq.testing.fake.log import FakePartition, Stored


class Agent(AgentServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @answering
    async def StartPublishSession(self, request: pb.StartPublishSessionRequest) -> Message:
        cluster = self.node.cluster
        count = len(cluster.topics.get(request.topic, ()))
        if not count:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {request.topic!r}")

        def change() -> Message:
            cluster.next_producer_id += 1
            return pb.StartPublishSessionResponse(
                producer_id=cluster.next_producer_id, partition_count=count, batch_bytes_max=BATCH_BYTES_MAX
            )

        return cluster.once(request.request_id, "producer id", change)

    async def SubscribeRecord(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # stubs say iterator
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no client of ours subscribes")

    async def MirrorRecord(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # as above
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no client of ours mirrors")

    @answering
    async def ClosePublishSession(self, request: pb.ClosePublishSessionRequest) -> Message:
        return pb.ClosePublishSessionResponse()

    async def PublishRecord(  # type: ignore[override]  # the stubs say iterator
        self, requests: AsyncIterator[pb.PublishRecordRequest], context: Context
    ) -> None:
        topic, answers, writing = "", set(), asyncio.Lock()  # gRPC takes one message of a stream at a time
        async for request in requests:
            topic = request.topic or topic
            self.node.published.append(request)
            task = asyncio.create_task(self._answer(topic, request, context, writing))
            answers.add(task)
            task.add_done_callback(answers.discard)
            await asyncio.sleep(0)  # appended before the next is read
        await asyncio.gather(*answers)

    async def _answer(
        self, topic: str, request: pb.PublishRecordRequest, context: Context, writing: asyncio.Lock
    ) -> None:
        answer = pb.PublishRecordResponse(correlation_id=request.correlation_id, base_offset=-1)
        try:
            await self.node.before("PublishRecord", request)
            log = self.node.cluster.partition(topic, request.partition)
            if log.leader != self.node.number:
                raise self.node.cluster.not_leader(log)
            if len(request.batch) > BATCH_BYTES_MAX:
                raise SmqError(ErrorCode.BATCH_TOO_LARGE, f"{len(request.batch)} bytes")
            stored, answer.duplicate = log.append(request.batch)
            await self._committed(log, stored)
            answer.base_offset, answer.last_offset, answer.ts_ns = stored.base_offset, stored.end - 1, stored.ts_ns
        except SmqError as e:
            answer.error.CopyFrom(detail_from_error(e))
        async with writing:
            await context.write(answer)

    @staticmethod
    async def _committed(log: FakePartition, stored: Stored) -> None:
        log.settle()
        while log.hwm < stored.end:
            await log.changed.wait()
            if stored not in log.stored:
                raise SmqError(ErrorCode.APPEND_LOST, "truncated")
