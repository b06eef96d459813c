"""Spark's rates on a topic: with format("smq"), with its own Kafka connector, and on Parquet of the same rows.

Owns the queries and the figures: rows per second, rows per CPU second of Spark (driver, Java and Python workers; the
nodes' CPU time is separate), a warm query of two tasks, the cost of one more task, and a micro-batch. All run in one
session on two cores, which the nodes share. A Python source that does nothing (floor.py) shows which part is
Spark's own.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.cpu import TreeCpu
from benchmarks.report import Report
from benchmarks.spark.floor import FloorSource
from benchmarks.spark.jars import JarsMissing, KafkaJars, fetch_kafka_jars
from smq.clients.sync import SyncProducer
from smq.spark_connector import session
from smq.testing.cluster import Cluster

VALUE_BYTES: Final = 100
CHUNK: Final = 10_000  # records handed to the producer in one call
REPEATS: Final = 3
SLOW_S: Final = 5.0  # a query that takes longer is run twice in all
TASKS_MANY: Final = 34  # compared with two: 32 more tasks
AIM_ROWS_PER_CPU_S: Final = 1_500_000
AIM_QUERY_MS: Final = 150.0
AIM_BATCH_MS: Final = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One way to the same rows. `batch(topic)` and `stream(topic, rows of one micro-batch)` have a value column;
    `needed(topic, columns)` has only those columns."""

    name: str
    batch: Callable[[str], DataFrame]
    needed: Callable[[str, str], DataFrame] | None = None
    stream: Callable[[str, int], DataFrame] | None = None
    tasks: Callable[[str, int], DataFrame] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one of a query costs: milliseconds of wall time, and of Spark's CPU time."""

    p50_ms: float
    cpu_ms: float


Sink = Callable[[DataFrame], DataStreamWriter]


def to_nothing(frame: DataFrame) -> DataStreamWriter:
    return frame.writeStream.format("noop")


def measure(cluster: Cluster, report: Report, *, records: int) -> None:
    """Measures all sources. If no Maven registry answers, it reports that the Kafka connector is left out."""
    with tempfile.TemporaryDirectory(prefix="smq-bench-spark-") as name:
        directory = Path(name)
        topics = {codec: _fill(cluster, records, codec) for codec in ("none", "lz4")}
        small = _fill(cluster, 2 * TASKS_MANY, "none")
        jars = find_jars(report, directory)
        with spark_session(jars) as spark:
            runs = Runs(spark, cluster, report, records)
            sources = _sources(spark, cluster, jars)
            for codec, topic in topics.items():
                for source in sources:
                    runs.rates(source, topic, f"100 B values, {codec}")
            runs.rates(_parquet(spark, sources[0], topics["none"], directory / "rows"), "", "Parquet, snappy")
            runs.rates(floor(spark, records), "", "ready made")
            few = floor(spark, 2 * TASKS_MANY)
            for source in [*sources, few, _parquet(spark, sources[0], small, directory / "few")]:
                runs.query(source, small)
            for source in sources:
                runs.tasks(source, small)
            for source in sources:
                runs.micro_batches(source, small, 2, directory)
                runs.micro_batches(source, topics["none"], max(2, records // 40), directory)
            runs.micro_batches(few, small, 2, directory)


def find_jars(report: Report, directory: Path) -> KafkaJars | None:
    try:
        return fetch_kafka_jars(pyspark.__version__, directory)
    except JarsMissing as e:
        report.add("Spark's Kafka connector", f"left out: {e}")
        return None


def _fill(cluster: Cluster, records: int, codec: str) -> str:
    """A topic with half of the records in each of two partitions, for two tasks."""
    topic = cluster.make_topic(2)
    bootstrap = [node.grpc for node in cluster.alive()]
    values = [os.urandom(VALUE_BYTES // 2).hex().encode() for _ in range(CHUNK)]  # compresses by half, as text does

    with SyncProducer(bootstrap, compression=codec) as producer:
        for partition in (0, 1):
            for at in range(0, records // 2, CHUNK):
                producer.send_many(topic, values[: min(CHUNK, records // 2 - at)], partition=partition)
    return topic


@contextmanager
def spark_session(jars: KafkaJars | None) -> Iterator[SparkSession]:
    conf = {"spark.log.level": "ERROR"}
    if jars is not None:
        conf["spark.jars"] = ",".join(map(str, jars.jars))
    spark = session("smq benchmarks", master="local[2]", conf=conf)
    try:
        yield spark
    finally:
        spark.stop()


def _sources(spark: SparkSession, cluster: Cluster, jars: KafkaJars | None) -> list[Source]:
    options = {"servers": ",".join(node.grpc for node in cluster.nodes.values())}
    found = [_kafka_like(spark, "smq", 'format("smq")', options)]
    if jars is not None:
        options = {"kafka.bootstrap.servers": ",".join(node.kafka for node in cluster.nodes.values())}
        found.append(_kafka_like(spark, "kafka", f"Kafka connector {jars.version}", options))
    return found


def _kafka_like(spark: SparkSession, format_name: str, name: str, options: dict[str, str]) -> Source:
    """Both connectors take the same options."""
    both = {**options, "startingOffsets": "earliest"}

    def batch(topic: str) -> DataFrame:
        return spark.read.format(format_name).options(**both).option("subscribe", topic).load()

    def tasks(topic: str, count: int) -> DataFrame:
        read = spark.read.format(format_name).options(**both).option("subscribe", topic)
        return read.option("minPartitions", count).load()

    def stream(topic: str, rows: int) -> DataFrame:
        read = spark.readStream.format(format_name).options(**both).option("subscribe", topic)
        return read.option("maxOffsetsPerTrigger", rows).load()

    def needed(topic: str, columns: str) -> DataFrame:
        read = spark.read.format(format_name).options(**both).option("subscribe", topic)
        return read.schema(columns).load()

    # Spark's Kafka connector takes no schema.
    prunes = needed if format_name == "smq" else None
    return Source(name=name, batch=batch, needed=prunes, stream=stream, tasks=tasks)


def floor(spark: SparkSession, rows: int) -> Source:
    spark.dataSource.register(FloorSource)

    def stream(_: str, of_batch: int) -> DataFrame:
        return spark.readStream.format("floor").option("rows", of_batch).load()

    return Source(
        name="a Python source that does nothing",
        batch=lambda _: spark.read.format("floor").option("rows", rows).load(),
        needed=lambda _, columns: spark.read.format("floor").option("rows", rows).schema(columns).load(),
        stream=stream,
    )


def _parquet(spark: SparkSession, source: Source, topic: str, directory: Path) -> Source:
    source.batch(topic).write.parquet(str(directory))
    return Source(name="Parquet", batch=lambda _: spark.read.parquet(str(directory)))


QUERIES: Final[dict[str, Callable[[DataFrame], Any]]] = {
    "count": lambda frame: frame.count(),
    "aggregate": lambda frame: frame.agg(f.sum(f.length("value")), f.max("offset"), f.max("timestamp")).collect(),
    "noop": lambda frame: frame.write.format("noop").mode("overwrite").save(),
}
# The columns that the queries use. Spark prunes no columns of a Python source: the reader must name them.
NEEDED: Final = {"count": "offset bigint", "aggregate": "value binary, offset bigint, timestamp timestamp"}


class Runs:
    """Measurements in one session."""

    def __init__(self, spark: SparkSession, cluster: Cluster, report: Report, records: int) -> None:
        self._report = report
        self._records = records
        self._nodes = [TreeCpu(node.pid) for node in cluster.nodes.values()]
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        self._spark_tree = TreeCpu(gateway.proc.pid)

    def _java_cpu_s(self) -> float:
        return self._spark_tree.root_seconds()

    def _python_cpu_s(self) -> float:
        """CPU time of the driver and the Python workers."""
        return time.process_time() + self._spark_tree.seconds() - self._spark_tree.root_seconds()

    def _nodes_cpu_s(self) -> float:
        return sum(node.seconds() for node in self._nodes)

    def rates(self, source: Source, topic: str, what: str) -> None:
        """Runs each query over all columns, and over only those that it uses."""
        for name, query in QUERIES.items():
            self.rate(f"{name}, {what}: {source.name}", query, partial(source.batch, topic))
        if source.needed is None:
            return
        for name, columns in NEEDED.items():
            needed = partial(source.needed, topic, columns)
            self.rate(f"{name} of its columns, {what}: {source.name}", QUERIES[name], needed)

    def rate(self, what: str, query: Callable[[DataFrame], object], load: Callable[[], DataFrame]) -> None:
        """Runs twice to warm up (unless that takes minutes), then REPEATS times: the best wall time, and the CPU time
        of all runs, split into Java and Python."""
        began = time.perf_counter()
        query(load())
        repeats = REPEATS if time.perf_counter() - began < SLOW_S else 1
        if repeats > 1:
            query(load())
        walls = []
        python, java, nodes = self._python_cpu_s(), self._java_cpu_s(), self._nodes_cpu_s()
        for _ in range(repeats):
            began = time.perf_counter()
            query(load())
            walls.append(time.perf_counter() - began)
        python = (self._python_cpu_s() - python) / repeats
        java = (self._java_cpu_s() - java) / repeats
        nodes = (self._nodes_cpu_s() - nodes) / repeats
        rate, per_cpu = self._records / min(walls), self._records / (python + java)
        each_ns = {name: 1e9 * spent / self._records for name, spent in (("Java", java), ("Python", python))}
        split = ", ".join(f"{name} {ns:.0f} ns a row" for name, ns in each_ns.items())
        self._report.add(
            what,
            f"{rate / 1e6:.2f} M rows/s, {per_cpu / 1e6:.2f} M rows per CPU second ({split}; nodes: {nodes:.2f} CPU s)",
            rows_per_s=rate,
            rows_per_cpu_s=per_cpu,
            java_ns_per_row=each_ns["Java"],
            python_ns_per_row=each_ns["Python"],
            nodes_cpu_s=nodes,
            rows=self._records,
            aim_rows_per_cpu_s=AIM_ROWS_PER_CPU_S,
        )

    def query(self, source: Source, topic: str) -> None:
        """A warm query of two tasks and almost no rows: the cost of starting one, planning included."""
        times = _times_ms(lambda: source.batch(topic).count(), 20)
        self._report.add(
            f"warm query of two tasks: {source.name}",
            f"p50 {statistics.median(times):.0f} ms, min {min(times):.0f} ms (aim {AIM_QUERY_MS:.0f})",
            p50_ms=statistics.median(times),
            min_ms=min(times),
        )

    def tasks(self, source: Source, topic: str) -> None:
        """The CPU time of one more task."""
        if source.tasks is None:
            return
        make = source.tasks
        few = statistics.median(_times_ms(lambda: make(topic, 2).count(), 10))
        many = statistics.median(_times_ms(lambda: make(topic, TASKS_MANY).count(), 5))
        cost = 2 * (many - few) / (TASKS_MANY - 2)  # two tasks run in parallel
        self._report.add(f"one task more: {source.name}", f"{cost:.1f} ms of a core", task_ms=cost)

    def micro_batches(
        self, source: Source, topic: str, rows_max: int, directory: Path, sink: Sink = to_nothing, label: str = ""
    ) -> MicroBatch:
        """About forty micro-batches of a stateless query with its checkpoint on this disk; the first ten warm up. The
        CPU time is that of all, with the start of the query."""
        assert source.stream is not None
        checkpoint = tempfile.mkdtemp(dir=directory)
        query = sink(source.stream(topic, rows_max)).option("checkpointLocation", checkpoint)
        cpu, nodes = self._python_cpu_s() + self._java_cpu_s(), self._nodes_cpu_s()
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        progress = [p for p in running.recentProgress if p["numInputRows"]]
        cpu_ms = 1000 * (self._python_cpu_s() + self._java_cpu_s() - cpu) / len(progress)
        nodes_cpu_ms = 1000 * (self._nodes_cpu_s() - nodes) / len(progress)
        progress = progress[10:]
        times: list[float] = [p["durationMs"]["triggerExecution"] for p in progress]
        parts = {
            name: statistics.median(p["durationMs"].get(name, 0) for p in progress)
            for name in ("latestOffset", "queryPlanning", "addBatch", "walCommit", "commitOffsets")
        }
        split = ", ".join(f"{name} {ms:.0f}" for name, ms in parts.items())
        rows = statistics.median(p["numInputRows"] for p in progress)
        self._report.add(
            f"micro-batch of {rows:,.0f} rows: {label or source.name}",
            f"p50 {statistics.median(times):.0f} ms, min {min(times):.0f} ms (aim {AIM_BATCH_MS:.0f}; {split});"
            f" {cpu_ms:.0f} ms of CPU, nodes {nodes_cpu_ms:.0f} ms",
            p50_ms=statistics.median(times),
            min_ms=min(times),
            parts_ms=parts,
            cpu_ms=cpu_ms,
            nodes_cpu_ms=nodes_cpu_ms,
        )
        return MicroBatch(p50_ms=statistics.median(times), cpu_ms=cpu_ms)


def _times_ms(work: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each run, after two to warm up."""
    times = []
    for _ in range(count + 2):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    return times[2:]
