"""A streaming query without Spark: it calls the stream reader as Spark does, and keeps a checkpoint as Spark does."""

import json
import pickle
from typing import Any

from smq.spark_connector.options import stream_options
from smq.spark_connector.schema import default_schema
from smq.spark_connector.stream.stream_reader import SmqStreamReader

SCHEMA = default_schema(include_headers=False, include_index=True)
Json = dict[str, Any]


class Query:
    """A streaming query as Spark runs it: its two logs are the checkpoint, which outlives the process."""

    def __init__(self, servers: str, **options: str) -> None:
        given = {"servers": servers, "subscribe": "t", "retryTimeoutMs": "2000", **options}
        if "subscribePattern" in options:
            del given["subscribe"]
        self.options = {key.lower(): value for key, value in given.items()}
        self.offset_log: list[str] = []
        self.commits = 0
        self.rows: list[tuple[str, int, int]] = []
        self.restart()

    def restart(self, **options: str) -> None:
        """A new process on the same checkpoint."""
        self.options.update({key.lower(): value for key, value in options.items()})
        self.reader = SmqStreamReader(stream_options(self.options), SCHEMA)

    def start(self) -> Json:
        """Where the next micro-batch begins."""
        if self.commits:
            found: Json = json.loads(self.offset_log[self.commits - 1])
            return found
        return again(self.reader.initialOffset())

    def plan(self) -> bool:
        """Writes the next micro-batch to the offset log, as Spark does; False if there is nothing new."""
        start = self.start()
        end = again(self.reader.latestOffset(start, self.reader.getDefaultReadLimit()))
        if self.offset_log and json.dumps(end) == json.dumps(start):
            return False
        self.offset_log.append(json.dumps(end))
        return True

    def run(self) -> list[tuple[str, int, int]]:
        """Runs the planned micro-batch that is not committed; returns its rows."""
        end = json.loads(self.offset_log[self.commits])
        rows: list[tuple[str, int, int]] = []
        worker: SmqStreamReader = pickle.loads(pickle.dumps(SmqStreamReader(stream_options(self.options), SCHEMA)))
        for part in self.reader.partitions(self.start(), end):
            for batch in worker.read(part):
                columns = (batch.column(name).to_pylist() for name in ("topic", "partition", "offset"))
                rows += zip(*columns, strict=True)
        return rows

    def commit(self) -> None:
        self.commits += 1

    def batch(self) -> int:
        """Plans, runs and commits one micro-batch. Returns its number of rows, -1 if there was nothing to plan."""
        if not self.plan():
            return -1
        rows = self.run()
        self.rows += rows
        self.commit()
        return len(rows)

    def drain(self) -> list[int]:
        sizes = []
        while (size := self.batch()) >= 0:
            sizes.append(size)
            assert len(sizes) < 100
        return sizes


def again(value: Json) -> Json:
    """Over the socket and back."""
    copy: Json = json.loads(json.dumps(value))
    return copy
