"""A streaming job of its own: a topic into files, or into another topic, record by record. It can be killed.

python -m tests.spark.streaming_job ROOT GO

It starts Spark and then waits for the file GO, which has the options of the read as JSON, and `target`: the topic to
write to, through the steps of `steps`. Without it the rows go to files under ROOT. With `availableNow` the job ends.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED
from tests.spark.steps import DRIVER


def main(root: Path, go: Path) -> None:
    os.environ[DRIVER] = str(os.getpid())  # Java and the Python workers inherit it
    # A task is tried three times.
    spark = session("job", master="local[2,3]", conf={"spark.log.level": "ERROR", **SHORT_LIVED})
    while not go.exists():
        time.sleep(0.1)
    options = json.loads(go.read_text())
    target, is_ending = options.pop("target", None), options.pop("availableNow", False)
    writer = _to_files(spark, options, root / "out") if target is None else _to_topic(spark, options, target)
    writer = writer.option("checkpointLocation", str(root / "checkpoint"))
    trigger = writer.trigger(availableNow=True) if is_ending else writer.trigger(processingTime="0 seconds")
    trigger.start().awaitTermination()
    spark.stop()


def _to_files(spark: SparkSession, options: dict[str, Any], out: Path) -> DataStreamWriter:
    rows = _read(spark, "smq", options).selectExpr("topic", "partition", "offset", "cast(value as string) as value")
    return rows.coalesce(1).writeStream.format("parquet").option("path", str(out))


def _to_topic(spark: SparkSession, options: dict[str, Any], target: str) -> DataStreamWriter:
    """A row's value says where it comes from. Each partition that has records has a task of its own, so that a commit
    is one of several transactions."""
    from tests.spark.dying_source import DyingSource

    spark.dataSource.register(DyingSource)
    rows = _read(spark, DyingSource.name(), options | {"minPartitions": "1"})
    rows = rows.selectExpr("key", "concat_ws(' ', partition, offset, cast(value as string)) as value")
    return rows.writeStream.format(DyingSource.name()).options(servers=options["servers"], topic=target)


def _read(spark: SparkSession, name: str, options: dict[str, Any]) -> DataFrame:
    return spark.readStream.format(name).options(**options).load()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
