"""Long hunts on one node's file: crash images of a new trace, and damage that a simulated cluster must survive.

Owns both loops and the command line `python -m chaos_tests images` and `flips`; each leaves one `run.json` for the
ledger. The full tests run the same loops.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from chaos_tests.crash.recorder import record
from chaos_tests.crash.trace import Acked, Trace, images
from chaos_tests.crash.verify import log_and_journal, verdict
from chaos_tests.sim.ledger import code_commit
from chaos_tests.sim.run import simulate
from chaos_tests.sim.scenario import load
from smq.replication.ports import Disk

RUN: Final = "run.json"
SUBMISSIONS: Final = 400  # in the trace that images are made from
BIT_FLIPS: Final = Path(__file__).parent / "bit_flips.toml"
_SHOWN_EVERY: Final = 100


@dataclass(frozen=True, slots=True)
class LongRun:
    """One line of the ledger. `found` is empty if everything held."""

    kind: str
    commit: str
    command: str
    figures: dict[str, float]
    found: list[str]


def image_failures(
    trace: Trace, folder: Path, count: int, *, seed: int = 1, judge: Callable[[Disk, Acked], str] = log_and_journal
) -> Iterator[str]:
    """One message for each image that fails a check."""
    for number, image in enumerate(images(trace, seed, count), 1):
        said = verdict(folder / "node", image, judge)
        if said:
            yield f"image {number} of seed {seed}: {said}"


@dataclass(slots=True)
class Damages:
    """Outcomes of damage to a node's data file in simulated clusters, summed over seeds."""

    seeds: int
    virtual_s: float
    outcomes: Counter[str]
    violations: list[str]


def damage_files(count: int) -> Iterator[Damages]:
    """Yields the sums after each seed, until `count` files were damaged or something was found."""
    scenario = load(BIT_FLIPS)
    sums = Damages(0, 0.0, Counter(), [])
    while sums.outcomes.total() < count and not sums.violations:
        sums.seeds += 1
        result = simulate(scenario, sums.seeds)
        sums.virtual_s += result.virtual_s
        sums.violations += [f"seed {sums.seeds}: {violation}" for violation in result.violations]
        sums.outcomes.update(note["outcome"] for note in result.history if note.get("what") == "flip-file")
        yield sums


def crash_images(count: int, out: Path) -> int:
    """The command `images`."""
    commit, begun = code_commit(), time.monotonic()
    trace = record(SUBMISSIONS)
    with tempfile.TemporaryDirectory() as folder:
        found = list(image_failures(trace, Path(folder), count))
    figures = {"images": count, "minutes": _minutes(begun)}
    command = f"python -m chaos_tests images --count {count}"
    return _keep(LongRun("crash images", commit, command, figures, found), out)


def bit_flips(count: int, out: Path) -> int:
    """The command `flips`."""
    commit, begun = code_commit(), time.monotonic()
    sums, shown = Damages(0, 0.0, Counter(), []), 0
    for sums in damage_files(count):
        if sums.outcomes.total() - shown >= _SHOWN_EVERY:
            shown = sums.outcomes.total()
            print(f"{shown} damages in {sums.seeds} seeds, {len(sums.violations)} violations", flush=True)
    for outcome, times in sorted(sums.outcomes.items()):
        print(f"  {times:5} {outcome}")
    figures = {
        "damages": sums.outcomes.total(),
        "seeds": sums.seeds,
        "virtual hours": round(sums.virtual_s / 3600, 2),
        "minutes": _minutes(begun),
    }
    command = f"python -m chaos_tests flips --count {count}"
    return _keep(LongRun("damaged files", commit, command, figures, sums.violations), out)


def _keep(run: LongRun, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    (out / RUN).write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
    for problem in run.found:
        print(problem)
    figures = ", ".join(f"{name} {value:,}" for name, value in run.figures.items())
    print(f"commit {run.commit}: {figures}, {len(run.found)} findings; {out / RUN}")
    return 1 if run.found else 0


def _minutes(begun: float) -> float:
    return round((time.monotonic() - begun) / 60, 1)
