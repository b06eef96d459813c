"""The columns of a write: those of Spark's Kafka sink, and `timestamp`.

Owns which columns a DataFrame must have, checked on the driver before a task runs, how an Arrow batch becomes rows, and
by which number a replay knows the same rows again. Other columns are ignored, as Spark's Kafka sink does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The rows of an Arrow batch, column by column out of Arrow; None for a column that is not there."""

    count: int
    topic: list[str | None] | None
    partition: list[int | None] | None
    key: list[bytes | None] | None
    value: list[bytes | None]
    headers: list[Sequence[tuple[str, bytes | None]] | None] | None
    timestamp_ms: list[int | None] | None

    def rows(self) -> Iterator[Row]:
        nothing: list[Any] = [None] * self.count
        columns = (self.topic, self.partition, self.key, self.value, self.headers, self.timestamp_ms)
        return zip(*(nothing if column is None else column for column in columns), strict=True)

    def digest(self, topic: str | None) -> int:
        """The sum of a hash of each row, of 64 bits, so that neither the order of the rows nor their division among
        tasks matters. Of what the query gave: not of where a row without a key went, nor when one without a timestamp
        was written. `topic` is the option's, if it has one. Column by column, because a stronger hash of each row
        would cost a third of what its writing does."""
        topics: list[str | None] | None = self.topic if topic is None else [topic]
        hashes = np.zeros(self.count, np.uint64)
        for each in (
            _of_bytes(None if topics is None else [None if name is None else name.encode() for name in topics]),
            _of_numbers(self.partition),
            _of_bytes(self.key),
            _of_bytes(self.value),
            _of_bytes(
                None if self.headers is None else [None if h is None else repr(h).encode() for h in self.headers]
            ),
            _of_numbers(self.timestamp_ms),
        ):
            hashes = _mixed(hashes ^ each)
        return int(hashes.sum(dtype=np.uint64))


_Hashes: TypeAlias = "npt.NDArray[np.uint64]"
_NULL: Final = 1 << 63  # of no value: lengths and numbers are below it


def _of_bytes(values: list[bytes | None] | None) -> "_Hashes | np.uint64":
    if values is None:
        return np.uint64(_NULL)
    present, count = [value or b"" for value in values], len(values)
    lengths, checksums = np.fromiter(map(len, present), np.uint64, count), map(crc32c, present)
    hashes = lengths << np.uint64(32) | np.fromiter(checksums, np.uint64, count)
    if None in values:
        hashes[[value is None for value in values]] = _NULL
    return hashes


def _of_numbers(values: list[int | None] | None) -> "_Hashes | np.uint64":
    if values is None:
        return np.uint64(_NULL)
    return np.fromiter((_NULL if value is None else value & (_NULL - 1) for value in values), np.uint64)


def _mixed(hashes: _Hashes) -> _Hashes:
    """Spreads each number over all bits (the finalizer of splitmix64): sums of mere CRCs would miss values that change
    places."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def values_of(batch: pa.RecordBatch, columns: Columns) -> Values:
    def listed(place: int | None) -> list[Any] | None:
        return None if place is None else batch.column(place).to_pylist()

    headers = listed(columns.headers)
    return Values(
        count=batch.num_rows,
        topic=listed(columns.topic),
        partition=listed(columns.partition),
        key=None if columns.key is None else _as_bytes(batch, columns.key),
        value=_as_bytes(batch, columns.value),
        headers=None if headers is None else [None if h is None else _headers(h) for h in headers],
        timestamp_ms=None if columns.timestamp is None else _times_ms(batch, columns.timestamp),
    )


def _as_bytes(batch: pa.RecordBatch, place: int) -> list[bytes | None]:
    column = batch.column(place)
    found: list[bytes | None] = (column if _is_binary(column.type) else column.cast(pa.binary())).to_pylist()
    return found


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
