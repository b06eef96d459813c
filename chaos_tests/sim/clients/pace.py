"""When clients act: in waves, as many as a run needs, and most of them where faults strike.

Owns the count of what was acknowledged and the waves. An operation in a quiet second finds nothing, one that is alone
races with nobody, and each costs as much to simulate as any other: so clients act together, hurry shortly before and
after a fault, dawdle in between, and keep to a budget for the whole run.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from chaos_tests.sim.rpc import Sleep, Wait
from smq.testing.clock import NS_PER_S, Scheduler

ACKED_MIN: Final = 200  # acknowledged changes: a run with fewer proves too little and does not count as one
ACKED_PLANNED: Final = 195.0  # what the clients aim at; the probes at the end come on top
CHANGES: Final = frozenset({"send", "commit", "trim", "create", "drop", "alloc", "assign"})  # reads are not counted

WAVE_MS: Final = 700.0  # between two waves, on average, while the run is on its budget
RUSH_WAVE_MS: Final = 40.0  # the same around a fault
RUSH_MS: Final = 200.0
JITTER_MS: Final = 6.0  # between the first and the last client of a wave
THINK_MS: Final = 200.0  # a client that thinks this long joins every wave, one that thinks twice as long every second
SLACK: Final = 10.0  # operations ahead or behind that are noise
FACTOR_RANGE: Final = (0.15, 12.0)


class Pace:
    """One a run. `acked` counts the operations of CHANGES that were answered with success."""

    def __init__(self, scheduler: Scheduler, rng: Random, seconds: float) -> None:
        self._scheduler = scheduler
        self._rng = rng
        self._span_ns = seconds * NS_PER_S
        self._began_ns = 0
        self._rush_until_ns = 0
        self._waiting: list[tuple[float, Callable[[], None]]] = []  # one a client: (chance to join, how to wake it)
        self._wave = scheduler.at(0, lambda: None)
        self.acked = 0
        self.stopped = False

    def begin(self) -> None:
        """The storm begins: the budget is spread from here on."""
        self._began_ns = self._scheduler.now_ns
        self._plan_wave()

    def stop(self) -> None:
        """It is over: everybody who thinks is woken to see that."""
        self.stopped = True
        self._wave.cancel()
        self._break(everybody=True)

    def rush(self) -> None:
        """A fault strikes, or is about to."""
        self._rush_until_ns = self._scheduler.now_ns + int(RUSH_MS * 1e6)
        self._wave.cancel()
        self._plan_wave()

    def took(self, function: str) -> None:
        """An operation was answered with success."""
        self.acked += function in CHANGES

    def think(self, mean_ms: float) -> Wait | Sleep:
        """Until a wave takes this client along."""
        if self.stopped:
            return Sleep(0)
        chance = min(1.0, THINK_MS / mean_ms)
        return Wait(lambda wake: self._waiting.append((chance, wake)))

    def _plan_wave(self) -> None:
        if self.stopped:
            return
        mean_ms = RUSH_WAVE_MS if self._scheduler.now_ns < self._rush_until_ns else WAVE_MS
        gap_ms = self._rng.expovariate(1.0) * mean_ms * self._factor()
        self._wave = self._scheduler.after_ms(gap_ms, self._on_wave)

    def _factor(self) -> float:
        """Above 1 where the run is ahead of its budget."""
        due = ACKED_PLANNED * (self._scheduler.now_ns - self._began_ns) / self._span_ns
        low, high = FACTOR_RANGE
        return max(low, min(high, ((self.acked + SLACK) / (due + SLACK)) ** 8))

    def _on_wave(self) -> None:
        self._break(everybody=False)
        self._plan_wave()

    def _break(self, *, everybody: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for chance, wake in waiting:
            if everybody or self._rng.random() < chance:
                self._scheduler.after_ms(self._rng.random() * JITTER_MS, wake)
            else:
                self._waiting.append((chance, wake))
