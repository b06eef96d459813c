"""Which partitions the consumer fetches from which node, without a network."""

from typing import Any

import pytest

from smq.clients.errors import detail_from_error
from smq.clients.fetch_planner import (
    LAGGING_ANSWERS_MAX,
    NO_POSITION,
    FetchPlanner,
    FetchSettings,
    PartitionFetch,
    PlannedFetch,
)
from smq.clients.metadata import ClusterView, Metadata, PartitionView, TopicView
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Epoch, NodeId, Offset

T = "t"


def planner_of(leaders: list[int], **settings: Any) -> FetchPlanner:
    """Partition i is led by leaders[i]; every partition has copies on nodes 1 to 3."""
    partitions = tuple(
        PartitionView(
            leader=NodeId(n), leader_available=True, epoch=Epoch(0), replicas=(NodeId(1), NodeId(2), NodeId(3))
        )
        for n in leaders
    )
    metadata = Metadata(["boot:1"])
    addresses = {NodeId(n): f"n{n}:1" for n in (1, 2, 3)}
    topics = {T: TopicView(topic_id=b"a", partitions=partitions)}
    metadata.update(ClusterView(cluster_id="c", addresses=addresses, topics=topics))
    planner = FetchPlanner(FetchSettings(**settings), metadata, lambda: 0.5)
    planner.assigned = {(T, i): PartitionFetch(T, i, 0) for i in range(len(leaders))}
    return planner


def answer(
    partition: int, *ranges: tuple[int, int], error: SmqError | None = None, size: int = 10, hwm: int = 100
) -> pb.FetchResponse:
    part = pb.FetchedPartition(topic=T, partition=partition, hwm=hwm, lso=hwm)
    for base, last in ranges:
        part.batches.add(base_offset=base, last_offset=last, ts_ns=1, data=b"x" * size)
    if error is not None:
        part.error.CopyFrom(detail_from_error(error))
    return pb.FetchResponse(partitions=[part])


def partitions_of(plans: list[PlannedFetch]) -> dict[str, list[int]]:
    return {p.address: sorted(f.partition for f, _ in p.items) for p in plans}


def test_partitions_of_one_leader_share_a_call() -> None:
    planner = planner_of([1, 2, 1, 3])
    assert partitions_of(planner.plan(0.0)) == {"n1:1": [0, 2], "n2:1": [1], "n3:1": [3]}
    assert planner.plan(0.0) == [], "all are busy"


def test_partition_that_is_ready_again_does_not_wait_for_the_others_long_poll() -> None:
    planner = planner_of([1, 1])
    [plan] = planner.plan(0.0)
    planner.fetched(plan, answer(0, (0, 4)), 0.0)
    # The answer left partition 1 out: both are free again, and the next call holds both.
    [again] = planner.plan(0.0)
    assert [(p.partition, p.offset) for p in again.request(planner.settings).partitions] in (
        [(0, 5), (1, 0)],
        [(1, 0), (0, 5)],
    )


def test_order_of_partitions_changes_so_that_none_starves() -> None:
    planner = planner_of([1, 1, 1])
    firsts = set()
    for _ in range(3):
        [plan] = planner.plan(0.0)
        firsts.add(plan.items[0][0].partition)
        planner.fetched(plan, pb.FetchResponse(), 0.0)
    assert firsts == {0, 1, 2}


def test_full_partition_is_not_fetched_until_it_is_read() -> None:
    planner = planner_of([1], partition_bytes_max=10)
    [plan] = planner.plan(0.0)
    assert planner.fetched(plan, answer(0, (0, 4)), 0.0)
    assert planner.plan(0.0) == []
    fetch = planner.assigned[T, 0]
    fetch.buffered_bytes -= len(fetch.batches.popleft().data)
    assert planner.plan(0.0)


def test_nothing_is_fetched_while_all_buffers_together_are_full() -> None:
    planner = planner_of([1, 2], buffer_bytes_max=10)
    plans = planner.plan(0.0)
    planner.fetched(plans[0], answer(plans[0].items[0][0].partition, (0, 4)), 0.0)
    planner.fetched(plans[1], pb.FetchResponse(), 0.0)
    assert planner.plan(0.0) == []


def test_answer_from_before_a_seek_is_discarded() -> None:
    planner = planner_of([1])
    [plan] = planner.plan(0.0)
    planner.assigned[T, 0].move(50)
    assert not planner.fetched(plan, answer(0, (0, 4)), 0.0)
    assert not planner.failed(plan, SmqError(ErrorCode.UNKNOWN_TOPIC, ""), 0.0)
    [again] = planner.plan(0.0)
    assert again.request(planner.settings).partitions[0].offset == 50


def test_batch_that_begins_below_the_position_is_kept_and_one_wholly_below_is_not() -> None:
    planner = planner_of([1])
    fetch = planner.assigned[T, 0]
    fetch.move(7)
    [plan] = planner.plan(0.0)
    planner.fetched(plan, answer(0, (0, 4), (5, 9)), 0.0)
    assert [(b.base_offset, b.last_offset) for b in fetch.batches] == [(5, 9)]
    assert fetch.fetch_offset == 10


def test_high_water_mark_of_a_lagging_replica_does_not_go_back() -> None:
    planner = planner_of([1])
    for hwm in (100, 90):
        [plan] = planner.plan(0.0)
        planner.fetched(plan, answer(0, hwm=hwm), 0.0)
    assert planner.assigned[T, 0].hwm == 100


@pytest.mark.parametrize("code", [ErrorCode.NOT_REPLICA, ErrorCode.DATA_DAMAGED, ErrorCode.NODE_NOT_READY])
def test_replica_that_cannot_serve_is_temporarily_avoided(code: ErrorCode) -> None:
    planner = planner_of([1])
    [plan] = planner.plan(0.0)
    assert not planner.fetched(plan, answer(0, error=SmqError(code, "")), 0.0)
    assert planner.plan(0.0) == [], "a pause first"
    wakeup = planner.next_wakeup_ms(0.0)
    assert wakeup is not None
    [again] = planner.plan(wakeup)
    assert again.address == "n2:1"
    planner.fetched(again, answer(0), wakeup)
    assert planner.plan(wakeup)[0].address == "n1:1", "a served answer clears the record"


def test_node_that_is_down_costs_a_pause_and_a_refresh() -> None:
    planner = planner_of([1])
    [plan] = planner.plan(0.0)
    assert not planner.failed(plan, SmqError(ErrorCode.TIMED_OUT, "broken"), 0.0)
    assert planner.stale_topics == {T}
    assert planner.next_wakeup_ms(0.0) is not None


def test_passing_failures_are_silent_and_lasting_ones_are_raised() -> None:
    planner = planner_of([1], stall_timeout_ms=1_000.0)
    trouble = SmqError(ErrorCode.NODE_NOT_READY, "starting")
    for now, is_raised in ((0.0, False), (500.0, False), (1_000.0, True)):
        [plan] = planner.plan(now)
        assert planner.fetched(plan, answer(0, error=trouble), now) is is_raised
    assert planner.assigned[T, 0].error is not None
    assert planner.plan(1e9) == [], "until the reader has heard of it"


def test_replicas_that_are_gone_are_reported_as_a_partition_without_them() -> None:
    planner = planner_of([1], stall_timeout_ms=0.0)
    [plan] = planner.plan(0.0)
    assert planner.failed(plan, SmqError(ErrorCode.UNREACHABLE, "no node answers at h:1"), 0.0)
    error = planner.assigned[T, 0].error
    assert error is not None
    assert (error.code, "h:1" in error.message) == (ErrorCode.LEADER_UNAVAILABLE, True)


def test_out_of_range_is_raised_immediately() -> None:
    planner = planner_of([1])
    [plan] = planner.plan(0.0)
    gone = SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, "gone", ErrorDetails(lo=Offset(5), hi=Offset(9)))
    assert planner.fetched(plan, answer(0, error=gone), 0.0)
    error = planner.assigned[T, 0].error
    assert error is not None
    assert (error.code, error.details.lo, error.details.hi) == (ErrorCode.OFFSET_OUT_OF_RANGE, 5, 9)
    planner.assigned[T, 0].move(5)
    assert planner.plan(0.0)


def test_out_of_range_requests_a_reset_if_the_user_wants_one() -> None:
    planner = planner_of([1], reset="earliest")
    [plan] = planner.plan(0.0)
    assert not planner.fetched(plan, answer(0, error=SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, "")), 0.0)
    assert planner.resets == [(planner.assigned[T, 0], "earliest")]


def test_unknown_topic_is_final_only_when_repeated() -> None:
    planner = planner_of([1])
    unknown = SmqError(ErrorCode.UNKNOWN_TOPIC, "")
    now = 0.0
    for attempt in range(1, LAGGING_ANSWERS_MAX + 1):
        [plan] = planner.plan(now)
        assert planner.fetched(plan, answer(0, error=unknown), now) == (attempt == LAGGING_ANSWERS_MAX)
        now += 1_000.0


def test_named_node_is_asked_whichever_node_leads() -> None:
    planner = planner_of([1, 2], only_node=3)
    assert partitions_of(planner.plan(0.0)) == {"n3:1": [0, 1]}


def test_partition_without_a_known_replica_requests_a_refresh() -> None:
    planner = planner_of([1])
    planner.assigned["u", 0] = PartitionFetch("u", 0, 0)
    planner.plan(0.0)
    assert planner.stale_topics == {"u"}


def test_a_start_that_is_staged_is_waited_for_as_long_as_its_transaction_may_take() -> None:
    """A dead member's transaction ends by its time-out, which is as long as a stall by default: that is none."""
    planner = planner_of([1])
    waiting = planner.assigned[T, 0]
    waiting.move(NO_POSITION)
    staged = SmqError(ErrorCode.OFFSET_STAGED, "an open transaction has staged it")
    transaction_timeout_ms = planner.settings.stall_timeout_ms
    now_ms, retries = 0.0, 0
    while now_ms < transaction_timeout_ms + 1_000:  # and the clock that ends it moves in steps
        planner.plan(now_ms)
        retries += planner.unplaced == [waiting]
        planner.unplaced = []
        assert not planner.not_placed(waiting, staged, now_ms)
        now_ms = waiting.retry_at_ms
    assert (waiting.error, retries > transaction_timeout_ms / 1_000) == (None, True)
    silent = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "its leader does not answer")
    assert not planner.not_placed(waiting, silent, now_ms), "its stall begins now"
    assert planner.not_placed(waiting, silent, now_ms + planner.settings.stall_timeout_ms)


def test_start_that_is_not_known_is_looked_up_again_and_reported_in_the_end() -> None:
    planner = planner_of([1, 1], stall_timeout_ms=1_000.0)
    planner.assigned[T, 0].move(NO_POSITION)
    assert partitions_of(planner.plan(0.0)) == {"n1:1": [1]}
    [waiting] = planner.unplaced
    planner.unplaced = []
    error = SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, "its leader does not answer")
    assert not planner.not_placed(waiting, error, 0.0)
    assert (planner.plan(0.0), planner.unplaced) == ([], []), "not before the pause is over"
    assert (planner.plan(500.0), planner.unplaced) == ([], [waiting])
    assert planner.not_placed(waiting, error, 1_000.0)
    assert waiting.error is not None
    assert waiting.error.code is ErrorCode.OFFSET_NOT_AVAILABLE
    waiting.move(7)
    [plan] = planner.plan(1_000.0)
    assert [(f.partition, f.fetch_offset) for f, _ in plan.items] == [(0, 7)]
