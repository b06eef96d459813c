"""The first code of a Python process of Spark's: it connects back before anything slow is imported.

Owns one case. Spark starts a process for each streaming query, and gives it ten seconds to connect back, by a constant.
PySpark's own imports, numpy and pyarrow come before that: 0.3 s of CPU, which takes ten seconds if many others want it.
Python imports this module by its name at its start, because `local_session` puts its folder on PYTHONPATH; nothing else
imports it. It must import next to nothing, and must never touch a process that Spark has not given a path.
"""

import importlib
import os
import sys

_PATH = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH", "")  # of a unix socket, of which Spark accepts one connection


def _connect_early() -> None:
    """PySpark's own connection to the path, when it comes, is the one that is made here. Over a unix socket there is no
    secret to exchange, and once it is connected Spark waits without a limit."""
    import socket

    connect = socket.socket.connect
    early = socket.socket(socket.AF_UNIX)
    early.connect(_PATH)

    def connect_later(self: socket.socket, address: object) -> None:
        if address != _PATH:
            connect(self, address)  # type: ignore[arg-type]  # whatever the caller gave
            return
        socket.socket.connect = connect  # type: ignore[method-assign]  # as it was
        os.dup2(early.fileno(), self.fileno())
        early.close()

    socket.socket.connect = connect_later  # type: ignore[method-assign,assignment]  # until PySpark connects


if os.path.exists(_PATH):
    _connect_early()

# There may be another module of this name further on the path, and Python looks for one only.
sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
_this = sys.modules.pop("sitecustomize")
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as e:
    if e.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _this
