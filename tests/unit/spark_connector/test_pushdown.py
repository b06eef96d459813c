"""Filters to bounds to narrower ranges: no record that passes the filters may be left out."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from smq.spark_connector.options import TimeUnit
from smq.spark_connector.planning import Range
from smq.spark_connector.pushdown import Bounds, narrowed
from smq.spark_connector.read_bounds import PartitionKey

# Record i of a partition: appended at 1000 + 10 i ns; created at ORDER[i] ms, in no order.
ORDER = [5, 3, 9, 1, 7, 7, 2, 8, 4, 6]
RECORDS = [(topic, p, offset) for topic in ("a", "b") for p in range(3) for offset in range(len(ORDER))]


def look_up(unit: TimeUnit, times: Mapping[PartitionKey, int]) -> dict[PartitionKey, int | None]:
    def value(offset: int) -> int:
        return ORDER[offset] if unit is TimeUnit.CREATE_MS else 1000 + 10 * offset

    return {key: next((o for o in range(len(ORDER)) if value(o) >= time), None) for key, time in times.items()}


def read(*filters: Filter) -> list[tuple[str, int, int]]:
    places = [(t, p) for t in ("a", "b") for p in range(3)]
    whole = [Range(topic=t, topic_id="1f", partition=p, lo=0, hi=len(ORDER), replicas=()) for t, p in places]
    left = narrowed(whole, Bounds.of(filters), look_up)
    return [(r.topic, r.partition, offset) for r in left for offset in range(r.lo, r.hi)]


def at_ms(ms: float) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ([], 60),
        ([EqualTo(("topic",), "a")], 30),
        ([EqualTo(("topic",), "nowhere")], 0),
        ([In(("PARTITION",), (0, 2)), EqualTo(("topic",), "a")], 20),
        ([GreaterThan(("partition",), 0)], 40),
        ([LessThan(("offset",), 3)], 18),
        ([LessThanOrEqual(("_index",), 3), GreaterThanOrEqual(("offset",), 2)], 12),
        ([EqualTo(("offset",), 4)], 6),
        ([In(("offset",), (2, 4))], 18),
        ([LessThan(("offset",), 3), GreaterThan(("offset",), 5)], 0),
        ([GreaterThanOrEqual(("ts_ns",), 1050)], 30),
        ([GreaterThan(("ts_ns",), 1050)], 24),
        ([LessThan(("ts_ns",), 1050)], 30),
        ([LessThan(("ts_ns",), -5)], 0),
        ([GreaterThan(("ts_ns",), 2**63 - 1)], 0),
        ([GreaterThanOrEqual(("timestamp",), at_ms(9))], 48),
        ([LessThan(("timestamp",), at_ms(2))], 60),
        ([EqualTo(("value",), b"x"), IsNotNull(("offset",)), Not(EqualTo(("offset",), 1))], 60),
        ([EqualTo(("offset", "inner"), 1)], 60),
    ],
)
def test_filter_narrows_the_read(filters: list[Filter], count: int) -> None:
    assert len(read(*filters)) == count


COMPARED: dict[Callable[..., Filter], Callable[[float, float], bool]] = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
}
NUMBERS = st.one_of(
    st.tuples(st.just("partition"), st.integers(-1, 3)),
    st.tuples(st.just("offset"), st.integers(-2, 11)),
    st.tuples(st.just("ts_ns"), st.integers(990, 1110)),
    st.tuples(st.just("timestamp"), st.floats(0.1, 10).map(lambda ms: round(ms, 1))),
)
FILTERS = st.lists(st.tuples(st.sampled_from(sorted(COMPARED, key=str)), NUMBERS), max_size=4)


@given(FILTERS)
def test_no_row_that_passes_the_filters_is_left_out(
    filters: list[tuple[Callable[..., Filter], tuple[str, float]]],
) -> None:
    def passes(topic: str, partition: int, offset: int) -> bool:
        row = {"partition": partition, "offset": offset, "ts_ns": 1000 + 10 * offset, "timestamp": ORDER[offset]}
        return all(COMPARED[kind](row[column], value) for kind, (column, value) in filters)

    pushed = [kind((column,), at_ms(value) if column == "timestamp" else value) for kind, (column, value) in filters]
    assert {row for row in RECORDS if passes(*row)} <= set(read(*pushed))
