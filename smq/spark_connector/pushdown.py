"""Filter pushdown: bounds on topics, partitions, offsets and times from a query's filters, to read less.

Owns the translation of Spark's filters into bounds, and of bounds into narrower ranges. Pure: the caller passes in a
function that looks up offsets by time. It must never leave out a record that passes the filters; Spark filters again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, TypeAlias

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from smq.spark_connector.option_values import INT64_MAX
from smq.spark_connector.options import TimeUnit
from smq.spark_connector.planning import Range
from smq.spark_connector.read_bounds import LookUp, PartitionKey

Interval: TypeAlias = tuple[int, int]  # [first, past the last)

_EVERYTHING: Final[Interval] = (-INT64_MAX - 1, INT64_MAX + 1)
# `timestamp` is in milliseconds. The producers' times are in no order, so only a lower bound narrows the read.
_NUMBERS: Final = {"partition": "partition", "offset": "offset", "_index": "offset", "ts_ns": "ts_ns"}
_TIMESTAMP: Final = "timestamp"
_INTERVALS: Final[dict[type[Filter], Callable[[int], Interval]]] = {
    EqualTo: lambda value: (value, value + 1),
    GreaterThan: lambda value: (value + 1, _EVERYTHING[1]),
    GreaterThanOrEqual: lambda value: (value, _EVERYTHING[1]),
    LessThan: lambda value: (_EVERYTHING[0], value),
    LessThanOrEqual: lambda value: (_EVERYTHING[0], value + 1),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rows outside `intervals` (by column), and topics and partitions not in `members`, may be left out."""

    intervals: dict[str, Interval] = field(default_factory=dict)
    members: dict[str, frozenset[object]] = field(default_factory=dict)

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> "Bounds":
        """The filters are joined by AND; those that do not bound the columns above are ignored."""
        bounds = cls()
        for each in filters:
            bounds._add(each)
        return bounds

    def _add(self, each: Filter) -> None:
        column = _column_of(each)
        if column is None:
            return
        if isinstance(each, EqualTo | In):
            among = frozenset(each.value if isinstance(each, In) else (each.value,))
            self.members[column] = self.members.get(column, among) & among
        interval = _interval(each, is_time=column == _TIMESTAMP)
        if interval is not None:
            name = _NUMBERS.get(column, column)
            lo, hi = self.interval(name)
            self.intervals[name] = (max(lo, interval[0]), min(hi, interval[1]))

    def interval(self, name: str) -> Interval:
        return self.intervals.get(name, _EVERYTHING)

    def admits(self, topic: str, partition: int) -> bool:
        lo, hi = self.interval("partition")
        return (
            topic in self.members.get("topic", (topic,))
            and partition in self.members.get("partition", (partition,))
            and lo <= partition < hi
        )


def narrowed(ranges: Iterable[Range], bounds: Bounds, look_up: LookUp) -> list[Range]:
    """The parts of `ranges` within the bounds, without empty ones."""
    lo, hi = bounds.interval("offset")
    kept = [replace(r, lo=max(r.lo, lo), hi=min(r.hi, hi)) for r in ranges if bounds.admits(r.topic, r.partition)]
    first_ns, stop_ns = bounds.interval("ts_ns")
    kept = _from_time(kept, TimeUnit.APPEND_NS, first_ns, look_up)
    kept = _from_time(kept, TimeUnit.CREATE_MS, bounds.interval(_TIMESTAMP)[0], look_up)
    if stop_ns <= INT64_MAX:
        ends = look_up(TimeUnit.APPEND_NS, dict.fromkeys(_keys(kept), max(0, stop_ns)))
        kept = [replace(r, hi=_earlier(r.hi, ends[r.topic, r.partition])) for r in kept]
    return [r for r in kept if r.lo < r.hi]


def _from_time(ranges: Sequence[Range], unit: TimeUnit, first: int, look_up: LookUp) -> list[Range]:
    if first <= 0:
        return list(ranges)
    if first > INT64_MAX:
        return []
    starts = look_up(unit, dict.fromkeys(_keys(ranges), first))
    found = [(r, starts[r.topic, r.partition]) for r in ranges]
    return [replace(r, lo=max(r.lo, start)) for r, start in found if start is not None]


def _keys(ranges: Iterable[Range]) -> list[PartitionKey]:
    return [(r.topic, r.partition) for r in ranges]


def _earlier(end: int, found: int | None) -> int:
    return end if found is None else min(end, found)


def _column_of(each: Filter) -> str | None:
    """The column whose values the filter bounds; None for all other filters."""
    if not isinstance(each, EqualTo | In | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return None
    column = each.attribute[0].lower() if len(each.attribute) == 1 else ""
    return column if column in _NUMBERS or column in ("topic", _TIMESTAMP) else None


def _interval(each: Filter, *, is_time: bool) -> Interval | None:
    """The numbers (for a time: milliseconds) that pass the filter, or more."""
    if isinstance(each, In):
        numbers = [n for value in each.value if (n := _number(value, is_time=is_time)) is not None]
        return (min(numbers), max(numbers) + 1) if len(numbers) == len(each.value) > 0 else None
    make = _INTERVALS.get(type(each))
    number = _number(getattr(each, "value", None), is_time=is_time)
    if make is None or number is None:
        return None
    # A filter's time has microseconds: its millisecond may hold records on either side of it.
    return make(number) if not is_time else (make(number)[0] - isinstance(each, GreaterThan), _EVERYTHING[1])


def _number(value: object, *, is_time: bool) -> int | None:
    if is_time:
        is_aware = isinstance(value, datetime) and value.tzinfo is not None
        return int(value.timestamp() * 1000 // 1) if is_aware and isinstance(value, datetime) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
