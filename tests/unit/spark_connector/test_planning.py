"""From options to tasks: which offsets are read, and that each of them is read by exactly one task."""

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.spark_connector.errors import DataLossError, OptionError
from smq.spark_connector.options import ReadOptions, TimeUnit, read_options
from smq.spark_connector.planning import MERGED_RECORDS_MAX, SLICES_MAX, Range, SmqSlice, plan_slices, resolve_ranges
from smq.spark_connector.read_bounds import PartitionKey, PartitionView, select_partitions

NODES = ("a:1", "b:1", "c:1")
ID = "5f" * 16


def options(**more: str) -> ReadOptions:
    base = {"servers": "h:1"}
    if not {"subscribe", "assign", "subscribePattern"} & more.keys():
        base["subscribe"] = "t"
    return read_options({**base, **{k.lower(): v for k, v in more.items()}})


def span(lo: int, hi: int, partition: int = 0, topic: str = "t") -> Range:
    return Range(topic=topic, topic_id=ID, partition=partition, lo=lo, hi=hi, replicas=NODES)


def views(*ends: tuple[int, int]) -> dict[tuple[str, int], PartitionView]:
    return {("t", i): PartitionView(topic_id=ID, lo=lo, hi=hi, replicas=NODES) for i, (lo, hi) in enumerate(ends)}


def look_up(unit: TimeUnit, times: Mapping[PartitionKey, int]) -> dict[PartitionKey, int | None]:
    """A record every 10 ms (and every 20 ns) from offset 0 on, 100 records in each partition."""
    step = 10 if unit is TimeUnit.CREATE_MS else 20
    found = {key: -(-time // step) for key, time in times.items()}
    return {key: offset if offset < 100 else None for key, offset in found.items()}


def resolved(options: ReadOptions, views: dict[tuple[str, int], PartitionView]) -> list[Range]:
    return resolve_ranges(options, views, look_up)


def bounds(ranges: list[Range]) -> list[tuple[int, int, int]]:
    return [(r.partition, r.lo, r.hi) for r in ranges]


# ------------------------------------------------------------------------------------------------ ranges
def test_defaults_read_everything() -> None:
    assert bounds(resolved(options(), views((0, 10), (5, 7)))) == [(0, 0, 10), (1, 5, 7)]


def test_empty_partitions_are_left_out() -> None:
    assert bounds(resolved(options(), views((4, 4), (0, 1)))) == [(1, 0, 1)]


def test_json_offsets_and_marks_together() -> None:
    chosen = options(startingOffsets='{"t":{"0":3,"1":-2}}', endingOffsets='{"t":{"0":-1,"1":6}}')
    assert bounds(resolved(chosen, views((0, 10), (5, 7)))) == [(0, 3, 10), (1, 5, 6)]


@pytest.mark.parametrize("json", ['{"t":{"0":1}}', '{"t":{"0":1,"1":1,"2":1}}', '{"u":{"0":1,"1":1}}', "{}"])
def test_json_that_names_other_partitions_is_refused(json: str) -> None:
    with pytest.raises(OptionError, match="must name every partition that is read"):
        resolved(options(startingOffsets=json), views((0, 9), (0, 9)))


def test_start_beyond_end_is_refused() -> None:
    chosen = options(startingOffsets='{"t":{"0":5}}', endingOffsets='{"t":{"0":4}}')
    with pytest.raises(OptionError, match="swap them"):
        resolved(chosen, views((0, 9)))


@pytest.mark.parametrize("start", [1, 10])
def test_start_outside_the_log_is_data_loss(start: int) -> None:
    chosen = options(startingOffsets=f'{{"t":{{"0":{start}}}}}')
    with pytest.raises(DataLossError, match=rf"startingOffsets {start} of t-0 is outside \[2, 9\]"):
        resolved(chosen, views((2, 9)))


def test_end_beyond_the_high_water_mark_is_data_loss() -> None:
    with pytest.raises(DataLossError, match=r"endingOffsets 10 of t-0 is outside \[2, 9\]"):
        resolved(options(endingOffsets='{"t":{"0":10}}'), views((2, 9)))


def test_offsets_outside_are_clamped_if_data_loss_is_accepted() -> None:
    chosen = options(startingOffsets='{"t":{"0":1}}', endingOffsets='{"t":{"0":10}}', failOnDataLoss="false")
    assert bounds(resolved(chosen, views((2, 9)))) == [(0, 2, 9)]


def test_start_beyond_the_end_of_the_log_reads_nothing_if_accepted() -> None:
    chosen = options(startingOffsets='{"t":{"0":12}}', failOnDataLoss="false")
    assert resolved(chosen, views((2, 9))) == []


HUNDRED = views((0, 100), (0, 100))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"startingTimestamp": "95"}, (10, 100)),
        ({"startingTimestampNs": "95"}, (5, 100)),
        ({"endingTimestamp": "95"}, (0, 10)),
        ({"endingTimestampNs": "95"}, (0, 5)),
        ({"endingTimestamp": "5000"}, (0, 100)),
        ({"startingTimestamp": "100", "endingTimestamp": "200"}, (10, 20)),
        ({"startingTimestamp": "100", "startingOffsets": "earliest"}, (10, 100)),
        ({"startingTimestamp": "100", "startingOffsetsByTimestamp": '{"t":{"0":1}}'}, (10, 100)),
        ({"startingOffsetsByTimestamp": '{"t":{"0":100,"1":100}}', "startingOffsets": "earliest"}, (10, 100)),
        ({"startingOffsetsByTimestampNs": '{"t":{"0":100,"1":100}}'}, (5, 100)),
        ({"endingOffsetsByTimestamp": '{"t":{"0":100,"1":100}}', "endingOffsets": "latest"}, (0, 10)),
        ({"endingOffsetsByTimestampNs": '{"t":{"0":100,"1":100}}'}, (0, 5)),
        ({"startingTimestamp": "200", "endingTimestamp": "100"}, None),
    ],
)
def test_times_choose_offsets_with_the_kafka_connectors_precedence(
    chosen: dict[str, str], expected: tuple[int, int] | None
) -> None:
    ranges = bounds(resolved(options(**chosen), HUNDRED))
    assert ranges == ([] if expected is None else [(0, *expected), (1, *expected)])


def test_time_for_each_partition() -> None:
    chosen = options(startingOffsetsByTimestamp='{"t":{"0":100,"1":300}}')
    assert bounds(resolved(chosen, HUNDRED)) == [(0, 10, 100), (1, 30, 100)]


def test_times_must_name_every_partition() -> None:
    with pytest.raises(OptionError, match=r"startingOffsetsByTimestamp must name every.*missing: t-1"):
        resolved(options(startingOffsetsByTimestamp='{"t":{"0":100}}'), HUNDRED)


def test_time_after_the_last_record_is_refused_with_both_ways_out() -> None:
    with pytest.raises(OptionError, match=r"startingTimestamp: no record of t-0 .* earlier time, .*'latest'"):
        resolved(options(startingTimestamp="5000"), HUNDRED)


def test_time_after_the_last_record_starts_at_the_end_if_requested() -> None:
    chosen = options(startingTimestamp="5000", startingOffsetsByTimestampStrategy="latest")
    assert resolved(chosen, HUNDRED) == []


def test_time_before_the_log_start_begins_at_the_log_start() -> None:
    assert bounds(resolved(options(startingTimestamp="0"), views((30, 100)))) == [(0, 30, 100)]


def test_subscribe_selects_all_partitions_and_assign_some() -> None:
    there = dict.fromkeys((("t", 0), ("t", 1), ("other", 0)), HUNDRED["t", 0])
    assert select_partitions(options().source, there, frozenset()) == [("t", 0), ("t", 1)]
    assert select_partitions(options(assign='{"t":[1]}').source, there, frozenset()) == [("t", 1)]


def test_pattern_selects_whole_names() -> None:
    there = dict.fromkeys((("a1", 0), ("a2", 1), ("a2", 0), ("xa1", 0), ("a11", 0)), HUNDRED["t", 0])
    assert select_partitions(options(subscribePattern="a.").source, there, frozenset()) == [
        ("a1", 0),
        ("a2", 0),
        ("a2", 1),
    ]


def test_pattern_that_matches_nothing_reads_nothing_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert select_partitions(options(subscribePattern="zzz").source, HUNDRED, frozenset()) == []
    assert "matches no topic" in caplog.text


def test_missing_topic_is_named() -> None:
    with pytest.raises(OptionError, match=r"no topic 'u' \(existing topics: t\).*smq topic create"):
        select_partitions(options(subscribe="t,u").source, HUNDRED, frozenset())


def test_missing_partition_is_named() -> None:
    with pytest.raises(OptionError, match=r"topic 't' has 2 partitions, but 'assign' names \[7\]"):
        select_partitions(options(assign='{"t":[0,7]}').source, HUNDRED, frozenset())


# ------------------------------------------------------------------------------------------------ slices
def test_large_ranges_get_a_task_each() -> None:
    size = MERGED_RECORDS_MAX
    assert len(plan_slices([span(0, size, p) for p in range(6)])) == 6


def test_small_ranges_share_tasks() -> None:
    size = MERGED_RECORDS_MAX // 4
    assert [len(s.ranges) for s in plan_slices([span(0, size, p) for p in range(6)])] == [4, 2]


def test_min_partitions_cuts_and_does_not_merge() -> None:
    slices = plan_slices([span(0, 90), span(0, 10, 1)], partitions_min=10)
    assert len(slices) >= 10
    assert all(len(s.ranges) == 1 for s in slices)


def test_min_partitions_beyond_the_records_gives_one_each() -> None:
    assert len(plan_slices([span(0, 3)], partitions_min=100)) == 3


def test_records_per_partition_caps_each_task() -> None:
    slices = plan_slices([span(0, 95), span(0, 3, 1), span(0, 3, 2)], records_per_partition_max=10)
    assert all(sum(r.size for r in s.ranges) <= 10 for s in slices)


def test_more_tasks_than_spark_can_hold_are_refused() -> None:
    with pytest.raises(OptionError, match="ask for fewer"):
        plan_slices([span(0, SLICES_MAX + 1)], records_per_partition_max=1)


def test_pieces_of_a_range_prefer_different_replicas() -> None:
    slices = plan_slices([span(0, 300)], partitions_min=3)
    assert {s.ranges[0].replicas[0] for s in slices} == set(NODES)
    assert all(set(s.ranges[0].replicas) == set(NODES) for s in slices)


@pytest.mark.parametrize("partitions", [2, 3, 6, 7])
def test_partitions_are_read_evenly_from_all_nodes(partitions: int) -> None:
    """In any order of the replicas: with two of them, as with three."""
    for nodes in (NODES, NODES[:2]):
        turned = [nodes[p % len(nodes) :] + nodes[: p % len(nodes)] for p in range(partitions)]
        size = MERGED_RECORDS_MAX
        pieces = [replace(span(0, size, p), replicas=turned[p]) for p in range(partitions)]
        served = Counter(s.ranges[0].replicas[0] for s in plan_slices(pieces))
        assert max(served.values()) <= -(-partitions // len(nodes))


def test_slice_survives_pickling() -> None:
    part = SmqSlice([span(1, 2), span(2**53, 2**53 + 2, 1)])
    copy: Any = pickle.loads(pickle.dumps(part))
    assert copy.ranges == part.ranges


RANGES = st.lists(
    st.tuples(st.integers(0, 2**62), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8
)


@given(ends=RANGES, partitions_min=st.none() | st.integers(1, 50), records_max=st.none() | st.integers(1, 120))
def test_every_offset_lands_in_exactly_one_slice(
    ends: list[tuple[int, int]], partitions_min: int | None, records_max: int | None
) -> None:
    ranges = [span(lo, hi, p) for p, (lo, hi) in enumerate(ends)]
    slices = plan_slices(ranges, partitions_min=partitions_min, records_per_partition_max=records_max)
    found = Counter((r.partition, o) for s in slices for r in s.ranges for o in range(r.lo, r.hi))
    assert found == Counter((r.partition, o) for r in ranges for o in range(r.lo, r.hi))
    assert all(s.ranges and all(r.size > 0 for r in s.ranges) for s in slices)
    total = sum(r.size for r in ranges)
    if partitions_min is not None:
        assert len(slices) >= min(partitions_min, total)
    if records_max is not None:
        assert all(sum(r.size for r in s.ranges) <= records_max for s in slices)
