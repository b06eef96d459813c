"""One hot stream of requests for offsets without records to one node: callers that are due share a message.

Owns the gRPC stream, its two tasks, and which answer belongs to which caller. There is no timer on the way out: the
requests of one turn of the event loop leave together, and so do those that come while a message is being written. It
must never retry: every request ends with an answer, or with the error that broke the stream. Only `offset_assigner`
imports it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, Literal, Protocol, TypeVar

import grpc
from grpc import aio

from smq.clients.channels import NodeStubs
from smq.clients.errors import error_from_detail, error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError

# A message of this many requests of this size has 1 MiB, which every node takes: one that is too large would break the
# stream for all callers. A topic's name has at most 249 characters.
MESSAGE_REQUESTS_MAX: Final = 500
REQUEST_BYTES_MAX: Final = 2 << 10
SWEEP_S: Final = 0.1  # overdue requests are looked for this often: a node that answers does so by its own deadline


class Answer(Protocol):
    """What answers of both kinds have."""

    @property
    def correlation_id(self) -> int: ...

    @property
    def error(self) -> pb.ErrorDetail: ...

    def HasField(self, field_name: Literal["error"]) -> bool: ...


class Request(Protocol):
    """What requests of both kinds have."""

    correlation_id: int

    def ByteSize(self) -> int: ...


R = TypeVar("R", bound=Request)
A = TypeVar("A", bound=Answer)
MessageIn = TypeVar("MessageIn")
MessageOut = TypeVar("MessageOut")


class Kind(ABC, Generic[R, A, MessageOut, MessageIn]):
    """What differs between the two calls."""

    @abstractmethod
    def open(self, node: NodeStubs) -> "aio.StreamStreamCall[MessageOut, MessageIn]": ...

    @abstractmethod
    def message(self, requests: Sequence[R]) -> MessageOut: ...

    @abstractmethod
    def answers(self, message: MessageIn) -> Iterable[A]: ...


class Assignments(Kind[pb.Assignment, pb.Assigned, pb.AssignOffsetsRequest, pb.AssignOffsetsResponse]):
    def open(self, node: NodeStubs) -> "aio.StreamStreamCall[pb.AssignOffsetsRequest, pb.AssignOffsetsResponse]":
        return node.broker.AssignOffsets(None)

    def message(self, requests: Sequence[pb.Assignment]) -> pb.AssignOffsetsRequest:
        return pb.AssignOffsetsRequest(assignments=requests)

    def answers(self, message: pb.AssignOffsetsResponse) -> Iterable[pb.Assigned]:
        return message.assigned


class Advances(Kind[pb.Advance, pb.Advanced, pb.AdvanceHighWaterMarkRequest, pb.AdvanceHighWaterMarkResponse]):
    def open(
        self, node: NodeStubs
    ) -> "aio.StreamStreamCall[pb.AdvanceHighWaterMarkRequest, pb.AdvanceHighWaterMarkResponse]":
        return node.broker.AdvanceHighWaterMark(None)

    def message(self, requests: Sequence[pb.Advance]) -> pb.AdvanceHighWaterMarkRequest:
        return pb.AdvanceHighWaterMarkRequest(advances=requests)

    def answers(self, message: pb.AdvanceHighWaterMarkResponse) -> Iterable[pb.Advanced]:
        return message.advanced


class OffsetStream(Generic[R, A, MessageOut, MessageIn]):
    """Used once: a broken stream is discarded. Its queues are bounded by the callers."""

    def __init__(self, address: str, node: NodeStubs, kind: Kind[R, A, MessageOut, MessageIn]) -> None:
        self.address = address
        self.is_broken = False
        self.messages_sent = 0
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._due: deque[R] = deque()
        self._unanswered: dict[int, tuple[asyncio.Future[A], float]] = {}  # by correlation id: and its deadline
        self._next_id = 0
        self._wakeup = asyncio.Event()
        self._sweep: asyncio.TimerHandle | None = None
        self._call = kind.open(node)
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def submit(self, request: R, timeout_s: float) -> "asyncio.Future[A]":
        """The future of its answer. It fails with TIMED_OUT if the node gives none in time. INVALID_REQUEST."""
        if request.ByteSize() > REQUEST_BYTES_MAX:
            reason = f"the request has {request.ByteSize()} bytes, at most {REQUEST_BYTES_MAX} are possible"
            raise SmqError(ErrorCode.INVALID_REQUEST, reason)
        self._next_id += 1
        request.correlation_id = self._next_id
        future: asyncio.Future[A] = self._loop.create_future()
        self._unanswered[self._next_id] = (future, self._loop.time() + timeout_s)
        self._due.append(request)
        self._wakeup.set()
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._end_overdue)
        return future

    async def close(self) -> None:
        """Ends the stream and its tasks."""
        self._break(lambda: SmqError(ErrorCode.TIMED_OUT, "the client was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _break(self, error: Callable[[], SmqError]) -> None:
        """Every unanswered request fails with an error of its own: raising one adds to its traceback."""
        if self.is_broken:
            return
        self.is_broken = True
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        if self._sweep is not None:
            self._sweep.cancel()
        unanswered, self._unanswered = self._unanswered, {}
        self._due.clear()
        for future, _ in unanswered.values():
            if not future.done():
                future.set_exception(error())

    def _end_overdue(self) -> None:
        now = self._loop.time()
        for number, (future, deadline) in list(self._unanswered.items()):
            if deadline <= now:
                del self._unanswered[number]
                if not future.done():
                    error = SmqError(ErrorCode.TIMED_OUT, f"the node at {self.address} gave no answer in time")
                    future.set_exception(error)
        self._sweep = self._loop.call_later(SWEEP_S, self._end_overdue) if self._unanswered else None

    async def _write(self) -> None:
        try:
            while True:
                while self._due:
                    requests = [self._due.popleft() for _ in range(min(len(self._due), MESSAGE_REQUESTS_MAX))]
                    self.messages_sent += 1
                    await self._call.write(self._kind.message(requests))
                self._wakeup.clear()
                await self._wakeup.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended: the reading task learns the reason
        except (ValueError, RuntimeError, aio.UsageError) as e:
            reason = f"the stream to {self.address} cannot be written: {e}"
            self._break(lambda: SmqError(ErrorCode.TIMED_OUT, reason))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for answer in self._kind.answers(message):
                    self._settle(answer)
        except grpc.RpcError as e:
            failure = e
            self._break(lambda: error_from_rpc(failure, self.address))
        self._break(lambda: SmqError(ErrorCode.TIMED_OUT, f"the node at {self.address} ended the stream"))

    def _settle(self, answer: A) -> None:
        found = self._unanswered.pop(answer.correlation_id, None)
        if found is None or found[0].done():
            return  # overdue, or its caller was cancelled
        if answer.HasField("error"):
            found[0].set_exception(error_from_detail(answer.error))
        else:
            found[0].set_result(answer)
