"""Streaming jobs in processes of their own that are killed, what is published in the meantime, and what a log has."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import key_partition
from smq.records import NewRecord
from smq.spark_connector.batch_reader import SmqReader
from smq.spark_connector.options import read_options
from smq.spark_connector.schema import default_schema
from smq.testing.node_client import Unanswered
from smq.testing.node_process import ClusterError, wait_for
from tests.spark import steps
from tests.spark.support import SLOW_START

PublishFn = Callable[..., None]
Row = tuple[int, int, bytes, bytes]  # partition, offset, key, value
ROOT: Final = Path(__file__).parents[2]  # the jobs are modules of the tests
PARTITIONS: Final = 3
DRIVERS_MAX: Final = 30
PATIENCE_S: Final = 300  # a driver starts in ten seconds on a quiet machine


@dataclass(frozen=True, slots=True)
class _Driver:
    process: "subprocess.Popen[bytes]"
    go: Path  # the file that it waits for
    output: Path

    def kill(self) -> None:
        if self.process.poll() is None:
            steps.kill_driver(self.process.pid)
            self.process.wait(30)


class Job:
    """The program of streaming_job.py on the checkpoint under `root`, run by run. Jobs of several names may share it.

    `ahead` drivers start in advance and wait for their turn: a start takes many times as long as a micro-batch.
    """

    def __init__(self, root: Path, options: dict[str, str], name: str = "run", ahead: int = 0) -> None:
        self._root = root
        self._options = options
        self._name = name
        self._ahead = ahead
        self._started = 0
        self._waiting: deque[_Driver] = deque()
        self._driver: _Driver | None = None
        self.armed = root / f"{name}.armed"

    def start(self, **options: bool) -> "subprocess.Popen[bytes]":
        while len(self._waiting) <= self._ahead:
            self._prepare()
        self._driver = self._waiting.popleft()
        draft = self._driver.go.with_suffix(".draft")
        draft.write_text(json.dumps(self._options | options))
        draft.rename(self._driver.go)
        return self._driver.process

    def _prepare(self) -> None:
        self._started += 1
        assert self._started <= DRIVERS_MAX
        go, output = (self._root / f"{self._name}-{self._started}.{kind}" for kind in ("go", "log"))
        command = [sys.executable, "-m", "tests.spark.streaming_job", str(self._root), str(go)]
        environment = os.environ | {steps.ARMED: str(self.armed)}
        with output.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=ROOT, env=environment
            )
        self._waiting.append(_Driver(process, go, output))

    def committed(self) -> int:
        """The number of micro-batches that the checkpoint lists as done."""
        found = (self._root / "checkpoint" / "commits").glob("[0-9]*")
        return max((int(path.name) + 1 for path in found), default=0)

    def wait_committed(self, batches: int) -> None:
        self._wait(f"{batches} micro-batches", lambda: self.committed() >= batches)

    def arm(self, step: str, action: steps.Action) -> None:
        """The next process of this job that reaches the step does so."""
        steps.taken(self.armed).unlink(missing_ok=True)
        steps.arm(self.armed, step, action)

    def wait_reached(self) -> None:
        self._wait("the armed step", lambda: steps.taken(self.armed).exists())

    def release(self) -> None:
        """Lets a process go on that waits at its step."""
        steps.taken(self.armed).unlink()

    def wait_killed(self) -> None:
        """Returns after the driver has been killed at the armed step."""
        self.wait_reached()
        wait_for("the end of the driver", self.has_failed)
        assert self._running().returncode == -signal.SIGKILL, self.output()[-3000:]

    def wait_failed(self) -> str:
        """Returns the output of the run, which ends with an error."""
        wait_for("the end of the query", self.has_failed, PATIENCE_S)
        assert self._running().returncode == 1, self.output()[-3000:]
        return self.output()

    def kill(self) -> None:
        if self._driver is not None:
            self._driver.kill()

    def close(self) -> None:
        """Ends also the drivers that wait."""
        for driver in self._waiting:
            driver.kill()
        self._waiting.clear()
        self.kill()

    def finish(self) -> None:
        """A run that ends by itself when everything has been read, whatever the size of a micro-batch."""
        self._options.pop("maxOffsetsPerTrigger")
        self._ahead = 0
        while self.start(availableNow=True).wait(PATIENCE_S) != 0:
            assert self._has_ended()

    def has_failed(self) -> bool:
        return self._running().poll() is not None

    def output(self) -> str:
        """The output of the current run so far."""
        assert self._driver is not None
        return self._driver.output.read_text()

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        def is_there() -> bool:
            has_ended = self.has_failed()
            if condition():
                return True
            if has_ended and self._has_ended():
                self.start()
            return False

        wait_for(what, is_there, PATIENCE_S)

    def _has_ended(self) -> bool:
        """The job ended by itself, which is allowed for one reason only."""
        if self._running().poll() is None:
            return False
        assert SLOW_START in self.output(), self.output()[-3000:]
        return True

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._driver is not None
        return self._driver.process


@contextmanager
def publishing(publish: PublishFn, topic: str, *, pause_s: float = 0.2) -> Iterator[None]:
    """Appends records to all partitions in the meantime, each key to its own; the log itself shows the outcome of sends
    that a kill left in doubt."""
    over = threading.Event()
    keys = {p: [b"key-%d" % n for n in range(60) if key_partition(b"key-%d" % n, PARTITIONS) == p] for p in range(3)}

    def run() -> None:
        number = 0
        while not over.wait(pause_s):
            for partition in range(PARTITIONS):
                number += 1
                of_keys = keys[partition]
                records = [NewRecord(of_keys[i % len(of_keys)], b"%d-%d" % (number, i), 1) for i in range(20)]
                try:
                    publish(topic, partition, records)
                except (SmqError, Unanswered, ClusterError):
                    continue  # no leader for a moment

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_the_log(servers: str, topic: str) -> list[Row]:
    """All committed records, in the order of the log."""
    reader = SmqReader(
        read_options({"servers": servers, "subscribe": topic}),
        default_schema(include_headers=False, include_index=False),
    )
    columns = ("partition", "offset", "key", "value")
    rows: list[Row] = []
    for part in reader.partitions():
        for batch in reader.read(part):
            rows += zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
    return sorted(rows)
