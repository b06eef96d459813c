"""A group as an operator sees it: members, assignments, committed offsets, and how far it is behind.

Owns the one definition of a group's lag, in offsets, records, bytes and time, for gRPC, command line, console and
metrics; Kafka's groups and native groups are the same here. It only reads, and waits for no node for long: a figure
that is not known is None, never zero. The ports and the lag monitor import it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from smq.clients.lag_totals import LagFigures
from smq.coordinator.groups.protocols import CONSUMER, assigned_indexes
from smq.coordinator.limits import FETCH_CONCURRENCY, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import known_ranges
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.consumers import is_settled
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import (
    ClusterState,
    CommittedOffset,
    GroupKind,
    GroupPhase,
    GroupState,
    MemberState,
    PartitionState,
    held,
)

_NS_PER_MS: Final = 1_000_000
PHASES: Final = {
    GroupPhase.EMPTY: "Empty",
    GroupPhase.PREPARING: "PreparingRebalance",
    GroupPhase.COMPLETING: "CompletingRebalance",
    GroupPhase.STABLE: "Stable",
}


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """`committed` is None if the group has committed nothing for a partition that a member was assigned."""

    topic: str
    part: PartitionState
    committed: CommittedOffset | None

    @property
    def position(self) -> Offset | None:
        """The next offset that the group reads."""
        return self.committed.position if self.committed is not None else None

    def unread_from(self, log_start: Offset) -> Offset:
        """Where its lag begins. Only a member knows where it starts without a commit, so that is the first record."""
        position = self.position
        return position if position is not None else log_start

    def lag_at(self, log_start: Offset, hwm: Offset) -> int:
        """Never negative, although a commit may name an offset that does not exist yet."""
        return max(0, hwm - self.unread_from(log_start))


def state_of(group: GroupState) -> str:
    """Under Kafka's names. A round that is open at the coordinator is not in it."""
    if group.kind is not GroupKind.CONSUMER or not group.members:
        return PHASES[group.phase]
    if group.target_epoch < group.generation:
        return "Assigning"
    return "Stable" if all(is_settled(group, m) for m in group.members.values()) else "Reconciling"


def assigned_partitions(state: ClusterState, group: GroupState, member: MemberState) -> list[tuple[str, int]]:
    """The partitions that a consumer has; empty if its assignment does not parse."""
    if group.kind is GroupKind.CONSUMER:
        names = ((state.topic_names.get(topic_id), index) for topic_id, index in held(member))
        return [(name, index) for name, index in names if name is not None]
    found = assigned_indexes(member.assignment) if group.protocol_type == CONSUMER else None
    return [(topic, index) for topic, indexes in found or () for index in indexes]


def positions(state: ClusterState, group: GroupState) -> Iterator[GroupPosition]:
    """All partitions that the group has committed for or was assigned, in order of topic and partition."""
    found = [(pid, state.partition(pid)) for pid in partitions_of(state, group)]
    named = [(state.topic_names[part.topic_id], part.index, pid, part) for pid, part in found if part is not None]
    for topic, _, pid, part in sorted(named, key=lambda row: row[:2]):
        yield GroupPosition(topic, part, group.offsets.get(pid))


def partitions_of(state: ClusterState, group: GroupState) -> Iterator[PartitionId]:
    """Those that the group has committed for, then further ones that exist and that a member was assigned. The caller
    may take its time."""
    seen: dict[PartitionId, None] = dict.fromkeys(group.offsets)
    yield from list(seen)
    for m in list(group.members.values()):
        for topic, index in assigned_partitions(state, group, m):
            known = state.topics.get(topic)
            if known is None or not 0 <= index < len(known.partitions):
                continue
            pid = known.partitions[index].pid
            if pid not in seen:
                seen[pid] = None
                yield pid


# ------------------------------------------------------------------------------------------------------------ lag
@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Of one group in one partition. The end is the high water mark. `offsets` counts up to it, with those that
    retention has deleted, and so does not shrink by itself; where the group has committed nothing, from the log start.
    `records` are those that can still be read: None if they
    are stored elsewhere, and where compaction has been, because no offset says how many it has left. `size_bytes` is
    the stored size of the batches with them, `age_ms` the time since the next one was appended: 0 if there is none."""

    log_start: Offset
    end: Offset
    is_end_known: bool  # False: the partition's leader has not answered; `end` may be higher, and the rest is None
    offsets: int | None = None
    records: int | None = None
    size_bytes: int | None = None
    age_ms: int | None = None

    @property
    def figures(self) -> LagFigures:
        return LagFigures(self.offsets, self.records, self.size_bytes, self.age_ms)


async def lags_of(
    calls: NodeCalls, places: Sequence[GroupPosition], timeout_ms: int, *, with_sizes: bool, now_ns: int
) -> list[Lag]:
    """In the same order. The ends are read after the positions, so that none is older than what is compared with it.
    `with_sizes` also measures bytes and age, where this node holds a copy."""
    ends = await known_ranges(calls, [(at.topic, at.part.index) for at in places], timeout_ms)
    found = []
    for at in places:
        end = ends.get((at.topic, at.part.index))
        if end is None:
            found.append(Lag(log_start=at.part.log_start, end=calls.node.known_hwm(at.part), is_end_known=False))
        else:
            found.append(counted(at, end.log_start, end.hwm))
    if not with_sizes:
        return found
    slots = asyncio.Semaphore(FETCH_CONCURRENCY)

    async def measure(at: GroupPosition, lag: Lag) -> Lag:
        async with slots:
            return await measured(calls, at, lag, timeout_ms, now_ns=now_ns)

    return list(await asyncio.gather(*(measure(at, lag) for at, lag in zip(places, found, strict=True))))


def counted(at: GroupPosition, log_start: Offset, end: Offset) -> Lag:
    """What follows from the offsets alone."""
    records = None
    if not at.part.is_external:
        first = max(at.unread_from(log_start), log_start)
        records = max(0, end - first) if first >= min(at.part.compacted_end, end) else None
    return Lag(log_start=log_start, end=end, is_end_known=True, offsets=at.lag_at(log_start, end), records=records)


async def measured(calls: NodeCalls, at: GroupPosition, lag: Lag, timeout_ms: int, *, now_ns: int) -> Lag:
    """With bytes and age, if this node's copy reaches the end."""
    if not lag.is_end_known or at.part.is_external:
        return lag
    first = max(at.unread_from(lag.log_start), lag.log_start)
    if first >= lag.end:
        return replace(lag, size_bytes=0, age_ms=0)
    try:
        backlog = await calls.backlog(at.topic, at.part.index, first, lag.end, min(timeout_ms, VIEW_ENDS_MS))
    except SmqError:
        return lag  # another node's copy reaches the end
    if not backlog.size_bytes:
        return lag  # deleted meanwhile
    return replace(lag, size_bytes=backlog.size_bytes, age_ms=age_ms(backlog.ts_ns, now_ns))


def age_ms(ts_ns: int, now_ns: int) -> int:
    """Of a record that was appended at `ts_ns`; 0 if there is none (-1). Append times come from the leader's clock,
    which may be ahead of this node's."""
    return max(0, now_ns - ts_ns) // _NS_PER_MS if ts_ns >= 0 else 0
