"""One Fetch over several partitions: all that is there now, or the first that comes within max_wait.

Owns the rule for waiting and the byte cap of a whole response. It knows no wire format. The services
import it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from smq.coordinator.calls import Answer, NodeCalls
from smq.coordinator.grpc_errors import internal
from smq.coordinator.limits import FETCH_CONCURRENCY
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import Cancel, Fetched


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
        polls = _Fetches(calls, outcomes_needed=1)
        for place, (want, before) in enumerate(zip(wanted, outcomes, strict=True)):
            polls.start(place, want, bytes_left=bytes_max, max_wait_ms=left_ms, bytes_min=_size(before) + 1)
        outcomes = _merged(await polls.take(answer_ms), outcomes, bytes_max)
        left_ms = max_wait_ms - int((time.monotonic() - started) * 1000)
    return outcomes


class _Fetches:
    """Fetches of several partitions under way at a time, with neither a task nor a timer each."""

    def __init__(self, calls: NodeCalls, *, outcomes_needed: int) -> None:
        self._node = calls.node
        self._outcomes_needed = outcomes_needed
        self._outcomes: dict[int, Fetched | SmqError] = {}
        self._withdrawals: list[Cancel] = []
        self._enough = Answer[None](calls.patience)

    def start(self, place: int, want: Wanted, *, bytes_left: int, max_wait_ms: int = 0, bytes_min: int = 1) -> None:
        done = partial(self._on_done, place)
        try:
            withdraw = self._node.fetch(
                want.topic,
                want.partition,
                want.offset,
                max_bytes=min(want.max_bytes, bytes_left),
                max_wait_ms=max_wait_ms,
                done=done,
                min_bytes=bytes_min,
            )
        except SmqError as e:
            done(e)
        except Exception as e:  # noqa: BLE001 - one partition's fault must not take the others' data with it
            done(internal("fetch", e))
        else:
            self._withdrawals.append(withdraw)

    def _on_done(self, place: int, outcome: Fetched | SmqError) -> None:
        self._outcomes[place] = outcome
        if len(self._outcomes) == self._outcomes_needed:
            self._enough.done(None)

    async def take(self, answer_ms: int) -> dict[int, Fetched | SmqError]:
        """As many as are needed, by their places; those that did not come within `answer_ms` are missing."""
        try:
            await self._enough.result(answer_ms, grace_ms=0)
            await asyncio.sleep(0)  # one advance wakes many partitions: take those that it woke too
        except SmqError:
            pass  # too late: the only error that `_enough` is ever given
        finally:
            for withdraw in self._withdrawals:
                withdraw()
        return self._outcomes


async def _read_now(calls: NodeCalls, wanted: Sequence[Wanted], answer_ms: int, bytes_max: int) -> list[Outcome]:
    """In order, a few at a time, so that what is read beyond the cap stays small."""
    outcomes: list[Outcome] = [None] * len(wanted)
    left = bytes_max
    for first in range(0, len(wanted), FETCH_CONCURRENCY):
        group = range(first, min(first + FETCH_CONCURRENCY, len(wanted)))
        reads = _Fetches(calls, outcomes_needed=len(group))
        for place in group:
            reads.start(place, wanted[place], bytes_left=left)
        found = await reads.take(answer_ms)
        for place in group:
            outcome = found.get(place) or SmqError(ErrorCode.TIMED_OUT, f"no answer within {answer_ms} ms")
            outcomes[place], left = _trimmed(outcome, left, is_first=left == bytes_max)
        if left <= 0:
            break
    return outcomes


def _merged(found: Mapping[int, Fetched | SmqError], outcomes: Sequence[Outcome], bytes_max: int) -> list[Outcome]:
    """The long polls that have ended take the place of what was read before."""
    left = bytes_max
    newer: list[Outcome] = [None] * len(outcomes)
    for place, before in enumerate(outcomes):
        outcome = found.get(place, before)
        if outcome is not None and left > 0:
            newer[place], left = _trimmed(outcome, left, is_first=left == bytes_max)
    return newer


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
