"""Callbacks of an asyncio client that run in the thread which waits for it.

Owns the way of a callback from the event loop to the waiting thread and back. So a callback of a blocking consumer may
use that consumer, as code around it may. Only `sync.consumer` imports it.
"""

import asyncio
import queue
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from typing import Final, TypeVar

from smq.clients.sync.loop import Call, Running

T = TypeVar("T")
Q = TypeVar("Q")

# In the context that a coroutine begins with: so it finds the thread that waits for it.
_calls: Final[ContextVar[queue.SimpleQueue[Call]]] = ContextVar("calls for the thread that waits")


def wait_for_result(running: Running[T]) -> T:
    """Begins a coroutine and waits for its end, also on Ctrl-C. Its callbacks run here meanwhile, and may wait in the
    same way."""
    context = copy_context()
    context.run(_calls.set, running.calls)
    return running.wait(context)


def in_waiting_thread(callback: Callable[[Q], object]) -> Callable[[Q], Awaitable[None]]:
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

        _calls.get().put(call)
        await done

    return run


def _finish(done: "asyncio.Future[None]", error: Exception | None) -> None:
    if done.done():
        return  # the call was cancelled meanwhile
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
