"""The production Clock and Rng: asyncio's loop and the operating system.

Owns the translation and nothing else; it holds no state that a decision could depend on. Only the composition root
imports it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable

from smq.replication.ports import Timer


class AsyncioClock:
    """`on_error` receives every exception of the node's callbacks: the node's state is then unknown, and the process
    must end. Without it the loop's own handler receives them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None] | None = None
    ) -> None:
        self._loop = loop
        self._on_error = on_error

    monotonic_ns = staticmethod(time.monotonic_ns)

    def wall_ns(self) -> int:
        return time.time_ns()

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
