"""Features and limits in Spark: lines of docs/spark.md that no other test covers, and its tables of them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.spark.support import numbered

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spark.md"

ReadFn = Callable[..., DataFrame]
PublishFn = Callable[..., None]
TopicFn = Callable[..., str]


# ------------------------------------------------------------------------------------------------ the page
def section() -> str:
    return PAGE.read_text().partition("\n## What works, and what does not\n")[2].partition("\n## ")[0]


def claims() -> set[str]:
    """The tests that the page's lines name."""
    return set(re.findall(r"\| `(test_[a-z0-9_]+)` \|$", section(), re.MULTILINE))


def existing_tests() -> set[str]:
    files = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in files for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}


def test_every_line_of_the_page_names_a_test_that_is_there() -> None:
    unknown = claims() - existing_tests()
    assert claims()
    assert not unknown, f"docs/spark.md names tests that are not there: {sorted(unknown)}"


def test_no_line_of_the_page_is_without_a_test() -> None:
    for line in section().splitlines():
        if line.startswith("| ") and not line.startswith("| what"):
            assert re.search(r"\| `test_[a-z0-9_]+` \|$", line), line


def test_every_test_of_this_file_is_a_line_of_the_page() -> None:
    own = re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE)
    about_the_page = {name for name in own if "of_the_page" in name}
    assert set(own) - about_the_page <= claims()


# ------------------------------------------------------------------------------------------------ its lines
def plan(frame: DataFrame) -> str:
    """The physical plan, without running it."""
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.mark.spark
@pytest.mark.cluster
def test_columns_are_pruned_by_schema_only(new_topic: TopicFn, read: ReadFn) -> None:
    topic = new_topic(1)
    (scan,) = [line for line in plan(read(topic).select("offset")).splitlines() if "Scan" in line]
    assert "value#" in scan
    (scan,) = [line for line in plan(read(topic, "offset bigint").select("offset")).splitlines() if "Scan" in line]
    assert "value#" not in scan


@pytest.mark.spark
@pytest.mark.cluster
def test_temporary_view_is_a_snapshot_until_it_is_replaced(
    spark: SparkSession, servers: str, new_topic: TopicFn, publish: PublishFn
) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(6))
    made = f"CREATE OR REPLACE TEMPORARY VIEW stale USING smq OPTIONS (servers '{servers}', subscribe '{topic}')"
    spark.sql(made)
    count = "SELECT count(*) FROM stale"
    assert spark.sql(count).first() == (6,)
    publish(topic, 0, numbered(4))
    assert spark.sql(count).first() == (6,)
    spark.sql(made)
    assert spark.sql(count).first() == (10,)


@pytest.mark.spark
@pytest.mark.cluster
def test_hidden_columns_must_be_asked_for_at_the_load(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(2))
    with pytest.raises(PySparkException, match="UNRESOLVED_COLUMN"):
        read(topic).select("_index").collect()
    rows = read(topic, includeIndex="true").selectExpr("`_index` = offset", "ts_ns > 0", "epoch >= 0").distinct()
    assert [tuple(row) for row in rows.collect()] == [(True, True, True)]


@pytest.mark.spark
@pytest.mark.cluster
def test_join_broadcasts_a_small_topic_only_on_request(new_topic: TopicFn, read: ReadFn) -> None:
    topic = new_topic(1)
    left, right = read(topic, "key binary, offset bigint"), read(topic, "key binary, value binary")
    assert "BroadcastHashJoin" not in plan(left.join(right, "key"))
    assert "BroadcastHashJoin" in plan(left.join(f.broadcast(right), "key"))


@pytest.mark.spark
def test_topic_is_no_table_name_after_the_format(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match=r"UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY|TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("SELECT * FROM smq.`flights`").collect()


@pytest.mark.spark
@pytest.mark.cluster
def test_continuous_mode_is_refused_by_spark(
    spark: SparkSession, servers: str, new_topic: TopicFn, tmp_path: Path
) -> None:
    stream = spark.readStream.format("smq").options(servers=servers, subscribe=new_topic(1)).load()
    writer = stream.writeStream.format("console").option("checkpointLocation", str(tmp_path))
    with pytest.raises(PySparkException, match=r"(?i)continuous"):
        writer.trigger(continuous="1 second").start().awaitTermination(60)


@pytest.mark.spark
@pytest.mark.cluster
def test_times_come_as_spark_and_as_the_log_keep_them(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(1, first=234))
    row = read(topic, includeIndex="true").selectExpr("unix_micros(timestamp) AS us", "ts_ns").first()
    assert row is not None
    assert row.us == (1000 + 234) * 1000
    assert row.ts_ns > 10**18


@pytest.mark.spark
@pytest.mark.cluster
def test_two_sides_of_a_self_join_read_the_same_offsets(new_topic: TopicFn, publish: PublishFn, read: ReadFn) -> None:
    topic = new_topic(1)
    publish(topic, 0, numbered(3))
    frame = read(topic, "offset bigint")
    assert frame.union(frame).count() == 6
    publish(topic, 0, numbered(3))
    assert frame.join(frame.withColumnRenamed("offset", "o"), f.col("offset") == f.col("o")).count() == 3
