"""What processes have used, from /proc: CPU time, private memory, bytes written.

Owns only these sums. Processes that have ended are left out.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of all the processes together: since they started, memory as of now."""

    cpu_s: float
    written_bytes: int  # handed to the block layer
    private_bytes: int  # resident and of no file: no process is charged for the page cache

    def since(self, before: "Usage") -> "Usage":
        return Usage(
            cpu_s=self.cpu_s - before.cpu_s,
            written_bytes=self.written_bytes - before.written_bytes,
            private_bytes=self.private_bytes,
        )


def usage_of(pids: Iterable[int]) -> Usage:
    cpu = written = private = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            written += _field(f"/proc/{pid}/io", "write_bytes")
            private += _field(f"/proc/{pid}/status", "RssAnon") * 1024
        except FileNotFoundError:
            continue  # it was killed
    return Usage(cpu_s=cpu / _TICKS_S, written_bytes=written, private_bytes=private)


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return 0  # the process was killed, and nothing is left of it but its exit code
