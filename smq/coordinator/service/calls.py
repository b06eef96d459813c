"""From the node's callbacks to asyncio: the one place where they meet.

Owns the time-outs of the services' calls, all of them on one timer. A service awaits the methods of `NodeCalls`;
cancelling one withdraws its long poll, and a node that never answers costs the caller no more than its timeout. All
services may import it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from smq.coordinator.limits import TIMEOUT_GRACE_MS, TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX
from smq.raft_state.commands import Command, OffsetCommit
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, Offset, PartitionId
from smq.raft_state.replies import OffsetsAssigned, Reply
from smq.replication.api import Cancel, Fetched, NodeApi, PartitionRange, TimeKind, TimeOffset
from smq.replication.runtime.deadlines import Deadline, Deadlines

T = TypeVar("T")


_TICK_S: Final = 0.1  # what waits here waits for seconds, and only where the node has missed its own deadline


class Patience:
    """Time-outs without a timer each. The one there is runs only while something waits."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()
        self._is_ticking = False

    def add(self, after_ms: int, fn: Callable[[], None]) -> Deadline:
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        return self._deadlines.add(time.monotonic_ns() + after_ms * 1_000_000, fn)

    def _tick(self) -> None:
        self._deadlines.run(time.monotonic_ns())
        self._is_ticking = not self._deadlines.is_empty
        if self._is_ticking:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)


class Answer(Generic[T]):
    """What a call of NodeApi will give: hand `done` to it, then await `result`."""

    __slots__ = ("_future", "_patience")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(self, result: T | SmqError) -> None:
        if self._future.done():
            return  # cancelled, or given up below
        if isinstance(result, SmqError):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)

    async def result(self, timeout_ms: int, withdraw: Cancel | None = None, *, grace_ms: int = TIMEOUT_GRACE_MS) -> T:
        """SmqError where the call failed, TIMED_OUT where the node did not keep its own deadline."""

        def give_up() -> None:
            if withdraw is not None:
                withdraw()
            self.done(SmqError(ErrorCode.TIMED_OUT, f"the node did not answer within {timeout_ms} ms"))

        deadline = self._patience.add(timeout_ms + grace_ms, give_up)
        try:
            return await self._future
        finally:
            deadline.cancel()
            if withdraw is not None and self._future.cancelled():
                withdraw()


class NodeCalls:
    """NodeApi, awaitable. Every method raises SmqError."""

    def __init__(self, node: NodeApi) -> None:
        self.node = node
        self.patience = Patience()

    async def propose(self, command: Command, timeout_ms: int) -> Reply:
        answer = Answer[Reply](self.patience)
        self.node.propose(command, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def barrier(self, timeout_ms: int) -> LogIndex:
        answer = Answer[LogIndex](self.patience)
        self.node.barrier(timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def digest(self, timeout_ms: int) -> tuple[LogIndex, str]:
        answer = Answer[tuple[LogIndex, str]](self.patience)
        self.node.digest(answer.done)
        return await answer.result(timeout_ms)

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        answer_ms: int,
        min_bytes: int = 1,
    ) -> Fetched:
        """`answer_ms` is more than `max_wait_ms`: before the node says that an offset is out of range, or a topic
        unknown, it needs a barrier."""
        answer = Answer[Fetched](self.patience)
        withdraw = self.node.fetch(
            topic,
            partition,
            offset,
            max_bytes=max_bytes,
            max_wait_ms=max_wait_ms,
            done=answer.done,
            min_bytes=min_bytes,
        )
        return await answer.result(answer_ms, withdraw, grace_ms=0)

    async def partition_range(self, topic: str, partition: int, timeout_ms: int) -> PartitionRange:
        answer = Answer[PartitionRange](self.patience)
        self.node.partition_range(topic, partition, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int
    ) -> TimeOffset:
        answer = Answer[TimeOffset](self.patience)
        self.node.offset_for_time(topic, partition, kind, value, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def commit_offsets(
        self, group: str, items: Sequence[OffsetCommit], request_id: bytes, timeout_ms: int
    ) -> Reply:
        answer = Answer[Reply](self.patience)
        self.node.commit_offsets(group, items, request_id, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def assign_offsets(
        self, topic: str, partition: int, count: int, *, request_id: bytes, not_before: int | None, timeout_ms: int
    ) -> OffsetsAssigned:
        answer = Answer[OffsetsAssigned](self.patience)
        self.node.assign_offsets(
            topic,
            partition,
            count,
            request_id=request_id,
            not_before=not_before,
            timeout_ms=timeout_ms,
            done=answer.done,
        )
        return await answer.result(timeout_ms)

    async def advance_external_hwm(self, topic: str, partition: int, offset: int, timeout_ms: int) -> Offset:
        answer = Answer[Offset](self.patience)
        self.node.advance_external_hwm(topic, partition, offset, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def fetch_offsets(
        self, group: str, pids: Sequence[PartitionId] | None, timeout_ms: int
    ) -> dict[PartitionId, tuple[Offset, str]]:
        answer = Answer[dict[PartitionId, tuple[Offset, str]]](self.patience)
        self.node.fetch_offsets(group, pids, timeout_ms, answer.done)
        return await answer.result(timeout_ms)


def timeout_of(asked_ms: int, remaining_ms: float | None = None) -> int:
    """The timeout of a request: what it asks for (0 = 30 s), but within the client's own deadline."""
    if asked_ms < 0:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"timeout_ms is {asked_ms}: it must be 0 (the default) or more")
    chosen = min(asked_ms or TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX)
    return chosen if remaining_ms is None else max(1, min(chosen, int(remaining_ms)))
