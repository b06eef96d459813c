"""From the node's callbacks to asyncio: the one place where they meet.

Owns nothing. A service awaits the methods of `NodeCalls`; cancelling one withdraws its long poll, and a node that
never answers costs the caller no more than its timeout. All services may import it.
"""

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from smq.coordinator.limits import TIMEOUT_GRACE_MS, TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX
from smq.raft_state.commands import Command, OffsetCommit, Reply
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, Offset, PartitionId
from smq.replication.api import Cancel, Fetched, NodeApi, PartitionRange, TimeKind, TimeOffset

T = TypeVar("T")


class Answer(Generic[T]):
    """What a call of NodeApi will give: hand `done` to it, then await `result`."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
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
        try:
            async with asyncio.timeout((timeout_ms + grace_ms) / 1000):
                return await self._future
        except TimeoutError:
            raise SmqError(ErrorCode.TIMED_OUT, f"the node did not answer within {timeout_ms} ms") from None
        finally:
            if withdraw is not None and (self._future.cancelled() or not self._future.done()):
                withdraw()


class NodeCalls:
    """NodeApi, awaitable. Every method raises SmqError."""

    def __init__(self, node: NodeApi) -> None:
        self.node = node

    async def propose(self, command: Command, timeout_ms: int) -> Reply:
        answer = Answer[Reply]()
        self.node.propose(command, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def barrier(self, timeout_ms: int) -> LogIndex:
        answer = Answer[LogIndex]()
        self.node.barrier(timeout_ms, answer.done)
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
        answer = Answer[Fetched]()
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
        answer = Answer[PartitionRange]()
        self.node.partition_range(topic, partition, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int
    ) -> TimeOffset:
        answer = Answer[TimeOffset]()
        self.node.offset_for_time(topic, partition, kind, value, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def commit_offsets(
        self, group: str, items: Sequence[OffsetCommit], request_id: bytes, timeout_ms: int
    ) -> Reply:
        answer = Answer[Reply]()
        self.node.commit_offsets(group, items, request_id, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def fetch_offsets(
        self, group: str, pids: Sequence[PartitionId] | None, timeout_ms: int
    ) -> dict[PartitionId, tuple[Offset, str]]:
        answer = Answer[dict[PartitionId, tuple[Offset, str]]]()
        self.node.fetch_offsets(group, pids, timeout_ms, answer.done)
        return await answer.result(timeout_ms)


def timeout_of(asked_ms: int, remaining_ms: float | None = None) -> int:
    """The timeout of a request: what it asks for (0 = 30 s), but within the client's own deadline."""
    if asked_ms < 0:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"timeout_ms is {asked_ms}: it must be 0 (the default) or more")
    chosen = min(asked_ms or TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX)
    return chosen if remaining_ms is None else max(1, min(chosen, int(remaining_ms)))
