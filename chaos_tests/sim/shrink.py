"""Cuts the faults of a failing seed down to those that it takes: Hypothesis drops and shortens strikes.

Owns the search and the file format of a schedule. A schedule replays only with its seed and scenario: clients, network
and disks keep the randomness of the seed.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, Verbosity, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from chaos_tests.sim.faults.schedule import Strike
from chaos_tests.sim.run import Result, simulate
from chaos_tests.sim.scenario import Scenario

# The share of a strike that is left, by the number that Hypothesis shrinks: 0 drops the strike, most numbers keep it,
# so that the first schedules to be tried are nearly complete.
STRETCHES: Final = (None, 0.1, 0.3, 1.0)
LEVELS: Final = 1000
FEW: Final = 6  # strikes: Hypothesis is quick with this many
TRIES: Final = 200  # runs: a fifth of that cuts most schedules of fifty strikes down to two or three


class ShrinkError(ValueError):
    """There is nothing to shrink; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """The smallest schedule that was found, and its anomalies."""

    scenario: Scenario
    seed: int
    strikes: tuple[Strike, ...]
    strikes_before: int
    anomalies: tuple[str, ...]
    runs: int

    def describe(self) -> list[str]:
        return [strike.describe(self.scenario.faults) for strike in self.strikes]


def shrink(scenario: Scenario, seed: int, wanted: frozenset[str] = frozenset(), tries: int = TRIES) -> Shrunk:
    """Cuts down the schedule of a failing seed. `wanted` are the anomalies that count, by default all that the full
    schedule shows. ShrinkError if it shows none of them."""
    full = simulate(scenario, seed)
    seen = _anomalies(full)
    if not seen or (wanted and not seen & wanted):
        raise ShrinkError(f"seed {seed} of {scenario.name} shows {', '.join(sorted(seen)) or 'no anomaly'}")
    search = _Search(scenario, seed, full.strikes, wanted or seen, tries)
    strikes = search.run()
    final = simulate(scenario, seed, schedule=strikes)
    anomalies = tuple(sorted(_anomalies(final)))
    return Shrunk(
        scenario=scenario,
        seed=seed,
        strikes=strikes,
        strikes_before=len(full.strikes),
        anomalies=anomalies,
        runs=search.runs,
    )


def _anomalies(result: Result) -> frozenset[str]:
    return frozenset(violation.anomaly for violation in result.violations)


class _Search:
    def __init__(
        self, scenario: Scenario, seed: int, full: tuple[Strike, ...], wanted: frozenset[str], tries: int
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._full = full
        self._wanted = wanted
        self._tries = tries
        self._known: dict[tuple[Strike, ...], bool] = {}
        self.best: tuple[Strike, ...] | None = None
        self.runs = 0

    def run(self) -> tuple[Strike, ...]:
        if not self._fails(()):
            self._try_full()
        if self.best == ():
            return ()
        self._halve()
        quiet = settings(
            max_examples=self._tries,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        levels = st.tuples(*(st.integers(0, LEVELS) for _ in self._full))
        try:
            find(levels, lambda chosen: self._fails(self._cut(chosen)), settings=quiet)
        except NoSuchExample:
            pass  # no smaller schedule fails: it takes all strikes
        assert self.best is not None
        return self.best

    def _halve(self) -> None:
        """Most schedules fail because of a few of their strikes: halves are the cheapest cuts."""
        while len(self._full) > FEW:
            middle = len(self._full) // 2
            half = next((h for h in (self._full[:middle], self._full[middle:]) if self._fails(h)), None)
            if half is None:
                return
            self._full = half

    def _try_full(self) -> None:
        """The list must reproduce the seed: each strike has its own randomness, and its time is recorded."""
        if not self._fails(self._full):
            raise ShrinkError(
                f"seed {self._seed} of {self._scenario.name} does not fail when its strikes come from the list: the"
                " order of two events at the same instant must matter"
            )

    def _cut(self, levels: tuple[int, ...]) -> tuple[Strike, ...]:
        kept = []
        for strike, level in zip(self._full, levels, strict=True):
            stretch = STRETCHES[min(level, len(STRETCHES) - 1)]
            if stretch is not None:
                kept.append(replace(strike, stretch=stretch))
        return tuple(kept)

    def _fails(self, strikes: tuple[Strike, ...]) -> bool:
        known = self._known.get(strikes)
        if known is not None:
            return known
        if self.runs >= self._tries:
            return False  # out of tries: the best one so far stands
        self.runs += 1
        fails = bool(_anomalies(simulate(self._scenario, self._seed, schedule=strikes)) & self._wanted)
        self._known[strikes] = fails
        if fails and (self.best is None or _size(strikes) < _size(self.best)):
            self.best = strikes
        return fails


def _size(strikes: tuple[Strike, ...]) -> tuple[int, float]:
    return len(strikes), sum(strike.stretch for strike in strikes)


# ------------------------------------------------------------------------------------------------ schedules on disk
def save_schedule(path: Path, strikes: tuple[Strike, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([strike.as_json() for strike in strikes], indent=1) + "\n", encoding="utf-8")


def load_schedule(path: Path) -> tuple[Strike, ...]:
    """The schedule in a file. ShrinkError if the file is no schedule."""
    try:
        raw: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Strike(**entry) for entry in raw)
    except (OSError, ValueError, TypeError) as e:
        raise ShrinkError(f"{path} is no schedule: {e}") from e
