"""Admission control: how much of each partition one micro-batch takes.

Owns the arithmetic of maxOffsetsPerTrigger, maxBytesPerTrigger, minOffsetsPerTrigger and Spark's read limits. Pure: the
caller passes in a function that looks up sizes in bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from smq.spark_connector.options import StreamOptions
from smq.spark_connector.read_bounds import PartitionKey

# (end, stored bytes) for each partition's (start, maximal bytes): complete batches, at least one.
SizeLookUp: TypeAlias = Callable[[Mapping[PartitionKey, tuple[int, int]]], Mapping[PartitionKey, tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one micro-batch; None = no limit."""

    rows_max: int | None = None
    bytes_max: int | None = None
    rows_min: int | None = None


def default_limit(options: StreamOptions) -> ReadLimit:
    """The limit that Spark passes back to latestOffset. Spark has no limit of several kinds: this one stands for all
    options."""
    if options.rows_max is not None:
        return ReadMaxRows(options.rows_max)
    if options.bytes_max is not None:
        return ReadMaxBytes(options.bytes_max)
    if options.rows_min is not None:
        return ReadMinRows(options.rows_min)
    return ReadAllAvailable()


def limits_of(options: StreamOptions, limit: ReadLimit) -> Limits:
    """Spark's limit; if it is our own default, all limits of the options. "All available" overrides the options, as
    Spark requires (Trigger.Once)."""
    if limit == default_limit(options):
        return Limits(rows_max=options.rows_max, bytes_max=options.bytes_max, rows_min=options.rows_min)
    if isinstance(limit, ReadMaxRows):
        return Limits(rows_max=limit.max_rows)
    if isinstance(limit, ReadMaxBytes):
        return Limits(bytes_max=limit.max_bytes)
    if isinstance(limit, ReadMinRows):
        return Limits(rows_min=limit.min_rows)
    return Limits()


def admit(
    positions: Mapping[PartitionKey, int],
    goals: Mapping[PartitionKey, int],
    limits: Limits,
    size_up: SizeLookUp,
    turn: int,
) -> dict[PartitionKey, int]:
    """Where the micro-batch ends in each partition; at its position if it takes nothing there. `turn` changes from one
    micro-batch to the next, so that no partition starves."""
    pending = {key: goals[key] - positions[key] for key in sorted(positions) if goals[key] > positions[key]}
    if limits.rows_max is not None:
        pending = split(pending, limits.rows_max, turn)
    if limits.bytes_max is not None and pending:
        pending = _within_bytes(positions, pending, limits.bytes_max, size_up, turn)
    return {key: position + pending.get(key, 0) for key, position in positions.items()}


def split(pending: Mapping[PartitionKey, int], most: int, turn: int = 0) -> dict[PartitionKey, int]:
    """Divides `most` rows (or all pending ones): first one per partition, in rotation, then the rest in proportion."""
    if sum(pending.values()) <= most:
        return dict(pending)
    keys = list(pending)
    if most <= len(keys):
        return {keys[(turn + i) % len(keys)]: 1 for i in range(most)}
    rest = {key: rows - 1 for key, rows in pending.items()}
    left, total = most - len(keys), sum(rest.values())
    shares = {key: 1 + rows * left // total for key, rows in rest.items()}
    by_remainder = sorted(keys, key=lambda key: -(rest[key] * left % total))
    for key in by_remainder[: most - sum(shares.values())]:
        shares[key] += 1
    return shares


def _within_bytes(
    positions: Mapping[PartitionKey, int],
    pending: Mapping[PartitionKey, int],
    bytes_max: int,
    size_up: SizeLookUp,
    turn: int,
) -> dict[PartitionKey, int]:
    """The part of `pending` that is stored in at most `bytes_max`, or in one batch if that alone is larger."""
    keys = list(pending)
    total = sum(pending.values())
    share = {key: max(1, rows * bytes_max // total) for key, rows in pending.items()}
    sizes = size_up({key: (positions[key], share[key]) for key in keys})
    taken: dict[PartitionKey, int] = {}
    size_bytes = 0
    start = turn % len(keys)
    for key in keys[start:] + keys[:start]:
        end, size = sizes[key]
        rows = min(pending[key], end - positions[key])
        if rows > 0 and (not taken or size_bytes + size <= bytes_max):
            taken[key] = rows
            size_bytes += size
    # Lagging replicas know no sizes of newly committed batches. Take one row then: "nothing" would end a run.
    return taken or {keys[start]: 1}
