"""The garbage collector of Spark's Python workers: loaded modules are exempt from it.

Owns that setting, made in worker processes only. Cheap to import: the data source imports it on the look-up of any
source.
"""

import gc
import sys
from typing import Final

# The main module of the processes that Spark forks and reuses: its own, or that of `local_session`.
_DAEMONS: Final = ("pyspark.daemon", "smq.spark_connector.daemon")
_TIMES: Final = 3  # a worker still imports modules during its first request
_times_left = _TIMES


def freeze_loaded_modules() -> None:
    """Exempts everything loaded so far from garbage collection. Spark's worker collects after every request, which
    takes 25-45 ms to walk over modules that never go away. Does nothing in other processes."""
    global _times_left
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if _times_left and spec is not None and spec.name in _DAEMONS:
        if _times_left == _TIMES:
            gc.collect()  # the worker has done so itself before the other times
        gc.freeze()
        _times_left -= 1
