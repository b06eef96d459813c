"""What a request's names mean: topics, partitions, groups, commits, and the position where a reader starts.

Owns which look-ups the services need. It must never say "unknown" by its own decision: the node's `find` decides that,
after a read barrier. Services import it; it knows no wire format.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from smq.coordinator.limits import FETCH_CONCURRENCY, RANGES_PER_TURN, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.start_positions import OffsetType, Position, StartRequest, resolve
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import ClusterState, CommittedOffset, GroupState, PartitionState, TopicState
from smq.replication.api import PartitionRange, TimeKind
from smq.replication.partition.by_name import unknown_partition, unknown_topic


async def find_topic(calls: NodeCalls, topic: str, timeout_ms: int) -> TopicState:
    """UNKNOWN_TOPIC if there is none."""
    found = await calls.find(lambda state: state.topics.get(topic), timeout_ms)
    if found is None:
        raise unknown_topic(topic)
    return found


async def find_partition(calls: NodeCalls, topic: str, partition: int, timeout_ms: int) -> PartitionState:
    """UNKNOWN_TOPIC or UNKNOWN_PARTITION if there is none."""
    found = await calls.find(lambda state: state.partition_of(topic, partition), timeout_ms)
    if found is None:
        raise unknown_partition(calls.node.state, topic, partition)
    return found


async def confirm_unknown(calls: NodeCalls, are_known: Callable[[ClusterState], bool], timeout_ms: int) -> None:
    """For a request with many names: returns once the state says of each whether it is known or unknown. That is
    immediately if all are known, otherwise after one barrier for all of them."""
    await calls.find(lambda state: are_known(state) or None, timeout_ms)


async def find_group(calls: NodeCalls, group: str, timeout_ms: int) -> GroupState:
    """The group as it is after a barrier: members and commits change all the time. UNKNOWN_GROUP if there is none."""
    await calls.barrier(timeout_ms)
    found = calls.node.state.groups.get(group)
    if found is None:
        raise SmqError(ErrorCode.UNKNOWN_GROUP, f"there is no group {group!r}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAsk:
    """Where a reader of one partition wants to start. `timestamp_ms` replaces the type: the first record whose create
    time is at or after it; the end if there is none."""

    topic: str
    partition: int
    type: OffsetType
    value: int = 0
    group: str = ""
    reset_if_gone: bool = False
    timestamp_ms: int | None = None
    is_committed: bool = True  # the log ends at the last stable offset, otherwise at the high water mark
    is_stable: bool = False  # not while an open transaction has staged the group's offset


Start: TypeAlias = tuple[Position, PartitionRange]


async def start_position(calls: NodeCalls, ask: StartAsk, timeout_ms: int) -> Start:
    (found,) = await start_positions(calls, [ask], timeout_ms)
    if isinstance(found, SmqError):
        raise found
    return found


async def start_positions(calls: NodeCalls, asks: Sequence[StartAsk], timeout_ms: int) -> list[Start | SmqError]:
    """Looks up what the offset types need, all commits of a group and all ranges together, then resolves each
    position."""

    def are_known(state: ClusterState) -> bool:
        return all(state.partition_of(ask.topic, ask.partition) is not None for ask in asks)

    try:
        await confirm_unknown(calls, are_known, timeout_ms)
        commits = await _commits(calls, asks, timeout_ms)
    except SmqError as e:
        return [e] * len(asks)
    places = asyncio.Semaphore(FETCH_CONCURRENCY)

    async def prepare(ask: StartAsk) -> StartRequest | SmqError:
        async with places:
            try:
                return await _prepared(calls, ask, commits, timeout_ms)
            except SmqError as e:
                return e

    # The ranges are read last, so that none is older than what is compared with it.
    prepared = await asyncio.gather(*(prepare(ask) for ask in asks))
    wanted = [(ask.topic, ask.partition) for ask, p in zip(asks, prepared, strict=True) if not isinstance(p, SmqError)]
    ranges = iter(await calls.partition_ranges(wanted, timeout_ms))
    return [
        p if isinstance(p, SmqError) else _resolved(p, next(ranges), is_committed=ask.is_committed)
        for ask, p in zip(asks, prepared, strict=True)
    ]


Commits: TypeAlias = dict[tuple[str, PartitionId], CommittedOffset]


async def _commits(calls: NodeCalls, asks: Sequence[StartAsk], timeout_ms: int) -> Commits:
    """What the groups have committed in the partitions that exist."""
    by_group: dict[str, list[PartitionId]] = {}
    for ask in asks:
        part = calls.node.state.partition_of(ask.topic, ask.partition)
        if ask.type.needs_commit and ask.timestamp_ms is None and part is not None and ask.group:
            by_group.setdefault(ask.group, []).append(part.pid)
    found: Commits = {}
    for group, pids in by_group.items():
        for pid, committed in (await calls.fetch_offsets(group, pids, timeout_ms)).items():
            found[group, pid] = committed
    return found


async def _prepared(calls: NodeCalls, ask: StartAsk, commits: Commits, timeout_ms: int) -> StartRequest:
    part = calls.node.state.partition_of(ask.topic, ask.partition)
    if part is None:
        raise unknown_partition(calls.node.state, ask.topic, ask.partition)
    if ask.timestamp_ms is not None or ask.type.needs_time:
        kind, time = (
            (TimeKind.TS_NS, ask.value) if ask.timestamp_ms is None else (TimeKind.TIMESTAMP_MS, ask.timestamp_ms)
        )
        found = await calls.offset_for_time(ask.topic, ask.partition, kind, time, timeout_ms)
        is_found = found.ts_ns >= 0
        return StartRequest(
            type=OffsetType.EXACT_TS_NS,
            time_offset=found.offset if is_found else None,
            searched_end=None if is_found else found.offset,
        )
    if ask.type.needs_commit and not ask.group:
        raise SmqError(ErrorCode.INVALID_REQUEST, "RESUME_OR_EARLIEST and RESUME_OR_LATEST need a group")
    committed = commits.get((ask.group, part.pid))
    if ask.is_stable:
        committed = _stable_commit(calls.node.state, ask, part.pid)
    return StartRequest(
        type=ask.type,
        value=ask.value,
        committed=committed.position if committed is not None else None,
        reset_if_gone=ask.reset_if_gone,
    )


def _stable_commit(state: ClusterState, ask: StartAsk, pid: PartitionId) -> CommittedOffset | None:
    """Of the state as it is now, after the barrier of `_commits`: one that was read before may be older than the end of
    a transaction that is not seen any more."""
    if pid in staged_partitions(state, ask.group):
        message = f"an open transaction has staged an offset of group {ask.group!r} in {ask.topic}/{ask.partition}"
        raise SmqError(ErrorCode.OFFSET_STAGED, message)
    group = state.groups.get(ask.group)
    return None if group is None else group.offsets.get(pid)


def staged_partitions(state: ClusterState, group: str) -> frozenset[PartitionId]:
    """The partitions for which an open transaction has staged offsets of the group, as this node knows."""
    return frozenset(pid for transaction in state.transactions.values() for pid in transaction.offsets.get(group, ()))


def _resolved(start: StartRequest, range_: PartitionRange | SmqError, *, is_committed: bool) -> Start | SmqError:
    if isinstance(range_, SmqError):
        return range_
    if start.searched_end is not None:
        range_ = _as_searched(range_, start.searched_end)
    # A group that has read beyond an open transaction, and now reads what is committed, goes on where it was: it waits.
    is_resuming = start.type.needs_commit and start.committed is not None
    try:
        return resolve(start, range_.log_start, range_.end_for(is_committed=is_committed and not is_resuming)), range_
    except SmqError as e:
        return e


def _as_searched(range_: PartitionRange, end: Offset) -> PartitionRange:
    """The range as it was when a look-up by time found nothing before `end`. The range was read later: records that
    came in between may be as late as the time. A reader that starts at their end would miss them."""
    end = max(end, range_.log_start)
    return replace(range_, hwm=min(range_.hwm, end), lso=min(range_.lso, end))


def has_leader(part: PartitionState, state: ClusterState) -> bool:
    """Whether the process that leads the partition is the one that runs on its node, as far as this node knows."""
    leader = state.nodes.get(part.leader)
    return leader is not None and not leader.fenced and leader.incarnation == part.leader_incarnation


async def known_ranges(
    calls: NodeCalls, partitions: Sequence[tuple[str, int]], timeout_ms: int
) -> dict[tuple[str, int], PartitionRange]:
    """For views of many partitions: the exact ranges, without those whose leader has not answered soon."""
    questions = []
    for first in range(0, len(partitions), RANGES_PER_TURN):
        some = partitions[first : first + RANGES_PER_TURN]
        questions.append(asyncio.create_task(calls.partition_ranges(some, min(timeout_ms, VIEW_ENDS_MS))))
        await asyncio.sleep(0)
    answers = [await question for question in questions]
    return {(r.topic, r.partition): r for answer in answers for r in answer if isinstance(r, PartitionRange)}
