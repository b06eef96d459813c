"""One PublishRecord stream to one node: batches out, answers in, and what becomes of them when it breaks.

Owns the gRPC stream and its two tasks. It must never decide about retries: every batch handed in is handed back
exactly once, with an answer or with the error that broke the stream. Only the producer imports it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import grpc
from grpc import aio

from smq.clients.batch_queue import Batch
from smq.clients.channels import NodeStubs
from smq.clients.errors import error_from_rpc
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, SmqError

ANSWER_GRACE_MS: Final = 2_000.0  # past the request's own time-out a node that lives has answered; then it is given up

AnswerFn = Callable[[Batch, pb.PublishRecordResponse], None]
BrokenFn = Callable[["PublishStream", list[tuple[Batch, SmqError]]], None]


class PublishStream:
    """Has one life: once broken it is thrown away. Its queues are bounded by the batches in flight."""

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
        """When the batch was sent that has waited longest for its answer."""
        for _, sent_ms, _ in self._unanswered.values():
            return sent_ms
        return None

    def unanswered(self) -> list[Batch]:
        return [batch for batch, _, _ in self._unanswered.values()]

    def give_up(self, error: SmqError) -> None:
        """Breaks the stream: every unanswered batch goes back with `error`, or with what only it deserves."""
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
        self._on_broken(self, _shared_out(batches, error))

    async def close(self) -> None:
        """Ends the stream; afterwards no task of it runs."""
        self.give_up(SmqError(ErrorCode.TIMED_OUT, "the producer was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Opens the stream and writes; a second task reads."""
        try:
            self._call = self._node.agent.PublishRecord(None)
            self._tasks.append(asyncio.create_task(self._read(self._call)))
            while True:
                while self._unwritten:
                    await self._call.write(self._unwritten.popleft())
                self._wakeup.clear()
                await self._wakeup.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the call has ended: the reading task learns why and gives up
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
        self.give_up(error)


def _shared_out(batches: list[Batch], error: SmqError) -> list[tuple[Batch, SmqError]]:
    """A stream breaks for all when one message is too large for gRPC: the largest is to blame, the rest may retry."""
    if error.code is not ErrorCode.LIMIT_EXCEEDED or not batches:
        return [(batch, error) for batch in batches]
    largest = max(batches, key=lambda b: len(b.data))
    bystander = SmqError(ErrorCode.TIMED_OUT, f"another batch broke the stream: {error.message}")
    return [(batch, error if batch is largest else bystander) for batch in batches]
