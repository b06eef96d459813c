"""The production Clock, Rng and Compute: asyncio's loop, the operating system, and threads.

Owns the translation and nothing else; it holds no state that a decision could depend on. Only the composition root
imports it.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from smq.replication.ports import T, Timer

COMPUTE_THREADS: Final = 2  # codecs run without Python's lock; more would take the cores that other nodes' work needs


class AsyncioClock:
    """`on_error` receives every exception of the node's callbacks: the node's state is then unknown, and the process
    must end. Without it the loop's own handler receives them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        self._loop = loop
        self._on_error = on_error

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def call_later(self, delay_ms: float, fn: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_ms / 1000, self._run, fn)

    def call_soon(self, fn: Callable[[], None]) -> None:
        self._loop.call_soon(self._run, fn)

    def call_soon_threadsafe(self, fn: Callable[[], None]) -> None:
        """For the disk's writer thread. RuntimeError once the loop is closed."""
        self._loop.call_soon_threadsafe(self._run, fn)

    def _run(self, fn: Callable[[], None]) -> None:
        if self._on_error is None:
            fn()
            return
        try:
            fn()
        except Exception as e:  # noqa: BLE001 - after any exception the node cannot continue
            self._on_error(e)


class SystemRng:
    """Unpredictable randomness: ids must not collide between nodes, nor timeouts fall in step."""

    def __init__(self) -> None:
        self._random = secrets.SystemRandom()

    def random(self) -> float:
        return self._random.random()

    def randbytes(self, n: int) -> bytes:
        return secrets.token_bytes(n)


class ThreadCompute:
    """Threads start with the first job. A job that raises ends in the clock's `on_error`."""

    def __init__(self, clock: AsyncioClock) -> None:
        self._clock = clock
        self._threads = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="smq-compute")

    def run(self, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._threads.submit(job).add_done_callback(partial(self._on_done, done))

    def _on_done(self, done: Callable[[T], None], future: "Future[T]") -> None:
        if future.cancelled():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the node
            self._clock.call_soon_threadsafe(lambda: done(future.result()))

    def close(self) -> None:
        """Jobs under way end; those that have not begun never do."""
        self._threads.shutdown(wait=False, cancel_futures=True)
