"""The partitions of a read, and where it starts or ends in each: names, patterns, offsets and times.

Owns the check of the options against the cluster's topics. Pure: the caller passes in a function that looks up offsets
by time. Batch and stream readers import it.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from smq.raft_state.errors import ErrorCode, SmqError
from smq.spark_connector.errors import OptionError, report_loss
from smq.spark_connector.options import EARLIEST, LATEST, PositionSpec, SourceOptions, TimeSpec, TimeUnit

log = logging.getLogger(__name__)

PartitionKey: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """A partition according to the cluster: `topic_id` is that of its topic (one that is deleted and created again gets
    another), `lo` its first offset, `hi` its first offset that is not readable yet; `replicas` are gRPC addresses, live
    ones first. If its leader has not answered, the end is not known: there may be records from `hi` on."""

    topic_id: str
    lo: int
    hi: int
    replicas: tuple[str, ...]
    is_end_known: bool = True


Views: TypeAlias = Mapping[PartitionKey, PartitionView]
# The first offset at or after each partition's time; None if there is no such readable record.
LookUp: TypeAlias = Callable[[TimeUnit, Mapping[PartitionKey, int]], Mapping[PartitionKey, int | None]]


# ------------------------------------------------------------------------------------------------ partitions
def select_partitions(options: SourceOptions, views: Views, external: Set[str]) -> list[PartitionKey]:
    """The partitions that `subscribe`, `subscribePattern` or `assign` name.

    OptionError for a topic or partition that does not exist, WRONG_STORAGE for a topic of `external`. A pattern passes
    over `external`; if it matches nothing (yet), that only logs a warning.
    """
    check_storage(options, external)
    counts = partition_counts(views)
    if options.pattern is not None:
        return matching_partitions(options, views)
    wanted = options.assigned or dict.fromkeys(options.topics, ())
    missing = [topic for topic in wanted if topic not in counts]
    if missing:
        existing = ", ".join(sorted(counts)[:20]) or "none"
        raise OptionError(
            f"the cluster has no topic {', '.join(map(repr, missing))} (existing topics: {existing}); create it with "
            "`smq topic create`, or correct 'subscribe' or 'assign'"
        )
    selected: list[PartitionKey] = []
    for topic, partitions in wanted.items():
        far = [p for p in partitions if p >= counts[topic]]
        if far:
            raise OptionError(
                f"topic {topic!r} has {counts[topic]} partitions, but 'assign' names {far}: use 0..{counts[topic] - 1}"
            )
        selected += [(topic, p) for p in partitions or range(counts[topic])]
    return selected


def check_storage(options: SourceOptions, external: Set[str]) -> None:
    """WRONG_STORAGE if `subscribe` or `assign` names a topic of `external`: it has offsets, but no records to read."""
    named = [topic for topic in options.assigned or options.topics if topic in external]
    if named:
        topics = ", ".join(map(repr, named))
        raise SmqError(
            ErrorCode.WRONG_STORAGE, f"the records of topic {topics} are stored elsewhere (storage=external)"
        )


def matching_partitions(options: SourceOptions, views: Views) -> list[PartitionKey]:
    """The existing partitions that the options name: those that a stream reads from now on."""
    found = sorted(key for key in views if is_named(options, key))
    if options.pattern is not None and not found:
        log.warning("subscribePattern %r matches no topic of the cluster", options.pattern)
    return found


def is_named(options: SourceOptions, key: PartitionKey) -> bool:
    """Whether the options name this partition, existing or not."""
    topic, partition = key
    if options.pattern is not None:
        return re.fullmatch(options.pattern, topic) is not None
    return partition in options.assigned.get(topic, ()) if options.assigned else topic in options.topics


def partition_counts(views: Views) -> dict[str, int]:
    counts: dict[str, int] = {}
    for topic, _ in views:
        counts[topic] = counts.get(topic, 0) + 1
    return counts


# ------------------------------------------------------------------------------------------------ places
def starting_offsets(options: SourceOptions, views: Views, look_up: LookUp) -> dict[PartitionKey, int]:
    """Where a new read starts in each partition of `views`, within its existing offsets.

    OptionError if the option does not name exactly these partitions, or if no record is at or after the given time and
    the strategy is "error". Offsets outside the partition raise DataLossError, or are clamped with a warning if
    failOnDataLoss is false.
    """
    spec = options.starting
    if isinstance(spec, TimeSpec):
        found = look_up(spec.unit, per_partition(spec.name, spec.times, views))
        return {key: _after_time(options, spec, key, view, found[key]) for key, view in views.items()}
    return _offsets("startingOffsets", spec, views, fail=options.fail_on_data_loss)


def ending_offsets(
    options: SourceOptions, spec: PositionSpec, views: Views, look_up: LookUp
) -> dict[PartitionKey, int]:
    """Where a batch read ends (exclusive) in each partition of `views`. A time after the last record means the end of
    the log, as in the Kafka connector. Errors as for the start."""
    if isinstance(spec, TimeSpec):
        found = look_up(spec.unit, per_partition(spec.name, spec.times, views))
        ends = {key: view.hi if (offset := found[key]) is None else offset for key, view in views.items()}
        return {key: min(max(ends[key], view.lo), view.hi) for key, view in views.items()}
    return _offsets("endingOffsets", spec, views, fail=options.fail_on_data_loss)


def per_partition(
    name: str, spec: int | Mapping[str, Mapping[int, int]], keys: Iterable[PartitionKey]
) -> dict[PartitionKey, int]:
    """`spec` for each partition. OptionError if it does not name exactly these partitions."""
    if isinstance(spec, int):
        return dict.fromkeys(keys, spec)
    given = {(topic, p): value for topic, by_partition in spec.items() for p, value in by_partition.items()}
    wanted = set(keys)
    if given.keys() != wanted:
        missing = ", ".join(f"{t}-{p}" for t, p in sorted(wanted - given.keys())) or "none"
        extra = ", ".join(f"{t}-{p}" for t, p in sorted(given.keys() - wanted)) or "none"
        marks = f"; use {EARLIEST} for earliest and {LATEST} for latest" if name.endswith("Offsets") else ""
        raise OptionError(
            f"{name} must name every partition that is read and no other (missing: {missing}; not read: {extra}){marks}"
        )
    return given


def _after_time(
    options: SourceOptions, spec: TimeSpec, key: PartitionKey, view: PartitionView, found: int | None
) -> int:
    if found is not None:
        return min(max(found, view.lo), view.hi)
    if options.latest_if_no_match:
        return view.hi
    raise OptionError(
        f"{spec.name}: no record of {key[0]}-{key[1]} has that {spec.unit.value} or a later one; give an earlier time, "
        "or set .option('startingOffsetsByTimestampStrategy', 'latest') to start such partitions at their end"
    )


def _offsets(
    name: str, spec: int | Mapping[str, Mapping[int, int]], views: Views, *, fail: bool
) -> dict[PartitionKey, int]:
    requested = per_partition(name, spec, views)
    return {key: _within(name, key, _literal(requested[key], view), view, fail=fail) for key, view in views.items()}


def _literal(offset: int, view: PartitionView) -> int:
    return view.lo if offset == EARLIEST else view.hi if offset == LATEST else offset


def _within(name: str, key: PartitionKey, offset: int, view: PartitionView, *, fail: bool) -> int:
    if view.lo <= offset <= view.hi:
        return offset
    report_loss(f"{name} {offset} of {key[0]}-{key[1]} is outside [{view.lo}, {view.hi}]", fail=fail)
    return min(max(offset, view.lo), view.hi)
