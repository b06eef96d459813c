"""Where asyncio clients run in benchmarks: on the one loop of the blocking clients.

Owns nothing. gRPC's asyncio allows one loop a process, and other sections use the blocking clients in the same one.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from smq.clients import sync

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Begins `work` beside the caller."""
    return asyncio.run_coroutine_threadsafe(work, sync._loop_thread().loop)
