"""Reads fixed-width records field by field instead of record by record.

The start of a record is known only from the record before it, unless both have one size. Then a stretch of records is a
matrix with one record per row, and a field is some of its columns. Producers of fixed-width values write long such
stretches. Owns how a stretch is found and verified: every length, count and offset in it is compared, so the result is
that of the compiled reader, or none. Pure. Imported by `record_columns`.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smq.records import INT32_MAX

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

# Each stretch costs some 30 calls of numpy: smaller batches and shorter stretches are faster record by record.
RECORDS_MIN: Final = 512
_STRETCH_MIN: Final = 512  # on average
_STRETCHES_FREE: Final = 4  # the first ones are short: offsets and times soon need one more byte
_FIRST_WINDOW: Final = 64  # from there on, an offset needs more than one byte: the first stretch of a batch ends there
_VARINT_BYTES_MAX: Final = 10
_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The places of a record's fields, in bytes from its start, as (start, length); the length of a null is -1."""

    size: int
    # Attributes, lengths and counts: the same bytes in each record of a stretch. Some twice, to fill whole words.
    same: tuple[int, ...]
    timestamp: tuple[int, int]  # start and length of a varint
    offset: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive records of one shape, one per row. `timestamp_deltas` are relative to the batch's base timestamp."""

    shape: Shape
    rows: Bytes
    timestamp_deltas: Ints

    def binary(self, field: tuple[int, int]) -> pa.Array:
        """A field of bytes as an Arrow array."""
        start, length = field
        count = len(self.rows)
        if length < 0:
            return pa.nulls(count, pa.binary())
        ends = np.arange(0, length * count + 1, length or 1, dtype=np.int32)
        ends = ends if length else np.zeros(count + 1, dtype=np.int32)
        data = np.ascontiguousarray(self.rows[:, start : start + length])
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def stretches(body: bytes | memoryview, count: int) -> list[Stretch] | None:
    """All `count` records of the decompressed `body`. None if they form no long stretches, have headers, or contradict
    the batch header: then the compiled reader reads them, or reports the error."""
    data = np.frombuffer(body, dtype=np.uint8)
    if len(data) > INT32_MAX:  # Arrow's offsets would not hold it
        return None
    found: list[Stretch] = []
    at = done = 0
    window = _FIRST_WINDOW
    while done < count:
        shape = shape_at(body, at)
        if shape is None or len(found) > _STRETCHES_FREE + done // _STRETCH_MIN:
            return None
        rows_max = min(count - done, window, (len(data) - at) // shape.size)
        stretch = _stretch(data[at : at + rows_max * shape.size].reshape(rows_max, shape.size), shape, done)
        size = len(stretch.rows)
        if size == 0:
            return None
        if size == rows_max:
            window = count
        found.append(stretch)
        at += size * shape.size
        done += size
    return found if at == len(data) else None


def shape_at(body: bytes | memoryview, at: int) -> Shape | None:
    """The shape of the record at `at`; None if it has headers, or does not fit into `body`."""
    try:
        length, after_length = _varint(body, at)
        attributes, timestamp = body[after_length], after_length + 1
        _, offset = _varint(body, timestamp)
        _, key_length = _varint(body, offset)
        key_bytes, key = _varint(body, key_length)
        value_length = key + max(0, key_bytes)
        value_bytes, value = _varint(body, value_length)
        headers = value + max(0, value_bytes)
        is_plain = attributes == body[headers] == 0 and min(key_bytes, value_bytes) >= -1
    except IndexError:
        return None
    if not is_plain or headers + 1 != after_length + length:
        return None
    same = [*range(at, timestamp), *range(key_length, key), *range(value_length, value), headers]
    same += [headers] * (-len(same) % _WORD_BYTES)
    return Shape(
        size=headers + 1 - at,
        same=tuple(column - at for column in same),
        timestamp=(timestamp - at, offset - timestamp),
        offset=(offset - at, key_length - offset),
        key=(key - at, key_bytes),
        value=(value - at, value_bytes),
    )


def _stretch(rows: Bytes, shape: Shape, first: int) -> Stretch:
    """The leading `rows` that have the shape; `first` is the number of the first row in the batch."""
    timestamps, is_same = _varints(rows, *shape.timestamp)
    offsets, is_offset = _varints(rows, *shape.offset)
    is_same &= is_offset
    is_same &= offsets == np.arange(first, first + len(rows))
    words = rows.take(shape.same, axis=1).view(np.uint64)  # eight bytes per comparison
    for column in range(words.shape[1]):
        is_same &= words[:, column] == words[0, column]
    size = len(rows) if is_same.all() else int(is_same.argmin())
    return Stretch(shape=shape, rows=rows[:size], timestamp_deltas=timestamps[:size])


def _varints(rows: Bytes, start: int, length: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The zigzag varints of `length` bytes at column `start`, and which rows have one of that length."""
    last = rows[:, start + length - 1]
    is_one = last < 128
    raw = last.astype(np.uint64)
    for column in range(start + length - 2, start - 1, -1):
        byte = rows[:, column]
        is_one &= byte >= 128
        raw <<= np.uint64(7)
        raw |= byte & 127
    return (raw >> np.uint64(1)).view(np.int64) ^ -(raw & np.uint64(1)).view(np.int64), is_one


def _varint(body: bytes | memoryview, at: int) -> tuple[int, int]:
    """A zigzag varint and its end. IndexError if it does not end within `body` or within its longest form."""
    raw = 0
    for i in range(_VARINT_BYTES_MAX):
        byte = body[at + i]
        raw |= (byte & 127) << (7 * i)
        if byte < 128:
            return (raw >> 1) ^ -(raw & 1), at + i + 1
    raise IndexError(at)
