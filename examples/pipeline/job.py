"""The streaming job: `python -m examples.pipeline.job --servers S --topic T --output D --checkpoint C`.

Owns the query. It prints one line of JSON per completed micro-batch. It may be killed at any moment and started again
with the same arguments: the checkpoint holds its position, and the file sink accepts each batch once. SIGTERM ends it.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED
from smq.spark_connector.stream.lag import LagListener, QueryLag

FLIGHT = "origin string, time_hour string, distance bigint, arr_delay double"
# How far a flight may be behind the newest one and still count. Flights are published in order of their days, evenly to
# all partitions, so one day covers the distance between partitions.
LATENESS = "1 day"


def windows(flights: DataFrame) -> DataFrame:
    """Flights, miles and minutes of delay by day (UTC) and airport of departure; a day appears once it is over."""
    parsed = flights.select(f.from_json(f.col("value").cast("string"), FLIGHT).alias("flight")).select("flight.*")
    timed = parsed.withColumn("at", f.to_timestamp("time_hour")).withWatermark("at", LATENESS)
    counted = timed.groupBy(f.window("at", "1 day").alias("day"), "origin").agg(
        f.count("*").alias("flights"),
        f.sum("distance").alias("miles"),
        f.sum("arr_delay").alias("delay_minutes"),
    )
    return counted.select(f.col("day.start").alias("day"), "origin", "flights", "miles", "delay_minutes")


def start(spark: SparkSession, arguments: argparse.Namespace) -> StreamingQuery:
    """Starts the query."""
    flights = (
        spark.readStream.format("smq")
        .option("servers", arguments.servers)
        .option("subscribe", arguments.topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", arguments.rows_per_batch)
        .load()
    )
    return (
        windows(flights)
        .writeStream.format("parquet")
        .option("path", arguments.output)
        .option("checkpointLocation", arguments.checkpoint)
        .outputMode("append")
        .queryName("flights by day")
        .start()
    )


def main(given: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m examples.pipeline.job", description=__doc__)
    parser.add_argument("--servers", required=True, help="gRPC addresses, host:port[,host:port]")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--output", required=True, help="directory of the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of the query's own state")
    parser.add_argument("--rows-per-batch", type=int, default=20_000)
    arguments = parser.parse_args(given)
    conf = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2", **SHORT_LIVED}
    spark = session("flights by day", conf=conf)
    spark.streams.addListener(LagListener(emit_lag))
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    emit(event="started", java=gateway.proc.pid)
    query = start(spark, arguments)

    def stop(number: int, frame: FrameType | None) -> None:
        query.stop()

    signal.signal(signal.SIGTERM, stop)
    query.awaitTermination()
    spark.stop()


def emit_lag(lag: QueryLag) -> None:
    emit(event="batch", batch=lag.batch_id, lag=lag.total)


def emit(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
