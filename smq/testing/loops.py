"""Event loops for tests: one per test with a deadline, and one in a thread for tests that block.

Owns the deadline after which a hanging test fails. Nothing here depends on smq.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")
TEST_TIMEOUT_S: Final = 20.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in an event loop of its own; TimeoutError after TEST_TIMEOUT_S, so that a hang is a failure."""

    async def bounded() -> T:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            return await work

    return asyncio.run(bounded())


@contextmanager
def in_thread(
    context: AbstractAsyncContextManager[T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[T]:
    """Enters and leaves `context` in the event loop of a new thread, for a caller that blocks."""
    loop = loop_factory()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def enter() -> T:
        return await context.__aenter__()

    async def leave() -> None:
        await context.__aexit__(None, None, None)

    try:
        entered = asyncio.run_coroutine_threadsafe(enter(), loop).result()
        try:
            yield entered
        finally:
            asyncio.run_coroutine_threadsafe(leave(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
