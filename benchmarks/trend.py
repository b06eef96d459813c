"""How the figures of this machine have changed from run to run.

Owns benchmarks/results/trend.jsonl, one line per run and row, with its table and picture. Every run adds to it. It must
never measure. It compares runs of one machine only: the file stays there.
"""

import json
import statistics
import time
from collections import defaultdict
from typing import Final

from benchmarks.pages import blank, svg
from benchmarks.report import RESULTS, Report, commit

TREND: Final = RESULTS / "trend.jsonl"
PICTURE: Final = RESULTS / "trend.svg"
LAST_RUNS: Final = 7  # the median of as many before is what a run is compared with
NOTABLE: Final = 1.25
RUN: Final = frozenset({"time", "commit", "what"})  # of a line; the rest are figures


def add(report: Report) -> None:
    """What a run has measured."""
    run = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit()}
    TREND.parent.mkdir(parents=True, exist_ok=True)
    with TREND.open("a") as file:
        for row in report.rows:
            figures = {name: value for name, value in row.items() if isinstance(value, float)}
            if figures:
                file.write(json.dumps({**run, "what": row["what"], **figures}) + "\n")


def show() -> None:
    """Prints each figure's last value beside the median of the runs before, the largest changes first; draws them."""
    if not TREND.exists():
        raise SystemExit(f"{TREND} does not exist yet: `make bench-nightly` measures and writes it")
    series: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in TREND.read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - RUN:
            series[row["what"], name].append(row[name])
    changes = sorted(((_change(values), key) for key, values in series.items()), key=lambda found: -abs(found[0] - 1))
    for change, (what, name) in changes:
        values = series[what, name]
        mark = " *" if not 1 / NOTABLE < change < NOTABLE else ""
        print(
            f"{what[:70]:<70} {name:<14} {values[-1]:>12,.2f} {change:>6.2f} x of {len(values) - 1} runs before{mark}"
        )
    PICTURE.write_text(_picture(series))
    print(f"drawn: {PICTURE} (* by more than a quarter)")


def _change(values: list[float]) -> float:
    before = values[-1 - LAST_RUNS : -1]
    usual = statistics.median(before) if before else values[-1]
    return values[-1] / usual if usual else 1.0


def _picture(series: dict[tuple[str, str], list[float]]) -> str:
    figure, axes = blank(10, 5)
    for (what, name), values in series.items():
        if values[0]:
            axes.plot([value / values[0] for value in values], marker=".", label=f"{what} {name}"[:60])
    axes.set_yscale("log")
    axes.set_xlabel("run")
    axes.set_ylabel("times the first run")
    axes.legend(fontsize=5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg(figure)
