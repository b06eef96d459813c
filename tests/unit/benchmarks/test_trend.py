"""The figures of runs, kept to see how they change."""

import json
from pathlib import Path

import pytest

from benchmarks import trend
from benchmarks.report import Report


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of this test are kept. The directory does not exist yet, as in a new checkout."""
    file = tmp_path / "results" / "trend.jsonl"
    monkeypatch.setattr(trend, "TREND", file)
    monkeypatch.setattr(trend, "PICTURE", file.with_suffix(".svg"))
    return file


def run(**figures: float) -> None:
    report = Report()
    for name, value in figures.items():
        report.add(f"a line: {name}", "", p50_ms=value, system="smq")
    trend.add(report)


def test_each_run_adds_its_figures(kept: Path) -> None:
    run(smq=1.0)
    run(smq=2.0)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(row["what"], row["p50_ms"]) for row in rows] == [("a line: smq", 1.0), ("a line: smq", 2.0)]


def test_a_figure_is_compared_with_the_median_of_the_runs_before(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steady, slower in ((1.0, 2.0), (1.1, 90.0), (1.2, 2.0), (1.1, 3.0)):
        run(steady=steady, slower=slower)
    capsys.readouterr()
    trend.show()
    first, second, _ = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "a line: slower p50_ms 3.00 1.50 x of 3 runs before *"
    assert " ".join(second.split()) == "a line: steady p50_ms 1.10 1.00 x of 3 runs before"
    assert "<svg" in trend.PICTURE.read_text()


def test_without_a_run_it_says_what_to_run(kept: Path) -> None:
    with pytest.raises(SystemExit, match="make bench-nightly"):
        trend.show()
