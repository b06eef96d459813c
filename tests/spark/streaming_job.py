"""A streaming job of its own: a topic into files, or into another topic, record by record. It can be killed.

python streaming_job.py '{"servers": "...", "subscribe": "t", ...}' OUT CHECKPOINT [available-now]
"""

import json
import sys

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED


def main(options: str, out: str, checkpoint: str, *mode: str) -> None:
    spark = session("job", master="local[2]", conf={"spark.log.level": "ERROR", **SHORT_LIVED})
    given = json.loads(options)
    target = given.pop("target", None)  # the topic to write to, instead of OUT
    stream = spark.readStream.format("smq").options(**given).load()
    rows = stream.selectExpr("topic", "partition", "offset", "cast(value as string) as value")
    if target is None:
        writer = rows.coalesce(1).writeStream.format("parquet").option("path", out)
    else:
        named = rows.selectExpr("concat_ws(' ', partition, offset, value) as value")
        writer = named.writeStream.format("smq").options(servers=given["servers"], topic=target)
    writer = writer.option("checkpointLocation", checkpoint)
    trigger = writer.trigger(availableNow=True) if mode else writer.trigger(processingTime="0 seconds")
    query = trigger.start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
