"""The lag of each group over the last hour, for the console to draw, and the rates of topics and partitions.

Owns the samples, which are bounded in number and in groups. It reads what this node knows, and waits for no other node.
Of a partition without a replica here, the last tenth of a second may be missing. The composition root starts it.
"""

import asyncio
import contextlib
from collections import deque
from itertools import islice
from typing import Final

from smq.coordinator.limits import METRICS_GROUPS_MAX
from smq.coordinator.service.group_lag import GroupPosition, partitions_of
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import PartitionId
from smq.replication.api import NodeApi

SAMPLE_S: Final = 30.0  # 100,000 offsets take a tenth of a second of the loop, in slices
SAMPLES_MAX: Final = 120  # an hour


class History:
    """`lags` has the total lag of each group in offsets, the oldest first; `rates` the offsets per second of each topic
    between the last two looks, `partition_rates` those of each partition."""

    def __init__(self, node: NodeApi) -> None:
        self._node = node
        self.lags: dict[str, deque[int]] = {}
        self.rates: dict[str, float] = {}
        self.partition_rates: dict[PartitionId, float] = {}
        self._ends: dict[PartitionId, tuple[float, int]] = {}  # when, and up to where; a topic made again has new ids
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> None:
        """One look at each group and topic; forgets those that are gone."""
        turns = Turns()
        await self._look_at_groups(turns)
        await self._look_at_topics(turns)

    async def _look_at_topics(self, turns: Turns) -> None:
        ends: dict[PartitionId, tuple[float, int]] = {}
        rates: dict[str, float] = {}
        by_partition: dict[PartitionId, float] = {}
        for topic in list(self._node.state.topics.values()):
            async for part in turns.over(list(topic.partitions)):
                now, end = asyncio.get_running_loop().time(), self._node.known_hwm(part)
                then, before = self._ends.get(part.pid, (now, end))
                ends[part.pid] = now, end
                if now > then:
                    by_partition[part.pid] = rate = max(0, end - before) / (now - then)
                    rates[topic.name] = rates.get(topic.name, 0.0) + rate
        self.rates, self.partition_rates, self._ends = rates, by_partition, ends

    async def _look_at_groups(self, turns: Turns) -> None:
        groups = list(islice(self._node.state.groups.values(), METRICS_GROUPS_MAX))
        for group in groups:
            lag = 0
            async for pid in turns.over(partitions_of(self._node.state, group)):
                part = self._node.state.partition(pid)
                if part is not None:
                    at = GroupPosition("", part, group.offsets.get(pid))
                    lag += at.lag_at(part.log_start, self._node.known_hwm(part))
            self.lags.setdefault(group.name, deque(maxlen=SAMPLES_MAX)).append(lag)
        for name in self.lags.keys() - {group.name for group in groups}:
            del self.lags[name]
