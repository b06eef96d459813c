"""spark.readStream.format("smq") on a real Spark and a real cluster, into files: each record once, whatever happens."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from smq.clients.pb import smq_pb2 as pb
from smq.records import encode_batch
from smq.spark_connector.stream.lag import LagListener, QueryLag
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.spark.file_job import Job
from tests.spark.support import numbered, span
from tests.unit.spark_connector.stream_query import Query

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(400)]

PublishFn = Callable[..., None]
TopicFn = Callable[..., str]


@pytest.fixture
def job(spark: SparkSession, servers: str, tmp_path: Path) -> Callable[..., Job]:
    return lambda topic, **options: Job(spark, tmp_path, servers=servers, subscribe=topic, **options)


def test_runs_of_available_now_continue_from_the_last_and_see_new_partitions(
    cluster: Cluster, new_topic: TopicFn, publish: PublishFn, job: Callable[..., Job]
) -> None:
    topic = new_topic(2)
    for partition in range(2):
        publish(topic, partition, numbered(250))
    stream = job(topic, startingOffsets="earliest", maxOffsetsPerTrigger="300")
    assert stream.run() == [300, 200]
    node = cluster.alive()[0].raw
    node.call(node.admin.AddPartitions, pb.AddPartitionsRequest(name=topic, partition_count=3, timeout_ms=10_000))
    publish(topic, 2, numbered(40))
    publish(topic, 0, numbered(10))
    assert sum(stream.run()) == 50
    assert stream.run() == []
    assert stream.rows() == span(0, 0, 260) + span(1, 0, 250) + span(2, 0, 40)


def test_running_query_reads_on_through_the_death_of_a_node_and_reports_its_lag(
    spark: SparkSession, cluster: Cluster, new_topic: TopicFn, publish: PublishFn, job: Callable[..., Job]
) -> None:
    topic = new_topic(3)
    lags: list[QueryLag] = []
    listener = LagListener(lags.append)
    spark.streams.addListener(listener)
    stream = job(topic, startingOffsets="earliest", maxOffsetsPerTrigger="200")
    for partition in range(3):
        publish(topic, partition, numbered(300))
    query = stream.start(available_now=False)
    try:
        wait_for("the first rows", lambda: query.lastProgress is not None and query.lastProgress.numInputRows, 120)
        victim = cluster.wait_leader(topic, 0)
        cluster.kill(victim)
        for partition in range(3):
            publish(topic, partition, numbered(100, first=300))
        query.processAllAvailable()
    finally:
        query.stop()
        cluster.restart(victim)
        spark.streams.removeListener(listener)
    assert stream.rows() == [place for partition in range(3) for place in span(partition, 0, 400)]
    wait_for("the listener's last event", lambda: bool(lags) and lags[-1].total == 0)
    assert {lag.query_id for lag in lags} == {query.id}
    assert max(lag.total for lag in lags) >= 300  # 200 of 900 rows a micro-batch
    assert set(lags[-1].records) == {(topic, p) for p in range(3)}


def test_a_query_that_retention_passes_fails_and_goes_on_once_the_loss_is_accepted(
    cluster: Cluster, new_topic: TopicFn, publish: PublishFn, job: Callable[..., Job]
) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(200), batch_records=10)
    stream = job(topic, startingOffsets=json.dumps({topic: {"0": 0}}))
    stream.run()
    publish(topic, 0, numbered(200), batch_records=10)
    leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
    request = pb.DeleteRecordsRequest(partition=0, topic=topic, before_offset=350, timeout_ms=10_000)
    leader.call(leader.admin.DeleteRecords, request)
    with pytest.raises(StreamingQueryException, match=r"\[200, 350\) of .* are gone.*failOnDataLoss"):
        stream.run()
    assert stream.rows() == span(0, 0, 200)
    stream.options["failOnDataLoss"] = "false"
    stream.run()
    assert stream.rows() == span(0, 0, 200) + span(0, 350, 400)


def test_micro_batches_of_a_real_cluster_hold_no_more_bytes_than_asked(
    servers: str, new_topic: TopicFn, publish: PublishFn
) -> None:
    """Without Spark: the nodes' own answers about sizes and times."""
    topic = new_topic(2)
    for partition in range(2):
        publish(topic, partition, numbered(500), batch_records=50)
    batch_bytes = len(encode_batch(numbered(50)))
    query = Query(servers, subscribe=topic, startingTimestamp="1010", maxBytesPerTrigger=str(5 * batch_bytes))
    sizes = query.drain()
    assert max(sizes) <= 250
    assert len(sizes) >= 4
    assert sorted(query.rows) == [(topic, p, offset) for p in range(2) for offset in range(10, 500)]


def test_stream_refuses_what_it_cannot_do_before_any_task_runs(spark: SparkSession, servers: str) -> None:
    reader = spark.readStream.format("smq").options(servers=servers, subscribe="t", endingOffsets="latest")
    query = reader.load().writeStream.format("noop").start()
    with pytest.raises(StreamingQueryException, match="'endingOffsets' is only for batch reads"):
        query.awaitTermination(300)


@pytest.mark.full
def test_a_stream_starts_though_its_process_loads_for_longer_than_spark_waits(
    cluster: Cluster, new_topic: TopicFn, publish: PublishFn, tmp_path: Path
) -> None:
    """As on a busy machine. The process has connected before it loads anything."""
    topic = new_topic(1)
    publish(topic, 0, numbered(7))
    command = [sys.executable, "-m", "tests.spark.slow_job", str(tmp_path), cluster.servers, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split()[-1:] == ["7"], done.stderr[-3000:]
