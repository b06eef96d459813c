"""Decodes raw record batches to Arrow: columns are filled batch by batch, and sent once they are large enough.

Owns the source of every projected column. Does no I/O and keeps nothing between reads; runs on executors. Fields of
single records come from `record_columns`; all others are per batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smq.records import TIMESTAMP_TYPE_MASK, BatchCorrupt, BatchHeader
from smq.spark_connector.record_columns import RecordColumns, RecordReader
from smq.spark_connector.schema import HEADERS_COLUMN, needs_records

Ints: TypeAlias = npt.NDArray[np.int64]

# Arrow goes to the JVM fastest in batches of 10k-100k rows and 1-12 MB; a batch is sent when it passes either.
ROWS_PER_BATCH: Final = 50_000
BYTES_PER_BATCH: Final = 8 << 20
# Milliseconds beyond this do not fit into an int64 of Spark's microseconds. Such a create time is clamped: one
# producer's bad clock must not make a topic unreadable.
TIMESTAMP_MS_MAX: Final = (2**63 - 1) // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBatch:
    """A fetched record batch with a checked CRC; `ts_ns` is the append time of its base offset."""

    header: BatchHeader
    data: bytes
    ts_ns: int


@dataclass(slots=True)
class Block:
    """Rows decoded but not yet sent, in pieces: records, offsets, and the values that all rows of a batch share."""

    records: RecordColumns = field(default_factory=RecordColumns)
    offsets: list[Ints] = field(default_factory=list)
    shared: list[tuple[int, int, int, int]] = field(default_factory=list)  # rows, timestampType, ts_ns - offset, epoch
    rows: int = 0
    size_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.rows >= ROWS_PER_BATCH or self.size_bytes >= BYTES_PER_BATCH


class Decoder:
    """Turns the raw batches of one partition into Arrow record batches of one projection."""

    def __init__(self, topic: str, partition: int, columns: Sequence[str], schema: pa.Schema) -> None:
        """`columns` are the canonical names of `schema`'s fields, in order."""
        self._topic = topic
        self._partition = partition
        self._columns = tuple(columns)
        self._schema = schema
        self._needs_records = needs_records(columns)
        self._reader = RecordReader(columns)
        self._block = Block()

    def add(self, raw: RawBatch, lo: int, hi: int) -> Iterator[pa.RecordBatch]:
        """Adds the records of `raw` with offsets in [lo, hi); yields Arrow batches that are full.

        BatchCorrupt if the records do not decode, even with a correct CRC. A control batch has no rows.
        """
        header = raw.header
        if header.is_control or header.end <= lo or header.base_offset >= hi or lo >= hi:
            return
        if header.count == header.last_offset_delta + 1:
            self._add_dense(raw, lo, hi)
        else:
            self._add_sparse(raw, lo, hi)
        if self._block.is_full:
            yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        """The remaining rows, in equal pieces of at most twice ROWS_PER_BATCH rows (a batch slightly above the limit is
        not worth a second, tiny one)."""
        block, self._block = self._block, Block()
        if not block.rows:
            return
        whole = self._build(block)
        pieces = -(-block.rows // (2 * ROWS_PER_BATCH))
        size = -(-block.rows // pieces)
        for start in range(0, block.rows, size):
            yield whole.slice(start, size)

    def _add_dense(self, raw: RawBatch, lo: int, hi: int) -> None:
        """The usual batch: no offset is missing, so the range is a slice and offsets need no decoding."""
        header = raw.header
        first = max(lo, header.base_offset)
        last = min(hi, header.end)
        if self._needs_records:
            records = self._reader.read(raw.data, header)
            if records.rows != header.count:
                raise BatchCorrupt(f"the batch at {header.base_offset} does not hold {header.count} records as it says")
            if last - first < header.count:
                records = records.cut(first - header.base_offset, last - first)
            self._append_records(records)
        self._append_shared(np.arange(first, last, dtype=np.int64), raw)

    def _add_sparse(self, raw: RawBatch, lo: int, hi: int) -> None:
        """A batch from which compaction has removed records: each record's own offset counts."""
        records, offsets = self._reader.read_some(raw.data, raw.header, lo, hi)
        if self._needs_records:
            self._append_records(records)
        self._append_shared(offsets, raw)

    def _append_records(self, records: RecordColumns) -> None:
        self._block.records.extend(records)
        self._block.size_bytes += records.size_bytes

    def _append_shared(self, offsets: Ints, raw: RawBatch) -> None:
        rows = len(offsets)
        timestamp_type = int(bool(raw.header.attributes & TIMESTAMP_TYPE_MASK))
        self._block.offsets.append(offsets)
        self._block.shared.append((rows, timestamp_type, raw.ts_ns - raw.header.base_offset, raw.header.epoch))
        self._block.rows += rows

    def _build(self, block: Block) -> pa.RecordBatch:
        runs = np.array(block.shared, dtype=np.int64).reshape(-1, 4)
        made: dict[str, Any] = {}  # pa.Array; Arrow arrays have no common static type across element types
        for name in dict.fromkeys(self._columns):
            made[name] = _BUILDERS[name](self, block, runs)
        arrays = [made[name].cast(f.type) for name, f in zip(self._columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _offsets(self, block: Block, runs: Ints) -> pa.Array:
        return pa.array(np.concatenate(block.offsets))

    def _append_times(self, block: Block, runs: Ints) -> pa.Array:
        return pa.array(np.concatenate(block.offsets) + np.repeat(runs[:, 2], runs[:, 0]))

    def _timestamps(self, block: Block, runs: Ints) -> pa.Array:
        ms = np.concatenate(block.records.timestamp).clip(-TIMESTAMP_MS_MAX, TIMESTAMP_MS_MAX)
        return pa.array(ms * 1000).cast(pa.timestamp("us", tz="UTC"))

    def _constant(self, value: str | int, rows: int) -> pa.Array:
        return pa.repeat(pa.scalar(value), rows)


def _run(column: int) -> Callable[[Decoder, Block, Ints], Any]:
    """A builder of a column that a whole batch shares."""
    return lambda decoder, block, runs: pa.array(np.repeat(runs[:, column], runs[:, 0]))


_BUILDERS: Final[dict[str, Callable[[Decoder, Block, Ints], Any]]] = {
    "key": lambda decoder, block, runs: pa.concat_arrays(block.records.key),
    "value": lambda decoder, block, runs: pa.concat_arrays(block.records.value),
    "topic": lambda decoder, block, runs: decoder._constant(decoder._topic, block.rows),
    "partition": lambda decoder, block, runs: decoder._constant(decoder._partition, block.rows),
    "offset": Decoder._offsets,
    "timestamp": Decoder._timestamps,
    "timestampType": _run(1),
    HEADERS_COLUMN: lambda decoder, block, runs: pa.concat_arrays(block.records.headers),
    "_index": Decoder._offsets,
    "ts_ns": Decoder._append_times,
    "epoch": _run(3),
}
