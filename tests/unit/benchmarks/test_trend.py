"""The figures of runs, kept to see how they change."""

import json
from pathlib import Path

import pytest

from benchmarks import trend
from benchmarks.report import Report


def test_the_first_run_of_a_checkout_makes_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "results" / "trend.jsonl"
    monkeypatch.setattr(trend, "TREND", kept)
    report = Report()
    report.add("metrics", "1.5 %", percent=1.5, pairs=250)
    for _ in range(2):
        trend.add(report)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(row["what"], row["percent"]) for row in rows] == [("metrics", 1.5)] * 2
