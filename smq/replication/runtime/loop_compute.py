"""Computes on the loop itself, for nodes without threads.

Owns nothing but the delay: a result never arrives within the call. Tests use it; a server has threads
(`asyncio_runtime`).
"""

from collections.abc import Callable

from smq.replication.ports import Clock, T


class LoopCompute:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._clock.call_soon(lambda: done(job()))
