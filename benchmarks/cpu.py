"""CPU seconds of a process and all its descendants, from /proc.

Owns only that sum. Spark's Python daemon leaves its ended workers to the kernel (SIGCHLD ignored), so that their time
is in no total afterwards: the last figure of an ended process is kept here.
"""

import os
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class TreeCpu:
    """`seconds()` never goes back. It misses the time that a process used between the last look and its end."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[tuple[int, str], int] = {}  # ticks by pid and start time, as pids are reused

    def root_seconds(self) -> float:
        """User and system time of the root alone, until now."""
        fields = Path(f"/proc/{self._root}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def seconds(self) -> float:
        """User and system time of the root and of all descendants ever seen, until now."""
        found: dict[int, tuple[str, int]] = {}
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            pid = int(entry.name)
            found[pid] = (fields[19], int(fields[11]) + int(fields[12]))
            children.setdefault(int(fields[1]), []).append(pid)
        left = [self._root]
        while left:
            pid = left.pop()
            if pid in found:
                started, ticks = found[pid]
                self._seen[pid, started] = ticks
            left += children.get(pid, [])
        return sum(self._seen.values()) / TICKS_PER_S
