"""One page of records of one partition or of all: where it begins and ends, and the records in the order of their time.

Owns the way from a request to offsets, and the merging of partitions. `record_reads` reads each of them. `record_pages`
and `following` import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from smq.coordinator.http.console.asking import PARTITIONS_MAX, Ask, Cursor
from smq.coordinator.http.console.record_reads import PAGE_RECORDS, Found, Shown, Wish, read, read_back
from smq.coordinator.http.console.refusals import BadRequest
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.errors import SmqError
from smq.raft_state.state import TopicState
from smq.replication.api import PartitionRange, TimeKind

TIMEOUT_MS: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the partitions of a page begin and end. `problems`: partitions that cannot be read, such as those without a
    copy on this node."""

    ranges: Mapping[int, PartitionRange]
    starts: Cursor
    ends: Mapping[int, int]  # of those that end before their last record
    is_back: bool  # the page has the last records before `starts`
    problems: Mapping[int, SmqError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    records: list[Shown]
    first: Cursor  # where the page begins
    next: Cursor  # where to go on
    ends: Cursor
    searched: int
    problems: Mapping[int, SmqError]

    @property
    def has_more(self) -> bool:
        return any(offset < self.ends[partition] for partition, offset in self.next.items())


async def planned(calls: NodeCalls, topic: TopicState, ask: Ask) -> Plan:
    """BadRequest for partitions that the topic does not have."""
    chosen = _chosen(topic, ask)
    found = await calls.partition_ranges([(topic.name, partition) for partition in chosen], TIMEOUT_MS)
    ranges = {p: r for p, r in zip(chosen, found, strict=True) if isinstance(r, PartitionRange)}
    problems = {p: r for p, r in zip(chosen, found, strict=True) if isinstance(r, SmqError)}
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for partition, range_ in ranges.items():
        try:
            starts[partition] = await _start(calls, ask, range_)
            if (end := await _end(calls, ask, range_)) is not None:
                ends[partition] = end
        except SmqError as e:
            problems[partition] = e
            starts.pop(partition, None)
    is_back = ask.before is not None or (ask.is_newest and ask.at is None)
    return Plan(ranges=ranges, starts=starts, ends=ends, is_back=is_back, problems=problems)


def _chosen(topic: TopicState, ask: Ask) -> list[int]:
    count = len(topic.partitions)
    chosen = [] if ask.partition is None else [ask.partition]
    for partition in (*chosen, *(ask.at or ()), *(ask.before or ())):
        if partition >= count:
            raise BadRequest(f"topic {topic.name} has the partitions 0 to {count - 1}, not {partition}")
    if chosen:
        return chosen
    if count > PARTITIONS_MAX:
        raise BadRequest(
            f"topic {topic.name} has {count} partitions: a page shows all of a topic with {PARTITIONS_MAX} at most. "
            "Name one partition"
        )
    return list(range(count))


async def _start(calls: NodeCalls, ask: Ask, range_: PartitionRange) -> int:
    """Where the page begins, or before which it ends."""
    partition = range_.partition
    cursor = ask.at or ask.before
    if cursor is not None:
        return cursor.get(partition, range_.log_start)
    if ask.is_newest:
        return range_.lso
    if ask.time_ms is not None:
        return await _at_time(calls, range_, ask.time_ms)
    if ask.offset is None:
        return range_.log_start
    if ask.partition is None:  # one offset for all: each partition begins as near to it as it can
        return min(max(ask.offset, range_.log_start), range_.lso)
    return ask.offset


async def _end(calls: NodeCalls, ask: Ask, range_: PartitionRange) -> int | None:
    ends = [ask.to + 1] if ask.to is not None else []
    if ask.until_ms is not None:
        ends.append(await _at_time(calls, range_, ask.until_ms))
    return min(ends) if ends else None


async def _at_time(calls: NodeCalls, range_: PartitionRange, time_ms: int) -> int:
    found = await calls.offset_for_time(range_.topic, range_.partition, TimeKind.TIMESTAMP_MS, time_ms, TIMEOUT_MS)
    return found.offset


async def page_of(calls: NodeCalls, topic: str, ask: Ask, plan: Plan) -> Merged:
    """The first records from the plan's start on, or the last before it. Of several partitions in the order in which
    the leaders appended them, by their clocks."""
    found: dict[int, Found] = {}
    problems = dict(plan.problems)
    for partition, start in plan.starts.items():
        end = plan.ends.get(partition)
        wish = Wish(end=end, text=ask.wanted, share=len(plan.starts))
        try:
            if plan.is_back:
                last = start if end is None else min(start, end)
                begin = plan.ranges[partition].log_start
                found[partition] = await read_back(calls, topic, partition, begin, last, wish)
            else:
                found[partition] = await read(calls, topic, partition, start, wish)
        except SmqError as e:
            problems[partition] = e
    return _merged(found, plan, problems)


def _merged(found: Mapping[int, Found], plan: Plan, problems: Mapping[int, SmqError]) -> Merged:
    records = sorted((s for f in found.values() for s in f.records), key=lambda s: (s.ts_ns, s.partition, s.offset))
    first = {partition: f.begin for partition, f in found.items()}
    following = {partition: f.next_offset for partition, f in found.items()}
    if plan.is_back:
        shown, left_out = records[-PAGE_RECORDS:], records[:-PAGE_RECORDS]
        first |= {s.partition: s.offset + 1 for s in left_out}
    else:
        shown, left_out = records[:PAGE_RECORDS], records[PAGE_RECORDS:]
        following |= {s.partition: s.offset for s in reversed(left_out)}
    return Merged(
        records=shown,
        first=first,
        next=following,
        ends={partition: f.end for partition, f in found.items()},
        searched=sum(f.searched for f in found.values()),
        problems=problems,
    )
