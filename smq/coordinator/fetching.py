"""One Fetch over several partitions: all that is there now, or the first that comes within max_wait.

Owns the rule for waiting and the byte cap of a whole response. It knows no wire format. The services
import it.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from smq.coordinator.calls import NodeCalls
from smq.coordinator.grpc_errors import internal
from smq.coordinator.limits import FETCH_CONCURRENCY
from smq.coordinator.lookup import find_partition
from smq.raft_state.errors import SmqError
from smq.replication.api import Fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    topic: str
    partition: int
    offset: int
    max_bytes: int


Outcome: TypeAlias = Fetched | SmqError | None  # None: not looked at, the response was full before


async def fetch_many(
    calls: NodeCalls,
    wanted: Sequence[Wanted],
    *,
    max_wait_ms: int,
    answer_ms: int,
    bytes_max: int,
    bytes_min: int = 1,
) -> list[Outcome]:
    """One outcome for each of `wanted`. Answers at once where any has an error or all together have `bytes_min`, else
    as soon as they do. `answer_ms` bounds one partition's read, barrier and all."""
    outcomes = await _read_now(calls, wanted, answer_ms, bytes_max)
    started = time.monotonic()
    left_ms = max_wait_ms
    # A round ends with more bytes than the one before, or with the time: there are never many.
    while left_ms > 0 and not _is_enough(outcomes, bytes_min):
        tasks = [
            _start(_fetch(calls, w, left_ms, answer_ms, bytes_max, bytes_min=_size(o) + 1))
            for w, o in zip(wanted, outcomes, strict=True)
        ]
        try:
            outcomes = await _first_of(tasks, outcomes, bytes_max)
        finally:
            for task in tasks:
                task.cancel()
        left_ms = max_wait_ms - int((time.monotonic() - started) * 1000)
    return outcomes


async def _read_now(calls: NodeCalls, wanted: Sequence[Wanted], answer_ms: int, bytes_max: int) -> list[Outcome]:
    """In order, a few at a time, so that what is read beyond the cap stays small."""
    outcomes: list[Outcome] = [None] * len(wanted)
    left = bytes_max
    for i in range(0, len(wanted), FETCH_CONCURRENCY):
        group = wanted[i : i + FETCH_CONCURRENCY]
        results = await asyncio.gather(*(_fetch(calls, w, 0, answer_ms, left) for w in group))
        for j, result in enumerate(results):
            outcomes[i + j], left = _trimmed(result, left, is_first=left == bytes_max)
        if left <= 0:
            break
    return outcomes


async def _first_of(
    tasks: Sequence[asyncio.Task[Fetched | SmqError]], outcomes: Sequence[Outcome], bytes_max: int
) -> list[Outcome]:
    """The long polls that end first take the place of what was read before."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)  # one advance wakes many partitions: take those that it woke too
    left = bytes_max
    newer: list[Outcome] = [None] * len(tasks)
    for i, (task, before) in enumerate(zip(tasks, outcomes, strict=True)):
        found = task.result() if task.done() else before
        if found is not None and left > 0:
            newer[i], left = _trimmed(found, left, is_first=left == bytes_max)
    return newer


def _start(work: Coroutine[Any, Any, Fetched | SmqError]) -> asyncio.Task[Fetched | SmqError]:
    return asyncio.create_task(work)


async def _fetch(
    calls: NodeCalls, wanted: Wanted, max_wait_ms: int, answer_ms: int, bytes_left: int, *, bytes_min: int = 1
) -> Fetched | SmqError:
    try:
        await find_partition(calls, wanted.topic, wanted.partition, answer_ms)
        return await calls.fetch(
            wanted.topic,
            wanted.partition,
            wanted.offset,
            max_bytes=min(wanted.max_bytes, bytes_left),
            max_wait_ms=max_wait_ms,
            answer_ms=answer_ms,
            min_bytes=bytes_min,
        )
    except SmqError as e:
        return e
    except Exception as e:  # noqa: BLE001 - one partition's fault must not take the others' data with it
        return internal("fetch", e)


def _trimmed(result: Fetched | SmqError, left: int, *, is_first: bool) -> tuple[Outcome, int]:
    """Drops the batches that do not fit any more; the first batch of a response always comes."""
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
    return Fetched(result.batches[:kept], result.log_start, result.hwm, result.lso), min(left, 0)


def _size(outcome: Outcome) -> int:
    return sum(len(b.data) for b in outcome.batches) if isinstance(outcome, Fetched) else 0


def _is_enough(outcomes: Sequence[Outcome], bytes_min: int) -> bool:
    """A partition with nothing new is enough where nothing is asked for."""
    return any(isinstance(o, SmqError) for o in outcomes) or sum(map(_size, outcomes)) >= bytes_min
