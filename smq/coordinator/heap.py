"""Keeps the garbage collector's passes short on a node that holds hundreds of thousands of objects for long.

Owns the collector's frozen set. A full pass looks at everything that is not frozen: 0.1 s and more at 10,000
partitions and 100,000 commits, in which the loop stands still. So what has survived a long one is frozen, and the
next one looks only at what came since. Frozen objects are freed as ever when nobody refers to them; only cycles that
fall out of use later stay, until all are looked at once more, FREEZES_MAX long passes on. The composition root starts
it, and the benchmarks.
"""

import gc
import time
from typing import Final, Literal

LONG_NS: Final = 10_000_000  # of a full pass: some 50,000 objects survived it
FREEZES_MAX: Final = 64  # between two looks at all: each is one pass as long as it would have been without this
_FULL: Final = 2  # the collector's oldest generation

_Info = dict[str, int]


class HeapKeeper:
    """From `start` to `stop`."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._freezes = 0
        self.longest_ns = 0  # of all full passes so far

    def start(self) -> None:
        """What has been built so far lives as long as the process."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._on_pass)

    def stop(self) -> None:
        gc.callbacks.remove(self._on_pass)
        gc.unfreeze()

    def _on_pass(self, phase: Literal["start", "stop"], info: _Info) -> None:
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._began_ns = time.monotonic_ns()
            return
        took_ns = time.monotonic_ns() - self._began_ns
        self.longest_ns = max(self.longest_ns, took_ns)
        if took_ns >= LONG_NS:
            self._keep()

    def _keep(self) -> None:
        """All that is left was reachable a moment ago."""
        if self._freezes < FREEZES_MAX:
            self._freezes += 1
            gc.freeze()
        else:
            self._freezes = 0
            gc.unfreeze()
