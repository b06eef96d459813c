"""What makes the event loop late, and so delays every request: measured, and the collector's share kept short.

Owns the garbage collector's frozen set. A full pass scans everything that is not frozen: with 10,000 partitions and
100,000 commits it blocks the loop for 0.1 s and more. So the survivors of a long pass are frozen, and the next pass
scans only newer objects. A frozen object is still freed when its last reference goes; only cycles that become garbage
later stay. So if after FREEZES_MAX long passes there are twice as many frozen objects as after the last complete scan,
all are scanned once more. A state that changes but does not grow never gets there, and garbage in cycles stays smaller
than what is in use.

Owns the probe of how late the loop runs its timers. It must never change how a request is served. Only `composition`
starts them.
"""

import asyncio
import gc
import time
from typing import Final, Literal

from smq.replication.monitoring.measures import NS_PER_S, Histogram

PROBE_S: Final = 0.2  # five probes per second cost nothing, and find what lasts longer than that for certain
LONG_NS: Final = 5_000_000  # of a full pass: about 20,000 objects survived it
# Python's own, except the last: after this many passes over the middle generation comes a full one. It then scans this
# many times 7,000 new objects, about 2 ms.
THRESHOLDS: Final = (700, 10, 4)
FREEZES_MAX: Final = 64  # between two counts of the frozen objects, which themselves take some milliseconds
GROWTH_MAX: Final = 2  # times the objects frozen after the last complete scan: beyond it comes the next one
FROZEN_MIN: Final = 500_000  # the least such number: about what 10,000 partitions and 100,000 commits make
_GENERATIONS: Final = ("0", "1", "2")
_FULL: Final = 2  # the collector's oldest generation

_Info = dict[str, int]


class HeapKeeper:
    """Works from `start` to `stop`."""

    def __init__(self, pauses: Histogram | None = None) -> None:
        """`pauses`: where the time of every pass is noted, by its generation."""
        self._pauses = pauses
        self._began_ns = 0
        self._freezes = 0
        self._frozen = 0  # after the last complete scan
        self._scans_all = False  # the next full pass
        self.longest_ns = 0  # of all full passes so far

    def start(self) -> None:
        """Everything built so far lives as long as the process. Call it before the node serves: it is a full pass, over
        what the command line has not frozen."""
        gc.collect()
        gc.freeze()  # uncounted: a node without its state has far fewer than FROZEN_MIN
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._on_pass)

    def stop(self) -> None:
        gc.callbacks.remove(self._on_pass)
        gc.unfreeze()

    def _on_pass(self, phase: Literal["start", "stop"], info: _Info) -> None:
        if phase == "start":
            self._began_ns = time.monotonic_ns()
            return
        took_ns = time.monotonic_ns() - self._began_ns
        if self._pauses is not None:
            self._pauses.observe(took_ns, _GENERATIONS[info["generation"]])
        if info["generation"] != _FULL:
            return
        self.longest_ns = max(self.longest_ns, took_ns)
        if took_ns >= LONG_NS:
            self._freeze_survivors()

    def _freeze_survivors(self) -> None:
        """Freezes the survivors: all of them were reachable a moment ago."""
        self._freezes += 1
        if self._scans_all:
            self._freeze_all()
        elif self._freezes % FREEZES_MAX == 0 and gc.get_freeze_count() > GROWTH_MAX * max(self._frozen, FROZEN_MIN):
            self._scans_all = True
            gc.unfreeze()
        else:
            gc.freeze()

    def _freeze_all(self) -> None:
        gc.freeze()
        self._scans_all = False
        self._frozen = gc.get_freeze_count()


class LoopLag:
    def __init__(self, lag: Histogram) -> None:
        self._lag = lag
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + PROBE_S
        self._timer = loop.call_at(due, self._probe, loop, due)

    def _probe(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._lag.observe(max(0, int((loop.time() - due) * NS_PER_S)))
        self.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
