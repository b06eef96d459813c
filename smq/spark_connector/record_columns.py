"""The records of one batch as columns: keys, values, create times and headers, as far as a projection needs them.

Owns the choice between two ways to read records, which give the same result: field by field if the records have one
shape, otherwise one by one with the compiled reader. Does no I/O. Imported by `decode`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from aiokafka.codec import gzip_decode, lz4_decode, snappy_decode, zstd_decode
from aiokafka.record.default_records import DefaultRecordBatch

from smq.records import CODECS, HEADER_BYTES, TIMESTAMP_TYPE_MASK, BatchCorrupt, BatchHeader
from smq.spark_connector.fixed_width import RECORDS_MIN, Stretch, stretches
from smq.spark_connector.schema import HEADERS_COLUMN

Ints: TypeAlias = npt.NDArray[np.int64]
HeaderPairs: TypeAlias = list[tuple[str, bytes | None]]

HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_BATCHES_PER_TRY: Final = 16  # how often the fast way is tried again in a partition with records of many shapes
_DECOMPRESS: Final = {
    CODECS["gzip"]: gzip_decode,
    CODECS["snappy"]: snappy_decode,
    CODECS["lz4"]: lz4_decode,
    CODECS["zstd"]: zstd_decode,
}


@dataclass(slots=True)
class RecordColumns:
    """The requested columns, each in consecutive pieces; the other columns are empty."""

    key: list[pa.Array] = field(default_factory=list)
    value: list[pa.Array] = field(default_factory=list)
    timestamp: list[Ints] = field(default_factory=list)  # milliseconds
    headers: list[pa.Array] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(map(len, self.key or self.value or self.timestamp or self.headers))

    @property
    def size_bytes(self) -> int:
        """The size of keys and values, which producers choose."""
        return sum(piece.nbytes for piece in (*self.key, *self.value))

    def cut(self, start: int, rows: int) -> "RecordColumns":
        """Some of the rows."""
        return RecordColumns(
            key=[pa.concat_arrays(self.key).slice(start, rows)] if self.key else [],
            value=[pa.concat_arrays(self.value).slice(start, rows)] if self.value else [],
            timestamp=[np.concatenate(self.timestamp)[start : start + rows]] if self.timestamp else [],
            headers=[pa.concat_arrays(self.headers).slice(start, rows)] if self.headers else [],
        )

    def extend(self, more: "RecordColumns") -> None:
        self.key += more.key
        self.value += more.value
        self.timestamp += more.timestamp
        self.headers += more.headers


class RecordReader:
    """Reads the batches of one partition; remembers whether recent ones had one shape."""

    def __init__(self, columns: Iterable[str]) -> None:
        """`columns`: those of a projection; columns that do not come from records are ignored."""
        requested = set(columns)
        self._names: Final = tuple(name for name in ("key", "value", "timestamp", HEADERS_COLUMN) if name in requested)
        self._batches_to_skip = 0  # batches without another try of the fast way

    def read(self, data: bytes, header: BatchHeader) -> RecordColumns:
        """All records of a batch without gaps. BatchCorrupt if they do not decode, even with a correct CRC."""
        try:
            found = self._by_field(data, header) or self._columns(DefaultRecordBatch(data))
        except Exception as e:  # gzip, zlib, cramjam, struct and aiokafka each raise errors of their own
            raise undecodable(header, e) from e
        return found

    def read_some(self, data: bytes, header: BatchHeader, lo: int, hi: int) -> tuple[RecordColumns, Ints]:
        """The records with offsets in [lo, hi), and those offsets, of a batch that may have gaps."""
        try:
            kept = [r for r in DefaultRecordBatch(data) if lo <= r.offset < hi]
        except Exception as e:  # as above
            raise undecodable(header, e) from e
        return self._columns(kept), np.array([r.offset for r in kept], dtype=np.int64)

    def _by_field(self, data: bytes, header: BatchHeader) -> RecordColumns | None:
        """None if the records change shape often, or are too few."""
        if header.count < RECORDS_MIN or HEADERS_COLUMN in self._names:
            return None
        if self._batches_to_skip:
            self._batches_to_skip -= 1
            return None
        body = memoryview(data)[HEADER_BYTES:]
        found = stretches(_DECOMPRESS[header.codec](body.tobytes()) if header.codec else body, header.count)
        if found is None:
            self._batches_to_skip = _BATCHES_PER_TRY - 1
            return None
        return _of_stretches(found, header, self._names)

    def _columns(self, records: Iterable[Any]) -> RecordColumns:
        """One by one. Each record is dropped immediately, which is three times as fast as keeping it."""
        if len(self._names) == 1:
            (name,) = self._names
            return _arrays({name: list(map(_GETTERS[name], records))})
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        timestamps: list[int] = []
        headers: list[HeaderPairs | None] = []
        add_key, add_value, add_timestamp = keys.append, values.append, timestamps.append
        if HEADERS_COLUMN in self._names:
            for r in records:
                add_key(r.key)
                add_value(r.value)
                add_timestamp(r.timestamp)
                headers.append(_headers(r))
        else:  # the hot loop: an extra column costs less here than a condition
            for r in records:
                add_key(r.key)
                add_value(r.value)
                add_timestamp(r.timestamp)
        found: dict[str, list[Any]]
        found = {"key": keys, "value": values, "timestamp": timestamps, HEADERS_COLUMN: headers}
        return _arrays({name: found[name] for name in self._names})


def undecodable(header: BatchHeader, error: Exception) -> BatchCorrupt:
    return BatchCorrupt(f"the batch at offset {header.base_offset} does not decode: {error}")


def _headers(record: Any) -> HeaderPairs | None:
    return list(record.headers) or None


_GETTERS: Final[dict[str, Callable[[Any], Any]]] = {
    **{name: attrgetter(name) for name in ("key", "value", "timestamp")},
    HEADERS_COLUMN: _headers,
}


def _arrays(lists: Mapping[str, Sequence[Any]]) -> RecordColumns:
    columns = RecordColumns()
    if "key" in lists:
        columns.key.append(pa.array(lists["key"], pa.binary()))
    if "value" in lists:
        columns.value.append(pa.array(lists["value"], pa.binary()))
    if "timestamp" in lists:
        columns.timestamp.append(np.array(lists["timestamp"], dtype=np.int64))
    if HEADERS_COLUMN in lists:
        columns.headers.append(pa.array(lists[HEADERS_COLUMN], HEADERS_TYPE))
    return columns


def _of_stretches(found: Sequence[Stretch], header: BatchHeader, names: Sequence[str]) -> RecordColumns:
    columns = RecordColumns()
    is_appended = bool(header.attributes & TIMESTAMP_TYPE_MASK)
    for stretch in found:
        if "key" in names:
            columns.key.append(stretch.binary(stretch.shape.key))
        if "value" in names:
            columns.value.append(stretch.binary(stretch.shape.value))
        if "timestamp" in names:
            deltas = stretch.timestamp_deltas
            columns.timestamp.append(
                np.full_like(deltas, header.max_timestamp) if is_appended else deltas + header.base_timestamp
            )
    return columns
