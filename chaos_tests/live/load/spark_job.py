"""The streaming query of a chaos run, as a program: a topic into JSON files by `format("smq")`, exactly once.

    python -m chaos_tests.live.load.spark_job SERVERS TOPIC DIRECTORY

Owns its checkpoint and its files in DIRECTORY. It reads until `ends.json` exists and everything below those ends is in
the files; then it writes their rows to `rows.json` and ends. A query that fails is restarted from its checkpoint, as an
operator would do, but not for ever.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from smq.spark_connector import session
from smq.spark_connector.local_session import SHORT_LIVED

FAILURES_MAX: Final = 10
FAILED: Final = 3  # exit code: the query fails again and again
ENDS: Final = "ends.json"
ROWS: Final = "rows.json"
CHECKPOINT: Final = "checkpoint"
_FILES: Final = "files"
_SCHEMA: Final = "k string, o bigint, v bigint"
_POLL_S: Final = 0.3

Row = list[Any]  # the partition's key, offset, value


class Job:
    def __init__(self, servers: str, topic: str, directory: Path) -> None:
        self._directory = directory
        self._spark = session("chaos", master="local[2]", conf={"spark.log.level": "ERROR", **SHORT_LIVED})
        options = {"servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
        stream = self._spark.readStream.format("smq").options(**options).load()
        self._stream = stream.selectExpr(
            "concat(topic, '/', partition) as k", "offset as o", "cast(cast(value as string) as bigint) as v"
        )
        self._failures = 0
        self._query = self._start()

    def run(self) -> int:
        """The exit code."""
        while True:
            if not self._query.isActive:
                self._failures += 1
                print(f"failure {self._failures}: {self._query.exception()}", flush=True)
                if self._failures > FAILURES_MAX:
                    return FAILED
                self._query = self._start()
            elif (self._directory / ENDS).exists():
                rows = self._rows()
                if self._reach(rows, json.loads((self._directory / ENDS).read_text())):
                    self._query.stop()
                    self._write(self._rows())
                    return 0
            time.sleep(_POLL_S)

    def _start(self) -> Any:
        writer = self._stream.coalesce(1).writeStream.format("json").trigger(processingTime="500 milliseconds")
        places = {"path": str(self._directory / _FILES), "checkpointLocation": str(self._directory / CHECKPOINT)}
        return writer.options(**places).start()

    def _rows(self) -> list[Row]:
        """The files that the sink's own log names: a file of a failed micro-batch does not count."""
        frame = self._spark.read.schema(_SCHEMA).json(str(self._directory / _FILES))
        return [[row.k, row.o, row.v] for row in frame.collect()]

    @staticmethod
    def _reach(rows: list[Row], ends: dict[str, int]) -> bool:
        found: dict[str, int] = {}
        for key, offset, _ in rows:
            found[key] = max(found.get(key, 0), offset + 1)
        return all(found.get(key, 0) >= end for key, end in ends.items())

    def _write(self, rows: list[Row]) -> None:
        fresh = self._directory / f"{ROWS}.new"
        fresh.write_text(json.dumps(sorted(rows)))
        fresh.replace(self._directory / ROWS)


if __name__ == "__main__":
    servers, topic, directory = sys.argv[1:]
    sys.exit(Job(servers, topic, Path(directory)).run())
