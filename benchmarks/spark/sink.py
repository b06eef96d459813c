"""What Spark's sink costs: rows per CPU second of a batch write, and a micro-batch with the sink and without it.

Owns these figures. The rows are those of floor.py, which cost next to nothing to read, on two cores that the
nodes share. Beside the sink stand Spark's own for nothing and for Parquet, and its Kafka connector's, which writes rows
at least once. Compare by ratios within one run.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.report import Report
from benchmarks.spark.jars import KafkaJars
from benchmarks.spark.reads import MicroBatch, Runs, Sink, find_jars, floor, spark_session, to_nothing
from smq.testing.cluster import Cluster

PARTITIONS: Final = 3
MICRO_BATCHES: Final = (2, 50_000)  # rows of each
TURNS: Final = 2  # with the sink and without it, of which the better one counts
# 100 bytes, without a key and with one of a thousand: a key decides the row's partition.
COLUMNS: Final = {
    "100 B": ("value",),
    "100 B and a key": ("cast(offset % 1000 as string) as key", "value"),
}


def measure(cluster: Cluster, report: Report, *, records: int) -> None:
    with tempfile.TemporaryDirectory(prefix="smq-bench-spark-") as name:
        directory = Path(name)
        jars = find_jars(report, directory)
        with spark_session(jars) as spark:
            runs = Runs(spark, cluster, report, records)
            for label, columns in COLUMNS.items():
                for sink, write in _writes(cluster, jars, directory).items():
                    runs.rate(f"write of {label}: {sink}", write, partial(_rows, spark, records, columns))
            _micro_batches(spark, cluster, runs, report, directory)


def _rows(spark: SparkSession, records: int, columns: tuple[str, ...]) -> DataFrame:
    return floor(spark, records).batch("").selectExpr(*columns)


def _writes(cluster: Cluster, jars: KafkaJars | None, directory: Path) -> dict[str, Callable[[DataFrame], None]]:
    topic = cluster.make_topic(PARTITIONS)
    parquet = str(directory / "rows")
    found: dict[str, Callable[[DataFrame], None]] = {
        "nothing": lambda frame: frame.write.format("noop").mode("overwrite").save(),
        "Parquet": lambda frame: frame.write.mode("overwrite").parquet(parquet),
        'format("smq")': lambda frame: (
            frame.write.format("smq").options(servers=cluster.servers, topic=topic).mode("append").save()
        ),
    }
    if jars is not None:
        options = {"kafka.bootstrap.servers": ",".join(node.kafka for node in cluster.nodes.values()), "topic": topic}
        found[f"Kafka connector {jars.version}"] = lambda frame: frame.write.format("kafka").options(**options).save()
    return found


def _micro_batches(spark: SparkSession, cluster: Cluster, runs: Runs, report: Report, directory: Path) -> None:
    topic = cluster.make_topic(PARTITIONS)

    def to_topic(frame: DataFrame) -> DataStreamWriter:
        return frame.select("value").writeStream.format("smq").options(servers=cluster.servers, topic=topic)

    for rows in MICRO_BATCHES:
        source = floor(spark, rows)
        found: dict[str, list[MicroBatch]] = {"to nothing": [], 'to format("smq")': []}
        sinks: list[tuple[str, Sink]] = list(zip(found, (to_nothing, to_topic), strict=True))
        for _ in range(TURNS):
            for label, sink in sinks:
                found[label].append(runs.micro_batches(source, "", rows, directory, sink, label))
            sinks.reverse()  # neither of the two has the warmer machine
        wall, wall_with = (min(batch.p50_ms for batch in batches) for batches in found.values())
        cpu, cpu_with = (min(batch.cpu_ms for batch in batches) for batches in found.values())
        report.add(
            f"what the sink adds to a micro-batch of {rows:,} rows",
            f"{wall_with - wall:.0f} ms, ratio {wall_with / wall:.2f}; {cpu_with - cpu:.0f} ms of CPU,"
            f" ratio {cpu_with / cpu:.2f}",
            ms=wall_with - wall,
            cpu_ms=cpu_with - cpu,
        )
