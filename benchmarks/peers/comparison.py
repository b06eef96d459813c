"""The comparison's run: rounds over all systems, alternating, each with a fresh cluster; then the table.

Owns the order and the medians. A system or line that fails is named with its reason, never left out in silence.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import trend
from benchmarks.peers.lines import LINES, Figures, Line
from benchmarks.peers.programs import Missing
from benchmarks.peers.systems import SYSTEMS, System, running, smq_at
from benchmarks.report import RESULTS, Report, commit, machine

Found = dict[str, dict[str, list[Figures]]]  # by line, then by system


def compare(
    rounds: int,
    share: float,
    names: Sequence[str],
    lines: Sequence[str],
    directory: Path | None,
    against: str | None = None,
) -> Path:
    """Runs it, prints each figure when it is there, and writes one JSON file; returns its path. `lines` are parts of
    the lines' names; without any, all lines run. `against` is a commit of smq that runs as one more system."""
    kinds = [kind for kind in SYSTEMS if not names or kind.name in names]
    if against:
        kinds.append(smq_at(against))
    chosen = [line for line in LINES if not lines or any(part in line.name for part in lines)]
    found: Found = {line.name: {} for line in chosen}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for kind in _turned(kinds, number):
            with tempfile.TemporaryDirectory(prefix="smq-peers-", dir=directory) as root:
                _measure(kind, Path(root), chosen, share, found, failures)
    report = Report()
    print("medians:")
    for line in chosen:
        for name, figures in found[line.name].items():
            medians = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
            report.add(f"{line.name}: {name}", _text(medians), line=line.name, system=name, **medians)
    path = RESULTS / time.strftime("peers-%Y%m%d-%H%M%S.json")
    RESULTS.mkdir(exist_ok=True)
    flushes = {kind.name: kind.flushes for kind in kinds}
    document = {
        "commit": commit(), "machine": machine(), "rounds": rounds, "share": share, "flushes": flushes,
        "failures": failures, "medians": report.rows, "all": found,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=2) + "\n")
    trend.add(report)
    return path


def _turned(kinds: Sequence[type[System]], by: int) -> list[type[System]]:
    """Another system begins in each round."""
    return [*kinds[by % len(kinds) :], *kinds[: by % len(kinds)]]


def _measure(
    kind: type[System], root: Path, lines: Sequence[Line], share: float, found: Found, failures: dict[str, str]
) -> None:
    try:
        with running(kind, root) as system:
            print(f"{kind.name} (flushes {kind.flushes}), ready after {system.start_s:.1f} s:", flush=True)
            for number, line in enumerate(lines):
                if system.driver not in line.drivers:
                    continue
                try:
                    figures = line.run(system, f"bench-{number}", share)
                except (RuntimeError, OSError) as error:
                    failures[f"{kind.name}: {line.name}"] = str(error)
                    print(f"  {line.name:<58} failed: {error}", flush=True)
                    continue
                figures |= {"start_s": system.start_s, "private_mb": system.usage().private_bytes / 1e6}
                found[line.name].setdefault(kind.name, []).append(figures)
                print(f"  {line.name:<58} {_text(figures)}", flush=True)
    except Missing as reason:
        failures[kind.name] = str(reason)
        print(f"{kind.name} is left out: {reason}", flush=True)


def _text(figures: Figures) -> str:
    shown = [f"{name} {value:,.0f}" if value >= 100 else f"{name} {value:.2f}" for name, value in figures.items()]
    return ", ".join(part for part in shown if not part.startswith(("seconds", "count", "start_s")))
