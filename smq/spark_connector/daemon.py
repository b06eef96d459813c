"""Spark's daemon of Python workers, without a traceback on the user's terminal when Spark has left a worker.

Owns one case: Spark closes the connection of a worker that it no longer needs (the end of a query, a LIMIT that is
satisfied), and PySpark's daemon prints a BrokenPipeError and its stack for it. Owns also what the workers have loaded
already when they are forked, all together. Anything else is left as it is. Sessions of `smq.spark_connector` run it by
`spark.python.daemon.module`, in a process of its own; nothing imports it.
"""

import importlib
from typing import Any, Final

from pyspark import daemon

_daemon: Any = daemon  # PySpark leaves it without annotations
_worker = _daemon.worker
# A quarter of what a worker imports for smq. Only what starts no thread, which a fork would lose: not numpy, pyarrow.
PRELOADED: Final = ("aiokafka.codec", "aiokafka.record.default_records", "smq.clients.pb.smq_pb2")


def _quiet_worker(*arguments: Any) -> int:
    try:
        code: int = _worker(*arguments)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the daemon closes the connection, and ends this worker
    return code


if __name__ == "__main__":
    _daemon.worker = _quiet_worker
    for name in PRELOADED:
        importlib.import_module(name)
    _daemon.manager()
