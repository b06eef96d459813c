"""Keeps the garbage collector's passes short on a node that holds hundreds of thousands of objects for long.

Owns the collector's frozen set. A full pass looks at everything that is not frozen: 0.1 s and more at 10,000
partitions and 100,000 commits, in which the loop stands still. So what has survived a long one is frozen, and the
next one looks only at what came since. Frozen objects are freed as ever when nobody refers to them; only cycles that
fall out of use later stay. So all are looked at once more where FREEZES_MAX long passes on there are twice as many as
after the last such look: of a state that only changes there never are, and what is lost to cycles stays below what is
in use. The composition root starts it.
"""

import gc
import time
from typing import Final, Literal

LONG_NS: Final = 5_000_000  # of a full pass: some 20,000 objects survived it
# Python's own, but for the last: how many passes over the middle generation make a full one, which then meets so many
# times 7,000 new objects, some 2 ms each time.
THRESHOLDS: Final = (700, 10, 4)
FREEZES_MAX: Final = 64  # between two counts of what is frozen, which themselves take some milliseconds
GROWTH_MAX: Final = 2  # times the objects frozen after the last look at all: beyond it all are looked at again
FROZEN_MIN: Final = 500_000  # what that is at least: about what 10,000 partitions and 100,000 commits make
_FULL: Final = 2  # the collector's oldest generation

_Info = dict[str, int]


class HeapKeeper:
    """From `start` to `stop`."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._freezes = 0
        self._frozen = 0  # after the last look at all
        self._looks_at_all = False  # the next full pass
        self.longest_ns = 0  # of all full passes so far

    def start(self) -> None:
        """What has been built so far lives as long as the process. Called before anybody is served: it is a full pass
        by itself."""
        gc.collect()
        self._begin_anew()
        gc.set_threshold(*THRESHOLDS)
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
        self._freezes += 1
        if self._looks_at_all:
            self._begin_anew()
        elif self._freezes % FREEZES_MAX == 0 and gc.get_freeze_count() > GROWTH_MAX * max(self._frozen, FROZEN_MIN):
            self._looks_at_all = True
            gc.unfreeze()
        else:
            gc.freeze()

    def _begin_anew(self) -> None:
        gc.freeze()
        self._looks_at_all = False
        self._frozen = gc.get_freeze_count()
