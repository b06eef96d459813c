"""From what was asked to what each task reads: offset ranges, and their slicing into Spark partitions.

Pure: no I/O, no clock, no cluster. The batch reader gives it the options and the partitions' present ends; the
stream reader will give it ranges of its own. Every offset of a range lands in exactly one slice.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pyspark.sql.datasource import InputPartition

from smq.spark_connector.errors import DataLossError, OptionError
from smq.spark_connector.options import EARLIEST, LATEST, OffsetSpec, ReadOptions

log = logging.getLogger(__name__)

PartitionKey: TypeAlias = tuple[str, int]

# A task costs 15-110 ms whatever it reads, and 50,000 records of 100 bytes decode in about 30 ms: below this
# many records a task of its own costs more than it saves.
MERGED_RECORDS_MAX: Final = 50_000
SLICES_MAX: Final = 100_000  # Spark's scheduler keeps every task in the driver's memory; more is a mistyped option


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """What the cluster says of a partition: `lo` first offset there, `hi` first offset not yet readable, and the
    gRPC addresses of the live replicas."""

    lo: int
    hi: int
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Offsets [lo, hi) of one partition, and where to read them, best first."""

    topic: str
    partition: int
    lo: int
    hi: int
    replicas: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.lo}, {self.hi})"


class SmqSlice(InputPartition):
    """What one task reads: ranges, in order. Pickled to the executors."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return f"SmqSlice({', '.join(map(str, self.ranges))})"


# ------------------------------------------------------------------------------------------------ ranges
def select_partitions(options: ReadOptions, counts: Mapping[str, int]) -> list[PartitionKey]:
    """The partitions that `subscribe` or `assign` name; `counts` is each topic's partition count.

    OptionError for a topic or a partition that does not exist.
    """
    wanted = options.assigned or dict.fromkeys(options.topics, ())
    missing = [topic for topic in wanted if topic not in counts]
    if missing:
        there = ", ".join(sorted(counts)[:20]) or "none"
        raise OptionError(
            f"the cluster has no topic {', '.join(map(repr, missing))} (topics there: {there}); create it with "
            "`smq topic create`, or correct 'subscribe' or 'assign'"
        )
    selected: list[PartitionKey] = []
    for topic, partitions in wanted.items():
        far = [p for p in partitions if p >= counts[topic]]
        if far:
            raise OptionError(
                f"topic {topic!r} has {counts[topic]} partitions, 'assign' names {far}: use 0..{counts[topic] - 1}"
            )
        selected += [(topic, p) for p in partitions or range(counts[topic])]
    return selected


def resolve_ranges(options: ReadOptions, views: Mapping[PartitionKey, PartitionView]) -> list[Range]:
    """What to read of each partition, by `startingOffsets` and `endingOffsets`. Empty ranges are left out.

    OptionError where JSON offsets do not name exactly the partitions read, or run backwards. Offsets outside of
    what is there are a DataLossError, or are clamped (with a warning) where failOnDataLoss is false.
    """
    starting = _per_partition("startingOffsets", options.starting, views)
    ending = _per_partition("endingOffsets", options.ending, views)
    ranges = []
    for key, view in sorted(views.items()):
        lo, hi = _literal(starting[key], view), _literal(ending[key], view)
        if lo > hi and starting[key] >= 0 and ending[key] >= 0:
            raise OptionError(f"{key[0]}-{key[1]}: startingOffsets {lo} is beyond endingOffsets {hi}: swap them")
        lo = _within("startingOffsets", key, lo, view, fail=options.fail_on_data_loss)
        hi = _within("endingOffsets", key, hi, view, fail=options.fail_on_data_loss)
        if lo < hi:
            ranges.append(Range(topic=key[0], partition=key[1], lo=lo, hi=hi, replicas=view.replicas))
    return ranges


def _per_partition(name: str, spec: OffsetSpec, keys: Iterable[PartitionKey]) -> dict[PartitionKey, int]:
    if isinstance(spec, int):
        return dict.fromkeys(keys, spec)
    given = {(topic, p): offset for topic, offsets in spec.items() for p, offset in offsets.items()}
    wanted = set(keys)
    if given.keys() != wanted:
        missing = ", ".join(f"{t}-{p}" for t, p in sorted(wanted - given.keys())) or "none"
        extra = ", ".join(f"{t}-{p}" for t, p in sorted(given.keys() - wanted)) or "none"
        raise OptionError(
            f"{name} must name every partition that is read and no other (missing: {missing}; not read: {extra}); "
            f"use {EARLIEST} for earliest and {LATEST} for latest"
        )
    return given


def _literal(offset: int, view: PartitionView) -> int:
    return view.lo if offset == EARLIEST else view.hi if offset == LATEST else offset


def _within(name: str, key: PartitionKey, offset: int, view: PartitionView, *, fail: bool) -> int:
    if view.lo <= offset <= view.hi:
        return offset
    message = f"{name} {offset} of {key[0]}-{key[1]} is outside of [{view.lo}, {view.hi}]"
    if fail:
        raise DataLossError(message)
    clamped = min(max(offset, view.lo), view.hi)
    log.warning("%s: using %d, as failOnDataLoss is false", message, clamped)
    return clamped


# ------------------------------------------------------------------------------------------------ slices
def plan_slices(
    ranges: Iterable[Range], *, partitions_min: int | None = None, records_per_partition_max: int | None = None
) -> list[SmqSlice]:
    """Cuts large ranges as the options ask, merges small ones where they do not, and spreads the pieces over
    the replicas. OptionError where it would come to more than SLICES_MAX tasks."""
    whole = [r for r in ranges if r.size > 0]
    records_max = _records_max(whole, partitions_min, records_per_partition_max)
    pieces = _cut(whole, records_max)
    spread = [replace(piece, replicas=_rotated(piece.replicas, i + piece.partition)) for i, piece in pieces]
    if partitions_min is not None:
        return [SmqSlice([piece]) for piece in spread]
    return _merged(spread, min(MERGED_RECORDS_MAX, records_max or MERGED_RECORDS_MAX))


def _records_max(ranges: Sequence[Range], partitions_min: int | None, given: int | None) -> int | None:
    """The largest slice, in records, that keeps both options' promises; None = no limit."""
    limits = [given] if given is not None else []
    if partitions_min is not None:
        limits.append(max(1, sum(r.size for r in ranges) // partitions_min))
    return min(limits, default=None)


def _cut(ranges: Sequence[Range], records_max: int | None) -> list[tuple[int, Range]]:
    """(number of the piece within its range, piece), nearly equal pieces of at most `records_max` records."""
    if records_max is None:
        return [(0, r) for r in ranges]
    counts = [-(-r.size // records_max) for r in ranges]
    if sum(counts) > SLICES_MAX:
        raise OptionError(
            f"minPartitions and maxRecordsPerPartition make {sum(counts)} tasks of this read, more than {SLICES_MAX}: "
            "ask for fewer partitions, or more records in each"
        )
    return [
        (i, replace(r, lo=r.lo + r.size * i // count, hi=r.lo + r.size * (i + 1) // count))
        for r, count in zip(ranges, counts, strict=True)
        for i in range(count)
    ]


def _rotated(replicas: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Any replica serves below the high water mark, so each piece prefers another one."""
    start = by % len(replicas) if replicas else 0
    return replicas[start:] + replicas[:start]


def _merged(pieces: Sequence[Range], records_max: int) -> list[SmqSlice]:
    """Neighbours share a slice while they come to no more than `records_max` records together."""
    slices: list[SmqSlice] = []
    bin_: list[Range] = []
    records = 0
    for piece in pieces:
        if bin_ and records + piece.size > records_max:
            slices.append(SmqSlice(bin_))
            bin_, records = [], 0
        bin_.append(piece)
        records += piece.size
    if bin_:
        slices.append(SmqSlice(bin_))
    return slices
