"""spark.read.format("smq") on a real Spark and a real cluster, without registering anything."""

import json
import signal
from collections.abc import Callable, Iterator

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from smq.records import CODECS, NewRecord
from smq.testing.cluster import Cluster
from tests.spark.support import numbered, offsets, span

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

ReadFn = Callable[..., DataFrame]
PublishFn = Callable[..., None]
TopicFn = Callable[..., str]


def test_whole_topic_comes_record_by_record(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(3)
    for partition in range(3):
        publish(topic, partition, numbered(1200 + partition))
    rows = read(topic).orderBy("partition", "offset").collect()
    expected = [(p, i, b"k%d" % (i % 5), b"v%d" % i, 1000 + i) for p in range(3) for i in range(1200 + p)]
    found = [(r.partition, r.offset, bytes(r.key), bytes(r.value), round(r.timestamp.timestamp() * 1000)) for r in rows]
    assert found == expected
    assert {r.topic for r in rows} == {topic}
    assert {r.timestampType for r in rows} == {0}


def test_json_offsets_are_inclusive_and_exclusive(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(2)
    publish(topic, 0, numbered(1000), batch_records=70)
    publish(topic, 1, numbered(1000), batch_records=70)
    chosen = read(
        topic,
        startingOffsets=json.dumps({topic: {"0": 33, "1": -2}}),
        endingOffsets=json.dumps({topic: {"0": 777, "1": 5}}),
    )
    assert offsets(chosen) == span(0, 33, 777) + span(1, 0, 5)


def test_user_schema_is_a_projection(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(3))
    rows = read(topic, "`_index` bigint, VALUE binary, ts_ns bigint, epoch int").orderBy("_index").collect()
    assert [(r["_index"], bytes(r["VALUE"])) for r in rows] == [(0, b"v0"), (1, b"v1"), (2, b"v2")]
    assert all(r.ts_ns > 1_600_000_000_000_000_000 for r in rows)
    assert {r.epoch for r in rows} != {None}


def test_null_and_empty_keys_and_values_stay_apart(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    pairs = [(None, b"v"), (b"", b"v"), (b"k", None), (b"k", b""), (None, None)]
    publish(topic, 0, [NewRecord(key, value, 1) for key, value in pairs])
    rows = read(topic).orderBy("offset").collect()
    found = [(r.key if r.key is None else bytes(r.key), r.value if r.value is None else bytes(r.value)) for r in rows]
    assert found == pairs


def test_codec(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    """Batches of every codec in one partition."""
    topic = new_topic(1)
    for number, codec in enumerate(CODECS):
        publish(topic, 0, numbered(700, first=700 * number), codec=codec)
    rows = read(topic, "offset bigint, value binary").orderBy("offset").collect()
    assert [(r.offset, bytes(r.value)) for r in rows] == [(i, b"v%d" % i) for i in range(700 * len(CODECS))]


def test_min_partitions_makes_that_many_tasks(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(1000))
    frame = read(topic, minPartitions="4")
    assert frame.select(f.spark_partition_id()).distinct().count() == 4
    assert offsets(frame) == span(0, 0, 1000)


def test_data_frame_is_a_snapshot_of_its_first_action(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(5))
    frame = read(topic)
    assert frame.count() == 5
    publish(topic, 0, numbered(5))
    assert frame.count() == 5
    assert read(topic).count() == 10


# ------------------------------------------------------------------------------------------------ SQL
def test_temporary_view_in_sql(spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(6))
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW smq_view USING smq OPTIONS (servers '{servers}', subscribe '{topic}')")
    (row,) = spark.sql("SELECT count(*) AS n, max(offset) AS top FROM smq_view").collect()
    assert (row.n, row.top) == (6, 5)


@pytest.fixture
def table(spark: SparkSession) -> Iterator[str]:
    """A table whose OPTIONS Spark does not pass on."""
    spark.sql("CREATE TABLE smq_table USING smq OPTIONS (servers 'h:1', subscribe 't') COMMENT 'events'")
    yield "smq_table"
    spark.sql("DROP TABLE smq_table")


def test_table_without_its_options_says_how_to_give_them(spark: SparkSession, table: str) -> None:
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"SELECT * FROM {table}").collect()


def test_table_reads_with_options_given_at_the_select(
    spark: SparkSession, servers: str, table: str, new_topic: TopicFn, publish: PublishFn
) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(4))
    (row,) = spark.sql(
        f"SELECT count(*) AS n FROM {table} WITH (servers = '{servers}', subscribe = '{topic}')"
    ).collect()
    assert row.n == 4


# ------------------------------------------------------------------------------------------------ bad input
def fails(frame: Callable[[], DataFrame], match: str) -> None:
    with pytest.raises(PySparkException, match=match):
        frame().collect()


def test_unknown_topic_is_named(read: ReadFn) -> None:
    fails(lambda: read("no-such-topic"), "no topic 'no-such-topic'.*smq topic create")


def test_unknown_option_is_named(read: ReadFn) -> None:
    fails(lambda: read("t", startingOffset="earliest"), "did you mean 'startingOffsets'")


def test_offsets_past_the_end_are_refused_with_the_range(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(5))
    end = json.dumps({topic: {"0": 6}})
    fails(lambda: read(topic, endingOffsets=end), r"outside \[0, 5\].*failOnDataLoss")
    assert read(topic, endingOffsets=end, failOnDataLoss="false").count() == 5


# ------------------------------------------------------------------------------------------------ faults
def test_dead_node_costs_a_read_nothing(cluster: Cluster, new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(3)
    for partition in range(3):
        publish(topic, partition, numbered(2000))
    frame = read(topic, minPartitions="6")
    assert frame.count() == 6000  # this plans the read while the node is up: some tasks prefer it
    victim = cluster.wait_leader(topic, 0)
    cluster.kill(victim)
    try:
        assert offsets(frame) == [place for partition in range(3) for place in span(partition, 0, 2000)]
    finally:
        cluster.restart(victim)


def test_frozen_node_costs_a_read_only_time(
    cluster: Cluster, new_topic: TopicFn, publish: PublishFn, read: ReadFn
) -> None:
    topic = new_topic(3)
    for partition in range(3):
        publish(topic, partition, numbered(500))
    before = read(topic, minPartitions="6")
    assert before.count() == 1500  # this plans the read while the node answers: some tasks prefer it
    victim = next(n for n in cluster.nodes if n != cluster.raft_leader())
    cluster.signal(victim, signal.SIGSTOP)
    try:
        assert before.count() == 1500
        assert read(topic, minPartitions="6").count() == 1500
    finally:
        cluster.signal(victim, signal.SIGCONT)
        cluster.wait_ready(victim)
