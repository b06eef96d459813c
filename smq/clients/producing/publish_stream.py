"""One PublishRecord stream to one node: sends batches, receives answers, and returns unanswered batches if it breaks.

Owns the gRPC stream and its two tasks. It must never decide about retries: every submitted batch is handed back
exactly once, with an answer or with the error that broke the stream. Only the publisher imports it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import grpc
from grpc import aio

from smq.clients.channels import NodeStubs
from smq.clients.errors import error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.clients.producing.partition_queue import Batch
from smq.raft_state.errors import ErrorCode, SmqError

ANSWER_GRACE_MS: Final = 2_000.0  # after the request's timeout: a healthy node has answered by then

AnswerFn = Callable[[Batch, pb.PublishRecordResponse], None]
BrokenFn = Callable[["PublishStream", list[tuple[Batch, SmqError]]], None]


class PublishStream:
    """Used once: a broken stream is discarded. Its queues are bounded by the batches in flight."""

    def __init__(
        self, address: str, node: NodeStubs, acks: "pb.Acks.ValueType", on_answer: AnswerFn, on_broken: BrokenFn
    ) -> None:
        self.address = address
        self.is_broken = False
        self._node = node
        self._acks = acks
        self._on_answer = on_answer
        self._on_broken = on_broken
        self._unwritten: deque[pb.PublishRecordRequest] = deque()
        self._unanswered: dict[int, tuple[Batch, float, float]] = {}  # by correlation id: batch, sent at, deadline
        self._correlation_id = 0
        self._call: aio.StreamStreamCall[pb.PublishRecordRequest, pb.PublishRecordResponse] | None = None
        self._wakeup = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run())]

    def submit(self, batch: Batch, timeout_ms: float, now_ms: float) -> None:
        self._correlation_id += 1
        request = pb.PublishRecordRequest(
            correlation_id=self._correlation_id,
            topic=batch.topic,
            partition=batch.partition,
            acks=self._acks,
            timeout_ms=max(int(timeout_ms), 1),
            batch=batch.data,
        )
        self._unanswered[self._correlation_id] = (batch, now_ms, now_ms + timeout_ms + ANSWER_GRACE_MS)
        self._unwritten.append(request)
        self._wakeup.set()

    def deadline_ms(self) -> float | None:
        """When the oldest unanswered batch is overdue."""
        for _, _, deadline in self._unanswered.values():
            return deadline
        return None

    def oldest_sent_ms(self) -> float | None:
        """When the oldest unanswered batch was sent."""
        for _, sent_ms, _ in self._unanswered.values():
            return sent_ms
        return None

    def unanswered(self) -> list[Batch]:
        return [batch for batch, _, _ in self._unanswered.values()]

    def give_up(self, error: SmqError) -> None:
        """Breaks the stream: every unanswered batch is returned with `error`, or with an error of its own."""
        if self.is_broken:
            return
        self.is_broken = True
        for task in self._tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        batches = self.unanswered()
        self._unanswered.clear()
        self._unwritten.clear()
        self._on_broken(self, _assign_errors(batches, error))

    async def close(self) -> None:
        """Ends the stream and its tasks."""
        self.give_up(SmqError(ErrorCode.TIMED_OUT, "the producer was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Opens the stream and writes; a second task reads."""
        try:
            await self._node.log_in()
            self._call = self._node.agent.PublishRecord(None)
            self._tasks.append(asyncio.create_task(self._read(self._call)))
            while True:
                while self._unwritten:
                    await self._call.write(self._unwritten.popleft())
                self._wakeup.clear()
                await self._wakeup.wait()
        except (grpc.RpcError, asyncio.InvalidStateError) as e:
            if self._call is None and isinstance(e, grpc.RpcError):
                self.give_up(error_from_rpc(e, self.address))
            # otherwise the call has ended: the reading task learns the reason and gives up
        except SmqError as e:  # of the login
            self.give_up(e)
        except (ValueError, RuntimeError, grpc.aio.UsageError) as e:
            self.give_up(SmqError(ErrorCode.TIMED_OUT, f"the stream to {self.address} cannot be written: {e}"))

    async def _read(self, call: "aio.StreamStreamCall[pb.PublishRecordRequest, pb.PublishRecordResponse]") -> None:
        error = SmqError(ErrorCode.TIMED_OUT, f"the node at {self.address} ended the stream")
        try:
            async for answer in call:
                found = self._unanswered.pop(answer.correlation_id, None)
                if found is not None:
                    self._on_answer(found[0], answer)
        except grpc.RpcError as e:
            error = error_from_rpc(e, self.address)
            if error.code is ErrorCode.LOGIN_NEEDED and self._node.token is not None:
                self._node.token.forget()
        self.give_up(error)


def _assign_errors(batches: list[Batch], error: SmqError) -> list[tuple[Batch, SmqError]]:
    """One message too large for gRPC breaks the stream for all: the largest batch is to blame, the rest may retry."""
    if error.code is not ErrorCode.LIMIT_EXCEEDED or not batches:
        return [(batch, error) for batch in batches]
    largest = max(batches, key=lambda b: len(b.data))
    where, size = f"{largest.topic}/{largest.partition}", len(largest.data)
    message = f"a batch of {size} bytes for {where} is more than a node takes by gRPC (8 MiB, or request_bytes_max)"
    too_large = SmqError(ErrorCode.BATCH_TOO_LARGE, message)
    bystander = SmqError(ErrorCode.TIMED_OUT, f"another batch broke the stream: {error.message}")
    return [(batch, too_large if batch is largest else bystander) for batch in batches]
