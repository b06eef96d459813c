"""The Compute port without threads: results arrive after random delays, in any order, or soon.

Owns the delays. A killed process gets no result, as its clock gives none.
"""

from collections.abc import Callable
from typing import Final

from smq.replication.ports import Clock, Rng, T

DELAY_MS_MAX: Final = 8.0


class SimCompute:
    def __init__(self, clock: Clock, rng: Rng) -> None:
        self._clock = clock
        self._rng = rng

    def run(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        result = job()
        self._clock.call_later(self._rng.random() * DELAY_MS_MAX, lambda: done(result))


class LoopCompute:
    """Computes on the loop itself, with no more delay than that a result never arrives within the call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._clock.call_soon(lambda: done(job()))
