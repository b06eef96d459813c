"""Plans a read: offset ranges, and their slicing into Spark partitions.

Pure: no I/O, no clock, no cluster. The readers pass in where each partition starts and ends. Every offset of a range
is in exactly one slice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.datasource import InputPartition

from smq.spark_connector.errors import OptionError
from smq.spark_connector.options import ReadOptions, SourceOptions, TimeSpec
from smq.spark_connector.read_bounds import LookUp, PartitionKey, Views, ending_offsets, per_partition, starting_offsets

# A task costs 15-110 ms, whatever it reads, and 50,000 records of 100 bytes decode in about 30 ms: below this many
# records a task of its own costs more than it saves.
MERGED_RECORDS_MAX: Final = 50_000
SLICES_MAX: Final = 100_000  # Spark's scheduler keeps every task in the driver's memory; more must be a mistyped option


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Offsets [lo, hi) of one partition, and where to read them, best first. Of the topic with this id: a later one of
    the same name has other records at these offsets."""

    topic: str
    topic_id: str
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
    """The ranges that one task reads, in order. Pickled to the executors."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return f"SmqSlice({', '.join(map(str, self.ranges))})"


# ------------------------------------------------------------------------------------------------ ranges
def resolve_ranges(options: ReadOptions, views: Views, look_up: LookUp) -> list[Range]:
    """The range that a batch reads of each partition. Empty ranges are left out.

    Errors as for `starting_offsets` and `ending_offsets`; OptionError also if a start is beyond its end.
    """
    _check_forwards(options, views)
    starting = starting_offsets(options.source, views, look_up)
    ending = ending_offsets(options.source, options.ending, views, look_up)
    return ranges_between(starting, ending, views)


def ranges_between(lo: Mapping[PartitionKey, int], hi: Mapping[PartitionKey, int], views: Views) -> list[Range]:
    """The non-empty ranges [lo, hi), in order of topic and partition."""
    return [
        Range(
            topic=key[0],
            topic_id=views[key].topic_id,
            partition=key[1],
            lo=lo[key],
            hi=hi[key],
            replicas=views[key].replicas,
        )
        for key in sorted(hi)
        if lo[key] < hi[key]
    ]


def _check_forwards(options: ReadOptions, views: Views) -> None:
    if isinstance(options.source.starting, TimeSpec) or isinstance(options.ending, TimeSpec):
        return  # by time, the end may precede the start: then the range is empty
    starting = per_partition("startingOffsets", options.source.starting, views)
    ending = per_partition("endingOffsets", options.ending, views)
    for key in sorted(views):
        if starting[key] > ending[key] >= 0:
            raise OptionError(
                f"{key[0]}-{key[1]}: startingOffsets {starting[key]} is beyond endingOffsets {ending[key]}: swap them"
            )


# ------------------------------------------------------------------------------------------------ slices
def slices_of(options: SourceOptions, ranges: Iterable[Range]) -> list[SmqSlice]:
    """The tasks of one read, according to the options."""
    return plan_slices(
        ranges,
        partitions_min=options.partitions_min,
        records_per_partition_max=options.records_per_partition_max,
    )


def plan_slices(
    ranges: Iterable[Range], *, partitions_min: int | None = None, records_per_partition_max: int | None = None
) -> list[SmqSlice]:
    """Cuts large ranges according to the options, otherwise merges small ones, and spreads the pieces over the
    replicas. OptionError if that makes more than SLICES_MAX tasks."""
    whole = [r for r in ranges if r.size > 0]
    records_max = _records_max(whole, partitions_min, records_per_partition_max)
    pieces = _cut(whole, records_max)
    spread = _spread(pieces)
    if partitions_min is not None:
        return [SmqSlice([piece]) for piece in spread]
    return _merged(spread, min(MERGED_RECORDS_MAX, records_max or MERGED_RECORDS_MAX))


def _records_max(ranges: Sequence[Range], partitions_min: int | None, given: int | None) -> int | None:
    """The largest slice, in records, that satisfies both options; None = no limit."""
    limits = [given] if given is not None else []
    if partitions_min is not None:
        limits.append(max(1, sum(r.size for r in ranges) // partitions_min))
    return min(limits, default=None)


def _cut(ranges: Sequence[Range], records_max: int | None) -> list[Range]:
    """Nearly equal pieces of at most `records_max` records."""
    if records_max is None:
        return list(ranges)
    counts = [-(-r.size // records_max) for r in ranges]
    if sum(counts) > SLICES_MAX:
        raise OptionError(
            f"minPartitions and maxRecordsPerPartition make {sum(counts)} tasks of this read, more than {SLICES_MAX}: "
            "ask for fewer partitions, or more records in each"
        )
    return [
        replace(r, lo=r.lo + r.size * i // count, hi=r.lo + r.size * (i + 1) // count)
        for r, count in zip(ranges, counts, strict=True)
        for i in range(count)
    ]


def _spread(pieces: Sequence[Range]) -> list[Range]:
    """Any replica serves records below the high water mark, so each piece prefers the least loaded one so far."""
    load: dict[str, int] = {}
    spread = []
    for piece in pieces:
        by_load = tuple(sorted(piece.replicas, key=lambda address: load.get(address, 0)))
        if by_load:
            load[by_load[0]] = load.get(by_load[0], 0) + piece.size
        spread.append(replace(piece, replicas=by_load))
    return spread


def _merged(pieces: Sequence[Range], records_max: int) -> list[SmqSlice]:
    """Neighbours share a slice while together they have no more than `records_max` records."""
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
