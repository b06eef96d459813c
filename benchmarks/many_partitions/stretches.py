"""Runs a node as `smq` does, and records every long pass of its event loop with its causes.

Owns the measurement from inside. A pass is all the work between two polls of the loop's sockets: events that arrive
meanwhile wait for its end. The record splits it into CPU time of this thread (our own), waiting for a core (the
machine's), and other waiting: Python's lock, a page, the disk. It uses asyncio's own loop, since uvloop cannot be
inspected; its passes are a little longer. Run as a module it is the node's process:
`python -m benchmarks.many_partitions.stretches serve --config FILE`, with the output file in BENCHMARK_STRETCHES.
"""

import asyncio
import gc
import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FILE: Final = "BENCHMARK_STRETCHES"
COMMAND: Final = (sys.executable, "-m", "benchmarks.many_partitions.stretches", "serve", "--config")
LONG_NS: Final = 20_000_000  # a pass this long is recorded
PART_NS: Final = 2_000_000  # a part of it this long is named


@dataclass(slots=True)
class Stretch:
    """One pass, in milliseconds. `parts` are its longer callbacks and garbage collections, by their CPU time."""

    at_s: float
    wall_ms: float
    cpu_ms: float
    no_core_ms: float
    waited_ms: float
    parts: list[tuple[str, float]] = field(default_factory=list)


def read(path: Path) -> list[Stretch]:
    """The passes that a node has recorded so far."""
    if not path.exists():
        return []
    return [Stretch(**json.loads(line)) for line in path.read_text().splitlines()]


class _Selector(selectors.EpollSelector):
    """Sees where passes begin and end."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self._out = out.open("a", buffering=1)
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self.parts: list[tuple[str, int]] = []
        self._wall = self._cpu = self._no_core = 0

    def select(self, timeout: float | None = None) -> Any:
        self._end()
        try:
            return super().select(timeout)
        finally:
            self.parts.clear()
            self._no_core = self._waited_for_core()
            self._cpu = time.thread_time_ns()
            self._wall = time.monotonic_ns()

    def _end(self) -> None:
        wall = time.monotonic_ns() - self._wall
        if wall < LONG_NS or not self._wall:
            return
        cpu = time.thread_time_ns() - self._cpu
        no_core = self._waited_for_core() - self._no_core
        stretch = Stretch(
            at_s=time.time(),
            wall_ms=wall / 1e6,
            cpu_ms=cpu / 1e6,
            no_core_ms=no_core / 1e6,
            waited_ms=max(0, wall - cpu - no_core) / 1e6,
            parts=[(name, ns / 1e6) for name, ns in sorted(self.parts, key=lambda part: -part[1])],
        )
        self._out.write(json.dumps(asdict(stretch)) + "\n")

    def _waited_for_core(self) -> int:
        return int(os.pread(self._schedstat, 100, 0).split()[1])


def _watch_callbacks(selector: _Selector) -> None:
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        began = time.thread_time_ns()
        run(handle)
        took = time.thread_time_ns() - began
        if took >= PART_NS:
            selector.parts.append((_name(handle), took))

    asyncio.events.Handle._run = timed  # type: ignore[method-assign,assignment] # there is no public hook


def _name(handle: asyncio.events.Handle) -> str:
    callback: Any = handle._callback  # type: ignore[attr-defined] # nothing public says so
    arguments: Any = handle._args
    if len(arguments or ()) == 1 and callable(arguments[0]):
        callback = arguments[0]  # as the node's clock passes it to the loop
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner))
    while hasattr(callback, "func"):
        callback = callback.func
    return str(getattr(callback, "__qualname__", callback))


def _watch_collector(selector: _Selector) -> None:
    began = 0

    def on_pass(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time_ns()
        elif time.thread_time_ns() - began >= PART_NS:
            selector.parts.append((f"gc of generation {info['generation']}", time.thread_time_ns() - began))

    gc.callbacks.append(on_pass)


def _new_loop() -> asyncio.AbstractEventLoop:
    selector = _Selector(Path(os.environ[FILE]))
    _watch_callbacks(selector)
    _watch_collector(selector)
    return asyncio.SelectorEventLoop(selector)


def main(arguments: Iterable[str]) -> None:
    import uvloop

    from smq.coordinator.cli.main import main as smq

    uvloop.new_event_loop = _new_loop  # type: ignore[assignment] # the server gets its loop from it
    sys.argv = ["smq", *arguments]
    smq()


if __name__ == "__main__":
    main(sys.argv[1:])
