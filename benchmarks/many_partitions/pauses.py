"""Pauses of a node's event loop, measured from outside by one process per node.

Owns the probes. The node's own loop answers /healthz, so a late answer means that the loop was busy (or the machine: it
is an upper bound). Each line on stdin is answered in JSON with the pauses since the last one; `Watch` is the other end.
Run as a module it is the probing process, so that no work of the benchmark delays it.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

INTERVAL_S = 0.005
TIMEOUT_S = 30.0
LONG_MS = 50.0


class Watch:
    """Watches the loops of nodes, given by their HTTP addresses, from `__enter__` to `__exit__`."""

    def __init__(self, addresses: list[str]) -> None:
        self._processes = [self._start(address) for address in addresses]

    @staticmethod
    def _start(address: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "benchmarks.many_partitions.pauses", address]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Watch":
        self.take()  # waits for the first answers
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def take(self) -> tuple[float, int]:
        """The longest pause of any node since the last call, in milliseconds, and how many were above LONG_MS."""
        longest, long_ones = 0.0, 0
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            seen: dict[str, Any] = json.loads(process.stdout.readline())
            longest, long_ones = max(longest, seen["longest_ms"]), long_ones + seen["long"]
        return longest, long_ones


class _Seen:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waits_ms: list[float] = []  # of the answers since the last line

    def answer(self) -> None:
        """Answers each line after the node's next answer, so that a pause under way counts."""
        for _ in sys.stdin:
            with self.lock:
                before = len(self.waits_ms)
            while True:
                with self.lock:
                    if len(self.waits_ms) > before:
                        waits, self.waits_ms = self.waits_ms, []
                        break
                time.sleep(INTERVAL_S)
            print(json.dumps({"longest_ms": max(waits), "long": sum(w > LONG_MS for w in waits)}), flush=True)


def _ask(address: str, seen: _Seen) -> None:
    connection: http.client.HTTPConnection | None = None
    while True:
        began = time.perf_counter()
        try:
            if connection is None:
                connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
            connection.request("GET", "/healthz")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection = None  # the node is down, which is not a pause
        else:
            with seen.lock:
                seen.waits_ms.append((time.perf_counter() - began) * 1000)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    seen = _Seen()
    threading.Thread(target=_ask, args=(sys.argv[1], seen), daemon=True).start()
    seen.answer()
