"""`.option("metadata", ...)`: the cluster's metadata as DataFrames, compared with its nodes' other answers."""

import signal
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from smq.clients import SyncAdmin
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import SmqError
from smq.records import NewRecord
from smq.spark_connector.errors import OptionError
from smq.spark_connector.metadata_source import MetadataReader, MetadataSlice, metadata_options, metadata_schema
from smq.testing.cluster import Cluster

TopicFn = Callable[..., str]
PublishFn = Callable[..., None]


def planned(servers: str, **options: str) -> list[dict[str, object]]:
    """The rows of a read, without Spark."""
    kind = options["metadata"]
    reader = MetadataReader(metadata_options({"servers": servers, **options}), metadata_schema(kind))
    (part,) = reader.partitions()
    assert isinstance(part, MetadataSlice)
    return [dict(zip(metadata_schema(kind).names, row, strict=True)) for row in part.rows]


@pytest.mark.spark
@pytest.mark.cluster
def test_partitions_of_a_topic(
    spark: SparkSession, cluster: Cluster, servers: str, new_topic: TopicFn, publish: PublishFn
) -> None:
    topic = new_topic(3)
    publish(topic, 0, [NewRecord(None, b"v" * 100, 1)] * 40, batch_records=10)
    leader = cluster.nodes[cluster.wait_leader(topic, 0)].raw
    leader.call(
        leader.admin.DeleteRecords,
        pb.DeleteRecordsRequest(partition=0, topic=topic, before_offset=10, timeout_ms=10_000),
    )
    cluster.wait_converged(topic, 3)
    frame = spark.read.format("smq").options(servers=servers, metadata="partitions", subscribe=topic).load()
    rows = {row["partition"]: row for row in frame.collect()}
    with SyncAdmin(servers) as admin:
        described = admin.describe_topic(topic).partitions
    assert set(rows) == {p.partition for p in described} == {0, 1, 2}
    for p in described:
        row = rows[p.partition]
        assert (row.log_start, row.hwm, row.next_offset) == (p.log_start, p.hwm, p.next_offset)
        assert (row.leader, row.leader_available, row.epoch) == (p.leader, True, p.epoch)
        assert row.replicas == list(p.replicas)
        assert (row.silent_replicas, row.replica_lag) == ([], 0)
    assert (rows[0].log_start, rows[0].hwm) == (10, 40)
    assert rows[0].size_bytes > 3000
    assert rows[1].size_bytes == 0


@pytest.mark.spark
@pytest.mark.cluster
def test_groups_lag_is_in_sql(spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn) -> None:
    topic = new_topic(2)
    publish(topic, 0, [NewRecord(None, b"v", 1)] * 40)
    with SyncAdmin(servers) as admin:
        admin.commit_offsets("readers", {(topic, 0): 15, (topic, 1): 0})
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW smq_groups USING smq "
        f"OPTIONS (servers '{servers}', metadata 'groups', subscribe '{topic}')"
    )
    rows = spark.sql("SELECT * EXCEPT (committed_ms, lag_ms) FROM smq_groups ORDER BY partition").collect()
    with SyncAdmin(servers) as admin:
        described = admin.describe_group("readers", with_sizes=True)
    size = next(p.lag_bytes for p in described.positions if (p.topic, p.partition) == (topic, 0))
    assert size
    assert [tuple(row) for row in rows] == [
        ("readers", "Empty", topic, 0, 15, "", 0, 40, 25, 25, size, None, None),
        ("readers", "Empty", topic, 1, 0, "", 0, 0, 0, 0, 0, None, None),
    ]
    (behind, read) = spark.sql("SELECT lag_ms FROM smq_groups ORDER BY partition").collect()
    assert behind.lag_ms >= 0
    assert read.lag_ms == 0
    assert [tuple(r) for r in spark.sql("SELECT lag, `group` FROM smq_groups WHERE lag > 0").collect()] == [
        (25, "readers")
    ]


@pytest.mark.cluster
def test_partition_of_a_group_names_its_member(
    cluster: Cluster, servers: str, new_topic: TopicFn, publish: PublishFn
) -> None:
    topic = new_topic(1)
    publish(topic, 0, [NewRecord(None, b"v", 1)] * 7)
    settings = {
        "bootstrap.servers": cluster.nodes[1].kafka,
        "group.id": f"of-{topic}",
        "client.id": "counting",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        assert len(consumer.consume(7, timeout=60)) == 7
        (row,) = planned(servers, metadata="groups", group=f"kafka-cg-of-{topic}")
        assert (row["state"], row["client_id"]) == ("Stable", "counting")
        assert (row["offset"], row["committed_ms"], row["lag"], row["hwm"]) == (None, None, 7, 7)
        assert row["lag_records"] == 7
        assert row["lag_bytes"] not in (None, 0)
        assert row["lag_ms"] is not None
        consumer.commit(asynchronous=False)
        (row,) = planned(servers, metadata="groups", group=f"kafka-cg-of-{topic}")
        assert (row["offset"], row["lag"]) == (7, 0)
    finally:
        consumer.close()


@pytest.mark.cluster
def test_group_that_is_not_there_is_named(servers: str) -> None:
    with pytest.raises(SmqError, match="no-such-group"):
        planned(servers, metadata="groups", group="no-such-group")


@pytest.mark.cluster
def test_node_that_hangs_is_shown_as_silent(cluster: Cluster, servers: str, new_topic: TopicFn) -> None:
    topic = new_topic(1)
    victim = next(n for n in cluster.nodes if n not in (cluster.raft_leader(), cluster.wait_leader(topic, 0)))
    cluster.signal(victim, signal.SIGSTOP)
    try:
        (row,) = planned(servers, metadata="partitions", subscribe=topic)
    finally:
        cluster.signal(victim, signal.SIGCONT)
        cluster.wait_ready(victim)
    assert row["silent_replicas"] == [victim]
    assert row["size_bytes"] == 0


@pytest.mark.cluster
def test_missing_topic_is_named(servers: str) -> None:
    with pytest.raises(Exception, match="there is no topic 'no-such-topic'"):
        planned(servers, metadata="partitions", subscribe="no-such-topic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": "partition", "servers": "h:1"}, "one of 'partitions', 'groups', not 'partition'"),
        ({"metadata": "partitions"}, "does not know where the cluster is"),
        ({"metadata": "partitions", "servers": "h:1", "startingoffsets": "earliest"}, "no option 'startingoffsets'"),
        ({"metadata": "partitions", "servers": "h:1", "subscribed": "t"}, "did you mean 'subscribe'"),
        ({"metadata": "partitions", "servers": "h:1", "group": "g"}, "belongs to metadata 'groups'"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        metadata_options(options)


def test_schema_is_a_projection_of_known_columns() -> None:
    options = metadata_options({"metadata": "groups", "servers": "h:1", "group": "g"})
    whole = metadata_schema("groups")
    MetadataReader(options, whole.__class__([whole["lag"], whole["group"]]))
    with pytest.raises(OptionError, match="'groups' has no column"):
        MetadataReader(options, metadata_schema("partitions"))


@pytest.mark.spark
def test_missing_kind_is_reported_by_spark(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="not 'topics'"):
        spark.read.format("smq").options(servers="h:1", metadata="topics").load().collect()
