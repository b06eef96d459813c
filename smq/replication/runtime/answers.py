"""Answers to callers, given after the current callback has ended.

Owns the order in which answers leave. An answer must never be given from inside the call that asked for it, nor while a
part is in the middle of a change.
"""

from collections.abc import Callable

from smq.replication.ports import Clock


class Answers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []

    def deliver(self, fn: Callable[[], None]) -> None:
        if not self._waiting:
            self._clock.call_soon(self.flush)
        self._waiting.append(fn)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fn in waiting:
            fn()
