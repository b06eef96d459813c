"""Results of benchmarks: rows for people, JSON for machines.

Owns the shape of results and the place of their files. It must never measure. The benchmarks import it.
"""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass
class Report:
    """Rows in the order in which they were measured."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, value: str, **numbers: Any) -> None:
        """`value` is for people; `numbers` go to the JSON file, with units in their names."""
        self.rows.append({"what": what, "value": value, **numbers})
        print(f"  {what:<58} {value}", flush=True)

    def write(self) -> Path:
        """Writes one file per run, named after the time and never overwritten."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / time.strftime("bench-%Y%m%d-%H%M%S.json")
        document = {"commit": commit(), "machine": machine(), "rows": self.rows}
        path.write_text(json.dumps(document, indent=2) + "\n")
        return path


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def machine() -> dict[str, Any]:
    """The machine and the Python that the numbers depend on."""
    return {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}


def commit() -> str:
    """What `git describe` says, or unknown."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
