"""The comparison on docs/performance.md: its tables and its picture.

It must never measure: it is made from the JSON file of a run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.pages import blank, rewrite, svg
from benchmarks.peers.aims import Verdict, verdicts
from benchmarks.peers.lines import LINES

_COLOURS: Final = {
    "smq": "#2a7f4f",
    "Kafka": "#555555",
    "Kafka, fsync": "#999999",
    "etcd": "#3b6ea5",
    "NATS": "#c07f2c",
}

Row = dict[str, Any]
Cell = Callable[[Row], str]

_UNITS: Final = {"p50_ms": "ms", "gap_ms": "ms", "records_per_s": "records/s", "mb_per_s": "MB/s"}
_AIMED: Final = {
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "records_per_s": "records/s",
    "mb_per_s": "MB/s",
    "nodes_cpu_s_per_million": "CPU s per million",
    "written_per_byte": "bytes to disk per byte",
}
_OTHER_COLOUR: Final = "#8a5fa8"  # another commit of smq


def write_page(result: Path) -> None:
    """Replaces the table, the picture and the kept JSON file."""
    document = json.loads(result.read_text())
    del document["all"]
    command = "python -m benchmarks peers --write"
    rewrite("peers", command, _tables(document), picture=_picture(document), results=document)


def _tables(document: dict[str, Any]) -> str:
    systems = list(document["flushes"])
    rows = {(row["line"], row["system"]): row for row in document["medians"]}
    lines = [line for line in LINES if any((line.name, system) in rows for system in systems)]
    parts = [
        f"Commit {document['commit']}, Python {document['machine']['python']}, {document['machine']['cores']} cores: "
        f"medians of {document['rounds']} alternating runs, each with a fresh cluster of three nodes. "
        "Before an acknowledgement a record is on: "
        + "; ".join(f"{system}: {flushes}" for system, flushes in document["flushes"].items())
        + "."
    ]

    def table(title: str, chosen: list[tuple[str, Callable[[Row], str | None]]]) -> None:
        parts.append(f"| {title} | {' | '.join(systems)} |\n|---|{'---|' * len(systems)}")
        for name, cell in chosen:
            shown = [cell(rows[name, s]) if (name, s) in rows else None for s in systems]
            if any(shown):
                parts[-1] += f"\n| {name} | {' | '.join(text or '' for text in shown)} |"

    judged = {line.name: line.judged for line in lines}
    table("", [(line.name, lambda row: _figure(row, judged[row["line"]])) for line in lines])
    table(
        "nodes' CPU s per million records",
        [(line.name, lambda row: _number(row, "nodes_cpu_s_per_million")) for line in lines],
    )
    table(
        "bytes given to the disk per byte acknowledged, three copies",
        [(line.name, lambda row: _number(row, "written_per_byte")) for line in lines],
    )
    parts.append(_judged(rows))
    start = lines[0].name
    parts.append(
        "Ready after: " + "; ".join(f"{s} {rows[start, s]['start_s']:.1f} s" for s in systems if (start, s) in rows)
        + ". Private memory of the three nodes after the last of these rates: "
        + "; ".join(f"{s} {_last(document, s):,.0f} MB" for s in systems) + "."
    )  # fmt: skip
    parts += [f"Not measured in every round: {what}: {why}" for what, why in document["failures"].items()]
    parts.append("![Each line relative to the best system](performance/peers.svg)")
    return "\n\n".join(parts)


def _judged(rows: dict[tuple[str, str], Row]) -> str:
    """How many of the aims that this run can judge are reached, and each that is missed."""
    judged = list(verdicts(rows))
    missed = [verdict for verdict in judged if not verdict.is_reached]
    said = f"Of {len(judged)} aims, {len(judged) - len(missed)} are reached."
    items = [f"- {v.aim.line}, {_AIMED[v.aim.figure]}: {_text(v.value)}, {_asked(v)}" for v in missed]
    return f"{said} Missed:\n\n" + "\n".join(items) if missed else said


def _asked(verdict: Verdict) -> str:
    return f"{'at least' if verdict.aim.at_least else 'at most'} {_text(verdict.limit)}"


def _text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _figure(row: Row, judged: str) -> str:
    if "p50_ms" in row and judged == "p50_ms":
        return f"{row['p50_ms']:.2f} / {row['p99_ms']:.1f} ms (p50 / p99)"
    return f"{row[judged]:,.0f} {_UNITS[judged]}"


def _number(row: Row, name: str) -> str | None:
    value = row.get(name)
    return None if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _last(document: dict[str, Any], system: str) -> float:
    """Of the last line with all nodes: the gap after a kill leaves two."""
    rows = [row for row in document["medians"] if row["system"] == system and "gap_ms" not in row]
    return float(rows[-1]["private_mb"])


def _picture(document: dict[str, Any]) -> str:
    """Bars per line: 1 is the best system; a bar of 2 takes twice as long, or has half the rate."""
    rows = {(row["line"], row["system"]): row for row in document["medians"]}
    systems = list(document["flushes"])
    lines = [line for line in LINES if any((line.name, system) in rows for system in systems)]
    figure, axes = blank(10, 0.55 * len(lines) * len(systems) / 3 + 1)
    thickness = 0.8 / len(systems)
    for place, line in enumerate(lines):
        found = {s: float(rows[line.name, s][line.judged]) for s in systems if (line.name, s) in rows}
        best = min(found.values()) if line.lower_is_better else max(found.values())
        for at, (system, value) in enumerate(found.items()):
            behind = value / best if line.lower_is_better else best / value
            label = system if place == 0 else None
            axes.barh(place + at * thickness, behind, thickness, color=_COLOURS.get(system, _OTHER_COLOUR), label=label)
    axes.set_yticks([place + 0.3 for place in range(len(lines))], [line.name for line in lines])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times the best system's time, or the best rate divided by this one (shorter is better)")
    axes.legend(loc="lower right", fontsize=8)
    return svg(figure)
