"""One stream of requests for offsets without records: many callers in one message, each answered when its own is done.

Owns the order of work on a stream of AssignOffsets or AdvanceHighWaterMark, and its backpressure: beyond its bounds the
stream is not read, so HTTP/2 slows the client down. A refused request gets its own error and affects no other. It must
never wait for one request before it begins the next. `grpc.broker` alone imports it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.gate import Caller
from smq.coordinator.grpc.required import check_required
from smq.coordinator.grpc.service import Context, remaining_ms, request_id_of
from smq.coordinator.limits import OFFSET_REQUESTS_PER_MESSAGE_MAX, OFFSET_REQUESTS_PER_STREAM_MAX
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.request_checks import check_count, timeout_of
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.acls import Operation, Resource
from smq.raft_state.ids import Offset
from smq.raft_state.replies import OffsetsAssigned
from smq.replication.api import DoneFn, NodeApi

M = TypeVar("M")  # a message with requests
R = TypeVar("R", pb.Assignment, pb.Advance)
T = TypeVar("T")  # the node's result
A = TypeVar("A")  # an answer to one request


class Kind(ABC, Generic[M, R, T, A]):
    """What differs between the two calls."""

    @abstractmethod
    def requests(self, message: M) -> Sequence[R]: ...

    @abstractmethod
    def begin(self, node: NodeApi, request: R, timeout_ms: int, done: DoneFn[T]) -> None:
        """SmqError if the request is refused immediately."""

    @abstractmethod
    def answer(self, correlation_id: int, result: T | SmqError) -> A: ...

    @abstractmethod
    def response(self, answers: list[A]) -> object:
        """The message with these answers."""


class Assignments(Kind[pb.AssignOffsetsRequest, pb.Assignment, OffsetsAssigned, pb.Assigned]):
    def requests(self, message: pb.AssignOffsetsRequest) -> Sequence[pb.Assignment]:
        return message.assignments

    def begin(self, node: NodeApi, request: pb.Assignment, timeout_ms: int, done: DoneFn[OffsetsAssigned]) -> None:
        node.assign_offsets(
            request.topic,
            request.partition,
            request.count,
            request_id=request_id_of(request.request_id),
            not_before=request.not_before if request.HasField("not_before") else None,
            timeout_ms=timeout_ms,
            done=done,
        )

    def answer(self, correlation_id: int, result: OffsetsAssigned | SmqError) -> pb.Assigned:
        if isinstance(result, SmqError):
            return pb.Assigned(
                correlation_id=correlation_id, base_offset=-1, last_offset=-1, error=detail_from_error(result)
            )
        return pb.Assigned(correlation_id=correlation_id, base_offset=result.base, last_offset=result.last)

    def response(self, answers: list[pb.Assigned]) -> pb.AssignOffsetsResponse:
        return pb.AssignOffsetsResponse(assigned=answers)


class Advances(Kind[pb.AdvanceHighWaterMarkRequest, pb.Advance, Offset, pb.Advanced]):
    def requests(self, message: pb.AdvanceHighWaterMarkRequest) -> Sequence[pb.Advance]:
        return message.advances

    def begin(self, node: NodeApi, request: pb.Advance, timeout_ms: int, done: DoneFn[Offset]) -> None:
        node.advance_external_hwm(request.topic, request.partition, request.offset, timeout_ms, done)

    def answer(self, correlation_id: int, result: Offset | SmqError) -> pb.Advanced:
        if isinstance(result, SmqError):
            return pb.Advanced(correlation_id=correlation_id, hwm=-1, error=detail_from_error(result))
        return pb.Advanced(correlation_id=correlation_id, hwm=result)

    def response(self, answers: list[pb.Advanced]) -> pb.AdvanceHighWaterMarkResponse:
        return pb.AdvanceHighWaterMarkResponse(advanced=answers)


class OffsetCalls(Generic[M, R, T, A]):
    """`run` returns when the client has sent its last message and every request is answered."""

    def __init__(self, audience: Audience, kind: Kind[M, R, T, A], context: Context, caller: Caller) -> None:
        self._audience = audience
        self._node = audience.node
        self._kind: Final[Kind[M, R, T, A]] = kind
        self._context = context
        self._caller = caller
        self._answers: list[A] = []  # bounded by the unanswered requests, which these still are
        self._unanswered = 0
        self._is_closing = False
        self._wake = asyncio.Event()  # for the writer
        self._room = asyncio.Event()  # for the reader

    async def run(self, messages: AsyncIterable[M]) -> None:
        writer = asyncio.create_task(self._write_answers())
        try:
            async for message in messages:
                requests = self._kind.requests(message)
                check_count("the message", requests, OFFSET_REQUESTS_PER_MESSAGE_MAX)
                while self._unanswered >= OFFSET_REQUESTS_PER_STREAM_MAX:
                    self._room.clear()
                    await self._room.wait()
                self._begin(requests)
            self._is_closing = True
            self._wake.set()
            await writer
        finally:
            writer.cancel()

    def _begin(self, requests: Sequence[R]) -> None:
        self._unanswered += len(requests)
        remaining = remaining_ms(self._context)
        for request in requests:
            done = partial(self._on_done, request.correlation_id)
            try:
                check_required(request)
                self._caller.require(Operation.WRITE, Resource.TOPIC, request.topic)
                self._kind.begin(self._node, request, timeout_of(request.timeout_ms, remaining), done)
            except SmqError as e:
                done(e.with_traceback(None))

    def _on_done(self, correlation_id: int, result: T | SmqError) -> None:
        if isinstance(result, SmqError):
            result = self._audience.told(result)
        self._answers.append(self._kind.answer(correlation_id, result))
        self._wake.set()

    async def _write_answers(self) -> None:
        while True:
            while self._answers:
                answers, self._answers = self._answers, []
                await self._context.write(self._kind.response(answers))
                self._unanswered -= len(answers)
                self._room.set()
            if self._is_closing and not self._unanswered:
                return
            self._wake.clear()
            await self._wake.wait()
