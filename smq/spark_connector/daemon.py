"""Spark's daemon of Python workers, without a traceback on the user's terminal when Spark has left a worker.

Owns one case: Spark closes the connection of a worker that it no longer needs (the end of a query, a LIMIT that is
satisfied), and PySpark's daemon prints a BrokenPipeError and its stack for it. Anything else is left as it is. Sessions
of `smq.spark_connector` run it by `spark.python.daemon.module`, in a process of its own; nothing imports it.
"""

from typing import Any

from pyspark import daemon

_daemon: Any = daemon  # PySpark leaves it without annotations
_worker = _daemon.worker


def _quiet_worker(*arguments: Any) -> int:
    try:
        code: int = _worker(*arguments)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the daemon closes the connection, and ends this worker
    return code


if __name__ == "__main__":
    _daemon.worker = _quiet_worker
    _daemon.manager()
