"""One Fetch over several partitions: everything that is there now, or the first that arrives within max_wait.

Owns the rule for waiting and the byte cap of a whole response. Knows no wire format; services import it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from smq.coordinator.limits import FETCH_CONCURRENCY
from smq.coordinator.service.calls import Answer, NodeCalls, internal
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, TopicId
from smq.raft_state.state import PartitionState
from smq.replication.api import Cancel, Fetched, NodeApi


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFetch:
    topic: str
    partition: int
    offset: int
    max_bytes: int
    is_committed: bool = False  # nothing from the last stable offset on
    topic_id: TopicId | None = None  # reads this topic, and no other one of that name

    @property
    def asked(self) -> str | TopicId:
        """How the node finds the topic."""
        return self.topic if self.topic_id is None else self.topic_id


Outcome: TypeAlias = Fetched | SmqError | None  # None: not read, the response was full or late before


class KnownRange(NamedTuple):
    """What an answer without records says of its partition."""

    log_start: Offset
    hwm: Offset
    lso: Offset


def known_range(node: NodeApi, partition: PartitionState) -> KnownRange:
    """As this node knows it, so perhaps a little behind. Without a replica here, no last stable offset is known: then
    it is the lowest that it can be."""
    status = node.replica_status(partition.pid)
    if status is None:
        return KnownRange(partition.log_start, partition.hwm, partition.log_start)
    return KnownRange(status.log_start, status.hwm, status.lso)


# Reserves this many bytes of a budget for the length of a block.
Reserve: TypeAlias = Callable[[int], AbstractAsyncContextManager[None]]


def _unlimited(_size: int) -> AbstractAsyncContextManager[None]:
    return nullcontext()


async def fetch_many(
    calls: NodeCalls,
    requests: Sequence[PartitionFetch],
    *,
    max_wait_ms: int,
    answer_ms: int,
    bytes_max: int,
    bytes_min: int = 1,
    reserve: Reserve = _unlimited,
) -> list[Outcome]:
    """One outcome for each of `requests`. Answers immediately if any of them has an error or if together they have
    `bytes_min`, otherwise as soon as they have. `answer_ms` bounds each reading of all partitions, barriers included:
    those that were not begun by then are left out. Bytes are reserved while records are read, but not while the fetch
    waits: nothing that was read is kept during a wait."""
    until = time.monotonic() + max_wait_ms / 1000
    bytes_min = min(bytes_min, bytes_max)
    failed: dict[int, Fetched | SmqError] = {}
    # A round ends with something new or with the deadline. With the usual bytes_min of 1 there are at most two.
    while True:
        async with reserve(bytes_max):
            outcomes, is_full = await _read_now(calls, requests, answer_ms, bytes_max)
            left_ms = math.ceil((until - time.monotonic()) * 1000)
            if left_ms <= 0 or is_full or failed or _is_enough(outcomes, bytes_min):
                return [failed.get(place, outcome) for place, outcome in enumerate(outcomes)]
        watches = _Fetches(calls, outcomes_needed=1)
        ends = [_watched(request, outcome) for request, outcome in zip(requests, outcomes, strict=True)]
        del outcomes
        for place, (request, end) in enumerate(zip(requests, ends, strict=True)):
            watches.start(place, replace(request, offset=end, max_bytes=0), max_wait_ms=left_ms)
        found = await watches.take(answer_ms)
        failed = {place: outcome for place, outcome in found.items() if isinstance(outcome, SmqError)}


def _watched(request: PartitionFetch, outcome: Outcome) -> int:
    """The offset to wait at: the end of what this read returned, or would have without the partition's byte cap. For a
    committed reader that may be far below what the replica can serve: each transaction that ends moves it on."""
    if not isinstance(outcome, Fetched):
        return request.offset
    end = min(outcome.lso, outcome.readable_end) if request.is_committed else outcome.readable_end
    return max(request.offset, end)


class _Fetches:
    """Concurrent fetches of several partitions, without a task or a timer for each."""

    def __init__(self, calls: NodeCalls, *, outcomes_needed: int) -> None:
        self._node = calls.node
        self._outcomes_needed = outcomes_needed
        self._outcomes: dict[int, Fetched | SmqError] = {}
        self._withdrawals: list[Cancel] = []
        self._enough = Answer[None](calls.timeouts)

    def start(self, place: int, request: PartitionFetch, *, max_wait_ms: int = 0) -> None:
        done = partial(self._on_done, place)
        try:
            withdraw = self._node.fetch(
                request.asked,
                request.partition,
                request.offset,
                max_bytes=request.max_bytes,
                max_wait_ms=max_wait_ms,
                done=done,
                is_committed=request.is_committed,
            )
        except SmqError as e:
            done(e)
        except Exception as e:  # noqa: BLE001 - one partition's fault must not cost the others their data
            done(internal("fetch", e))
        else:
            self._withdrawals.append(withdraw)

    def _on_done(self, place: int, outcome: Fetched | SmqError) -> None:
        self._outcomes[place] = outcome
        if len(self._outcomes) == self._outcomes_needed:
            self._enough.done(None)

    async def take(self, answer_ms: int) -> dict[int, Fetched | SmqError]:
        """The outcomes by place, once there are enough; those that did not arrive within `answer_ms` are missing."""
        try:
            await self._enough.result(answer_ms, grace_ms=0)
            await asyncio.sleep(0)  # one advance wakes many partitions: take all of them
        except SmqError:
            pass  # timed out: the only error that `_enough` is ever given
        finally:
            for withdraw in self._withdrawals:
                withdraw()
        return self._outcomes


async def _read_now(
    calls: NodeCalls, requests: Sequence[PartitionFetch], answer_ms: int, bytes_max: int
) -> tuple[list[Outcome], bool]:
    """Reads in order, a few partitions at a time, so that little is read beyond the cap. Also says whether it ended
    before the last partition: there was more than the cap allows, or no time for the rest."""
    until = time.monotonic() + answer_ms / 1000
    left_ms = answer_ms
    outcomes: list[Outcome] = [None] * len(requests)
    left = bytes_max
    for first in range(0, len(requests), FETCH_CONCURRENCY):
        group = range(first, min(first + FETCH_CONCURRENCY, len(requests)))
        reads = _Fetches(calls, outcomes_needed=len(group))
        for place in group:
            reads.start(place, replace(requests[place], max_bytes=min(requests[place].max_bytes, left)))
        found = await reads.take(left_ms)
        for place in group:
            outcome = found.get(place) or SmqError(ErrorCode.TIMED_OUT, f"no answer within {answer_ms} ms")
            outcomes[place], left = _trimmed(outcome, left, is_first=left == bytes_max)
        left_ms = math.ceil((until - time.monotonic()) * 1000)
        if left <= 0 or (left_ms <= 0 and group.stop < len(requests)):
            return outcomes, True
    return outcomes, False


def _trimmed(result: Fetched | SmqError, left: int, *, is_first: bool) -> tuple[Outcome, int]:
    """Drops the batches that no longer fit; the first batch of a response is always kept."""
    if isinstance(result, SmqError):
        return result, left
    kept = 0
    for batch in result.batches:
        if len(batch.data) > left and not (is_first and kept == 0):
            break
        left -= len(batch.data)
        kept += 1
    if kept == len(result.batches):
        return result, left
    return replace(result, batches=result.batches[:kept]), min(left, 0)


def _is_enough(outcomes: Sequence[Outcome], bytes_min: int) -> bool:
    """An error ends the wait, too. Nothing new is enough if `bytes_min` is 0."""
    if any(isinstance(o, SmqError) for o in outcomes):
        return True
    return sum(len(b.data) for o in outcomes if isinstance(o, Fetched) for b in o.batches) >= bytes_min
