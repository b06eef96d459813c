"""Spark's Python worker processes: what is set in them once.

Owns a worker's garbage collector. Light: the data source imports it wherever any source is looked up.
"""

import gc
import sys
from typing import Final

_DAEMON: Final = "pyspark.daemon"  # the main module of the processes that Spark forks and reuses
_TIMES: Final = 3  # a worker's first question still imports what the second finds there
_times_left = _TIMES


def spare_collector() -> None:
    """Takes what is loaded by now out of the garbage collector's sight: Spark's worker collects after everything that
    it is asked, which costs 25-45 ms of walking over modules that never go away. Other processes are let alone."""
    global _times_left
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if _times_left and spec is not None and spec.name == _DAEMON:
        if _times_left == _TIMES:
            gc.collect()  # the worker has done so itself before the other times
        gc.freeze()
        _times_left -= 1
