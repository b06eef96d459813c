"""A batch write of its own, on two executors, in which Spark runs a second attempt of slow tasks beside the first.

python -m tests.spark.speculating_job '{"servers": "...", "topic": "t", ...}' MARKS

Spark does not speculate in local mode. Each attempt of a task leaves a file in the folder MARKS.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED

ROWS: Final = 80_000
TASKS: Final = 4
# Of each attempt of the first two tasks, after its rows: the second attempt of one task overtakes the first, and that
# of the other does not.
PAUSES_S: Final = {(0, 0): 60, (0, 1): 0, (1, 0): 15, (1, 1): 60}

CONF: Final = {
    "spark.log.level": "ERROR",
    "spark.executor.memory": "512m",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.task.duration.threshold": "3s",
}


def main(options: str, marks: str) -> None:
    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        (Path(marks) / f"{partition}-{attempt}").touch()
        time.sleep(pauses_s.get((partition, attempt), 0))

    pauses_s = PAUSES_S  # the function travels to the executors by itself
    spark = session("job", master="local-cluster[2,2,1024]", conf={**SHORT_LIVED, **CONF})
    rows = spark.range(0, ROWS, 1, TASKS).selectExpr("cast(id as string) as value")
    frame = rows.mapInArrow(slow, rows.schema)
    frame.write.format("smq").options(**json.loads(options)).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
