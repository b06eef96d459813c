"""An asyncio event loop on the virtual clock of one process, for the parts of a node that await.

Owns the loop's callbacks and timers, which are the process's: they pause with it and end with it. It has no sockets, no
threads and no signals: a node in the simulation has none, and the base class refuses whatever asks for one.
"""

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from smq.replication.ports import Clock
from smq.testing.virtual.clock import NS_PER_S

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimLoop(asyncio.AbstractEventLoop):
    """Of one process. An exception that no task awaits ends the process, as any other that leaves a callback."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, work: Coroutine[Any, Any, T], done: Callable[[T | BaseException], None]) -> None:
        """Begins the work; `done` gets what it returns or raises."""

        def ended(task: asyncio.Task[T]) -> None:
            error = task.exception()
            done(task.result() if error is None else error)

        self.create_task(work).add_done_callback(ended)

    # ------------------------------------------------------------------------------------ of AbstractEventLoop
    def time(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._clock.call_soon(lambda: self._step(handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        self._clock.call_later(delay * 1000, lambda: self._step(timer))
        return timer

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(max(0.0, when - self.time()), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:  # otherwise a task that its process has left behind at its end
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is skipped when its time comes."""

    def _step(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            handle._run()
        finally:
            events._set_running_loop(before)
