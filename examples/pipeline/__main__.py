"""`make pipeline`: a cluster, real flights, and job.py's query, killed with SIGKILL on the way and checked by pandas.

Owns the story and its verdict: exit code 0 only if the Parquet files equal pandas' result for the same flights.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Final

from chaos_tests.demo.flights import Flights, load_flights
from examples.pipeline.output import difference, expected, written
from smq.clients import SyncAdmin, SyncProducer
from smq.testing.cluster import live_cluster

TOPIC: Final = "flights"
PARTITIONS: Final = 4
BATCHES: Final = 8  # about this many micro-batches for all flights
KILL_AFTER_BATCHES: Final = 3
WAIT_S: Final = 300.0  # for a step that takes seconds: Java starts slowly on a busy machine
# A day is written once it is over, and it is over once a later record says so: a query's clock is that of its data. So
# the year's last day needs a record after it, which belongs to a window that stays open.
HEARTBEAT: Final = b'{"origin": "none", "time_hour": "2014-02-01T00:00:00Z"}'


class PipelineFailure(RuntimeError):
    """The pipeline failed; the message says how."""


class Job:
    """The streaming job's process, and its output so far."""

    def __init__(self, arguments: Sequence[str], log: IO[bytes]) -> None:
        command = [sys.executable, "-m", "examples.pipeline.job", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self._java: int | None = None

    def wait_for(self, what: str, is_met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line that meets the condition. PipelineFailure if the job ends before, or WAIT_S is over."""
        give_up_at = time.monotonic() + WAIT_S
        assert self._process.stdout is not None
        for line in self._process.stdout:
            progress = json.loads(line)
            self._java = progress.get("java", self._java)
            if is_met(progress):
                return dict(progress)
            if time.monotonic() > give_up_at:
                raise PipelineFailure(f"waited {WAIT_S:.0f} s for {what}; the job's last line: {progress}")
        raise PipelineFailure(f"waited for {what}, but the job ended with {self._process.wait()}: see job.log")

    def kill(self) -> None:
        """SIGKILL to Java, which drives the query, and to Python."""
        if self._java is not None:
            os.kill(self._java, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


def main(given: Sequence[str] | None = None) -> int:
    """0 if everything agreed, 1 if it did not."""
    parser = argparse.ArgumentParser(prog="python -m examples.pipeline", description=__doc__)
    parser.add_argument("--rows", type=int, help="the first ROWS flights only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave Parquet, checkpoint and logs there")
    arguments = parser.parse_args(given)
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="smq-pipeline-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _run(load_flights(arguments.rows), directory)
    except PipelineFailure as e:
        print(f"FAILED: {e}")
        log = directory / "job.log"
        if log.exists():
            print("job.log ends:\n" + log.read_text(errors="replace")[-3000:])
        return 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


def _run(flights: Flights, directory: Path) -> None:
    output = directory / "flights-by-day"
    rows = len(flights.values)
    with live_cluster(directory / "cluster", 3) as cluster, (directory / "job.log").open("ab") as log:
        print(f"cluster of 3 nodes at {cluster.servers}")
        _publish(cluster.servers, flights)
        print(f"published {rows:,} flights to {PARTITIONS} partitions")
        options = ["--servers", cluster.servers, "--topic", TOPIC, "--output", str(output)]
        options += ["--checkpoint", str(directory / "checkpoint"), "--rows-per-batch", str(max(1, rows // BATCHES))]
        job = Job(options, log)
        try:
            progress = job.wait_for("some micro-batches", lambda line: line.get("batch", -1) >= KILL_AFTER_BATCHES)
            job.kill()
            print(
                f"killed Spark with SIGKILL after micro-batch {progress['batch']}, {progress['lag']:,} records "
                "before the end"
            )
            job = Job(options, log)
            progress = job.wait_for("the end of the topic", lambda line: line.get("lag") == 0)
            print(f"started again from its checkpoint; micro-batch {progress['batch']} reached the end of the topic")
            _close_the_year(cluster.servers)
            wanted = expected(flights.frame)
            _wait_written(output, len(wanted))
        finally:
            job.stop()
    wrong = difference(written(output), wanted)
    if wrong:
        raise PipelineFailure(wrong)
    print(f"{len(wanted):,} windows in {output.name}: each once, and each as pandas has it")


def in_order(flights: Flights) -> list[bytes]:
    """The flights' values by hour. Their file sorts the months by name (1, 10, 11, 12, 2). After December the windows
    of February would be closed, and its flights would be late and dropped."""
    return [value for _, value in sorted(zip(flights.times_ms, flights.values, strict=True), key=itemgetter(0))]


def _publish(servers: str, flights: Flights) -> None:
    """Publishes in order of time, the same share to each partition, so that none is days ahead of another."""
    values = in_order(flights)
    with SyncAdmin(servers) as admin:
        admin.create_topic(TOPIC, PARTITIONS)
    with SyncProducer(servers, compression="lz4") as producer:
        for partition in range(PARTITIONS):
            producer.send_many(TOPIC, values[partition::PARTITIONS], partition=partition)


def _close_the_year(servers: str) -> None:
    with SyncProducer(servers) as producer:
        producer.send_many(TOPIC, [HEARTBEAT], partition=0)


def _wait_written(output: Path, windows: int) -> None:
    """Waits until the last day has been closed. The comparison finds windows that should not exist."""
    give_up_at = time.monotonic() + WAIT_S
    while len(written(output)) < windows:
        if time.monotonic() > give_up_at:
            raise PipelineFailure(f"{len(written(output))} of {windows} windows were written within {WAIT_S:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
