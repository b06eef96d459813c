"""A Python data source that does nothing: the cost of Spark itself around any source written in Python.

Owns rows of the same shape as a topic's, made once in each worker, and positions that are a number. It fetches and
decodes nothing. Use `format("floor")` after `spark.dataSource.register(FloorSource)`.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from smq.records import NewRecord, encode_batch, parse_header
from smq.spark_connector.decode import ROWS_PER_BATCH, Decoder, RawBatch
from smq.spark_connector.schema import arrow_schema, check_projection, default_schema

VALUE: Final = b"v" * 100
TASKS: Final = 2
BATCHES: Final = 50


class Share(InputPartition):
    """The number of rows of one task."""

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self.rows = rows


class FloorSource(DataSource):
    """Option `rows`: the rows of a batch read, or of each micro-batch."""

    @classmethod
    def name(cls) -> str:
        return "floor"

    def schema(self) -> StructType:
        return default_schema(include_headers=False, include_index=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return FloorReader(int(self.options["rows"]), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return FloorStreamReader(int(self.options["rows"]), schema)


class FloorReader(DataSourceReader):
    def __init__(self, rows: int, schema: StructType) -> None:
        self._rows = rows
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return _shares(self._rows)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _made(partition, self._schema)


class FloorStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Ends after BATCHES micro-batches."""

    def __init__(self, rows: int, schema: StructType) -> None:
        self._rows = rows
        self._schema = schema

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The end is always the same."""

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"at": min(start["at"] + self._rows, BATCHES * self._rows)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return _shares(end["at"] - start["at"])

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _made(partition, self._schema)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing is kept."""


def _shares(rows: int) -> list[InputPartition]:
    return [Share(rows // TASKS) for _ in range(TASKS)]


def _made(partition: InputPartition, schema: StructType) -> Iterator[Any]:
    assert isinstance(partition, Share)
    batch = _batch(schema.json())
    for at in range(0, partition.rows, ROWS_PER_BATCH):
        yield batch.slice(0, partition.rows - at)


@cache
def _batch(schema_json: str) -> pa.RecordBatch:
    schema = StructType.fromJson(json.loads(schema_json))
    data = encode_batch([NewRecord(None, VALUE, 1_700_000_000_000)] * ROWS_PER_BATCH)
    decoder = Decoder("floor", 0, check_projection(schema), arrow_schema(schema))
    raw = RawBatch(header=parse_header(data), data=data, ts_ns=0)
    (batch,) = [*decoder.add(raw, 0, ROWS_PER_BATCH), *decoder.flush()]
    return batch
