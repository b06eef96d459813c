"""A streaming query of this session into Parquet files, shared by several tests."""

from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.support import SLOW_START


class Job:
    """A query into Parquet files, started and restarted on one checkpoint."""

    def __init__(self, spark: SparkSession, root: Path, **options: str) -> None:
        self.spark = spark
        self.out = str(root / "out")
        self.checkpoint = str(root / "checkpoint")
        self.options = options

    def start(self, *, available_now: bool = True) -> StreamingQuery:
        stream = self.spark.readStream.format("smq").options(**self.options).load()
        writer = stream.select("partition", "offset").coalesce(1).writeStream.format("parquet").option("path", self.out)
        writer = writer.option("checkpointLocation", self.checkpoint)
        return (
            writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
        ).start()

    def run(self) -> list[int]:
        """Reads everything; returns the sizes of the micro-batches."""
        for _ in range(5):
            query = self.start()
            try:
                assert query.awaitTermination(300)
                break
            except StreamingQueryException as e:
                if SLOW_START not in str(e):
                    raise
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def rows(self) -> list[tuple[int, int]]:
        """(partition, offset) of every row of the sink."""
        return sorted((r.partition, r.offset) for r in self.spark.read.parquet(self.out).collect())
