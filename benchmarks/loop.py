"""The event loop of asyncio clients in benchmarks: the one of the blocking clients.

gRPC's asyncio allows one loop per process, and other sections use the blocking clients in the same process. It owns
nothing.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from smq.clients.sync.background_loop import loop_thread

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Starts `work` in that loop; does not wait for it."""
    return asyncio.run_coroutine_threadsafe(work, loop_thread().loop)
