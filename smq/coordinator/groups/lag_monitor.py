"""Keeps the lag of all groups in bytes and time for the metrics, in the partitions that this node leads.

Owns the pace: a pass over all groups every few seconds, one look-up at a time. A leader's copy always reaches the
partition's end, so each pair of group and partition is measured on one node. A scrape reads the last pass and waits for
nothing. It must never say 0 for what it has not measured. The composition root starts it.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.shown import shown_groups
from smq.coordinator.groups.view import GroupPosition, partitions_of
from smq.coordinator.limits import METRICS_PARTITIONS_MAX, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.turns import Turns
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset, PartitionId, TsNs
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
