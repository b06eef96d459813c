"""What a person waits for at a terminal: a short command, the start of `smq dev`, and a first record read back.

Owns these figures: the least and the median elapsed time, and the least CPU time, which says more on a busy machine.
The modules are compiled before, as an installation's are, whatever PYTHONDONTWRITEBYTECODE says here: only the first
start of a checkout compiles, which takes a quarter of a second.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Report
from smq.testing.node_process import CLI, wait_for

PORTS = ("--grpc-port", "0", "--http-port", "0", "--kafka-port", "0")
COMMANDS = (("topic", "create", "greetings"), ("produce", "greetings"), ("consume", "greetings", "-n", "1"))

_Times = tuple[float, float]  # elapsed and CPU seconds


def measure(report: Report, *, times: int) -> None:
    """Starts `smq dev` so many times, and asks one of them as often."""
    with _compiled() as environment:
        _first_record(environment)
        ready, first = zip(*(_first_record(environment) for _ in range(times)), strict=True)
        _add(report, "`smq dev` until it is ready", ready)
        _add(report, "`smq dev`, `topic create`, `produce`, `consume`: until the first record is read", first)
        with _dev(environment) as (reach, _):
            listed = [_one("topic", "list", environment=reach) for _ in range(times)]
        _add(report, "`smq topic list`", listed)


@contextmanager
def _compiled() -> Iterator[dict[str, str]]:
    """An environment whose first run compiles the modules, beside the checkout and not into it."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield kept | {"PYTHONPYCACHEPREFIX": directory}


def _first_record(environment: dict[str, str]) -> tuple[_Times, _Times]:
    """Until the node is ready, and until the first record is read."""
    began = time.monotonic()
    with _dev(environment) as (reach, cpu_s):
        ready = time.monotonic() - began, cpu_s
        spent = [_one(*command, environment=reach, typed="hello\n") for command in COMMANDS]
        return ready, (time.monotonic() - began, cpu_s + sum(cpu for _, cpu in spent))


@contextmanager
def _dev(environment: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
    """A node that is ready: the environment of commands on it, and the CPU seconds that it took."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-") as directory:
        ready = Path(directory) / "ready.json"
        command = [*CLI, "dev", "--ephemeral", *PORTS, "--ready-file", str(ready)]
        node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for("the node", ready.exists)
            cpu_s = _process_cpu_s(node.pid)
            yield {**environment, "SMQ_BOOTSTRAP": json.loads(ready.read_text())["nodes"][0]["grpc"]}, cpu_s
        finally:
            node.send_signal(signal.SIGINT)
            node.wait()


def _one(*arguments: str, environment: dict[str, str], typed: str | None = None) -> _Times:
    before, began = _children_cpu_s(), time.monotonic()
    subprocess.run([*CLI, *arguments], env=environment, input=typed, text=True, check=True, capture_output=True)
    return time.monotonic() - began, _children_cpu_s() - before


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _process_cpu_s(pid: int) -> float:
    """Of a process that runs, by the kernel's clock of 10 ms."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _add(report: Report, what: str, runs: Sequence[_Times]) -> None:
    elapsed = [elapsed for elapsed, _ in runs]
    least, median, cpu = min(elapsed), statistics.median(elapsed), min(cpu for _, cpu in runs)
    shown = f"least {least:.2f} s, median {median:.2f} s, CPU {cpu:.2f} s"
    report.add(what, shown, least_s=least, median_s=median, cpu_s=cpu)
