"""The pace of clients: waves, as many as a run needs, most of them around faults.

Owns the waves and the count of acknowledged changes. An operation in a quiet second finds nothing, a single one has no
race to lose, and each costs the same to simulate. So clients act together, speed up shortly before and after a fault,
slow down in between, and keep to a budget for the whole run.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from chaos_tests.sim.rpc import Sleep, Wait
from smq.testing.virtual.clock import NS_PER_S, Scheduler

ACKED_MIN: Final = 200  # acknowledged changes: a run with fewer proves too little and does not count
ACKED_PLANNED: Final = 195.0  # the clients' aim; the probes at the end are extra
CHANGES: Final = frozenset(
    {"send", "commit", "trim", "create", "drop", "alloc", "assign", "set", "place", "txn"}
)  # not reads

WAVE_MS: Final = 700.0  # between two waves, on average, while the run is on its budget
RUSH_WAVE_MS: Final = 40.0  # the same around a fault
RUSH_MS: Final = 200.0
JITTER_MS: Final = 6.0  # between the first and the last client of a wave
THINK_MS: Final = 200.0  # a client that thinks this long joins every wave; twice as long, every second one
SLACK: Final = 10.0  # operations ahead or behind that are noise
FACTOR_RANGE: Final = (0.15, 12.0)


class Pace:
    """One per run. `acked` counts the operations of CHANGES that succeeded."""

    def __init__(self, scheduler: Scheduler, rng: Random, seconds: float) -> None:
        self._scheduler = scheduler
        self._rng = rng
        self._span_ns = seconds * NS_PER_S
        self._began_ns = 0
        self._rush_until_ns = 0
        self._waiting: list[tuple[float, Callable[[], None]]] = []  # one per client: (chance to join, wake)
        self._wave = scheduler.at(0, lambda: None)
        self.acked = 0
        self.stopped = False

    def begin(self) -> None:
        """The storm begins: the budget is spread over the time from here on."""
        self._began_ns = self._scheduler.now_ns
        self._plan_wave()

    def stop(self) -> None:
        """The storm is over: wakes all thinking clients, so that they notice."""
        self.stopped = True
        self._wave.cancel()
        self._wake_clients(all_clients=True)

    def rush(self) -> None:
        """A fault strikes, or is about to."""
        self._rush_until_ns = self._scheduler.now_ns + int(RUSH_MS * 1e6)
        self._wave.cancel()
        self._plan_wave()

    def took(self, function: str) -> None:
        """An operation succeeded."""
        self.acked += function in CHANGES

    def think(self, mean_ms: float) -> Wait | Sleep:
        """A pause until a wave includes this client."""
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
        """Above 1 if the run is ahead of its budget."""
        due = ACKED_PLANNED * (self._scheduler.now_ns - self._began_ns) / self._span_ns
        low, high = FACTOR_RANGE
        return max(low, min(high, ((self.acked + SLACK) / (due + SLACK)) ** 8))

    def _on_wave(self) -> None:
        self._wake_clients(all_clients=False)
        self._plan_wave()

    def _wake_clients(self, *, all_clients: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for chance, wake in waiting:
            if all_clients or self._rng.random() < chance:
                self._scheduler.after_ms(self._rng.random() * JITTER_MS, wake)
            else:
                self._waiting.append((chance, wake))
