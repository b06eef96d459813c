"""Keeps the lag of all groups in bytes and time for the metrics, in the partitions that this node leads.

Owns the pace: a pass over all groups every few seconds, one look-up at a time. A leader's copy always reaches the
partition's end, so each pair of group and partition is measured on one node. A scrape reads the last pass and waits for
nothing. It must never say 0 for what it has not measured. The composition root starts it.
"""

import asyncio
import contextlib
from itertools import islice
from typing import Final

from smq.coordinator.limits import METRICS_GROUPS_MAX, METRICS_PARTITIONS_MAX, VIEW_ENDS_MS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.turns import Turns
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Offset, PartitionId, TsNs
from smq.raft_state.state import PartitionState
from smq.replication.api import Backlog, NodeApi

PASS_S: Final = 10.0  # between two passes; Prometheus scrapes every 15 seconds or so
NOTHING: Final = Backlog(0, TsNs(-1))


class LagMonitor:
    """`figures` has the backlog of each group in each partition that this node leads."""

    def __init__(self, node: NodeApi) -> None:
        self._calls = NodeCalls(node)
        self._known: dict[tuple[str, PartitionId], tuple[Offset, Offset, Backlog]] = {}  # between these offsets
        self._task: asyncio.Task[None] | None = None

    @property
    def figures(self) -> dict[tuple[str, PartitionId], Backlog]:
        return {key: backlog for key, (_, _, backlog) in self._known.items()}

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
        turns, node = Turns(), self._calls.node
        for name in sorted(node.state.groups)[:METRICS_GROUPS_MAX]:
            group = node.state.groups.get(name)
            async for pid, committed in turns.over(list(group.offsets.items()) if group is not None else ()):
                if committed.position is None or (place := self._led(pid)) is None:
                    continue
                part, end = place
                first = max(committed.position, part.log_start)
                known = self._known.get((name, pid))
                # Compaction changes the batches between two offsets.
                if known is not None and known[:2] == (first, end) and first >= part.compacted_end:
                    found[name, pid] = known
                elif (backlog := await self._measure(part, first, end)) is not None:
                    found[name, pid] = (first, end, backlog)
            if len(found) >= METRICS_PARTITIONS_MAX:
                break
        self._known = dict(islice(found.items(), METRICS_PARTITIONS_MAX))

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
