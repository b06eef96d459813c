"""Many seeds over all scenarios, on several processes, with progress, kept failures and a summary.

Owns the assignment of scenarios to seeds, the processes, the table of rare events and the last line. What was done is
in the ledger.
"""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from chaos_tests.history import write_jsonl
from chaos_tests.sim.ledger import Ledger, Totals
from chaos_tests.sim.observer import RARE
from chaos_tests.sim.run import Result, simulate
from chaos_tests.sim.scenario import Scenario, find, load_all, scenario_of

VIOLATIONS_SHOWN: Final = 5
SEEDS_PER_TASK: Final = 16  # some seconds: short enough for progress, long enough to make its overhead negligible
TASKS_PER_JOB: Final = 2  # one runs, one waits
RARE_SEEDS_MIN: Final = 200  # over all scenarios: each rare event then happens many times
SAVE_S: Final = 15.0  # a killed campaign repeats at most this much work


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order for a campaign: `count` seeds from `first_seed` on. With a ledger's folder, seeds that are too short do
    not count."""

    first_seed: int
    count: int
    scenario: str | None
    jobs: int
    trace: bool
    keep: Path | None
    needs_rare: bool  # fails if a rare event was never reached
    folder: Path | None = None  # of the ledger, if the campaign can be resumed

    def missing(self, totals: Totals) -> int:
        """How many seeds are still to run, as far as is known."""
        return self.count - totals.seeds - (totals.short if self.folder is None else 0)


def replay_line(seed: int, scenario: str) -> str:
    return f"python -m chaos_tests sim --seed {seed} --scenario {scenario} --trace"


def run_one(scenario: Scenario, trace: bool, keep: Path | None, seed: int) -> Result:
    """One seed. Keeps its directory if it failed or was traced; its history is not passed on."""
    result = simulate(scenario, seed, trace=trace)
    if keep is not None and (result.violations or trace):
        save(result, keep / f"{scenario.name}-{seed}")
    result.history = []
    result.trace = []
    return result


def _run_task(scenarios: list[Scenario], trace: bool, keep: Path | None, seeds: list[int]) -> list[Result]:
    return [run_one(scenario_of(seed, scenarios), trace, keep, seed) for seed in seeds]


def save(result: Result, folder: Path) -> None:
    """Writes history, trace, verdict and replay line of one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "history.jsonl", result.history)
    if result.trace:
        (folder / "trace.txt").write_text("\n".join(result.trace) + "\n", encoding="utf-8")
    verdict = {
        "seed": result.seed,
        "scenario": result.scenario,
        "replay": replay_line(result.seed, result.scenario),
        "digest": result.digest,
        "violations": [str(v) for v in result.violations],
    }
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=1) + "\n", encoding="utf-8")


def results(order: Order, ledger: Ledger) -> Iterator[Result]:
    """Results in any order, until enough seeds count; the caller enters each into the ledger. One process per job, so
    that no seed can disturb another."""
    scenarios = [find(order.scenario)] if order.scenario is not None else load_all()
    seeds = ledger.pending(order.first_seed)
    work = partial(_run_task, scenarios, order.trace, order.keep)
    if order.jobs == 1:
        while order.missing(ledger.totals) > 0:
            yield from work([next(seeds)])
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(order.jobs, mp_context=context, max_tasks_per_child=50) as pool:
        running: dict[Future[list[Result]], int] = {}
        try:
            while (missing := order.missing(ledger.totals)) > 0:
                missing -= sum(running.values())
                while missing > 0 and len(running) < order.jobs * TASKS_PER_JOB:
                    task = list(islice(seeds, min(SEEDS_PER_TASK, -(-missing // order.jobs))))
                    running[pool.submit(work, task)] = len(task)
                    missing -= len(task)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    del running[future]
                    yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def campaign(order: Order, ledger: Ledger) -> int:
    """Runs the seeds, prints as it goes, and returns the exit code. Saves the ledger even if a signal stops it."""
    started, saved, before = time.monotonic(), time.monotonic(), ledger.totals.seeds + ledger.totals.short
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for result in results(order, ledger):
            ledger.add(result)
            if result.violations:
                _show_failure(result, order.keep)
            now = time.monotonic()
            if order.folder is not None and now - saved > SAVE_S:
                saved = now
                ledger.save(order.folder)
            _show_progress(ledger, order, before, started)
    except KeyboardInterrupt:
        print(f"\nstopped: {ledger.totals.summary()}")
        return 130
    finally:
        signal.signal(signal.SIGTERM, handler)
        if order.folder is not None:
            ledger.save(order.folder)
    ran = ledger.totals.seeds + ledger.totals.short - before
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _show_scenarios(ledger)
    _show_rare(ledger.counts)
    missing = [name for name in RARE if not ledger.counts.get(name)] if order.needs_rare else []
    if missing:
        print(f"never reached: {', '.join(missing)}")
    rate = ran / ((time.monotonic() - started) / 60)
    commit = f"commit {ledger.commit}: " if order.folder is not None else ""
    print(f"{commit}{ledger.totals.summary()}, {rate:.0f} seeds per minute on {order.jobs} processes")
    return 1 if ledger.totals.violations or missing else 0


def _show_failure(result: Result, keep: Path | None) -> None:
    print(f"\nseed {result.seed} of {result.scenario}: {len(result.violations)} violations")
    for violation in result.violations[:VIOLATIONS_SHOWN]:
        print(f"  {violation}")
    if keep is not None:
        print(f"  kept in {keep / f'{result.scenario}-{result.seed}'}")
    print(f"  replay: {replay_line(result.seed, result.scenario)}", flush=True)


def _show_progress(ledger: Ledger, order: Order, before: int, started: float) -> None:
    """A bar on a terminal; otherwise a line every 100 seeds."""
    totals, count = ledger.totals, order.count
    ran = totals.seeds + totals.short - before
    rate = ran / max(1e-9, time.monotonic() - started) * 60
    line = f"{totals.seeds}/{count} seeds, {rate:.0f} per minute, {len(ledger.failed)} failed, {totals.short} too short"
    if sys.stderr.isatty():
        width = 30
        filled = min(width, width * totals.seeds // count)
        print(f"\r[{'#' * filled}{'.' * (width - filled)}] {line}", end="", file=sys.stderr, flush=True)
    elif ran % 100 == 0:
        print(line, file=sys.stderr, flush=True)


def _show_scenarios(ledger: Ledger) -> None:
    width = max(map(len, ledger.scenarios), default=0)
    for name, totals in sorted(ledger.scenarios.items()):
        print(f"  {name:<{width}}  {totals.summary()}")


def _show_rare(counts: dict[str, int]) -> None:
    width = max(map(len, RARE))
    for name in RARE:
        print(f"  {name:<{width}}  {counts.get(name, 0)}")
