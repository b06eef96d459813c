"""One fetch over several partitions: when it waits, for what, and how many bytes it reserves meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.coordinator.limits import FETCH_CONCURRENCY
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.fetching import Outcome, PartitionFetch, fetch_many, known_range
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, TsNs
from smq.raft_state.state import PartitionState
from smq.replication.api import Fetched, NodeApi, StoredBatch
from smq.testing.served import PATIENCE_S

BATCH_BYTES = 100


class Log:
    """Partitions of batches of one record each, served by NodeApi's fetch."""

    def __init__(self, **ends: int) -> None:
        self.ends = ends
        self.calls = 0
        self.refusal: SmqError | None = None  # of waiting
        self.is_stuck = False  # the disk: no read ends
        self._watches: list[tuple[str, int, Callable[[Any], None]]] = []

    def append(self, topic: str, count: int = 1) -> None:
        self.ends[topic] += count
        woken = [w for w in self._watches if w[0] == topic and w[1] < self.ends[topic]]
        self._watches = [w for w in self._watches if w not in woken]
        for _, _, done in woken:
            done(self._fetched(topic, []))

    def fetch(
        self,
        topic: str,
        _partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: Callable[[Any], None],
        is_committed: bool = False,
    ) -> Callable[[], None]:
        self.calls += 1
        if topic not in self.ends:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, topic)
        if self.is_stuck:
            return lambda: None
        if max_bytes == 0 and self.refusal is not None:
            done(self.refusal)
        elif max_bytes == 0 and offset >= self.ends[topic]:
            watch = (topic, offset, done)
            self._watches.append(watch)

            def end() -> None:
                if watch in self._watches:
                    self._watches.remove(watch)

            def expire() -> None:
                end()
                done(self._fetched(topic, []))

            asyncio.get_running_loop().call_later(max_wait_ms / 1000, expire)
            return end
        else:
            count = min(self.ends[topic] - offset, max(1, max_bytes // BATCH_BYTES)) if max_bytes else 0
            done(self._fetched(topic, [_batch(offset + i) for i in range(count)]))
        return lambda: None

    def _fetched(self, topic: str, batches: list[StoredBatch]) -> Fetched:
        end = Offset(self.ends[topic])
        return Fetched(batches, Offset(0), end, end, end)

    @property
    def waiting(self) -> int:
        return len(self._watches)


class Reserve:
    def __init__(self) -> None:
        self.taken = self.times = 0

    @asynccontextmanager
    async def __call__(self, size: int) -> AsyncIterator[None]:
        self.taken += size
        self.times += 1
        yield
        self.taken -= size


def _batch(offset: int) -> StoredBatch:
    return StoredBatch(Offset(offset), Offset(offset), TsNs(offset), memoryview(bytes(BATCH_BYTES)))


def _want(topic: str, offset: int = 0, max_bytes: int = 1_000) -> PartitionFetch:
    return PartitionFetch(topic=topic, partition=0, offset=offset, max_bytes=max_bytes)


def _counts(outcomes: list[Outcome]) -> list[int]:
    return [len(o.batches) if isinstance(o, Fetched) else -1 for o in outcomes]


async def _fetch(log: Log, *wanted: PartitionFetch, **options: Any) -> list[Outcome]:
    """It would wait longer than a test may take."""
    options = {"max_wait_ms": 600_000, "answer_ms": 1_200_000, "bytes_max": 10_000} | options
    async with asyncio.timeout(PATIENCE_S):
        return await fetch_many(NodeCalls(cast(Any, log)), wanted, **options)


async def _parked(log: Log, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while log.waiting < count:  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0)


async def test_a_fetch_that_waits_reserves_nothing_and_ends_with_the_first_record() -> None:
    log, reserve = Log(a=0, b=0), Reserve()
    task = asyncio.create_task(_fetch(log, _want("a"), _want("b"), reserve=reserve))
    await _parked(log, 2)
    assert (reserve.taken, reserve.times) == (0, 1)
    log.append("b")
    assert _counts(await task) == [0, 1]
    assert (reserve.taken, reserve.times, log.waiting) == (0, 2, 0)


async def test_bytes_min_is_waited_for_over_all_partitions() -> None:
    log = Log(a=1, b=0)
    task = asyncio.create_task(_fetch(log, _want("a"), _want("b"), bytes_min=3 * BATCH_BYTES))
    for _ in range(2):
        await _parked(log, 2)
        assert not task.done()
        log.append("b")
    assert _counts(await task) == [1, 2]


async def test_a_partition_at_its_own_cap_is_not_asked_again_and_again() -> None:
    log = Log(a=50)
    want = _want("a", max_bytes=BATCH_BYTES)
    outcomes = await _fetch(log, want, bytes_min=5 * BATCH_BYTES, max_wait_ms=300)
    assert _counts(outcomes) == [1]
    assert log.calls <= 4


async def test_a_full_response_is_answered_immediately() -> None:
    log = Log(a=5, b=5)
    outcomes = await _fetch(log, _want("a"), _want("b"), bytes_max=7 * BATCH_BYTES, bytes_min=9_000)
    assert _counts(outcomes) == [5, 2]
    log = Log(a=5, b=2, c=1)  # c's only batch does not fit, and without it there is less than bytes_max
    outcomes = await _fetch(log, *map(_want, "abc"), bytes_max=7 * BATCH_BYTES + 1, bytes_min=9_000)
    assert _counts(outcomes) == [5, 2, 0]


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.SHUTTING_DOWN])
async def test_a_refused_wait_ends_the_fetch_immediately(code: ErrorCode) -> None:
    log = Log(a=0, b=0)
    log.refusal = SmqError(code, "m")
    outcomes = await _fetch(log, _want("a"), _want("b"))
    assert code in {o.code for o in outcomes if isinstance(o, SmqError)}
    assert log.calls <= 6


async def test_an_error_of_one_partition_ends_the_wait_and_keeps_the_others_records() -> None:
    outcomes = await _fetch(Log(a=2), _want("a"), _want("nowhere"), bytes_min=9_000)
    assert _counts(outcomes) == [2, -1]


async def test_nothing_within_the_time_is_an_empty_answer() -> None:
    log = Log(a=0)
    assert _counts(await _fetch(log, _want("a"), max_wait_ms=0)) == [0]
    assert log.waiting == 0


async def test_one_deadline_bounds_the_reading_of_all_partitions() -> None:
    """Those that were not begun by then are no error: their turn comes with the next fetch."""

    log, reserve = Log(a=1), Reserve()
    log.is_stuck = True
    outcomes = await _fetch(log, *[_want("a")] * 3 * FETCH_CONCURRENCY, answer_ms=100, reserve=reserve)
    assert [o.code for o in outcomes if isinstance(o, SmqError)] == [ErrorCode.TIMED_OUT] * FETCH_CONCURRENCY
    assert outcomes[FETCH_CONCURRENCY:] == [None] * 2 * FETCH_CONCURRENCY
    assert (log.calls, reserve.taken, reserve.times) == (FETCH_CONCURRENCY, 0, 1)


@pytest.mark.parametrize(("lso", "told"), [(4, (1, 9, 4)), (None, (2, 8, 2))])
def test_a_range_without_records_never_tells_too_high_a_last_stable_offset(
    lso: int | None, told: tuple[int, int, int]
) -> None:
    """The replica here knows what is open. Without one, no more is known than the replicated marks."""
    status = None if lso is None else SimpleNamespace(log_start=1, hwm=9, lso=lso)
    node = SimpleNamespace(replica_status=lambda _pid: status)
    partition = SimpleNamespace(pid=b"", log_start=2, hwm=8)
    assert known_range(cast(NodeApi, node), cast(PartitionState, partition)) == told
