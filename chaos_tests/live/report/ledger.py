"""The ledger: the runs so far, their commits and findings, and the limits of the figures.

Owns docs/reliability.md, generated from docs/reliability/*.jsonl: one line per history, per simulation campaign and per
long run of crash images or damaged files (`"kind"` names the kind). `keep` appends the results that a command has left
in its directory. Only found.jsonl is written by hand: the findings of such runs, each with the test that pins it. It
must never judge.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from chaos_tests.live.faults.catalogue import CATALOGUE
from chaos_tests.live.faults.kinds import FAILOVERS
from chaos_tests.live.report.summary import SUMMARY
from chaos_tests.sim.ledger import FILE
from chaos_tests.sim.long_runs import RUN

KEPT: Final = Path("docs/reliability")
HISTORIES: Final = "histories.jsonl"
RUNS: Final = "runs.jsonl"
PAGE: Final = Path("docs/reliability.md")
FAILOVER_SAYS: Final = (
    "From the strike to an acknowledgement by another node in every partition that the struck nodes led, as a client "
    "with a 0.7 s time-out an attempt sees it. A killed node's connections close; an isolated or paused one is only "
    "silent."
)
SIMULATION: Final = "simulation"
FOUND: Final = "found"
LEFT: Final = "left"  # found, and not fixed here
_FIELDS: Final = (
    *("scenario", "seed", "commit", "nodes", "network", "disks", "workload", "started", "seconds", "fault_seconds"),
    *("acked_sends", "acked_records", "records_read", "settle_ms", "anomalies", "replay"),
)

Entry = dict[str, Any]


def keep(directory: Path, kept: Path = KEPT) -> int:
    """Keeps the results in a command's directory: valid histories that are not kept yet, a campaign of the simulation
    as far as it got, a long run. Returns the number of changed lines."""
    kept.mkdir(parents=True, exist_ok=True)
    runs = [_campaign(path) for path in directory.glob(FILE)]
    runs += [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob(RUN)]
    return _keep_histories(directory, kept / HISTORIES) + _keep_runs(runs, kept / RUNS)


def _keep_histories(campaign: Path, kept: Path) -> int:
    """Planted bugs and invalid runs prove nothing about the product and are left out."""
    known = {_identity(entry) for entry in read(kept)}
    added = []
    for path in sorted(campaign.glob(f"*/{SUMMARY}")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not (summary["planted"] or summary["invalid"] or _identity(summary) in known):
            added.append(history(summary))
    with kept.open("a", encoding="utf-8") as f:
        f.writelines(_line(entry) for entry in added)
    return len(added)


def history(summary: Entry) -> Entry:
    """The part of a run's summary that is kept."""
    entry = {"kind": "history", **{name: summary[name] for name in _FIELDS}}
    entry["operations"] = sum(sum(kinds.values()) for kinds in summary["operations"].values())
    entry["faults"] = [
        {
            "name": fault["name"],
            "family": fault["family"],
            "s": round(fault["end_s"] - fault["start_s"], 1),
            "failover_ms": fault["failover_ms"] and round(fault["failover_ms"]),
            "recovery_ms": fault["recovery_ms"] and round(fault["recovery_ms"]),
            "flips": fault["flips"],
        }
        for fault in summary["faults"]
    ]
    return entry


def _campaign(path: Path) -> Entry:
    """A campaign of the simulation. It may still be running: a later state replaces an earlier one."""
    state = json.loads(path.read_text(encoding="utf-8"))
    totals = state["totals"]
    scenario = f" --scenario {state['scenario']}" if state["scenario"] else ""
    return {
        "kind": SIMULATION,
        "commit": state["commit"],
        "command": f"python -m chaos_tests sim --resume DIR{scenario}",
        "figures": {
            "seeds": totals["seeds"],
            "virtual hours": round(totals["virtual_s"] / 3600, 2),
            "operations": totals["operations"],
            "acknowledged changes": totals["acked"],
        },
        "found": [f"python -m chaos_tests sim --seed {seed} --scenario {name}" for seed, name in state["failed"]],
    }


def _keep_runs(fresh: list[Entry], kept: Path) -> int:
    entries = {(e["kind"], e["commit"], e["command"]): e for e in read(kept)}
    before = dict(entries)
    entries |= {(e["kind"], e["commit"], e["command"]): e for e in fresh}
    if entries != before:
        kept.write_text("".join(map(_line, entries.values())), encoding="utf-8")
    return sum(before.get(key) != entry for key, entry in entries.items())


def _line(entry: Entry) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def read(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _identity(entry: Entry) -> tuple[Any, ...]:
    return entry["scenario"], entry["seed"], entry["nodes"], entry["commit"], entry["started"]


def page(entries: Iterable[Entry]) -> str:
    """docs/reliability.md."""
    all_of = list(entries)
    histories = [entry for entry in all_of if entry["kind"] == "history"]
    found = [entry for entry in all_of if entry["kind"] == FOUND]
    left = [entry for entry in all_of if entry["kind"] == LEFT]
    runs = [entry for entry in all_of if entry["kind"] not in ("history", FOUND, LEFT)]
    parts = [
        "# Runs so far, and their findings",
        "",
        "Generated by `python -m chaos_tests ledger` from `docs/reliability/*.jsonl`; do not edit. How each kind of "
        "run works: [chaos.md](chaos.md), [simulation.md](simulation.md).",
        "",
        *_live(histories),
        *_long(runs),
        *_fixed(found),
        *_left(left),
        "## What these figures do not show",
        "",
        "- The machines were small and shared: failover times hold the scheduling delays of two busy cores. Before "
        "commit a50027fe Raft elected after 300 to 600 ms of silence. It is 2,000 to 3,000 ms now, so an isolated or "
        "paused leader is replaced some two seconds later than the table says.",
        "- A history is about a minute long. Faults that need days to build up (slow leaks, counters that wrap) are "
        "not in it; the simulation's virtual hours are many runs of some twenty virtual seconds, too.",
        "- Each line holds for its commit alone. What was changed since was tested by the suites, not by these runs.",
        "- The simulation runs neither LMDB, sockets, gRPC nor the Kafka and Spark clients; the live histories "
        "run them, but few schedules of theirs. Crash images are of one node's file, recorded on one file system.",
        "- Flipped bits are judged by what clients are served. A bit that damages nothing that is read counts too.",
        "- Lying disks (which acknowledge a flush and lose it later) are not part of it: no log on one disk survives "
        "them.",
        "- The nodes of a history share one kernel, one clock source and one physical disk.",
        "- Runs with too little traffic to judge, or in which the harness failed, are not counted: they prove nothing.",
        "- Checkers judge what clients saw. What no client asked for in a run is not judged by it.",
        "",
    ]
    return "\n".join(parts)


def _live(histories: list[Entry]) -> list[str]:
    if not histories:
        return ["## Live histories", "", "None has been kept yet.", ""]
    parts = ["## Live histories", "", "| | |", "|---|---|"]
    parts += [f"| {name} | {value} |" for name, value in overview(histories)]
    times = {name: times for name, _, times in struck(histories)}
    parts += ["", f"Faults ([what they are](chaos.md#the-faults)), and how often: {_counts(times)}."]
    parts += ["", "### Failover", "", FAILOVER_SAYS, ""]
    parts += ["| family | times | min ms | p50 ms | p99 ms | max ms |", "|---|---|---|---|---|---|"]
    parts += [f"| {' | '.join(map(str, row))} |" for row in failovers(histories)]
    found = [entry for entry in histories if entry["anomalies"]]
    if found:
        parts += ["", "Histories with findings:", ""]
        parts += [f"- `{e['replay']}` on {e['commit']}: {_counts(e['anomalies'])}{_since(e, histories)}" for e in found]
    return [*parts, ""]


def overview(histories: list[Entry]) -> list[tuple[str, str]]:
    """(figure, value) over all histories."""
    anomalies: Counter[str] = Counter()
    for entry in histories:
        anomalies.update(entry["anomalies"])
    return [
        ("histories", f"{len(histories):,}"),
        ("... with five faults or more", f"{sum(len(e['faults']) >= 5 for e in histories):,}"),
        ("... without a finding", f"{sum(not e['anomalies'] for e in histories):,}"),
        ("of nodes", _counts(Counter(str(e["nodes"]) for e in histories))),
        ("network", _counts(Counter(e["network"] for e in histories))),
        ("disks", _counts(Counter(e["disks"] for e in histories))),
        ("hours", f"{sum(e['seconds'] for e in histories) / 3600:.1f}"),
        ("fault-hours", f"{sum(e['fault_seconds'] for e in histories) / 3600:.2f}"),
        ("faults", f"{sum(len(e['faults']) for e in histories):,}"),
        ("operations", f"{sum(e['operations'] for e in histories):,}"),
        ("records acknowledged", f"{sum(e['acked_records'] for e in histories):,}"),
        ("records read and compared", f"{sum(e['records_read'] for e in histories):,}"),
        ("with Kafka consumers in a group", f"{sum('Kafka' in e['workload'] for e in histories):,}"),
        ("with a Spark streaming read", f"{sum('Spark' in e['workload'] for e in histories):,}"),
        ("bits flipped", f"{sum(fault['flips'] for e in histories for fault in e['faults']):,}"),
        ("anomalies", _counts(anomalies) or "none"),
        ("commits", ", ".join(f"{c} ({n})" for c, n in Counter(e["commit"] for e in histories).items())),
    ]


def struck(histories: list[Entry]) -> list[tuple[str, str, int]]:
    """(fault, description, times)."""
    counts = Counter(fault["name"] for entry in histories for fault in entry["faults"])
    return [(name, CATALOGUE[name].says if name in CATALOGUE else "", n) for name, n in sorted(counts.items())]


def failovers(histories: list[Entry]) -> list[tuple[str, int, int, int, int, int]]:
    """(family, times, min, p50, p99, max) in ms."""
    rows = []
    for family in FAILOVERS:
        found = sorted(
            fault["failover_ms"]
            for entry in histories
            for fault in entry["faults"]
            if fault["failover_ms"] is not None and fault["family"] == family
        )
        if found:
            p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
            rows.append((family, len(found), found[0], round(median(found)), p99, found[-1]))
    return rows


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in sorted(of.items()))


def _since(entry: Entry, histories: list[Entry]) -> str:
    """The results of the same run on later commits."""
    later = [e for e in histories if e["replay"] == entry["replay"] and e["started"] > entry["started"]]
    results = [f"{'found again' if e['anomalies'] else 'held'} on {e['commit']}" for e in later]
    return f"; run again, it {', '.join(results)}" if results else ""


def _long(runs: list[Entry]) -> list[str]:
    """Simulation, crash images and damaged files: one table each, with sums if it has several lines."""
    parts = []
    for kind in dict.fromkeys(entry["kind"] for entry in runs):
        of = [entry for entry in runs if entry["kind"] == kind]
        names = list(of[0]["figures"])
        head = ["commit", *names, "found"]
        commands = ", ".join(f"`{command}`" for command in dict.fromkeys(entry["command"] for entry in of))
        parts += [f"## {kind.capitalize()}", "", f"By {commands}.", ""]
        parts += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for entry in of:
            found = "<br>".join(f"`{problem}`" for problem in entry["found"]) or "nothing"
            parts.append(_row(entry["commit"][:10], entry["figures"], names, found))
        if len(of) > 1:
            sums = {name: round(sum(entry["figures"][name] for entry in of), 2) for name in names}
            parts.append(_row("all", sums, names, str(sum(len(entry["found"]) for entry in of))))
        parts.append("")
    return parts


def _fixed(found: list[Entry]) -> list[str]:
    if not found:
        return []
    parts = ["## Found on the way, and fixed", "", "| by | what | fixed in | pinned by |", "|---|---|---|---|"]
    parts += [f"| {e['by']} | {e['what']} | {e['fixed']} | `{e['file']}::{e['test']}` |" for e in found]
    return [*parts, ""]


def _left(left: list[Entry]) -> list[str]:
    if not left:
        return []
    return ["## Found, and left", "", *(f"- {entry['by']}: {entry['what']}" for entry in left), ""]


def _row(commit: str, figures: dict[str, float], names: list[str], found: str) -> str:
    return f"| {commit} | {' | '.join(f'{figures[name]:,}' for name in names)} | {found} |"


def write_page(root: Path) -> Path:
    """docs/reliability.md under `root`."""
    entries = [entry for path in sorted((root / KEPT).glob("*.jsonl")) for entry in read(path)]
    (root / PAGE).write_text(page(entries), encoding="utf-8")
    return root / PAGE
