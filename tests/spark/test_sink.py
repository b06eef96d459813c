"""df.write and df.writeStream with format("smq") on a real Spark and cluster: each row once, whatever happens."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from smq.clients import SyncAdmin
from smq.raft_state.ids import key_partition
from smq.spark_connector.cluster_calls import Cluster as Connections
from smq.spark_connector.errors import SinkError
from smq.spark_connector.options import Security
from smq.spark_connector.sink.staging import abort_of_dead_quietly
from smq.spark_connector.sink.write_options import sink_options
from smq.spark_connector.sink.writer import SmqWriter, Staged
from smq.spark_connector.tasks import connected
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.spark.support import numbered, open_transactions

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(400)]

PublishFn = Callable[..., None]
TopicFn = Callable[..., str]
ReadFn = Callable[..., DataFrame]
RowsFn = Callable[..., DataFrame]


@pytest.fixture
def rows(spark: SparkSession) -> RowsFn:
    """`rows(n)`: n rows with the values 0, 1, ... as text, in two tasks."""

    def made(count: int, first: int = 0) -> DataFrame:
        frame = spark.range(first, first + count, 1, 2)
        return frame.selectExpr("cast(id % 7 as string) as key", "cast(id as string) as value")

    return made


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.value) for row in frame.select("value").collect())


# --------------------------------------------------------------------------------------------------- batches
def test_a_batch_write_puts_each_row_where_kafka_would(
    rows: RowsFn, servers: str, new_topic: TopicFn, read: ReadFn
) -> None:
    topic = new_topic(3)
    rows(1000).write.format("smq").options(servers=servers, topic=topic).mode("append").save()
    found = read(topic).select("key", "value", "partition").collect()
    assert sorted(int(row.value) for row in found) == list(range(1000))
    assert all(row.partition == key_partition(bytes(row.key), 3) for row in found)
    assert {row.partition for row in found} == {0, 1, 2}


def test_every_column_of_a_row_arrives(
    spark: SparkSession, servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster
) -> None:
    first, second = new_topic(2), new_topic(2)
    when = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    schema = (
        "value binary, topic string, headers array<struct<key: string, value: binary>>, key binary, partition int,"
        " timestamp timestamp, other string"
    )
    given = [
        (b"v0", first, [("h", b"x"), ("h", None)], b"k", 1, when, "ignored"),
        (None, second, None, None, 0, None, "ignored"),
        (b"", second, [], b"", 1, when, "ignored"),
    ]
    spark.createDataFrame(given, schema).write.format("smq").option("servers", servers).mode("append").save()
    found = read(f"{first},{second}", includeHeaders="true").orderBy("topic", "partition").collect()
    found.sort(key=lambda row: [first, second].index(row.topic))
    assert [(row.topic, row.partition, row.key, row.value) for row in found] == [
        (first, 1, b"k", b"v0"),
        (second, 0, None, None),
        (second, 1, b"", b""),
    ]
    assert [(h.key, h.value) for h in found[0].headers] == [("h", b"x"), ("h", None)]
    assert found[0].timestamp.timestamp() == when.timestamp()
    assert found[1].timestamp.timestamp() > when.timestamp(), "the time of the write"
    assert open_transactions(cluster) == []


def test_a_write_with_an_app_is_visible_once_however_often_it_is_run(
    rows: RowsFn, servers: str, new_topic: TopicFn, read: ReadFn
) -> None:
    topic = new_topic(2)

    def write(version: int, first: int) -> None:
        options = {"servers": servers, "topic": topic, "txnAppId": f"app of {topic}", "txnVersion": str(version)}
        rows(50, first).write.format("smq").options(**options).mode("append").save()

    for version, first in ((7, 0), (7, 0), (8, 50), (8, 50)):
        write(version, first)
    for version, first, why in ((8, 1000, "50 other rows"), (7, 0, "older than the last one, 8")):
        with pytest.raises(PySparkException, match=rf"(?s){why}.*kept.*needs a greater txnVersion"):
            write(version, first)
    assert numbers(read(topic)) == list(range(100))


def test_a_task_that_is_tried_again_writes_its_rows_once(
    rows: RowsFn, servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster
) -> None:
    topic = new_topic(2)

    def fails_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0:
            raise RuntimeError("the first attempt fails after its rows")

    frame = rows(30_000)  # more than one Arrow batch a task
    frame = frame.mapInArrow(fails_once, frame.schema)
    frame.write.format("smq").options(servers=servers, topic=topic).mode("append").save()
    assert numbers(read(topic)) == list(range(30_000))
    wait_for("the first attempts are aborted", lambda: open_transactions(cluster) == [], 60)


def test_nothing_of_a_write_that_fails_is_visible(
    rows: RowsFn, servers: str, new_topic: TopicFn, read: ReadFn, publish: PublishFn, cluster: Cluster
) -> None:
    """What its tasks have staged ends by abort, or by the time-out: then readers pass it."""
    topic = new_topic(1)

    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.partitionId() == 1:
            raise RuntimeError("this task never succeeds")

    frame = rows(30_000)
    writer = frame.mapInArrow(fails, frame.schema).write.format("smq").mode("append")
    with pytest.raises(PySparkException, match="this task never succeeds"):
        writer.options(servers=servers, topic=topic, transactionTimeoutMs="5000").save()
    publish(topic, 0, numbered(1))
    wait_for("readers pass what was staged", lambda: read(topic).count() == 1, 120)
    wait_for("all that was staged has ended", lambda: open_transactions(cluster) == [], 120)


def staged(servers: str, topic: str, version: int, *texts: str, **options: str) -> tuple[SmqWriter, Staged]:
    """The work of one task, without Spark."""
    named = {"txnappid": f"app of {topic}", "txnversion": str(version)}
    writer = writer_of(_schema("value string"), servers=servers, topic=topic, **named, **options)
    return writer, writer.write(iter([pa.record_batch([pa.array(texts)], names=["value"])]))


def writer_of(schema: StructType, **options: str) -> SmqWriter:
    return SmqWriter(sink_options(options, overwrite=False, is_stream=False), schema)


def test_two_jobs_with_one_name_are_fenced_and_not_interleaved(
    servers: str, new_topic: TopicFn, read: ReadFn, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(1)
    first, of_first = staged(servers, topic, 0, "0", "1")
    second, of_second = staged(servers, topic, 0, "0", "1")
    with pytest.raises(SinkError, match=r"another writer has taken the place of this one.*start the query again"):
        first.commit([of_first])
    second.commit([of_second])
    dropped = f"batch 0 of app of {topic} is not newer than its last one: its rows are dropped"
    assert dropped not in caplog.messages
    second.commit([of_second])  # the answer was lost, and it is asked again
    assert dropped in caplog.messages
    late, of_late = staged(servers, topic, 0, "0", "1")
    late.commit([of_late])
    assert numbers(read(topic)) == [0, 1]
    following, of_following = staged(servers, topic, 1, "2")
    following.commit([of_following])
    assert numbers(read(topic)) == [0, 1, 2]


def test_what_a_dead_task_has_staged_ends_by_its_time_out(
    servers: str, new_topic: TopicFn, read: ReadFn, publish: PublishFn, cluster: Cluster
) -> None:
    """No client aborts it: readers wait at its first row, then they pass. A commit that comes later says what to do."""
    topic = new_topic(1)
    writer, of_task = staged(servers, topic, 0, "never visible", transactiontimeoutms="5000")
    assert len(open_transactions(cluster)) == 1
    publish(topic, 0, numbered(1))
    wait_for("readers pass what was staged", lambda: read(topic).count() == 1, 120)
    assert open_transactions(cluster) == []
    with pytest.raises(SinkError, match=r"open for longer than transactionTimeoutMs.*start the query again"):
        writer.commit([of_task])
    assert [row.value for row in read(topic).collect()] == [b"v0"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"topic": None, "value": b"v"}, "its column 'topic' is null"),
        ({"topic": "{topic}", "partition": 2, "value": b"v"}, "names partition 2: '{topic}' has partitions 0 to 1"),
        ({"topic": "{topic}", "partition": -1, "value": b"v"}, "names partition -1"),
        ({"topic": "no-such-topic", "value": b"v"}, "could not be written.*no-such-topic"),
        ({"topic": "{topic}", "value": bytes(2_000_000)}, "could not be written.*BATCH_TOO_LARGE"),
    ],
    ids=["topic is null", "partition is too high", "partition is negative", "unknown topic", "too large"],
)
def test_a_row_that_cannot_be_written_fails_its_task_and_says_why(
    servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster, row: dict[str, Any], message: str
) -> None:
    topic = new_topic(2)
    columns = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("value", pa.binary())])
    bad = row | {"topic": row["topic"] and row["topic"].format(topic=topic)}
    rows = pa.RecordBatch.from_pylist([{"topic": topic, "value": b"good"}, bad], columns)
    writer = writer_of(_schema("topic string, partition integer, value binary"), servers=servers)
    with pytest.raises(SinkError, match=message.format(topic=topic)):
        writer.write(iter([rows]))
    wait_for("the task has aborted what it had staged", lambda: open_transactions(cluster) == [])
    assert read(topic).count() == 0


def _schema(text: str) -> StructType:
    schema = StructType()
    for column in text.split(", "):
        name, kind = column.split()
        schema.add(name, kind)
    return schema


def test_a_topic_that_is_deleted_while_rows_are_staged_costs_the_other_topics_nothing(
    servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster
) -> None:
    """Deleted before the commit, it takes its rows with it. Deleted before its rows are sent, it fails the task."""
    kept, deleted = new_topic(1), new_topic(1)
    columns = pa.schema([("topic", pa.string()), ("value", pa.binary())])
    rows = pa.RecordBatch.from_pylist([{"topic": kept, "value": b"0"}, {"topic": deleted, "value": b"1"}], columns)
    first, second = (writer_of(_schema("topic string, value binary"), servers=servers) for _ in range(2))
    of_first = first.write(iter([rows]))

    def deleting() -> Iterator[pa.RecordBatch]:
        yield rows
        with SyncAdmin(cluster.servers) as admin:
            admin.delete_topic(deleted)

    with pytest.raises(SinkError, match=f"could not be written.*{deleted}"):
        second.write(deleting())
    first.commit([of_first])
    assert [row.value for row in read(kept).collect()] == [b"0"]
    wait_for("nothing is left open", lambda: open_transactions(cluster) == [])


@pytest.mark.parametrize("winner", [0, 1])
def test_of_two_attempts_at_the_same_time_the_one_that_spark_takes_is_visible(
    servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, winner: int
) -> None:
    """Speculation, without the Spark cluster of `speculation`: both stage all rows, and one of them is taken."""
    topic = new_topic(1)
    found = []
    for number in (0, 1):
        attempt = SimpleNamespace(partitionId=lambda: 0, attemptNumber=lambda number=number: number)
        monkeypatch.setattr(TaskContext, "get", lambda attempt=attempt: attempt)
        writer, of_attempt = staged(servers, topic, 0, "0", "1", transactiontimeoutms="5000")
        found.append(of_attempt)
    assert len(open_transactions(cluster)) == 2, "neither has fenced the other"
    writer.commit([found[winner]])
    wait_for("what the other one has staged is aborted", lambda: open_transactions(cluster) == [], 120)
    assert numbers(read(topic)) == [0, 1]


def test_an_abort_that_arrives_late_does_not_end_what_the_next_batch_has_staged(
    servers: str, new_topic: TopicFn, read: ReadFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a dead attempt has staged is aborted after the commit; the next batch has the same transactional ids."""
    topic = new_topic(1)
    _, of_dead = staged(servers, topic, 0, "0")
    assert of_dead.producer is not None
    following: list[tuple[SmqWriter, Staged]] = []
    admin = Connections.admin

    def delayed(connections: Connections, address: str) -> Any:
        stub: Any = admin(connections, address)
        abort = stub.AbortTransaction

        def late(request: Any, timeout: float) -> Any:
            following.extend([staged(servers, topic, 1, "1")] if not following else [])
            return abort(request, timeout=timeout)

        stub.AbortTransaction = late
        return stub

    monkeypatch.setattr(Connections, "admin", delayed)
    abort_of_dead_quietly(connected(tuple(servers.split(",")), 60_000, Security()), of_dead.producer.transactional_id)
    ((writer, of_next),) = following
    writer.commit([of_next])
    assert numbers(read(topic)) == [1]


def test_rows_are_staged_through_the_death_of_a_leader(
    servers: str, new_topic: TopicFn, read: ReadFn, cluster: Cluster
) -> None:
    topic = new_topic(3)
    victim = cluster.wait_leader(topic, 0)

    def batches() -> Iterator[pa.RecordBatch]:
        for n in range(60):
            if n == 30:
                cluster.kill(victim)
            texts = [f"{n * 1000 + i:0100}" for i in range(1000)]
            yield pa.record_batch([pa.array(texts)], names=["value"])

    writer = writer_of(_schema("value string"), servers=servers, topic=topic)
    try:
        writer.commit([writer.write(batches())])
    finally:
        cluster.restart(victim)
    assert numbers(read(topic)) == list(range(60_000))


# --------------------------------------------------------------------------------------------------- streams
def run(spark: SparkSession, servers: str, source: str, checkpoint: Path, **options: Any) -> int:
    """Copies a topic to the end with `writeStream`; returns the rows that were read."""
    stream = spark.readStream.format("smq").options(servers=servers, subscribe=source, startingOffsets="earliest")
    if "tasks" in options:
        stream = stream.option("minPartitions", options.pop("tasks"))
    frame = stream.option("maxOffsetsPerTrigger", "100").load().select("key", "value")
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    if "foreach" in options:
        writer = writer.foreachBatch(options["foreach"])
    else:
        writer = writer.format("smq").options(servers=servers, **options)
    query = writer.start()
    assert query.awaitTermination(300)
    return sum(progress.numInputRows for progress in query.recentProgress)


def forget_last(written: Path) -> None:
    """Of `commits`: as if the driver had died between the sink's commit and its entry in the checkpoint."""
    last = max(written.glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def test_a_replayed_micro_batch_is_visible_once(
    spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn, read: ReadFn, tmp_path: Path
) -> None:
    source, target = new_topic(2), new_topic(3)
    for partition in (0, 1):
        publish(source, partition, numbered(150, first=150 * partition))
    assert run(spark, servers, source, tmp_path, topic=target) == 300
    for tasks in (1, 5):
        forget_last(tmp_path / "commits")
        count = run(spark, servers, source, tmp_path, topic=target, tasks=tasks)
        assert count == 100, "Spark runs the last micro-batch again, divided in another way"
    publish(source, 0, numbered(20, first=300))
    assert run(spark, servers, source, tmp_path, topic=target) == 20
    found = sorted(row.value for row in read(target).select("value").collect())
    assert found == sorted(b"v%d" % n for n in range(320))


def test_a_micro_batch_that_its_checkpoint_has_lost_is_refused_until_its_loss_is_accepted(
    spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn, read: ReadFn, tmp_path: Path
) -> None:
    """A disk or a hand has lost the last batch: Spark plans it again, with what has come since."""
    source, target = new_topic(1), new_topic(1)
    publish(source, 0, numbered(10))
    assert run(spark, servers, source, tmp_path, topic=target) == 10
    for lost in ("commits", "offsets"):
        forget_last(tmp_path / lost)
    publish(source, 0, numbered(5, first=10))
    why = r"(?s)batch 0 of .* was committed with 10 rows, and this one has 15.*is kept.*a new checkpointLocation"
    with pytest.raises(PySparkException, match=why):
        run(spark, servers, source, tmp_path, topic=target)
    assert run(spark, servers, source, tmp_path, topic=target, failOnDataLoss="false") == 15
    publish(source, 0, numbered(3, first=15))
    assert run(spark, servers, source, tmp_path, topic=target) == 3
    kept = [*range(10), *range(15, 18)]
    assert sorted(row.value for row in read(target).collect()) == sorted(b"v%d" % n for n in kept)


def test_a_replayed_foreach_batch_is_visible_once(
    spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn, read: ReadFn, tmp_path: Path
) -> None:
    source, target = new_topic(1), new_topic(1)
    publish(source, 0, numbered(150))

    def write(frame: DataFrame, batch_id: int) -> None:
        options = {"servers": servers, "topic": target, "txnAppId": f"job {target}", "txnVersion": str(batch_id)}
        frame.write.format("smq").options(**options).mode("append").save()

    assert run(spark, servers, source, tmp_path, foreach=write) == 150
    forget_last(tmp_path / "commits")
    assert run(spark, servers, source, tmp_path, foreach=write) == 50
    assert sorted(row.value for row in read(target).collect()) == sorted(b"v%d" % n for n in range(150))


def test_a_wrong_column_is_found_before_a_task_runs(
    spark: SparkSession, servers: str, new_topic: TopicFn, tmp_path: Path
) -> None:
    topic = new_topic(1)
    writer = spark.range(1).write.format("smq").options(servers=servers, topic=topic).mode("append")
    with pytest.raises(PySparkException, match="a write needs a column 'value'"):
        writer.save()
    stream = spark.readStream.format("rate").load().writeStream.format("smq").option("servers", servers)
    with pytest.raises(Exception, match="column 'value' must be binary or string, not bigint"):  # at start or later
        stream.options(topic=topic, checkpointLocation=str(tmp_path)).start().awaitTermination(300)
