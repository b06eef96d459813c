"""The node's callbacks as awaitable calls: the one place where callbacks and asyncio meet.

Owns the timeouts of the services' calls, all of them on one timer, and the one log event for a bug in a handler. A
service awaits the methods of `NodeCalls`. Cancelling such a call withdraws its long poll. A node that never answers
costs the caller its timeout and no more. All services may import it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import structlog

from smq.coordinator.limits import TIMEOUT_GRACE_MS
from smq.raft_state.commands import Command
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, PartitionId
from smq.raft_state.replies import Reply
from smq.raft_state.state import ClusterState, CommittedOffset
from smq.replication.api import (
    Backlog,
    Cancel,
    DoneFn,
    Fetched,
    NodeApi,
    PartitionRange,
    SizedRun,
    TimeKind,
    TimeOffset,
)
from smq.replication.ports import Quorum
from smq.replication.runtime.deadlines import Deadline, Deadlines

T = TypeVar("T")

_TICK_S: Final = 0.1  # a timeout here is seconds long, and fires only if the node has missed its own deadline


class Timeouts:
    """Many timeouts on one timer, which runs only while something waits."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()
        self._is_ticking = False

    def add(self, after_ms: int, fn: Callable[[], None]) -> Deadline:
        loop = asyncio.get_running_loop()
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_later(_TICK_S, self._tick)
        return self._deadlines.add(_now_ns(loop) + after_ms * 1_000_000, fn)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines.run(_now_ns(loop))
        self._is_ticking = not self._deadlines.is_empty
        if self._is_ticking:
            loop.call_later(_TICK_S, self._tick)


def _now_ns(loop: asyncio.AbstractEventLoop) -> int:
    """By the loop's clock, which is a virtual one in the simulation."""
    return int(loop.time() * 1e9)


class Answer(Generic[T]):
    """The future answer of a NodeApi call: pass `done` to the call, then await `result`."""

    __slots__ = ("_future", "_timeouts")

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(self, result: T | SmqError) -> None:
        if self._future.done():
            return  # cancelled, or timed out below
        if isinstance(result, SmqError):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)

    async def result(self, timeout_ms: int, withdraw: Cancel | None = None, *, grace_ms: int = TIMEOUT_GRACE_MS) -> T:
        """SmqError if the call failed; TIMED_OUT if the node missed its own deadline."""

        def give_up() -> None:
            if withdraw is not None:
                withdraw()
            self.done(SmqError(ErrorCode.TIMED_OUT, f"the node did not answer within {timeout_ms} ms"))

        deadline = self._timeouts.add(timeout_ms + grace_ms, give_up)
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
        self.timeouts = Timeouts()

    async def propose(self, command: Command, timeout_ms: int) -> Reply:
        answer = Answer[Reply](self.timeouts)
        self.node.propose(command, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def change(self, begin: Callable[[DoneFn[Reply]], Cancel], timeout_ms: int) -> Reply:
        """A change of a group: `begin` hands it to the group's coordinator."""
        answer = Answer[Reply](self.timeouts)
        return await answer.result(timeout_ms, begin(answer.done))

    async def barrier(self, timeout_ms: int) -> LogIndex:
        answer = Answer[LogIndex](self.timeouts)
        self.node.barrier(timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def find(self, look_up: Callable[[ClusterState], T | None], timeout_ms: int) -> T | None:
        """NodeApi's `find`. Never suspends if `look_up` finds anything now."""
        found = look_up(self.node.state)
        if found is not None:
            return found
        answer = Answer[T | None](self.timeouts)
        self.node.find(look_up, timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def digest(self, timeout_ms: int) -> tuple[LogIndex, str]:
        answer = Answer[tuple[LogIndex, str]](self.timeouts)
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
        is_committed: bool = False,
    ) -> Fetched:
        """`answer_ms` must exceed `max_wait_ms`: the node needs a barrier before it says that an offset is out of range
        or a topic unknown."""
        answer = Answer[Fetched](self.timeouts)
        withdraw = self.node.fetch(
            topic,
            partition,
            offset,
            max_bytes=max_bytes,
            max_wait_ms=max_wait_ms,
            done=answer.done,
            is_committed=is_committed,
        )
        return await answer.result(answer_ms, withdraw, grace_ms=0)

    async def partition_ranges(
        self, partitions: Sequence[tuple[str, int]], timeout_ms: int, *, at_leader: bool = False
    ) -> list[PartitionRange | SmqError]:
        """NodeApi's, in the same order. It does not raise: what fails as a whole fails for each of them."""
        answer = Answer[list[PartitionRange | SmqError]](self.timeouts)
        try:
            self.node.partition_ranges(partitions, timeout_ms, answer.done, at_leader=at_leader)
            return await answer.result(timeout_ms)
        except SmqError as e:
            return [e] * len(partitions)

    async def partition_range(self, topic: str, partition: int, timeout_ms: int) -> PartitionRange:
        (found,) = await self.partition_ranges([(topic, partition)], timeout_ms)
        if isinstance(found, SmqError):
            raise found
        return found

    async def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int
    ) -> TimeOffset:
        answer = Answer[TimeOffset](self.timeouts)
        withdraw = self.node.offset_for_time(topic, partition, kind, value, timeout_ms, answer.done)
        return await answer.result(timeout_ms, withdraw)

    async def sized_run(self, topic: str, partition: int, offset: int, bytes_max: int, timeout_ms: int) -> SizedRun:
        answer = Answer[SizedRun](self.timeouts)
        withdraw = self.node.sized_run(topic, partition, offset, bytes_max, timeout_ms, answer.done)
        return await answer.result(timeout_ms, withdraw)

    async def backlog(self, topic: str, partition: int, offset: int, end: int, timeout_ms: int) -> Backlog:
        answer = Answer[Backlog](self.timeouts)
        withdraw = self.node.backlog(topic, partition, offset, end, timeout_ms, answer.done)
        return await answer.result(timeout_ms, withdraw)

    async def describe_quorum(self, timeout_ms: int) -> Quorum:
        answer = Answer[Quorum](self.timeouts)
        self.node.describe_quorum(timeout_ms, answer.done)
        return await answer.result(timeout_ms)

    async def fetch_offsets(
        self, group: str, pids: Sequence[PartitionId] | None, timeout_ms: int
    ) -> dict[PartitionId, CommittedOffset]:
        answer = Answer[dict[PartitionId, CommittedOffset]](self.timeouts)
        self.node.fetch_offsets(group, pids, timeout_ms, answer.done)
        return await answer.result(timeout_ms)


log = structlog.get_logger(__name__)


def internal(where: str, error: BaseException) -> SmqError:
    """Logs the fault with its traceback; the client gets one line."""
    log.error("internal_error", where=where, error=repr(error), exc_info=error)
    return SmqError(ErrorCode.INTERNAL, f"{where} failed: {type(error).__name__}: {error}")
