"""The report of a live history: one HTML file with its pictures, readable without context.

Owns report.html of a run's directory, made only from history.jsonl and summary.json. It must never judge.
"""

import html
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from chaos_tests.history import OBSERVER, Event, read_jsonl
from chaos_tests.live.report.summary import SUMMARY, read_summary

_COLOURS: Final = {"ok": "#2a7f4f", "info": "#d08a00", "fail": "#c0392b"}
REPORT: Final = "report.html"
_SAYS: Final = {"ok": "acknowledged", "info": "outcome unknown", "fail": "refused"}
_OPERATIONS: Final = {
    "assign": "offsets taken without records (AssignOffsets)",
    "commit": "a group's offset committed",
    "fetch": "a group's committed offset asked for, linearizable",
    "gjoin": "a Kafka consumer got its group's generation",
    "gsync": "a Kafka consumer got its partitions",
    "hwm": "a partition's range asked for, linearizable",
    "kpoll": "records that a Kafka consumer or a Spark query received",
    "poll": "records read from one replica",
    "send": "records sent, by gRPC and Kafka producers",
}
STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em} h2{font-size:1.15em;margin-top:2em} table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.25em .6em;border-bottom:1px solid #ddd;vertical-align:top} td.n,th.n{text-align:right}
.good{color:#2a7f4f} .bad{color:#c0392b} pre{background:#f6f6f6;padding:.7em;overflow-x:auto;white-space:pre-wrap}
svg{width:100%;height:auto}
"""
_TIMES: Final = (
    "Failover: from the strike to an acknowledgement by another node in every partition that the struck nodes led. All "
    "well: from the fault's end to an acknowledgement in every partition with every node ready; a node that was down "
    "for it starts, recovers and catches up in this time."
)
PROMISES: Final = (
    "Each record acknowledged with acks=all is on every replica at the acknowledged offset, once.",
    "Where a topic keeps only some of its records, retention and compaction removed no others: the last record of each "
    "key is there, and every replica ends with the same bytes.",
    "Records that definitely failed are on no replica.",
    "Every reader of every replica saw the same records at the same offsets, in order and without gaps.",
    "High water marks and committed group offsets are linearizable: no client got an older one than known before.",
    "A group of consumers that faults rebalance got each acknowledged record, and its commits never went back.",
    "With a majority untouched, every partition kept acknowledging during the fault, and all did after the heal.",
)


def write_report(directory: Path) -> Path:
    """report.html of that run."""
    summary = read_summary(directory / SUMMARY)
    events = list(read_jsonl(directory / "history.jsonl"))
    fresh = directory / f"{REPORT}.new"
    fresh.write_text(_page(summary, events), encoding="utf-8")
    return fresh.replace(directory / REPORT)  # a run may be killed at any time, and its campaign goes on


def _page(summary: dict[str, Any], events: list[Event]) -> str:
    verdict = "everything held" if not summary["violations"] and not summary["invalid"] else "NOT everything held"
    colour = "good" if verdict == "everything held" else "bad"
    title = f"{summary['scenario']}, seed {summary['seed']}: {verdict}"
    parts = [
        f"<h1>smq chaos history: <span class='{colour}'>{html.escape(title)}</span></h1>",
        f"<p>{_verdict(summary)}</p>",
        f"<pre>{html.escape(summary['replay'])}</pre>",
        "<h2>What was promised</h2><ul>" + "".join(f"<li>{line}</li>" for line in PROMISES) + "</ul>",
        "<h2>What was found</h2>" + _findings(summary),
        "<h2>Faults</h2>" + _faults(summary),
        "<h2>Sends: latency, and acknowledgements per second</h2>"
        "<p>Grey bands are faults. A point is one send: green acknowledged, orange outcome unknown, red refused. The "
        "strip below has a line for every record acknowledged with acks=all: green if the final read of the "
        "replicas shows it, red otherwise.</p>",
        _picture(summary, events),
        "<h2>Operations</h2>" + _operations(summary),
    ]
    if summary["unavailable"]:
        parts.append(f"<h2>Faults that this machine did not allow</h2>{table((), summary['unavailable'].items())}")
    body = "\n".join(parts)
    return f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>{body}\n"


def _verdict(summary: dict[str, Any]) -> str:
    return (
        f"{summary['nodes']} nodes as processes ({summary['network']}, {summary['disks']}), checkout at commit "
        f"{summary['commit'] or 'unknown'}, {summary['started']}, {summary['seconds']:.0f} s. "
        f"{len(summary['faults'])} faults, {summary['acked_records']:,} records acknowledged, "
        f"{summary['records_read']:,} read and compared. Clients: {', '.join(summary['workload'])}."
        + f" {summary.get('records_deleted', 0):,} records were deleted by retention, and "
        f"{summary.get('records_compacted', 0):,} compacted away."
        + (f" The nodes were broken on purpose: {summary['planted']}." if summary["planted"] else "")
    )


def _findings(summary: dict[str, Any]) -> str:
    if summary["invalid"]:
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in summary["invalid"])
        return f"<p class='bad'>The run is invalid and proves nothing:</p><ul>{reasons}</ul>"
    if not summary["violations"]:
        return "<p class='good'>Nothing. Every checker passed over the whole history.</p>"
    first = "\n\n".join(summary["violations"][:5])
    counts = table(("anomaly", "times"), sorted(summary["anomalies"].items()))
    return f"{counts}<p>The first with their witnesses:</p><pre>{html.escape(first)}</pre>"


def _faults(summary: dict[str, Any]) -> str:
    head = ("fault", "", "nodes", "at s", "for s", "acks meanwhile", "failover ms", "all well after ms")
    rows = [
        (
            fault["name"],
            Html("<br>".join(html.escape(line) for line in (fault["says"], *fault["told"]))),
            ", ".join(map(str, fault["nodes"])),
            round(fault["start_s"], 1),
            round(fault["end_s"] - fault["start_s"], 1),
            fault["acks_during"],
            *(ms and round(ms) for ms in (fault["failover_ms"], fault["recovery_ms"])),
        )
        for fault in summary["faults"]
    ]
    return f"{table(head, rows)}<p>{_TIMES}</p>"


def _operations(summary: dict[str, Any]) -> str:
    found = summary["operations"].items()
    rows = [(name, _OPERATIONS.get(name, ""), *(of.get(kind, 0) for kind in _COLOURS)) for name, of in found]
    return table(("", "", "ok", "unknown", "refused"), rows)


class Html(str):
    """A cell that is HTML already."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Numbers, those that are not known and their headings are right-aligned."""
    body = [list(row) for row in rows]

    def cell(tag: str, value: object, *, is_number: bool) -> str:
        text = "" if value is None else f"{value:,}" if isinstance(value, int | float) else html.escape(str(value))
        text = value if isinstance(value, Html) else text
        return f"<{tag} class='n'>{text}</{tag}>" if is_number else f"<{tag}>{text}</{tag}>"

    lines = [[cell("td", value, is_number=not isinstance(value, str)) for value in row] for row in body]
    if head and body:
        first = [cell("th", name, is_number=not isinstance(body[0][i], str)) for i, name in enumerate(head)]
        lines.insert(0, first)
    return f"<table>{''.join('<tr>' + ''.join(line) + '</tr>' for line in lines)}</table>"


def _picture(summary: dict[str, Any], events: list[Event]) -> str:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    start = events[0]["t"] if events else 0
    points, acked = _sends(events, start)
    kept, lost = _fates(events, start)
    figure, (above, below, strip) = plt.subplots(3, 1, figsize=(11, 6.5), sharex=True, height_ratios=(6, 3, 0.6))
    for fault in summary["faults"]:
        for axes in (above, below):
            axes.axvspan(fault["start_s"], max(fault["end_s"], fault["start_s"] + 0.1), color="0.87", zorder=0)
        above.text(
            fault["start_s"], 1.01, fault["name"], transform=above.get_xaxis_transform(), fontsize=7, rotation=20
        )
    for kind, colour in _COLOURS.items():
        found = [(at, ms) for at, ms, was in points if was == kind]
        if found:
            above.scatter(*zip(*found, strict=True), s=3, color=colour, label=_SAYS[kind], rasterized=True)
    above.set_yscale("log")
    above.set_ylabel("latency of a send, ms")
    if points:
        above.legend(loc="upper right", fontsize=7)
    seconds = range(max(acked, default=0) + 1)
    below.fill_between(list(seconds), [acked[s] for s in seconds], step="post", color=_COLOURS["ok"], alpha=0.6)
    below.set_ylabel("records acknowledged/s")
    strip.eventplot([kept], colors=_COLOURS["ok"], linewidths=0.3, rasterized=True)
    strip.eventplot([lost], colors=_COLOURS["fail"], linewidths=2)
    strip.set_yticks([])
    strip.set_ylabel(f"{len(lost)} lost", rotation=0, ha="right", va="center")
    strip.set_xlabel("seconds since the start")
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight")
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _sends(events: list[Event], start: int) -> tuple[list[tuple[float, float, str]], Counter[int]]:
    """(seconds, latency ms, outcome) of every send, and records acknowledged by second."""
    open_ops: dict[int, Event] = {}
    points: list[tuple[float, float, str]] = []
    acked: Counter[int] = Counter()
    for event in events:
        if event["p"] == OBSERVER or event["f"] != "send":
            continue
        if event["ty"] == "invoke":
            open_ops[event["p"]] = event
            continue
        requested = open_ops.pop(event["p"])
        points.append(((requested["t"] - start) / 1e9, (event["t"] - requested["t"]) / 1e6, event["ty"]))
        if event["ty"] == "ok":
            acked[int((event["t"] - start) / 1e9)] += len(requested["v"])
    return points, acked


def _fates(events: list[Event], start: int) -> tuple[list[float], list[float]]:
    """Seconds of the acknowledgements (acks=all) with records in the final read, and of those without. Not of topics
    that keep only some of their records: the checkers say which of those had to stay."""
    forgetful = {topic for event in events for topic in event.get("topics", ()) if event["p"] == OBSERVER}
    read: set[int] = set()
    finals: set[int] = set()
    open_ops: dict[int, Event] = {}
    acked: list[tuple[float, list[int]]] = []
    for event in events:
        process, function = event["p"], event["f"]
        if function == "send":
            if event["ty"] == "invoke":
                open_ops[process] = event
            else:
                requested = open_ops.pop(process)
                is_whole = requested["k"].rpartition("/")[0] not in forgetful
                if event["ty"] == "ok" and requested["acks"] == -1 and is_whole:
                    acked.append(((event["t"] - start) / 1e9, requested["v"]))
        elif function == "poll" and event["ty"] == "invoke":
            (finals.add if event.get("final") else finals.discard)(process)
        elif function == "poll" and event["ty"] == "ok" and process in finals:
            read.update(value for batch in event["b"] for value in batch[2])
    if not read:
        return [at for at, _ in acked], []  # there was no final read: the findings say so
    kept = [at for at, values in acked if read.issuperset(values)]
    return kept, [at for at, values in acked if not read.issuperset(values)]
