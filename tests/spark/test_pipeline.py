"""examples/pipeline: all of it on fewer flights, and its check on wrong tables."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from chaos_tests.demo.flights import Flights, load_flights
from examples.pipeline.__main__ import in_order
from examples.pipeline.output import committed_files, difference, expected, written

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_pipeline_writes_each_window_once_through_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.pipeline", "--rows", "12000", "--keep", str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "killed Spark with SIGKILL after micro-batch" in ran.stdout
    assert "each once, and each as pandas has it" in ran.stdout
    assert difference(written(tmp_path / "flights-by-day"), expected(load_flights(12000).frame)) == ""


def test_flights_are_published_in_the_order_of_their_hours() -> None:
    """Their file is not in that order, which shows only after its first months."""
    flights = Flights(
        frame=pd.DataFrame(), keys=[], values=[b"jan", b"dec", b"feb", b"jan too"], times_ms=[1, 12, 2, 1]
    )
    assert in_order(flights) == [b"jan", b"jan too", b"feb", b"dec"]


def wanted() -> pd.DataFrame:
    return expected(load_flights(3000).frame)


def test_pipeline_check_finds_what_is_wrong() -> None:
    right = wanted()
    assert difference(right.copy(), right) == ""
    assert "written twice" in difference(pd.concat([right, right.head(1)], ignore_index=True), right)
    assert "windows were written, pandas has" in difference(right.iloc[:-1], right)
    other = right.copy()
    other.loc[0, "miles"] += 1
    assert "miles" in difference(other, right)


def test_pipeline_counts_committed_files_only(tmp_path: Path) -> None:
    """Files of a killed batch are next to the others; a compacted log replaces all earlier ones."""
    rows = wanted()
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    for name in ("a", "b", "c", "killed"):
        rows.to_parquet(tmp_path / f"{name}.parquet")

    def entry(*names: str) -> str:
        paths = [json.dumps({"path": f"file://{tmp_path}/{name}.parquet", "action": "add"}) for name in names]
        return "\n".join(["v1", *paths])

    assert committed_files(tmp_path / "none") == []
    (log / "0").write_text(entry("a"))
    (log / ".0.crc").write_text("")
    (log / "1").write_text(entry("b"))
    assert [p.stem for p in committed_files(tmp_path)] == ["a", "b"]
    (log / "2.compact").write_text(entry("a", "b", "c"))
    (log / "3").write_text(entry())
    assert [p.stem for p in committed_files(tmp_path)] == ["a", "b", "c"]
    assert len(written(tmp_path)) == 3 * len(rows)
