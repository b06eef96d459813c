"""Measures how late the event loop runs its timers: whatever delays one delays every request.

Owns the probe. It changes nothing and holds nothing but its next timer. The composition root starts it.
"""

import asyncio
from typing import Final

from smq.replication.measures import NS_PER_S, Histogram

PROBE_S: Final = 0.2  # five probes per second cost nothing, and find what lasts longer than that for certain


class LoopLag:
    def __init__(self, lag: Histogram) -> None:
        self._lag = lag
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PROBE_S
        self._timer = loop.call_at(due, self._probe, loop, due)

    def _probe(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._lag.observe(max(0, int((loop.time() - due) * NS_PER_S)))
        self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
