"""Keeps the lag of all groups in bytes and time for the metrics, in the partitions that this node leads.

Owns the pace: a pass over all groups every few seconds, one look-up at a time. A leader's copy always reaches the
partition's end, so each pair of group and partition is measured on one node. A scrape reads the last pass and waits for
nothing. It must never say 0 for what it has not measured. Also owns which groups have series of their own in the
metrics: a group has all its series or none, and the same ones on every node. Members, offsets and lag in offsets are
shown by its coordinator, bytes and time by the leaders of its partitions; each node can name the others' groups,
because all is in the replicated state. The composition root starts it; the metrics read it.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from smq.coordinator.limits import METRICS_GROUPS_MAX, METRICS_PARTITIONS_MAX, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_lag import GroupPosition, partitions_of
from smq.coordinator.service.turns import Turns
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NodeId, Offset, PartitionId, TsNs
from smq.raft_state.state import GroupState, PartitionState
from smq.replication.api import Backlog, NodeApi

PASS_S: Final = 10.0  # between two passes; Prometheus scrapes every 15 seconds or so
NOTHING: Final = Backlog(0, TsNs(-1))


@dataclass(frozen=True, slots=True)
class Backlogs:
    """What groups have before them in the partitions that this node leads. `omitted` counts further ones, which the
    limit on the number of series leaves out."""

    found: Mapping[tuple[str, PartitionId], Backlog]
    omitted: int


class LagMonitor:
    """Keeps `backlogs`."""

    def __init__(self, node: NodeApi) -> None:
        self._calls = NodeCalls(node)
        self._known: dict[tuple[str, PartitionId], tuple[Offset, Offset, Backlog]] = {}  # between these offsets
        self._omitted = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def backlogs(self) -> Backlogs:
        """Of the last pass."""
        return Backlogs({key: backlog for key, (_, _, backlog) in self._known.items()}, self._omitted)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self.measure_all()
            await asyncio.sleep(PASS_S)

    async def measure_all(self) -> None:
        """One pass. What could not be measured is absent afterwards."""
        found: dict[tuple[str, PartitionId], tuple[Offset, Offset, Backlog]] = {}
        turns, node, looked, omitted = Turns(), self._calls.node, 0, 0
        async for name, _, is_shown in turns.over(shown_groups(node)):
            if not is_shown or (group := node.state.groups.get(name)) is None:
                continue
            async for pid in turns.over(partitions_of(node.state, group)):
                if (place := self._led(pid)) is None:
                    continue
                looked += 1
                if looked > METRICS_PARTITIONS_MAX:
                    omitted += 1
                    continue
                part, end = place
                first = _unread_from(group, part)
                known = self._known.get((name, pid))
                # Compaction changes the batches between two offsets.
                if known is not None and known[:2] == (first, end) and first >= part.compacted_end:
                    found[name, pid] = known
                elif (backlog := await self._measure(part, first, end)) is not None:
                    found[name, pid] = (first, end, backlog)
        self._known, self._omitted = found, omitted

    def _led(self, pid: PartitionId) -> tuple[PartitionState, Offset] | None:
        """The partition and its high water mark, if this node leads it. Most are not led here: they cost one look."""
        node = self._calls.node
        part = node.state.partition(pid)
        if part is None or part.leader != node.node_id:
            return None
        replica = node.replica_status(pid)
        return (part, replica.hwm) if replica is not None and replica.is_leader else None

    async def _measure(self, part: PartitionState, first: Offset, end: Offset) -> Backlog | None:
        if first >= end:
            return NOTHING
        topic = self._calls.node.state.topic_names[part.topic_id]
        try:
            found = await self._calls.backlog(topic, part.index, first, end, VIEW_ENDS_MS)
        except SmqError:
            return None  # it leads no longer, or its disk is slow: the next pass tries again
        return found if found.size_bytes else None


def _unread_from(group: GroupState, part: PartitionState) -> Offset:
    """The first offset that there is to read."""
    at = GroupPosition("", part, group.offsets.get(part.pid))
    return max(at.unread_from(part.log_start), part.log_start)


def shown_groups(node: NodeApi) -> Iterator[tuple[str, NodeId, bool]]:
    """Each group's name, in order, with its coordinator, and whether it has series: the first ones of each coordinator.
    Node 0 coordinates as long as no node could; then Raft's leader shows its groups. Groups may come and go while the
    caller takes its time."""
    counts: defaultdict[NodeId, int] = defaultdict(int)
    for name in sorted(node.state.groups):
        owner = coordinator_of(node.state, name).node
        counts[owner] += 1
        yield name, owner, counts[owner] <= METRICS_GROUPS_MAX
