"""The page of a campaign of live histories: faults, findings, and a link to each history's report.

Owns index.html of a campaign's directory, made from the summaries in it. Its figures are the ledger's.
"""

import html
import sys
from pathlib import Path
from typing import Any, Final

from chaos_tests.live.report.ledger import FAILOVER_SAYS, failovers, history, overview, struck
from chaos_tests.live.report.page import PROMISES, REPORT, STYLE, Html, table, write_report
from chaos_tests.live.report.summary import SUMMARY, read_summary

INDEX: Final = "index.html"


def write_index(campaign: Path) -> Path:
    """index.html of that directory."""
    runs = [(path.parent.name, read_summary(path)) for path in sorted(campaign.glob(f"*/{SUMMARY}"))]
    runs.sort(key=lambda run: run[1]["started"])
    fresh = campaign / f"{INDEX}.new"
    fresh.write_text(_page(runs), encoding="utf-8")
    return fresh.replace(campaign / INDEX)  # a reader may have the old one open


def write_reports(directory: Path) -> int:
    """Writes the report of a run, or of all runs of a campaign with its index. Returns the exit code."""
    runs = sorted(path.parent for path in directory.glob(f"*/{SUMMARY}"))
    if (directory / SUMMARY).exists():
        print(write_report(directory))
    elif runs:
        for run in runs:
            print(write_report(run))
        print(write_index(directory))
    else:
        print(f"there is no {SUMMARY} in {directory} or in its directories: name a run's directory", file=sys.stderr)
        return 2
    return 0


def _page(runs: list[tuple[str, dict[str, Any]]]) -> str:
    good = [history(summary) for _, summary in runs if not summary["invalid"] and not summary["planted"]]
    bad = sum(bool(summary["violations"]) for _, summary in runs)
    invalid = sum(bool(summary["invalid"]) for _, summary in runs)
    problems = [*([f"{bad} with findings"] if bad else []), *([f"{invalid} invalid"] if invalid else [])]
    verdict = ", ".join(problems) or "everything held"
    colour = "bad" if problems else "good"
    name = f"smq chaos: {len(runs)} {'history' if len(runs) == 1 else 'histories'}"
    parts = [f"<h1>{name}, <span class='{colour}'>{verdict}</span></h1>"]
    parts += ["<h2>What was promised</h2><ul>", *(f"<li>{line}</li>" for line in PROMISES), "</ul>"]
    if good:
        parts += ["<h2>All together</h2>", table((), overview(good))]
        parts += ["<h2>What was done to the clusters</h2>", table(("fault", "", "times"), struck(good))]
        columns = ("failover after", "times", "min ms", "p50 ms", "p99 ms", "max ms")
        parts += ["<h2>Failover</h2>", f"<p>{FAILOVER_SAYS}</p>", table(columns, failovers(good))]
    parts += ["<h2>Each history</h2>", _histories(runs)]
    head = f"<!doctype html><meta charset='utf-8'><title>{name}, {verdict}</title><style>{STYLE}</style>"
    return f"{head}{''.join(parts)}\n"


def _histories(runs: list[tuple[str, dict[str, Any]]]) -> str:
    rows = []
    for name, summary in runs:
        verdict, colour = "held", "good"
        if summary["violations"] or summary["invalid"]:
            colour = "bad"
            verdict = "invalid" if summary["invalid"] else ", ".join(sorted(summary["anomalies"]))
        link = Html(f"<a href='{html.escape(name)}/{REPORT}'>{html.escape(name)}</a>")
        faults = ", ".join(fault["name"] for fault in summary["faults"])
        verdict = Html(f"<span class='{colour}'>{html.escape(verdict)}</span>")
        rows.append((link, faults, verdict, round(summary["seconds"]), summary["acked_records"]))
    return table(("history", "faults", "verdict", "s", "records"), rows)
