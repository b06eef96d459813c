"""What a person waits for at a terminal: a short command, the start of `smq dev`, and a first record read back.

Owns these figures: the least and the median elapsed time, and the least CPU time, which says more on a busy machine.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Report
from smq.testing.node_process import CLI, wait_for

PORTS = ("--grpc-port", "0", "--http-port", "0", "--kafka-port", "0")


def measure(report: Report, *, times: int) -> None:
    """Starts `smq dev` so many times, and asks one of them as often."""
    ready, first = zip(*(_first_record() for _ in range(times)), strict=True)
    _add(report, "`smq dev` until it is ready", ready)
    _add(report, "`smq dev`, `topic create`, `produce`, `consume`: until the first record is read", first)
    with _dev() as environment:
        listed = [_one("topic", "list", environment=environment) for _ in range(times)]
    _add(report, "`smq topic list`", [elapsed for elapsed, _ in listed], cpu_s=min(cpu for _, cpu in listed))


def _first_record() -> tuple[float, float]:
    began = time.monotonic()
    with _dev() as environment:
        ready = time.monotonic() - began
        _one("topic", "create", "greetings", environment=environment)
        _one("produce", "greetings", environment=environment, typed="hello\n")
        _one("consume", "greetings", "-n", "1", environment=environment)
        return ready, time.monotonic() - began


@contextmanager
def _dev() -> Iterator[dict[str, str]]:
    """The environment of commands on a node that is ready."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory:
        ready = Path(directory) / "ready.json"
        command = [*CLI, "dev", "--ephemeral", *PORTS, "--ready-file", str(ready)]
        node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for("the node", ready.exists)
            yield {**os.environ, "SMQ_BOOTSTRAP": json.loads(ready.read_text())["nodes"][0]["grpc"]}
        finally:
            node.send_signal(signal.SIGINT)
            node.wait()


def _one(*arguments: str, environment: dict[str, str], typed: str | None = None) -> tuple[float, float]:
    """Elapsed and CPU seconds of one command."""
    before, began = _children_cpu_s(), time.monotonic()
    subprocess.run([*CLI, *arguments], env=environment, input=typed, text=True, check=True, capture_output=True)
    return time.monotonic() - began, _children_cpu_s() - before


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _add(report: Report, what: str, elapsed: list[float] | tuple[float, ...], **more: float) -> None:
    least, median = min(elapsed), statistics.median(elapsed)
    cpu = f", CPU {more['cpu_s']:.2f} s" if more else ""
    report.add(what, f"least {least:.2f} s, median {median:.2f} s{cpu}", least_s=least, median_s=median, **more)
