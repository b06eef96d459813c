"""The event loop behind the blocking clients, and what they share.

Owns one background loop per process: started on first use, shared by all blocking clients, and started again after a
fork (a forked child has no threads; `forked` says which clients it may use). Only `smq.clients.sync` imports it.
"""

import asyncio
import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from smq.clients.forked import check_owner
from smq.raft_state.errors import SmqError

T = TypeVar("T")
C = TypeVar("C", bound="BlockingClient")

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

    def stop(self) -> None:
        if self.pid == os.getpid() and self.loop.is_running():
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
    """A coroutine on the loop, for the thread that waits for it. `ended` is done once the coroutine has ended, not when
    it is cancelled."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.ended: Future[T] = Future()
        self._work, self._loop = work, loop
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # Ctrl-C came before begin()
            self._work.close()
            self.ended.set_exception(CancelledError())

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


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
        running = self._running(work)
        try:
            running.begin()
            return running.ended.result()
        except KeyboardInterrupt:
            running.cancel()
            wait([running.ended])  # what follows must not find it halfway
            raise

    def _running(self, work: Coroutine[Any, Any, T]) -> Running[T]:
        try:
            check_owner(self._runner.pid)
        except SmqError:
            work.close()
            raise
        return Running(work, self._runner.loop)
