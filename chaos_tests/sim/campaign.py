"""Many seeds: over all scenarios, on several processes, with progress, kept failures and a summary.

Owns the assignment of scenarios to seeds, the table of rare events and the last line.
"""

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos_tests.history import write_jsonl
from chaos_tests.sim.observer import RARE
from chaos_tests.sim.run import Result, simulate
from chaos_tests.sim.scenario import Scenario, find, load_all

VIOLATIONS_SHOWN = 5


@dataclass(slots=True)
class Totals:
    seeds: int = 0
    virtual_s: float = 0.0
    operations: int = 0
    acked: int = 0
    violations: int = 0
    failed: list[tuple[int, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.virtual_s += result.virtual_s
        self.operations += result.operations
        self.acked += result.acked
        self.violations += len(result.violations)
        self.counts.update(result.counts)
        if result.violations:
            self.failed.append((result.seed, result.scenario))

    def summary(self) -> str:
        return (
            f"{self.seeds} seeds, {self.virtual_s / 3600:.2f} virtual hours, {self.operations} operations"
            f" ({self.acked} acknowledged by all), {self.violations} violations"
        )


def replay_line(result: Result) -> str:
    return f"python -m chaos_tests sim --seed {result.seed} --scenario {result.scenario} --trace"


def scenario_of(seed: int, scenarios: list[Scenario]) -> Scenario:
    return scenarios[seed % len(scenarios)]


def run_one(scenario: Scenario, trace: bool, keep: Path | None, seed: int) -> Result:
    """One seed; its directory is kept where it failed (or was traced), its history is not passed on."""
    result = simulate(scenario, seed, trace=trace)
    if keep is not None and (result.violations or trace):
        save(result, keep / f"{scenario.name}-{seed}")
    result.history = []
    result.trace = []
    return result


def _run_numbered(scenarios: list[Scenario], trace: bool, keep: Path | None, seed: int) -> Result:
    return run_one(scenario_of(seed, scenarios), trace, keep, seed)


def save(result: Result, folder: Path) -> None:
    """History, trace, verdict and replay line of one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "history.jsonl", result.history)
    if result.trace:
        (folder / "trace.txt").write_text("\n".join(result.trace) + "\n", encoding="utf-8")
    verdict = {
        "seed": result.seed,
        "scenario": result.scenario,
        "replay": replay_line(result),
        "digest": result.digest,
        "violations": [str(v) for v in result.violations],
    }
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")


def results(scenarios: list[Scenario], seeds: range, jobs: int, trace: bool, keep: Path | None) -> Iterator[Result]:
    """In any order; one process a job, so that a seed cannot disturb another."""
    work = partial(_run_numbered, scenarios, trace, keep)
    if jobs == 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(work, seeds)


def campaign(
    *, first_seed: int, count: int, scenario: str | None, jobs: int, trace: bool, keep: Path | None, rare: bool
) -> int:
    """Runs the seeds and prints as it goes; the exit code."""
    scenarios = [find(scenario)] if scenario is not None else load_all()
    totals, started = Totals(), time.monotonic()
    for result in results(scenarios, range(first_seed, first_seed + count), jobs, trace, keep):
        totals.add(result)
        if result.violations:
            _show_failure(result, keep)
        _show_progress(totals, count, started)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _show_rare(totals.counts)
    missing = [name for name in RARE if not totals.counts[name]] if rare else []
    if missing:
        print(f"never reached: {', '.join(missing)}")
    minutes = (time.monotonic() - started) / 60
    print(f"{totals.summary()}, {totals.seeds / minutes:.0f} seeds a minute on {jobs} processes")
    return 1 if totals.violations or missing else 0


def _show_failure(result: Result, keep: Path | None) -> None:
    print(f"\nseed {result.seed} of {result.scenario}: {len(result.violations)} violations")
    for violation in result.violations[:VIOLATIONS_SHOWN]:
        print(f"  {violation}")
    if keep is not None:
        print(f"  kept in {keep / f'{result.scenario}-{result.seed}'}")
    print(f"  replay: {replay_line(result)}", flush=True)


def _show_progress(totals: Totals, count: int, started: float) -> None:
    """A bar on a terminal, a line every so often elsewhere."""
    rate = totals.seeds / max(1e-9, time.monotonic() - started) * 60
    line = f"{totals.seeds}/{count} seeds, {rate:.0f} a minute, {len(totals.failed)} failed"
    if sys.stderr.isatty():
        width = 30
        filled = width * totals.seeds // count
        print(f"\r[{'#' * filled}{'.' * (width - filled)}] {line}", end="", file=sys.stderr, flush=True)
    elif totals.seeds % 100 == 0:
        print(line, file=sys.stderr, flush=True)


def _show_rare(counts: Counter[str]) -> None:
    width = max(map(len, RARE))
    for name in RARE:
        print(f"  {name:<{width}}  {counts[name]}")
