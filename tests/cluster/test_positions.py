"""Where a reader starts, through gRPC on real nodes: every row of the table of positions (docs/rules.md)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode
from smq.testing.cluster import Cluster
from smq.testing.node_client import RawNode
from tests.cluster.raw import raises

NewTopic = Callable[..., str]
LeaderOf = Callable[..., RawNode]

FAR = 2**40
LO, HI = 3, 10  # ten records are published and the first three deleted


@pytest.fixture(params=[0, FAR], ids=["from-0", "from-2-to-the-40"])
def base(request: pytest.FixtureRequest) -> int:
    """Where the topic's offsets start: everything must be the same far out."""
    return int(request.param)


@pytest.fixture
def trimmed(base: int, new_topic: NewTopic, leader_of: LeaderOf) -> tuple[str, RawNode]:
    """A topic whose records base+3 .. base+9 are there, one batch each."""
    topic = new_topic(start_offset=base)
    leader = leader_of(topic)
    for i in range(HI):
        leader.publish_values(topic, 0, [b"v%d" % i])
    request = pb.DeleteRecordsRequest(topic=topic, partition=0, before_offset=base + LO, timeout_ms=10_000)
    assert leader.call(leader.admin.DeleteRecords, request).log_start == base + LO
    return topic, leader


@pytest.mark.parametrize("offset", [LO, HI - 1])
def test_exact_offset_within_the_range_starts_there(trimmed: tuple[str, RawNode], base: int, offset: int) -> None:
    topic, node = trimmed
    listed = node.list_offset(topic, 0, pb.EXACT_OFFSET, offset_value=base + offset)
    assert (listed.offset, listed.clamped) == (base + offset, False)
    started = node.subscribe_first(
        topic=topic, partition=0, offset_type=pb.EXACT_OFFSET, offset_value=base + offset
    ).started
    assert (started.offset, started.lo, started.hi) == (base + offset, base + LO, base + HI)


@pytest.mark.parametrize("offset", [-(2**62), -1, 0, LO - 1, HI, HI + 1, 2**62])
def test_exact_offset_without_a_record_is_out_of_range_and_names_the_range(
    trimmed: tuple[str, RawNode], base: int, offset: int
) -> None:
    topic, node = trimmed
    requested = offset + base if offset != -1 else -1
    for ask in (
        lambda: node.list_offset(topic, 0, pb.EXACT_OFFSET, offset_value=requested),
        lambda: node.subscribe_first(topic=topic, partition=0, offset_type=pb.EXACT_OFFSET, offset_value=requested),
    ):
        error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, ask)
        assert (error.details.lo, error.details.hi) == (base + LO, base + HI)


@pytest.mark.parametrize(
    ("requested", "given", "clamped"),
    [
        (-5, LO, True),
        (0, LO, True),
        (LO, LO, False),
        (7, 7, False),
        (HI, HI, False),
        (HI + 1, HI, True),
        (2**50, HI, True),
    ],
)
def test_reset_to_offset_clamps_and_says_so(
    trimmed: tuple[str, RawNode], base: int, requested: int, given: int, clamped: bool
) -> None:
    topic, node = trimmed
    listed = node.list_offset(topic, 0, pb.RESET_TO_OFFSET, offset_value=base + requested)
    assert (listed.offset, listed.clamped) == (base + given, clamped)
    started = node.subscribe_first(
        topic=topic, partition=0, offset_type=pb.RESET_TO_OFFSET, offset_value=base + requested
    ).started
    assert (started.offset, started.clamped) == (base + given, clamped)


def test_earliest_is_log_start_and_latest_is_the_hwm(trimmed: tuple[str, RawNode], base: int) -> None:
    topic, node = trimmed
    assert node.list_offset(topic, 0, pb.RESET_TO_EARLIEST).offset == base + LO
    assert node.list_offset(topic, 0, pb.RESET_TO_LATEST).offset == base + HI


def test_time_starts_at_the_first_record_at_or_after_it(trimmed: tuple[str, RawNode], base: int) -> None:
    topic, node = trimmed
    times = [batch.ts_ns for batch in node.fetch(topic, 0, base + LO).batches]
    assert len(times) == HI - LO
    assert times == sorted(set(times))
    for i, ts_ns in enumerate(times):
        assert node.list_offset(topic, 0, pb.EXACT_TS_NS, offset_value=ts_ns).offset == base + LO + i
        after = node.list_offset(topic, 0, pb.EXACT_TS_NS, offset_value=ts_ns + 1).offset
        assert after == base + LO + i + 1
    assert node.list_offset(topic, 0, pb.EXACT_TS_NS, offset_value=0).offset == base + LO
    assert node.list_offset(topic, 0, pb.EXACT_TS_NS, offset_value=2**62).offset == base + HI


def test_time_and_offset_subscriptions_of_one_topic_agree(trimmed: tuple[str, RawNode], base: int) -> None:
    topic, node = trimmed
    ts_ns = node.fetch(topic, 0, base + 6).batches[0].ts_ns

    def read(**start: Any) -> list[tuple[int, bytes]]:
        stream = node.subscribe(topic=topic, partition=0, stop_at_end=True, **start)
        return [(record.offset, record.value) for answer in stream for record in answer.records]

    by_time = read(offset_type=pb.EXACT_TS_NS, offset_value=ts_ns)
    by_offset = read(offset_type=pb.EXACT_OFFSET, offset_value=base + 6)
    assert by_time == by_offset == [(base + i, b"v%d" % i) for i in range(6, HI)]


@pytest.mark.parametrize(
    ("offset_type", "fallback"), [(pb.RESUME_OR_EARLIEST, LO), (pb.RESUME_OR_LATEST, HI)], ids=["earliest", "latest"]
)
def test_resume_falls_back_only_for_a_group_without_a_commit(
    trimmed: tuple[str, RawNode], base: int, offset_type: pb.OffsetType.ValueType, fallback: int
) -> None:
    topic, node = trimmed
    group = f"g-{topic}-{offset_type}"
    assert node.list_offset(topic, 0, offset_type, group=group).offset == base + fallback
    node.commit(group, topic, 0, base + 5)
    assert node.list_offset(topic, 0, offset_type, group=group).offset == base + 5


def test_resume_reads_exactly_the_next_record_from_any_node(
    cluster: Cluster, trimmed: tuple[str, RawNode], base: int
) -> None:
    topic, leader = trimmed
    group = f"g-{topic}"
    leader.commit(group, topic, 0, base + 7)
    for node in cluster.alive():
        assert node.raw.committed(group, topic, 0) == base + 7
        stream = node.raw.subscribe(
            topic=topic, partition=0, offset_type=pb.RESUME_OR_EARLIEST, group=group, stop_at_end=True
        )
        offsets = [record.offset for answer in stream for record in answer.records]
        assert offsets == [base + 7, base + 8, base + 9]


def test_resume_below_log_start_names_the_lost_range_unless_a_reset_was_requested(
    trimmed: tuple[str, RawNode], base: int
) -> None:
    topic, node = trimmed
    group = f"g-{topic}"
    node.commit(group, topic, 0, base + 5)
    request = pb.DeleteRecordsRequest(topic=topic, partition=0, before_offset=base + 8, timeout_ms=10_000)
    node.call(node.admin.DeleteRecords, request)
    error = raises(
        ErrorCode.OFFSET_OUT_OF_RANGE, lambda: node.list_offset(topic, 0, pb.RESUME_OR_EARLIEST, group=group)
    )
    assert (error.details.lo, error.details.hi) == (base + 8, base + HI)
    assert str(base + 5) in error.message
    listed = node.list_offset(topic, 0, pb.RESUME_OR_EARLIEST, group=group, reset_if_gone=True)
    assert (listed.offset, listed.clamped) == (base + 8, True)


def test_offset_type_that_is_none_is_refused(trimmed: tuple[str, RawNode]) -> None:
    topic, node = trimmed
    error = raises(ErrorCode.INVALID_REQUEST, lambda: node.list_offset(topic, 0, pb.OFFSET_TYPE_UNSPECIFIED))
    assert "EXACT_OFFSET" in error.message


def test_fetch_below_log_start_is_out_of_range_at_the_hwm_is_empty_and_past_the_end_is_out_of_range(
    cluster: Cluster, trimmed: tuple[str, RawNode], base: int
) -> None:
    topic, _ = trimmed
    cluster.wait_converged(topic, 1)
    for node in cluster.alive():
        for offset in (-1, base + LO - 1, base + HI + 1, 2**62):
            error = raises(ErrorCode.OFFSET_OUT_OF_RANGE, partial(node.raw.fetch, topic, 0, offset))
            assert (error.details.lo, error.details.hi) == (base + LO, base + HI)
        at_end = node.raw.fetch(topic, 0, base + HI)
        assert (list(at_end.batches), at_end.hwm, at_end.log_start) == ([], base + HI, base + LO)
