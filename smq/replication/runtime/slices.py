"""Runs long work in slices, so that the loop's other work gets its turn in between.

Owns how long a slice is. Its users own what a part is, and that the parts may be done at different moments. The node,
its replicas and the coordinator of groups import it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

from smq.replication.ports import Clock

T = TypeVar("T")

PARTS_MAX: Final = 200  # per slice, some 20 us each
SLICE_NS_MAX: Final = 5_000_000  # for steps whose cost is not known beforehand


class Slices:
    """The first slice runs immediately. After `stop` none runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    def each(self, parts: deque[T], work: Callable[[T], None]) -> None:
        """Calls `work` for each part and takes it off the deque; clearing the deque ends the work."""
        if self._is_stopped:
            return
        for _ in range(min(PARTS_MAX, len(parts))):
            work(parts.popleft())
        if parts:
            self._clock.call_soon(partial(self.each, parts, work))

    def run(self, steps: Iterator[None], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Runs the steps to their end, then calls `done`; if one raises, calls `failed`."""
        if self._is_stopped:
            return
        until_ns = self._clock.monotonic_ns() + SLICE_NS_MAX
        try:
            for _ in steps:
                if self._clock.monotonic_ns() >= until_ns:
                    self._clock.call_soon(partial(self.run, steps, done, failed))
                    return
        except Exception as e:  # noqa: BLE001 - `failed` re-raises any exception it does not know
            failed(e)
        else:
            done()
