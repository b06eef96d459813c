"""A Spark Structured Streaming read of a chaos run: `spark_job` in a process of its own, beside the other clients.

Owns that process. The final contents of the query's files go into the history as one consumer's `kpoll`, in order of
offset, so that the checkers of consumers find duplicate and missing records.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from chaos_tests.live.load.grpc import World
from chaos_tests.live.load.spark_job import CHECKPOINT, ENDS, FAILED, ROWS

START_S: Final = 180.0  # Java and two Pythons, on a busy machine
_STOP_S: Final = 20.0
_POLL_S: Final = 0.2
_LOG_TAIL_LINES: Final = 8


class SparkRead:
    """Implements history_run.LateReader."""

    group = "spark"

    def __init__(self, world: World, directory: Path) -> None:
        self._world = world
        self._directory = directory
        self._log = directory / "spark.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str | None:
        """Returns when the first micro-batch is done, or the reason why there is none."""
        self._directory.mkdir(parents=True)
        servers = ",".join(raw.address for raw in self._world.nodes.values())
        command = [sys.executable, "-m", "chaos_tests.live.load.spark_job", servers, self._world.partitions[0].topic]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(self._directory)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self._wait(lambda: any((self._directory / CHECKPOINT / "commits").glob("[0-9]*")), START_S)

    def drain(self, ends: Mapping[str, int], timeout_s: float) -> str | None:
        fresh = self._directory / f"{ENDS}.new"
        fresh.write_text(json.dumps(dict(ends)))
        fresh.replace(self._directory / ENDS)
        problem = self._wait((self._directory / ROWS).exists, timeout_s)
        if problem is not None:
            return problem
        process = self._world.recorder.new_process()
        self._world.recorder.invoke(process, "kpoll", c=self.group, g=self.group)
        self._world.recorder.ok(process, "kpoll", r=json.loads((self._directory / ROWS).read_text()))
        return None

    def stop(self) -> None:
        """Kills the driver, and the Java that it started in a process group of its own."""
        if self._process is None or self._process.poll() is not None:
            return
        with suppress(subprocess.TimeoutExpired):
            if (self._directory / ROWS).exists():
                self._process.wait(_STOP_S)
                return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for pid in [*map(int, children), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _wait(self, is_done: Callable[[], bool], timeout_s: float) -> str | None:
        assert self._process is not None
        give_up = time.monotonic() + timeout_s
        while not is_done():
            code = self._process.poll()
            if code is not None:
                how = "fails again and again" if code == FAILED else f"has ended with {code}"
                return f"the streaming query {how}: {self._last_output()}"
            if time.monotonic() > give_up:
                return f"the streaming query does not reach the end within {timeout_s:g} s: {self._last_output()}"
            time.sleep(_POLL_S)
        return None

    def _last_output(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
