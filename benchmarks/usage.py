"""What processes have used, from /proc: CPU time and private memory; and what a disk was given.

Owns only these sums. Processes that have ended are left out.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS_S: Final = os.sysconf("SC_CLK_TCK")
_WRITTEN_SECTORS: Final = 6  # in the `stat` of a block device
_SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of all the processes together: since they started, memory as of now."""

    cpu_s: float
    private_bytes: int  # resident and of no file: no process is charged for the page cache

    def since(self, before: "Usage") -> "Usage":
        return Usage(cpu_s=self.cpu_s - before.cpu_s, private_bytes=self.private_bytes)


def usage_of(pids: Iterable[int]) -> Usage:
    cpu = private = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu += int(fields[11]) + int(fields[12])
            private += _field(f"/proc/{pid}/status", "RssAnon") * 1024
        except FileNotFoundError:
            continue  # it was killed
    return Usage(cpu_s=cpu / _TICKS_S, private_bytes=private)


def written_below(directory: Path) -> int | None:
    """What the disk of a directory has been given, by everything on this machine, with the file system's journal. What
    processes have left in the page cache counts, too. `write_bytes` of /proc/PID/io would count a whole folio of that
    cache for each page in it. None if the directory has no device of its own: tmpfs, or a container's overlay."""
    os.sync()
    device = os.stat(directory).st_dev
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except FileNotFoundError:
        return None
    return int(fields[_WRITTEN_SECTORS]) * _SECTOR_BYTES


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return 0  # the process was killed, and nothing is left of it but its exit code
