"""CPU seconds of a process and all its descendants, from /proc.

Owns that sum alone. Children that have ended are in their parent's figures once it has waited for them.
"""

import os
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds(root: int) -> float:
    """User and system time of `root` and of everything below it."""
    times: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(entry.name)
        times[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        children.setdefault(int(fields[1]), []).append(pid)
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += times.get(pid, 0)
        left += children.get(pid, [])
    return total / TICKS_PER_S
