"""Callbacks of an asyncio client that run in the thread which waits for it.

Owns the way of a callback from the event loop to the waiting thread and back. So a callback of a blocking consumer may
use that consumer, as code around it may. Only `sync.consumer` imports it.
"""

import asyncio
import queue
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Q = TypeVar("Q")
_Call: TypeAlias = Callable[[], None] | None  # None: what the thread waits for is done


class CallerThread:
    """Every call that may run callbacks waits by `wait`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    def wait(self, running: Future[T]) -> T:
        """The result, after all callbacks that were called on the way. A callback may wait for another call."""
        before, calls = self._calls, queue.SimpleQueue[_Call]()
        self._calls = calls
        running.add_done_callback(lambda _: calls.put(None))
        try:
            while (call := calls.get()) is not None:
                call()
        finally:
            self._calls = before
        return running.result()

    def hand_over(self, callback: Callable[[Q], object]) -> Callable[[Q], Awaitable[None]]:
        """The callback for the event loop: it runs in the waiting thread, and its error is raised by the await."""

        async def run(argument: Q) -> None:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()

            def call() -> None:
                error: Exception | None = None
                try:
                    callback(argument)
                except Exception as e:  # noqa: BLE001 - it is raised where the callback was awaited
                    error = e
                loop.call_soon_threadsafe(_finish, done, error)

            self._calls.put(call)
            await done

        return run


def _finish(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.done():
        return  # the call was cancelled meanwhile
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
