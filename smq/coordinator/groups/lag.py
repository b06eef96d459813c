"""How far a group is behind, in offsets, records, bytes and time: one calculation for gRPC, CLI, console and metrics.

Owns what each figure means. It only reads, and waits for no node for long: a figure that is not known is None, never
zero. gRPC, HTTP and the lag monitor import it; Kafka's groups and native groups are the same here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smq.clients.lag import LagFigures
from smq.coordinator.groups.view import GroupPosition
from smq.coordinator.limits import FETCH_CONCURRENCY, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.lookup import known_ranges
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset

_NS_PER_MS = 1_000_000


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
