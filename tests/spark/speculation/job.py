"""A job that speculates: python -m tests.spark.speculation.job MASTER ROOT

For each line of its input, the options of a write as JSON, it writes a batch, or a stream from the topic `source` to
its end, and says so. Each write has TASKS tasks.
"""

import json
import sys
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED
from tests.spark.speculation.source import SpeculatedSource

TASKS: Final = 4
ROWS: Final = 1_000
SPECULATION: Final = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",  # once half of the tasks are done,
    "spark.speculation.multiplier": "1.5",  # one that takes this many times as long as they did
    "spark.speculation.minTaskRuntime": "500ms",
}
MEMORY: Final = {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.executor.instances": "2"}


def main(master: str, root: Path) -> None:
    conf = {"spark.log.level": "WARN", **SPECULATION, **MEMORY, **SHORT_LIVED}
    spark = session("speculating", master=master, conf=conf)
    spark.dataSource.register(SpeculatedSource)
    for number, line in enumerate(sys.stdin):
        options = json.loads(line)
        source = options.pop("source", None)
        if source is None:
            _write_batch(spark, options)
        else:
            _write_stream(spark, options, source, root / f"checkpoint-{number}")
        sys.stdout.write("written\n")
        sys.stdout.flush()
    spark.stop()


def _write_batch(spark: SparkSession, options: dict[str, str]) -> None:
    rows = spark.range(0, ROWS, 1, TASKS).selectExpr("cast(id as string) as value")
    rows.write.format(SpeculatedSource.name()).options(**options).mode("append").save()


def _write_stream(spark: SparkSession, options: dict[str, str], source: str, checkpoint: Path) -> None:
    stream = spark.readStream.format("smq").options(servers=options["servers"], subscribe=source)
    rows = stream.options(startingOffsets="earliest", minPartitions=str(TASKS)).load().select("value")
    writer = rows.writeStream.format(SpeculatedSource.name()).options(**options)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
