"""Reads the job's output, and compares it with pandas' result for the same flights.

Owns the reading of the sink's commit log: a batch that was killed midway leaves files behind that do not count, and
only Spark itself ignores them. Any other reader of the directory must consult `_spark_metadata`, as here.
"""

import json
from pathlib import Path
from urllib.parse import unquote, urlparse

import pandas as pd

COLUMNS = ["day", "origin", "flights", "miles", "delay_minutes"]


def committed_files(output: Path) -> list[Path]:
    """The Parquet files of the committed batches. None before the first."""
    log = output / "_spark_metadata"
    if not log.is_dir():
        return []
    entries = {int(p.name.partition(".")[0]): p for p in log.iterdir() if p.name.partition(".")[0].isdigit()}
    compacted = max((p for p in log.glob("*.compact")), key=lambda p: int(p.stem), default=None)
    first = int(compacted.stem) if compacted is not None else 0
    if compacted is not None:
        entries[first] = compacted
    files = []
    for number in sorted(n for n in entries if n >= first):
        _version, *lines = entries[number].read_text().splitlines()
        files += [Path(unquote(urlparse(json.loads(line)["path"]).path)) for line in lines]
    return files


def written(output: Path) -> pd.DataFrame:
    """All committed rows, in order."""
    frames = [pd.read_parquet(file) for file in committed_files(output)]
    rows = pd.concat(frames) if frames else pd.DataFrame(columns=COLUMNS)
    return _ordered(rows)


def expected(flights: pd.DataFrame) -> pd.DataFrame:
    """The same, computed by pandas from the flights."""
    day = pd.to_datetime(flights["time_hour"], utc=True).dt.floor("D").rename("day")
    grouped = flights.groupby([day, "origin"])
    table = grouped.agg(miles=("distance", "sum"), delay_minutes=("arr_delay", "sum"))
    table.insert(0, "flights", grouped.size())
    # Spark's sum of only nulls is null, pandas' is 0.
    table.loc[grouped["arr_delay"].count() == 0, "delay_minutes"] = float("nan")
    return _ordered(table.reset_index())


def difference(found: pd.DataFrame, wanted: pd.DataFrame) -> str:
    """The first difference, as a sentence; empty if there is none."""
    twice = int(found.duplicated(["day", "origin"]).sum())
    if twice:
        return f"{twice} windows were written twice"
    try:
        pd.testing.assert_frame_equal(found, wanted, check_dtype=False)
    except AssertionError as e:
        return f"{len(found)} windows were written, pandas has {len(wanted)}: {e}"
    return ""


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[COLUMNS].copy()
    rows["day"] = pd.to_datetime(rows["day"], utc=True).astype("datetime64[us, UTC]")
    return rows.sort_values(["day", "origin"]).reset_index(drop=True)
