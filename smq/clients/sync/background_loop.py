"""The event loop behind the blocking clients, and what they share.

Owns one background loop per process: started on first use, shared by all blocking clients, and started again after a
fork (a forked child has no threads; `forked` says which clients it may use). Only `smq.clients.sync` imports it.
"""

import asyncio
import atexit
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextvars import Context
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from smq.clients.forked import check_owner
from smq.raft_state.errors import SmqError

T = TypeVar("T")
C = TypeVar("C", bound="BlockingClient")
Call: TypeAlias = Callable[[], None] | None  # None: what the thread waits for has ended

STOP_TIMEOUT_S: Final = 5.0  # of the loop's thread at exit: it has nothing left to wait for


def documented_as(original: type) -> Callable[[type[C]], type[C]]:
    """Gives methods without a docstring that of the asyncio client's method of the same name: one text for both."""

    def decorate(blocking: type[C]) -> type[C]:
        for name, method in vars(blocking).items():
            if callable(method) and not name.startswith("_") and method.__doc__ is None:
                method.__doc__ = getattr(original, name).__doc__
        return blocking

    return decorate


class LoopThread:
    """The background loop of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="smq-clients", daemon=True)
        self._thread.start()
        self.before_stop: dict[Callable[[], None], None] = {}  # in order: what clients have to do before

    def stop(self) -> None:
        if self.pid == os.getpid() and self.loop.is_running():
            for leave in list(self.before_stop):
                leave()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_TIMEOUT_S)


_shared: LoopThread | None = None
_shared_lock = threading.Lock()


def loop_thread() -> LoopThread:
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = LoopThread()
            atexit.register(_shared.stop)
        return _shared


def _after_fork() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()  # the parent's lock may be held for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Running(Generic[T]):
    """A coroutine on the loop, for the thread that waits for it.

    Ctrl-C may come between any two bytecodes of that thread, and must leave nothing held that the loop needs. A lock
    taken in Python code, such as a Future's, may stay taken then; so what the two share is a flag and a SimpleQueue.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()  # for the thread that waits
        self._work, self._loop = work, loop
        self._task: asyncio.Task[T] | None = None
        self._has_ended = False  # not merely cancelled
        self._results: list[T] = []
        self._error: BaseException | None = None

    def wait(self, context: Context | None = None) -> T:
        """Begins the coroutine, in this context or else the thread's, and waits for its end. Ctrl-C cancels it, and
        waits for its end, too: what follows must not find it halfway."""
        try:
            self._loop.call_soon_threadsafe(self._begin, context=context)
            self._serve()
        except BaseException:  # it may come in one of the calls
            self._loop.call_soon_threadsafe(self._cancel)
            self._serve()
            raise
        try:
            if self._error is not None:
                raise self._error
            return self._results[0]
        finally:
            del self  # which the error's traceback would keep alive

    def _serve(self) -> None:
        while not self._has_ended and (call := self.calls.get()) is not None:
            call()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # Ctrl-C came before the beginning
            self._work.close()
            self._end(CancelledError())

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._take)

    def _take(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._end(CancelledError())
        elif (error := task.exception()) is not None:
            self._end(error)
        else:
            self._results.append(task.result())
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._has_ended = True
        self.calls.put(None)


class BlockingClient(ABC):
    """Runs coroutines on the background loop and waits for them."""

    def __init__(self) -> None:
        self._runner = loop_thread()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._running(work).wait()

    def _running(self, work: Coroutine[Any, Any, T]) -> Running[T]:
        try:
            check_owner(self._runner.pid)
        except SmqError:
            work.close()
            raise
        return Running(work, self._runner.loop)
