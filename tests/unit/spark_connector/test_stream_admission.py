"""Admission: limits hold, no partition starves, shares follow the backlog."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    ReadMinRows,
)

from smq.spark_connector.options import StreamOptions, stream_options
from smq.spark_connector.read_bounds import PartitionKey
from smq.spark_connector.stream.read_limits import Limits, admit, default_limit, limits_of, split

BATCH_ROWS, BATCH_BYTES = 10, 1000  # of the partitions below


def sized(requested: Mapping[PartitionKey, tuple[int, int]]) -> dict[PartitionKey, tuple[int, int]]:
    """Batches of 10 rows and 1000 bytes, as the cluster answers."""
    found = {}
    for key, (start, bytes_max) in requested.items():
        first = start // BATCH_ROWS
        count = max(1, bytes_max // BATCH_BYTES)
        found[key] = ((first + count) * BATCH_ROWS, count * BATCH_BYTES)
    return found


def options(**more: str) -> StreamOptions:
    return stream_options({"servers": "h:1", "subscribe": "t", **{k.lower(): v for k, v in more.items()}})


def backlog(*rows: int) -> tuple[dict[PartitionKey, int], dict[PartitionKey, int]]:
    """Positions and goals of partitions that are this many rows behind."""
    positions = {("t", p): 100 * p for p in range(len(rows))}
    return positions, {("t", p): 100 * p + count for p, count in enumerate(rows)}


def taken(rows: tuple[int, ...], limits: Limits, turn: int = 0) -> list[int]:
    positions, goals = backlog(*rows)
    ends = admit(positions, goals, limits, sized, turn)
    return [ends["t", p] - positions["t", p] for p in range(len(rows))]


def test_without_a_limit_everything_is_taken() -> None:
    assert taken((5, 0, 70), Limits()) == [5, 0, 70]


def test_rows_are_split_in_proportion_to_the_backlog() -> None:
    assert taken((9000, 900, 100), Limits(rows_max=1000)) == [898, 91, 11]


def test_fewer_rows_than_partitions_rotate() -> None:
    rounds = [taken((50, 50, 50), Limits(rows_max=2), turn) for turn in range(3)]
    assert rounds == [[1, 1, 0], [0, 1, 1], [1, 0, 1]]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 10**6), st.integers(0, 100))
def test_split_takes_exactly_the_limit_and_leaves_no_partition_out(rows: list[int], most: int, turn: int) -> None:
    pending = {("t", p): count for p, count in enumerate(rows)}
    shares = split(pending, most, turn)
    assert sum(shares.values()) == min(most, sum(rows))
    assert all(0 < share <= pending[key] for key, share in shares.items())
    if most >= len(rows):
        assert shares.keys() == pending.keys()


@given(st.lists(st.integers(0, 500), min_size=1, max_size=6), st.integers(1, 6000), st.integers(0, 9))
def test_byte_limit_holds_except_for_a_larger_first_batch(rows: list[int], bytes_max: int, turn: int) -> None:
    positions, goals = backlog(*rows)
    ends = admit(positions, goals, Limits(bytes_max=bytes_max), sized, turn)
    batches = [-(-(ends[key] - positions[key]) // BATCH_ROWS) for key in positions]
    assert sum(batches) * BATCH_BYTES <= max(bytes_max, BATCH_BYTES)
    assert any(batches) == any(rows)
    assert all(positions[key] <= ends[key] <= goals[key] for key in positions)


def test_byte_limit_lets_every_partition_reach_its_end() -> None:
    positions, goals = backlog(400, 10, 3, 90)
    for turn in range(100):
        positions = admit(positions, goals, Limits(bytes_max=BATCH_BYTES), sized, turn)
    assert positions == goals


def test_sizes_unknown_to_all_replicas_do_not_stop_a_run() -> None:
    positions, goals = backlog(50, 50)
    ends = admit(
        positions, goals, Limits(bytes_max=10), lambda requested: {k: (s, 0) for k, (s, _) in requested.items()}, 1
    )
    assert [ends[key] - positions[key] for key in positions] == [0, 1]


def test_row_and_byte_limits_hold_together() -> None:
    assert sum(taken((500, 500), Limits(rows_max=30, bytes_max=10**6))) == 30
    assert taken((500, 500), Limits(rows_max=900, bytes_max=2000)) == [10, 10]


@pytest.mark.parametrize(
    ("given_", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "7"}, ReadMaxRows(5)),
        ({"maxBytesPerTrigger": "7", "minOffsetsPerTrigger": "2"}, ReadMaxBytes(7)),
        ({"minOffsetsPerTrigger": "2"}, ReadMinRows(2)),
    ],
)
def test_default_limit_stands_for_all_options(given_: dict[str, str], limit: ReadLimit) -> None:
    chosen = options(**given_)
    assert default_limit(chosen) == limit
    assert limits_of(chosen, limit) == Limits(
        rows_max=chosen.rows_max, bytes_max=chosen.bytes_max, rows_min=chosen.rows_min
    )


def test_limits_that_spark_gives_override_the_options() -> None:
    chosen = options(maxOffsetsPerTrigger="5", minOffsetsPerTrigger="2")
    assert limits_of(chosen, ReadAllAvailable()) == Limits()
    assert limits_of(chosen, ReadMaxRows(9)) == Limits(rows_max=9)
    assert limits_of(chosen, ReadMaxBytes(9)) == Limits(bytes_max=9)
    assert limits_of(chosen, ReadMinRows(9)) == Limits(rows_min=9)
    assert limits_of(chosen, ReadMaxFiles(9)) == Limits()
