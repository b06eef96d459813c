"""The progress of a campaign: totals, the seeds that they sum up, and the commit that they hold for.

Owns the state file of a campaign that can be resumed. A file holds for one commit: seeds of two states of the code
prove neither, so a ledger refuses to continue with another commit. It must never run a seed.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import chaos_tests
import smq
from chaos_tests.sim.clients.pace import ACKED_MIN
from chaos_tests.sim.run import Result

VIRTUAL_S_MIN: Final = 20.0  # to count, a run must be this long and acknowledge ACKED_MIN changes
FILE: Final = "campaign.json"


class LedgerError(ValueError):
    """The campaign cannot continue; the message says why."""


@dataclass(slots=True)
class Totals:
    """Sums over seeds. `short` seeds ran and were judged, but do not count."""

    seeds: int = 0
    short: int = 0
    virtual_s: float = 0.0
    operations: int = 0
    acked: int = 0
    violations: int = 0

    def add(self, result: Result) -> None:
        is_short = result.acked < ACKED_MIN or result.virtual_s < VIRTUAL_S_MIN
        self.seeds += not is_short
        self.short += is_short
        self.virtual_s += result.virtual_s
        self.operations += result.operations
        self.acked += result.acked
        self.violations += len(result.violations)

    def summary(self) -> str:
        short = f" and {self.short} too short to count" if self.short else ""
        return (
            f"{self.seeds} seeds{short}, {self.virtual_s / 3600:.2f} virtual hours, {self.operations} operations"
            f" ({self.acked} acknowledged changes), {self.violations} violations"
        )


@dataclass(slots=True)
class Ledger:
    """The state of a campaign. `done` are disjoint ascending ranges [first, end) of seeds."""

    commit: str
    scenario: str | None = None  # the only one; None: all in turn
    done: list[list[int]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    scenarios: dict[str, Totals] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of rare events
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.totals.add(result)
        self.scenarios.setdefault(result.scenario, Totals()).add(result)
        for name, times in result.counts.items():
            self.counts[name] = self.counts.get(name, 0) + times
        if result.violations:
            self.failed.append((result.seed, result.scenario))
        self._mark(result.seed)

    def _mark(self, seed: int) -> None:
        at = next((i for i, (first, _) in enumerate(self.done) if first > seed), len(self.done))
        self.done.insert(at, [seed, seed + 1])
        merged: list[list[int]] = []
        for first, end in self.done:
            if merged and merged[-1][1] >= first:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self.done = merged

    def pending(self, first_seed: int) -> Iterator[int]:
        """Every seed from `first_seed` on that has not run yet, without end."""
        done, seed = [list(span) for span in self.done], first_seed
        while True:
            span = next((span for span in done if span[0] <= seed < span[1]), None)
            if span is None:
                yield seed
                seed += 1
            else:
                seed = span[1]

    # ------------------------------------------------------------------------------------------ the file
    def save(self, folder: Path) -> None:
        """Replaces the file as a whole: a campaign may be killed at any time."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{FILE}.new"
        with fresh.open("w", encoding="utf-8") as f:
            json.dump(asdict(self), f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        fresh.replace(folder / FILE)

    @classmethod
    def open(cls, folder: Path, commit: str, scenario: str | None) -> "Ledger":
        """The ledger in a folder, or a new one. LedgerError if it holds for another commit or scenario."""
        path = folder / FILE
        if not path.exists():
            return cls(commit, scenario)
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            ledger = cls(**{key: value for key, value in raw.items() if key in known})
            ledger.totals = Totals(**raw["totals"])
            ledger.scenarios = {name: Totals(**sums) for name, sums in raw["scenarios"].items()}
            ledger.failed = [(seed, name) for seed, name in raw["failed"]]
        except (ValueError, KeyError, TypeError) as e:
            raise LedgerError(f"{path} is not the state of a campaign ({e!r}): name another folder") from e
        if ledger.commit != commit:
            raise LedgerError(
                f"{path} holds for commit {ledger.commit}, the code is {commit}: check that one out, or begin a new"
                " campaign in another folder"
            )
        if ledger.scenario != scenario:
            raise LedgerError(f"{path} holds for scenario {ledger.scenario or 'all'}, not {scenario or 'all'}")
        return ledger


def code_commit() -> str:
    """The commit of the running code. LedgerError if the code is not exactly a commit."""
    root = Path(chaos_tests.__file__).resolve().parent.parent
    if Path(smq.__file__).resolve().parent.parent != root:
        raise LedgerError(f"smq comes from {smq.__file__}, not from {root}: one commit must name all the code")
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "smq", "chaos_tests")
    except (OSError, subprocess.CalledProcessError) as e:
        raise LedgerError(f"a campaign names the commit it holds for, and {root} is not a git checkout ({e})") from e
    if changed:
        raise LedgerError(f"a campaign names the commit it holds for; commit these first:\n{changed}")
    return commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
