"""The columns of `format("smq")`: those of Spark's Kafka connector by default, ours if a schema names them.

Owns names, Spark types and the check of a user's projection. Does no I/O. Imported on the driver and on executors.
"""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from smq.spark_connector.errors import OptionError

_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

# Order and types are those of Spark's Kafka connector, so that jobs can switch without changes.
KAFKA_COLUMNS: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
}
HEADERS_COLUMN: Final = "headers"
INDEX_COLUMNS: Final[dict[str, DataType]] = {"_index": LongType(), "ts_ns": LongType(), "epoch": IntegerType()}
ALL_COLUMNS: Final[dict[str, DataType]] = {**KAFKA_COLUMNS, HEADERS_COLUMN: _HEADERS, **INDEX_COLUMNS}
_BY_LOWER_NAME: Final = {name.lower(): name for name in ALL_COLUMNS}


def default_schema(*, include_headers: bool, include_index: bool) -> StructType:
    """The schema of a read without a user's schema."""
    columns = dict(KAFKA_COLUMNS)
    if include_headers:
        columns[HEADERS_COLUMN] = _HEADERS
    if include_index:
        columns.update(INDEX_COLUMNS)
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def check_projection(schema: StructType) -> tuple[str, ...]:
    """The canonical column name of each field of a user's schema, in its order.

    OptionError for an unknown column, a wrong type, or a column declared NOT NULL (Spark's Arrow reader refuses fields
    that are not nullable). Names are case-insensitive, as in Spark SQL.
    """
    if not schema.fields:
        raise OptionError(f"name at least one of the columns {', '.join(ALL_COLUMNS)} in .schema()")
    return tuple(_check_field(field) for field in schema.fields)


def _check_field(field: StructField) -> str:
    name = _BY_LOWER_NAME.get(field.name.lower())
    if name is None:
        raise OptionError(
            f"format('smq') has no column {field.name!r}: name only {', '.join(ALL_COLUMNS)} in .schema(), "
            "and parse the value column for anything else"
        )
    wanted = ALL_COLUMNS[name]
    if field.dataType.simpleString() != wanted.simpleString():
        raise OptionError(
            f"column {field.name!r} is {wanted.simpleString()}, not {field.dataType.simpleString()}: "
            f"write `{field.name} {wanted.simpleString()}` in .schema() and cast in a select"
        )
    if not field.nullable:
        raise OptionError(f"column {field.name!r} must be nullable in .schema(): leave NOT NULL out")
    return name


def arrow_schema(schema: StructType) -> pa.Schema:
    """Exactly the Arrow schema against which Spark checks the batches of `schema` (microseconds, UTC)."""
    return to_arrow_schema(schema, timezone="UTC")


def needs_records(columns: Sequence[str]) -> bool:
    """False if batch headers alone answer the projection, so that nothing need be decompressed."""
    return any(name in _RECORD_COLUMNS for name in columns)


_RECORD_COLUMNS: Final = frozenset({"key", "value", "timestamp", HEADERS_COLUMN})
