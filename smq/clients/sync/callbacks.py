"""Callbacks of an asyncio client that run in the thread which waits for it.

Owns the way of a callback from the event loop to the waiting thread and back. So a callback of a blocking consumer may
use that consumer, as code around it may. Only `sync.consumer` imports it.
"""

import asyncio
import queue
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final, TypeAlias, TypeVar

from smq.clients.sync.loop import Running

T = TypeVar("T")
Q = TypeVar("Q")
_Call: TypeAlias = Callable[[], None] | None  # None: what the thread waits for is done

# A coroutine begins with a copy of the context of the thread that starts it: so it finds the thread that waits for it.
_calls: Final[ContextVar[queue.SimpleQueue[_Call]]] = ContextVar("calls for the thread that waits")


def wait_for_result(running: Running[T]) -> T:
    """Begins a coroutine and waits for its end, also on Ctrl-C. Its callbacks run here meanwhile, and may wait in the
    same way."""
    calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    running.ended.add_done_callback(lambda _: calls.put(None))
    try:
        token = _calls.set(calls)
        try:
            running.begin()
        finally:
            _calls.reset(token)
        _serve(calls, running)
    except BaseException:  # Ctrl-C, which may come in a callback, too
        running.cancel()
        _serve(calls, running)
        raise
    return running.ended.result()


def _serve(calls: queue.SimpleQueue[_Call], running: Running[T]) -> None:
    while not running.ended.done() and (call := calls.get()) is not None:
        call()


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
