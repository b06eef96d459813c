"""Streams whose drivers and nodes are killed: every record once, none missing.

Once without Spark, many micro-batches in little time; and once with it, into files.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from smq.testing.cluster import Cluster
from tests.spark.killed_job import PARTITIONS, Job, PublishFn, in_the_log, publishing
from tests.unit.spark_connector.stream_query import Query

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

TopicFn = Callable[..., str]


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
    assert sorted(query.rows) == [(topic, p, offset) for p, offset, _, _ in in_the_log(servers, topic)]


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
    options = {"servers": servers, "subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "150"}
    job = Job(tmp_path, options)
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
        job.close()
        cluster.heal()
    assert job.committed() > driver_kills * batches
    written = spark.read.parquet(str(tmp_path / "out")).collect()
    published = [(partition, offset, value) for partition, offset, _, value in in_the_log(servers, topic)]
    assert sorted((r.partition, r.offset, r.value.encode()) for r in written) == published
