"""The columns of a write: those of Spark's Kafka sink, and `timestamp`.

Owns which columns a DataFrame must have, checked on the driver before a task runs, and how an Arrow batch becomes rows.
Other columns are ignored, as Spark's Kafka sink does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, StringType, StructField, StructType, TimestampType

from smq.spark_connector.errors import OptionError, SinkError

Row: TypeAlias = tuple[
    str | None, int | None, bytes | None, bytes | None, Sequence[tuple[str, bytes | None]] | None, int | None
]  # topic, partition, key, value, headers, timestamp in ms

_BYTES: Final = (BinaryType(), StringType())
_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "key": _BYTES,
    "value": _BYTES,
    "topic": (StringType(),),
    "partition": (IntegerType(),),
    "headers": (_HEADERS,),
    "timestamp": (TimestampType(),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The place of each column in the DataFrame; None if it has none."""

    key: int | None
    value: int
    topic: int | None
    partition: int | None
    headers: int | None
    timestamp: int | None


def check_columns(schema: StructType, *, has_topic: bool) -> Columns:
    """OptionError if a column is missing, is there twice, or has another type."""
    places: dict[str, int | None] = dict.fromkeys(_TYPES)
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in places:
            continue
        if places[name] is not None:
            raise OptionError(f"there are two columns {name!r}: drop one of them")
        _check_type(field, name)
        places[name] = place
    value = places.pop("value")
    if value is None:
        raise OptionError(
            f"a write needs a column 'value' of string or binary, and there are only {', '.join(schema.names)}:"
            " write .selectExpr('... AS value')"
        )
    if has_topic:
        places["topic"] = None  # the option takes precedence, as in the Kafka connector
    elif places["topic"] is None:
        raise OptionError("a write needs option 'topic', or a column 'topic' that names each row's")
    return Columns(value=value, **places)


def _check_type(field: StructField, name: str) -> None:
    wanted = " or ".join(kind.simpleString() for kind in _TYPES[name])
    if field.dataType.simpleString() not in wanted.split(" or "):
        raise OptionError(f"column {name!r} must be {wanted}, not {field.dataType.simpleString()}: cast it in a select")


def rows_of(batch: pa.RecordBatch, columns: Columns) -> Iterator[Row]:
    """The rows of an Arrow batch, column by column out of Arrow."""
    count = batch.num_rows
    nothing: list[Any] = [None] * count

    def listed(place: int | None) -> list[Any]:
        return nothing if place is None else batch.column(place).to_pylist()

    def as_bytes(place: int | None) -> list[Any]:
        if place is None:
            return nothing
        column = batch.column(place)
        found: list[Any] = (column if _is_binary(column.type) else column.cast(pa.binary())).to_pylist()
        return found

    headers = [None if h is None else _headers(h) for h in listed(columns.headers)]
    return zip(
        listed(columns.topic),
        listed(columns.partition),
        as_bytes(columns.key),
        as_bytes(columns.value),
        headers,
        _times_ms(batch, columns.timestamp) if columns.timestamp is not None else nothing,
        strict=True,
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _times_ms(batch: pa.RecordBatch, place: int) -> list[int | None]:
    """Arrow's microseconds, rounded down."""
    return [None if us is None else us // 1000 for us in batch.column(place).cast(pa.int64()).to_pylist()]


def _headers(given: Sequence[Any]) -> list[tuple[str, bytes | None]]:
    pairs = []
    for header in given:
        if header is None or header["key"] is None:
            raise SinkError("a row has a header without a key: leave it out of column 'headers'")
        pairs.append((header["key"], header["value"]))
    return pairs
