"""The lag of each group over the last hour, for the console to draw.

Owns the samples, which are bounded in number and in groups. It reads what this node knows, and waits for no other node.
Of a partition without a replica here, the last tenth of a second may be missing. The composition root starts it.
"""

import asyncio
import contextlib
from collections import deque
from itertools import islice
from typing import Final

from smq.coordinator.limits import METRICS_GROUPS_MAX
from smq.coordinator.service.turns import Turns
from smq.replication.api import NodeApi

SAMPLE_S: Final = 30.0  # 100,000 offsets take a tenth of a second of the loop, in slices
SAMPLES_MAX: Final = 120  # an hour


class LagHistory:
    """`samples` has the total lag of each group in offsets, the oldest first."""

    def __init__(self, node: NodeApi) -> None:
        self._node = node
        self.samples: dict[str, deque[int]] = {}
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
        """One sample of each group; forgets the groups that are gone."""
        turns = Turns()
        groups = list(islice(self._node.state.groups.values(), METRICS_GROUPS_MAX))
        for group in groups:
            lag = 0
            async for pid, committed in turns.over(list(group.offsets.items())):
                part, position = self._node.state.partition(pid), committed.position
                if part is not None and position is not None:
                    lag += max(0, self._node.known_hwm(part) - position)
            self.samples.setdefault(group.name, deque(maxlen=SAMPLES_MAX)).append(lag)
        for name in self.samples.keys() - {group.name for group in groups}:
            del self.samples[name]
