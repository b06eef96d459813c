"""The files that `smq topic export` and `smq disk export` write, JSONL and Parquet: complete, or absent.

Owns their columns and the renaming into place. Memory is bounded by one row group, whatever the size of the topic.
`cli.export` and `cli.disk_export` import it; pyarrow is loaded for Parquet only.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol

from smq import extra_advice
from smq.clients import ConsumerRecord
from smq.coordinator.cli.record_format import record_line
from smq.coordinator.user_errors import UserError

FORMATS: Final = ("jsonl", "parquet")
ROW_GROUP_ROWS: Final = 100_000  # readers skip and parallelise by row groups of about this size
ROW_GROUP_BYTES: Final = 32 << 20  # of keys and values: a row group is built in memory, so large records end it early
_PARQUET_ADVICE: Final = f"Parquet needs pyarrow: {extra_advice('spark')}; or export with --format jsonl"


class RecordFile(Protocol):
    """Takes records in order; the file is complete once `close` has returned."""

    def write(self, records: Sequence[ConsumerRecord]) -> None: ...
    def close(self) -> None: ...
    def discard(self) -> None:
        """Instead of `close`: writes nothing that is still to be written."""


class JsonlFile:
    """One line per record; see `record_format.record_line` for its fields."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, records: Sequence[ConsumerRecord]) -> None:
        self._out.writelines(record_line(record, offset_name="_index") + b"\n" for record in records)

    def close(self) -> None:
        """Nothing is left to write."""

    discard = close


class ParquetFile:
    """Columns topic, partition, _index, ts_ns, timestamp (the producer's, ms UTC), key, value, headers."""

    def __init__(self, out: BinaryIO) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as e:
            raise UserError(_PARQUET_ADVICE) from e
        header = pa.struct([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])
        self._schema = pa.schema(
            [
                pa.field("topic", pa.string(), nullable=False),
                pa.field("partition", pa.int32(), nullable=False),
                pa.field("_index", pa.int64(), nullable=False),
                pa.field("ts_ns", pa.int64(), nullable=False),
                pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
                ("key", pa.binary()),
                ("value", pa.binary()),
                ("headers", pa.list_(pa.field("element", header, nullable=False))),
            ]
        )
        self._array: Any = pa.array
        self._batch: Any = pa.RecordBatch
        self._writer: Any = pq.ParquetWriter(out, self._schema, compression="zstd")
        self._waiting: list[ConsumerRecord] = []
        self._waiting_bytes = 0

    def write(self, records: Sequence[ConsumerRecord]) -> None:
        for record in records:
            self._waiting.append(record)
            self._waiting_bytes += len(record.key or b"") + len(record.value or b"")
            if len(self._waiting) >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
                self._write_group()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        if self._waiting:
            self._write_group()
        self._writer.close()

    def discard(self) -> None:
        """A row group takes seconds on a busy machine."""
        self._waiting = []
        self._writer.close()  # which would otherwise write its footer later, to a closed file

    def _write_group(self) -> None:
        rows = self._waiting
        columns: list[list[Any]] = [
            [r.topic for r in rows],
            [r.partition for r in rows],
            [r.offset for r in rows],
            [r.ts_ns for r in rows],
            [r.timestamp_ms for r in rows],
            [r.key for r in rows],
            [r.value for r in rows],
            [[{"key": key, "value": value} for key, value in r.headers] for r in rows],
        ]
        arrays = [self._array(column, f.type) for column, f in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(self._batch.from_arrays(arrays, schema=self._schema))
        self._waiting, self._waiting_bytes = [], 0


_FILES: Final[dict[str, type[JsonlFile] | type[ParquetFile]]] = {"jsonl": JsonlFile, "parquet": ParquetFile}


@contextlib.contextmanager
def record_file(path: Path, format_name: str) -> Iterator[RecordFile]:
    """A file that is at `path`, fsynced, once the block has succeeded. If the block fails, nothing of it is left."""
    try:
        with AtomicFile(path) as out:
            file = _FILES[format_name](out)
            try:
                yield file
            except BaseException:  # also on Ctrl-C: the writer must write nothing later
                file.discard()
                raise
            file.close()
    except OSError as e:
        if isinstance(e, ConnectionError):
            raise
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from e


class AtomicFile:
    """A new file beside `path`: renamed to it when the block succeeds, removed otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> BinaryIO:
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.part")
        self._out = self._temporary.open("xb", buffering=1 << 20)  # with the mode of every new file of the user
        return self._out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._out.flush()
                os.fsync(self._out.fileno())
                self._temporary.replace(self._path)
                _fsync_directory(self._path.parent)
        finally:
            with contextlib.suppress(OSError):
                self._out.close()
            self._temporary.unlink(missing_ok=True)


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
