"""Look-ups on a node that lags: what another node created a moment ago is found, and "unknown" follows a barrier."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smq.coordinator.service import name_lookup as lookup_module
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import (
    StartAsk,
    confirm_unknown,
    find_partition,
    find_topic,
    known_ranges,
    start_positions,
)
from smq.coordinator.service.start_positions import OffsetType
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId, PartitionIndex, TsNs
from smq.raft_state.state import CommittedOffset
from smq.replication.api import NodeApi, PartitionRange, TimeKind, TimeOffset
from tests.unit.coordinator.lagging import NO_QUORUM, TOPIC, TOPIC_ID, LaggingNode, state_with

LookUp = Callable[[NodeCalls], Awaitable[object]]
OF_TOPIC: tuple[LookUp, ...] = (
    lambda calls: find_topic(calls, TOPIC, 1_000),
    lambda calls: find_partition(calls, TOPIC, 0, 1_000),
    lambda calls: confirm_unknown(calls, lambda state: TOPIC in state.topics, 1_000),
)


def looked_up(node: LaggingNode, look_up: LookUp) -> object:
    async def call() -> object:
        return await look_up(NodeCalls(node.api))

    return asyncio.run(call())


@pytest.mark.parametrize("look_up", OF_TOPIC)
def test_a_topic_created_through_another_node_is_found_after_one_barrier(look_up: LookUp) -> None:
    node = LaggingNode()
    looked_up(node, look_up)
    assert TOPIC in node.state.topics
    assert node.barriers == 1


@pytest.mark.parametrize("look_up", OF_TOPIC)
async def test_a_known_topic_costs_no_barrier_and_does_not_suspend(look_up: LookUp) -> None:
    node = LaggingNode()
    node.state = state_with((TOPIC, TOPIC_ID))
    with pytest.raises(StopIteration):  # the coroutine ends before it waits for anything
        look_up(NodeCalls(node.api)).__await__().send(None)
    assert node.barriers == 0


@pytest.mark.parametrize("look_up", OF_TOPIC)
def test_nothing_is_called_unknown_without_a_barrier(look_up: LookUp) -> None:
    with pytest.raises(SmqError) as e:
        looked_up(LaggingNode(failure=NO_QUORUM), look_up)
    assert e.value.code is ErrorCode.NO_QUORUM


@pytest.mark.parametrize(
    ("topic", "partition", "code"),
    [
        ("gone", 0, ErrorCode.UNKNOWN_TOPIC),
        (TOPIC, 1, ErrorCode.UNKNOWN_PARTITION),
        (TOPIC, -1, ErrorCode.UNKNOWN_PARTITION),
    ],
)
def test_what_a_barrier_confirms_to_be_unknown_is_named(topic: str, partition: int, code: ErrorCode) -> None:
    node = LaggingNode()
    with pytest.raises(SmqError) as e:
        looked_up(node, lambda calls: find_partition(calls, topic, partition, 1_000))
    assert (e.value.code, node.barriers) == (code, 1)


class CountingCalls(NodeCalls):
    """A node with topic "t" of many partitions, each with records 3 to 8; groups have committed 5 everywhere."""

    def __init__(self, partitions: int) -> None:
        state = state_with((TOPIC, TOPIC_ID))
        (first,) = state.topics[TOPIC].partitions
        state.topics[TOPIC].partitions = [replace(first, index=PartitionIndex(i)) for i in range(partitions)]
        super().__init__(cast(NodeApi, SimpleNamespace(state=state)))
        self.asked: list[str] = []
        self.late: set[int] = set()
        self.times: list[TimeOffset] = []  # what a look-up by time finds, by partition

    async def partition_ranges(
        self, partitions: Sequence[tuple[str, int]], timeout_ms: int, *, at_leader: bool = False
    ) -> list[PartitionRange | SmqError]:
        self.asked.append(f"ends of {len(partitions)}")
        return [self._range(index) for _, index in partitions]

    def _range(self, index: int) -> PartitionRange | SmqError:
        if index in self.late:
            return SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "m")
        part = self.node.state.topics[TOPIC].partitions[index]
        return PartitionRange(
            topic=TOPIC,
            partition=part.index,
            pid=part.pid,
            log_start=Offset(3),
            lso=Offset(9),
            hwm=Offset(9),
            next_offset=Offset(9),
            leader=part.leader,
            epoch=part.epoch,
            replicas=part.replicas,
        )

    async def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int
    ) -> TimeOffset:
        self.asked.append(f"{kind.name} {value}")
        return self.times[partition]

    async def fetch_offsets(
        self, group: str, pids: Sequence[PartitionId] | None, timeout_ms: int
    ) -> dict[PartitionId, CommittedOffset]:
        assert pids is not None
        self.asked.append(f"{len(pids)} commits of {group}")
        return {pid: CommittedOffset(offset=Offset(5), metadata="", committed_ms=0) for pid in pids}


def ask_of(type_: OffsetType, partition: int = 0, **more: Any) -> StartAsk:
    return StartAsk(topic=TOPIC, partition=partition, type=type_, **more)


def positions_of(calls: CountingCalls, asks: list[StartAsk]) -> list[int | ErrorCode]:
    found = asyncio.run(start_positions(calls, asks, 1_000))
    return [f.code if isinstance(f, SmqError) else f[0].offset for f in found]


def test_many_starts_cost_one_question_for_all_ends_and_one_per_group() -> None:
    calls = CountingCalls(100)
    asks = [ask_of(OffsetType.RESET_TO_LATEST, p) for p in range(50)]
    asks += [ask_of(OffsetType.RESUME_OR_EARLIEST, p, group=("g", "h")[p % 2]) for p in range(50, 100)]
    assert positions_of(calls, asks) == [9] * 50 + [5] * 50
    assert calls.asked == ["25 commits of g", "25 commits of h", "ends of 100"]


def test_each_start_has_an_answer_of_its_own() -> None:
    calls = CountingCalls(3)
    calls.late = {1}
    asks = [
        ask_of(OffsetType.RESET_TO_EARLIEST),
        ask_of(OffsetType.EXACT_OFFSET, value=9),
        ask_of(OffsetType.RESUME_OR_LATEST),
        ask_of(OffsetType.EXACT_OFFSET, 1, value=9),
        ask_of(OffsetType.RESET_TO_OFFSET, 2, value=7),
    ]
    assert positions_of(calls, asks) == [
        3,
        ErrorCode.OFFSET_OUT_OF_RANGE,
        ErrorCode.INVALID_REQUEST,  # without a group
        ErrorCode.OFFSET_NOT_AVAILABLE,  # and not "out of range"
        7,
    ]


def nothing_before(end: int) -> TimeOffset:
    return TimeOffset(Offset(end), TsNs(-1), -1)


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("by", [{"timestamp_ms": 70}, {"value": 70}], ids=["timestamp_ms", "EXACT_TS_NS"])
def test_a_time_that_no_record_has_is_the_end_of_its_look_up(by: dict[str, int], is_committed: bool) -> None:
    """Records at 6 to 8 came after the look-up and before the ranges: any of them may be that late."""
    calls = CountingCalls(4)
    calls.times = [nothing_before(6), nothing_before(1), nothing_before(9), TimeOffset(Offset(4), TsNs(70), 70)]
    asks = [ask_of(OffsetType.EXACT_TS_NS, p, is_committed=is_committed, **by) for p in range(4)]
    found = [f for f in asyncio.run(start_positions(calls, asks, 1_000)) if not isinstance(f, SmqError)]
    assert calls.asked == [f"{'TIMESTAMP_MS' if 'timestamp_ms' in by else 'TS_NS'} 70"] * 4 + ["ends of 4"]
    assert [(position.offset, range_.end_for(is_committed=is_committed)) for position, range_ in found] == [
        (6, 6),  # a position at the end shows that nothing was found
        (3, 3),  # retention has passed the end of the look-up
        (9, 9),
        (4, 9),
    ]


def test_a_view_has_the_ranges_that_are_known_and_asks_for_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "RANGES_PER_TURN", 2)
    calls = CountingCalls(5)
    calls.late = {3}
    found = asyncio.run(known_ranges(calls, [(TOPIC, p) for p in range(5)], 1_000))
    assert [p for _, p in found] == [0, 1, 2, 4]
    assert calls.asked == ["ends of 2", "ends of 2", "ends of 1"]
