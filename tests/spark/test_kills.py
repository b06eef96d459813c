"""Streams whose drivers and nodes are killed: every record once, none missing.

Once without Spark, many micro-batches in little time; and once with it, into files.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.records import NewRecord
from smq.spark_connector.batch_reader import SmqReader
from smq.spark_connector.options import read_options
from smq.spark_connector.schema import default_schema
from smq.testing.cluster import Cluster
from smq.testing.node_client import Unanswered
from smq.testing.node_process import ClusterError, wait_for
from tests.spark.support import SLOW_START
from tests.unit.spark_connector.stream_query import Query

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

PublishFn = Callable[..., None]
TopicFn = Callable[..., str]
Row = tuple[int, int, bytes]
JOB = Path(__file__).with_name("streaming_job.py")
PARTITIONS = 3
RUNS_MAX = 20
PATIENCE_S = 300  # a driver starts in ten seconds on a quiet machine


class Job:
    """The program of streaming_job.py on one checkpoint, run by run."""

    def __init__(self, root: Path, options: dict[str, str]) -> None:
        self._root = root
        self._options = options
        self._runs = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *mode: str) -> "subprocess.Popen[bytes]":
        places = [str(self._root / "out"), str(self._root / "checkpoint")]
        command = [sys.executable, str(JOB), json.dumps(self._options), *places, *mode]
        self._runs += 1
        assert self._runs <= RUNS_MAX
        with (self._root / f"run-{self._runs}.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        return self._process

    def committed(self) -> int:
        """The number of micro-batches that the checkpoint lists as done."""
        found = (self._root / "checkpoint" / "commits").glob("[0-9]*")
        return max((int(path.name) + 1 for path in found), default=0)

    def wait_committed(self, batches: int) -> None:
        def is_there() -> bool:
            if self._has_ended():
                self.start()
            return self.committed() >= batches

        wait_for(f"{batches} micro-batches", is_there, PATIENCE_S)

    def _has_ended(self) -> bool:
        """The job ended by itself, which is allowed for one reason only."""
        assert self._process is not None
        if self._process.poll() is None:
            return False
        assert SLOW_START in self._output(), self._output()[-3000:]
        return True

    def kill(self) -> None:
        """kill -9 of the driver: its Python, and the Java that it started in a process group of its own."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, check=False)
        for pid in [*map(int, listed.stdout.split()), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait(30)

    def finish(self) -> None:
        """A run that ends by itself when everything has been read, whatever the size of a micro-batch."""
        self._options.pop("maxOffsetsPerTrigger")
        while self.start("available-now").wait(PATIENCE_S) != 0:
            assert self._has_ended()

    def _output(self) -> str:
        """The output of the current run so far."""
        return (self._root / f"run-{self._runs}.log").read_text()


@contextmanager
def publishing(publish: PublishFn, topic: str) -> Iterator[None]:
    """Appends records to all partitions in the meantime; the log itself shows the outcome of sends that a kill left in
    doubt."""
    over = threading.Event()

    def run() -> None:
        number = 0
        while not over.wait(0.2):
            for partition in range(PARTITIONS):
                number += 1
                try:
                    publish(topic, partition, [NewRecord(None, b"%d-%d" % (number, i), 1) for i in range(20)])
                except (SmqError, Unanswered, ClusterError):
                    continue  # no leader for a moment

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("batches", [20, pytest.param(100, marks=pytest.mark.full)])
def test_many_micro_batches_through_kills_and_replays_read_each_record_once(
    cluster: Cluster, servers: str, new_topic: TopicFn, publish: PublishFn, batches: int
) -> None:
    """Killed in turn after a micro-batch, and between its plan and its commit: then the same records are read again."""
    topic = new_topic(PARTITIONS)
    query = Query(
        servers, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="50", retryTimeoutMs="60000"
    )
    random = Random(6)
    down: int | None = None
    try:
        with publishing(publish, topic):
            while query.commits < batches:
                if not query.plan():
                    continue
                rows = query.run()
                if random.random() < 0.3:
                    query.restart()
                    assert query.run() == rows
                query.rows += rows
                query.commit()
                if query.commits % 10 == 5:
                    down = random.choice(sorted(cluster.nodes))
                    cluster.kill(down)
                elif query.commits % 10 == 9 and down is not None:
                    cluster.restart(down)
                    down = None
    finally:
        cluster.heal()
    query.restart(maxOffsetsPerTrigger="1000000")
    query.drain()
    assert sorted(query.rows) == [(topic, p, offset) for p, offset, _ in in_the_log(servers, topic)]


@pytest.mark.parametrize(
    ("driver_kills", "batches"),
    [
        pytest.param(1, 4, marks=[pytest.mark.full, pytest.mark.timeout(1000)]),
        pytest.param(6, 20, marks=[pytest.mark.full, pytest.mark.timeout(3000)]),
    ],
)
def test_each_record_reaches_the_files_once_through_kills_of_driver_and_nodes(
    spark: SparkSession,
    cluster: Cluster,
    servers: str,
    new_topic: TopicFn,
    publish: PublishFn,
    tmp_path: Path,
    driver_kills: int,
    batches: int,
) -> None:
    topic = new_topic(PARTITIONS)
    job = Job(
        tmp_path,
        {"servers": servers, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "150"},
    )
    try:
        with publishing(publish, topic):
            for round_ in range(driver_kills):
                victim = sorted(cluster.nodes)[round_ % len(cluster.nodes)]
                done = job.committed()
                job.start()
                job.wait_committed(done + batches // 2)
                cluster.kill(victim)
                job.wait_committed(done + batches)
                job.kill()
                cluster.restart(victim)
        job.finish()
    finally:
        job.kill()
        cluster.heal()
    assert job.committed() > driver_kills * batches
    written = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted((r.partition, r.offset, r.value.encode()) for r in written) == in_the_log(servers, topic)


def in_the_log(servers: str, topic: str) -> list[Row]:
    reader = SmqReader(
        read_options({"servers": servers, "subscribe": topic}),
        default_schema(include_headers=False, include_index=False),
    )
    rows: list[Row] = []
    for part in reader.partitions():
        for batch in reader.read(part):
            rows += zip(*(batch.column(name).to_pylist() for name in ("partition", "offset", "value")), strict=True)
    return sorted(rows)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_each_record_reaches_another_topic_once_through_kills_between_staging_and_commit(
    cluster: Cluster, servers: str, new_topic: TopicFn, publish: PublishFn, tmp_path: Path
) -> None:
    """The driver is killed while transactions of its tasks are open, nodes in between."""
    topic, target = new_topic(PARTITIONS), new_topic(PARTITIONS)
    options = {"servers": servers, "subscribe": topic, "startingOffsets": "earliest", "target": target}
    job = Job(tmp_path, options | {"maxOffsetsPerTrigger": "150"})
    try:
        with publishing(publish, topic):
            for round_ in range(8):
                job.start()
                job.wait_committed(job.committed() + 3)
                wait_for("an open transaction", lambda: _is_staging(cluster), PATIENCE_S)
                job.kill()
                if round_ % 2:
                    victim = sorted(cluster.nodes)[round_ // 2 % len(cluster.nodes)]
                    cluster.kill(victim)
                    job.start()
                    job.wait_committed(job.committed() + 2)
                    job.kill()
                    cluster.restart(victim)
        job.finish()
    finally:
        job.kill()
        cluster.heal()
    assert job.committed() > 20
    copied = sorted(value for _, _, value in in_the_log(servers, target))
    assert copied == sorted(b"%d %d %s" % row for row in in_the_log(servers, topic))


def _is_staging(cluster: Cluster) -> bool:
    node = cluster.alive()[0].raw
    listed = node.call(node.admin.ListTransactions, pb.ListTransactionsRequest())
    return any(t.state == "Ongoing" and t.transactional_id.startswith("spark/") for t in listed.transactions)
