"""One PublishRecord stream: many requests in flight, each answered when its own batch is done.

Owns pipelining and backpressure of one stream: beyond its bounds the stream is not read, so HTTP/2 slows the client
down. A bad request gets its own error and affects no other. It must never wait for one batch before it reads the next.
`grpc.agent` alone imports it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable
from functools import partial
from typing import Final

import grpc

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.gate import Caller
from smq.coordinator.grpc.open_streams import PublishSession, PublishSessions
from smq.coordinator.grpc.required import check_fields, check_required
from smq.coordinator.limits import (
    PUBLISH_DISK_POLL_MS,
    PUBLISH_DISK_QUEUE_BYTES_MAX,
    PUBLISH_INFLIGHT_BYTES_PER_STREAM_MAX,
    PUBLISH_INFLIGHT_PER_STREAM_MAX,
)
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, overloaded, release_all, try_acquire_all
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import find_partition
from smq.coordinator.service.request_checks import timeout_of
from smq.coordinator.service.tracing import note_parent
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.acls import Operation, Resource
from smq.raft_state.ids import ProducerId
from smq.records import INT32_MAX, NewRecord, encode_batch, is_transactional, parse_header
from smq.replication.api import Acks, Produced, ProduceRequest

_ACKS: Final = {pb.ACKS_ALL: Acks.ALL, pb.ACKS_LEADER: Acks.LEADER, pb.ACKS_NONE: Acks.NONE}

Context = grpc.aio.ServicerContext[pb.PublishRecordRequest, pb.PublishRecordResponse]


class PublishStream:
    """`run` returns when the client has sent its last request and every one is answered."""

    def __init__(
        self,
        calls: NodeCalls,
        sessions: PublishSessions,
        node_budget: ByteBudget,
        wall_ms: Callable[[], int],
        context: Context,
        *,
        request_bytes_max: int,
        audience: Audience,
        is_mirror: bool,
        caller: Caller,
    ) -> None:
        self._audience = audience
        self._is_mirror = is_mirror
        self._caller = caller
        self._request_bytes_max = request_bytes_max
        self._calls = calls
        self._sessions = sessions
        self._budgets = (ByteBudget(PUBLISH_INFLIGHT_BYTES_PER_STREAM_MAX), node_budget)
        self._slots = asyncio.Semaphore(PUBLISH_INFLIGHT_PER_STREAM_MAX)  # from reading a request to writing its answer
        self._wall_ms = wall_ms
        self._context = context
        self._session_id = ""
        self._topic = ""
        self._answers: deque[pb.PublishRecordResponse] = deque()  # bounded by the slots
        self._unanswered = 0
        self._is_closing = False
        self._wake = asyncio.Event()

    async def run(self, requests: AsyncIterable[pb.PublishRecordRequest]) -> None:
        note_parent(self._context.invocation_metadata())
        writer = asyncio.create_task(self._write_answers())
        try:
            async for request in requests:
                await self._slots.acquire()
                self._unanswered += 1
                await self._take(request)
            self._is_closing = True
            self._wake.set()
            await writer
        finally:
            writer.cancel()

    async def _take(self, request: pb.PublishRecordRequest) -> None:
        try:
            check_required(request)
            self._check_size(request)
            topic, session = self._target(request)
            self._caller.require(Operation.WRITE, Resource.TOPIC, topic)
            if self._is_mirror:  # it also says where the records lie
                self._caller.require(Operation.ALTER, Resource.TOPIC, topic)
            timeout_ms = timeout_of(request.timeout_ms)
            acks = _ACKS.get(request.acks)
            if acks is None:
                raise SmqError(ErrorCode.INVALID_REQUEST, f"acks {request.acks} is unknown")
            batch = self._batch(request, session)
            if self._is_mirror and (acks is not Acks.ALL or not request.batch):
                raise SmqError(ErrorCode.INVALID_REQUEST, "a mirror sends batches, and waits for a majority: ACKS_ALL")
            if acks is not Acks.ALL and is_transactional(batch):
                message = "a batch of a transaction needs ACKS_ALL: the decision is about what a majority holds"
                raise SmqError(ErrorCode.INVALID_REQUEST, message)
            self._check_transaction(batch)
            try:
                await find_partition(self._calls, topic, request.partition, timeout_ms)
                await self._admit(len(batch), timeout_ms)
            except SmqError:
                if acks is not Acks.NONE and not self._is_mirror:
                    self._calls.node.expect_again(topic, request.partition, batch)
                raise
        except SmqError as e:
            self._answer_error(request.correlation_id, request.partition, e)
            return
        done = partial(self._on_produced, request.correlation_id, request.partition, len(batch))
        try:
            wanted = ProduceRequest(
                topic,
                request.partition,
                batch,
                acks,
                timeout_ms,
                done,
                names_bad_records=acks is not Acks.NONE and not self._is_mirror,
                is_mirrored=self._is_mirror,
            )
            self._calls.node.produce(wanted)
        except BaseException:  # `done`, which gives the bytes back, will never be called
            release_all(self._budgets, len(batch))
            raise

    def _check_transaction(self, batch: bytes) -> None:
        """A transactional batch of a user needs the right to the id of its transaction, which it does not name."""
        if self._caller.may_all or self._is_mirror or not is_transactional(batch):
            return
        transaction = self._calls.node.state.transaction_of(ProducerId(parse_header(batch).producer_id))
        if transaction is not None:  # otherwise the replica refuses it
            self._caller.require(Operation.WRITE, Resource.TRANSACTIONAL_ID, transaction.transactional_id)

    def _check_size(self, request: pb.PublishRecordRequest) -> None:
        size = request.ByteSize()
        if size > self._request_bytes_max:
            limit = self._request_bytes_max
            reason = f"the request has {size} bytes, and a node takes {limit} by gRPC: send it by Kafka's protocol"
            raise SmqError(ErrorCode.BATCH_TOO_LARGE, reason)

    # ------------------------------------------------------------------------------------------- backpressure
    async def _admit(self, size: int, timeout_ms: int) -> None:
        """Waits until the node may take `size` more bytes; the whole stream waits with it. OVERLOADED at the deadline
        of this request."""
        if not self._is_disk_behind() and try_acquire_all(self._budgets, size):
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while self._is_disk_behind():  # noqa: ASYNC110 - the disk does not signal that it has caught up
                    await asyncio.sleep(PUBLISH_DISK_POLL_MS / 1000)
                await acquire_all(self._budgets, size)
        except TimeoutError:
            raise overloaded(f"the node had no room for the request within {timeout_ms} ms") from None

    def _is_disk_behind(self) -> bool:
        return self._calls.node.queued_bytes() > PUBLISH_DISK_QUEUE_BYTES_MAX

    # ----------------------------------------------------------------------------------------------- requests
    def _target(self, request: pb.PublishRecordRequest) -> tuple[str, PublishSession | None]:
        """The topic and the session, if there is one. Both stay in force for the requests that follow."""
        if request.topic:
            self._topic, self._session_id = request.topic, ""
        elif request.session_id:
            self._topic, self._session_id = "", request.session_id
        session = self._sessions.get(self._session_id, self._caller.user) if self._session_id else None
        topic = session.topic if session is not None else self._topic
        if not topic:
            raise SmqError(
                ErrorCode.INVALID_REQUEST, "the first request of a stream must name a session_id, or a topic"
            )
        return topic, session

    def _batch(self, request: pb.PublishRecordRequest, session: PublishSession | None) -> bytes:
        kind = request.WhichOneof("payload")
        if kind == "batch":
            return request.batch
        if kind is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "the request has neither batch nor records")
        if session is None:
            raise SmqError(ErrorCode.INVALID_REQUEST, "records need a session_id; without one send a batch")
        check_fields(request, ("base_sequence",))
        if not 0 <= request.base_sequence <= INT32_MAX:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"base_sequence is {request.base_sequence}: it must be >= 0")
        if not request.records.records:
            raise SmqError(ErrorCode.INVALID_BATCH, "a batch holds at least one record")
        now_ms = self._wall_ms()
        try:
            return encode_batch(
                (_new_record(r, now_ms) for r in request.records.records),
                producer_id=session.producer_id,
                producer_epoch=session.producer_epoch,
                base_sequence=request.base_sequence,
            )
        except (ValueError, TypeError, OverflowError) as e:
            raise SmqError(ErrorCode.INVALID_BATCH, f"the records cannot be encoded: {e}") from e

    # ----------------------------------------------------------------------------------------------- answers
    def _on_produced(self, correlation_id: int, partition: int, size: int, result: Produced | SmqError) -> None:
        release_all(self._budgets, size)
        if isinstance(result, SmqError):
            self._answer_error(correlation_id, partition, result)
            return
        self._answer(
            pb.PublishRecordResponse(
                correlation_id=correlation_id,
                partition=partition,
                base_offset=result.base_offset,
                last_offset=result.last_offset,
                ts_ns=result.ts_ns,
                duplicate=result.duplicate,
            )
        )

    def _answer_error(self, correlation_id: int, partition: int, error: SmqError) -> None:
        self._answer(
            pb.PublishRecordResponse(
                correlation_id=correlation_id,
                partition=partition,
                base_offset=-1,
                last_offset=-1,
                ts_ns=-1,
                error=detail_from_error(self._audience.told(error)),
            )
        )

    def _answer(self, response: pb.PublishRecordResponse) -> None:
        self._answers.append(response)
        self._wake.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                await self._context.write(self._answers.popleft())
                self._unanswered -= 1
                self._slots.release()
            if self._is_closing and not self._unanswered:
                return
            self._wake.clear()
            await self._wake.wait()


def _new_record(record: pb.NewRecord, now_ms: int) -> NewRecord:
    return NewRecord(
        key=record.key if record.HasField("key") else None,
        value=record.value if record.HasField("value") else None,
        timestamp_ms=record.timestamp_ms if record.HasField("timestamp_ms") else now_ms,
        headers=[(h.key, h.value if h.HasField("value") else None) for h in record.headers],
    )
