"""The record batch: Kafka's v2 header layout, its CRC, patching, validation, and the codec around aiokafka's.

Owns the one place that knows the bytes of a RecordBatch. Works per batch, over memoryviews; only `encode_batch`,
`open_batch` and `decode_batch` look at records, and only they import the compiled codec (lazily). It must never import
another layer; every layer may import it. Layout: the Kafka protocol guide, "Record Batch".
"""

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

from crc32c import crc32c

Buffer: TypeAlias = bytes | bytearray | memoryview

# base offset, length, leader epoch, magic, crc, attributes, last offset delta, base timestamp, max timestamp,
# producer id, producer epoch, base sequence, records count
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_PREFIX: Final = struct.Struct(">qii")  # base offset, length, leader epoch: the fields that patching rewrites
HEADER_BYTES: Final = _HEADER.size  # 61
_CRC: Final = struct.Struct(">I")
_CRC_FIELD: Final = 17
CRC_START: Final = 21  # the CRC covers everything from the attributes on
_LENGTH: Final = struct.Struct(">i")
_LENGTH_FIELD: Final = 8
_ATTRIBUTES: Final = struct.Struct(">h")
_MAX_TIMESTAMP: Final = struct.Struct(">q")
_MAX_TIMESTAMP_START: Final = 35
LENGTH_OVERHEAD: Final = 12  # base offset and length themselves are not counted by length
MAGIC: Final = 2

CODEC_MASK: Final = 0x07
TIMESTAMP_TYPE_MASK: Final = 0x08
TRANSACTIONAL_MASK: Final = 0x10
CONTROL_MASK: Final = 0x20

CODECS: Final = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
CODEC_NAMES: Final = {number: name for name, number in CODECS.items()}
INT32_MAX: Final = 2**31 - 1
RECORD_BYTES_MIN: Final = 7  # length, attributes, two deltas, three empty lengths: one byte each
# The largest expansion of one byte in each format: deflate's 258 bytes for two bits, snappy's 64 for three bytes, lz4's
# 255, zstd's block of 128 KiB for four. It bounds the record count that a producer may claim.
_EXPANSION_MAX: Final = {0: 1, 1: 1_032, 2: 22, 3: 255, 4: 1 << 15}
_RECORDS_MAX: Final = (128 << 20) // RECORD_BYTES_MIN  # a batch with more is taken for a decompression bomb


class BatchError(ValueError):
    """The bytes are not a storable batch; the message says why."""


class BatchCorrupt(BatchError):
    """The CRC or the framing does not match: bytes were damaged or are missing."""


@dataclass(slots=True)  # not frozen: made for each batch, and that costs half a microsecond per field
class BatchHeader:
    """The decoded 61 bytes. `length` counts from the leader epoch on; `size` is the whole batch in bytes."""

    base_offset: int
    length: int
    epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def size(self) -> int:
        return self.length + LENGTH_OVERHEAD

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def end(self) -> int:
        """First offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_MASK)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_MASK)

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last record; wraps to 0 after 2**31 - 1."""
        return (self.base_sequence + self.last_offset_delta) & INT32_MAX


def parse_header(batch: Buffer) -> BatchHeader:
    """The header of the batch at the start of `batch`. BatchCorrupt if it is too short."""
    if len(batch) < HEADER_BYTES:
        raise BatchCorrupt(f"a record batch has at least {HEADER_BYTES} bytes, this has {len(batch)}")
    return BatchHeader(*_HEADER.unpack_from(batch))


def check_crc(batch: Buffer, header: BatchHeader) -> None:
    """BatchCorrupt if the length or the CRC-32C does not match the bytes. `batch` is exactly one batch."""
    if header.length + LENGTH_OVERHEAD != len(batch):
        raise BatchCorrupt(f"the header says {header.size} bytes, there are {len(batch)}")
    if crc32c(memoryview(batch)[CRC_START:]) != header.crc:
        raise BatchCorrupt("the CRC-32C of the batch does not match its bytes")


# A control batch: its one record has version and type as its key, and version and coordinator epoch as its value. The
# log alone writes them, so the record's place is fixed.
_MARKER_RECORD: Final = struct.Struct(">BBBBBhhBhiB")
_MARKER_TYPE: Final = struct.Struct(">h")
_MARKER_TYPE_AT: Final = HEADER_BYTES + 7
_ABORT, _COMMIT = 0, 1


def marker_batch(*, producer_id: int, producer_epoch: int, is_commit: bool, timestamp_ms: int) -> bytes:
    """The control batch that says how a producer's transaction has ended, with base offset 0."""
    # Each length is a zigzag varint of one byte: twice the number.
    size = _MARKER_RECORD.size
    kind = _COMMIT if is_commit else _ABORT
    record = _MARKER_RECORD.pack(2 * (size - 1), 0, 0, 0, 2 * 4, 0, kind, 2 * 6, 0, 0, 0)
    header = _HEADER.pack(
        0,
        HEADER_BYTES + size - LENGTH_OVERHEAD,
        0,
        MAGIC,
        0,
        TRANSACTIONAL_MASK | CONTROL_MASK,
        0,
        timestamp_ms,
        timestamp_ms,
        producer_id,
        producer_epoch,
        -1,
        1,
    )
    batch = bytearray(header + record)
    _CRC.pack_into(batch, _CRC_FIELD, crc32c(memoryview(batch)[CRC_START:]))
    return bytes(batch)


def is_commit_marker(batch: Buffer) -> bool:
    """Whether a control batch commits; otherwise it aborts. BatchError if the log has not written it."""
    if len(batch) != HEADER_BYTES + _MARKER_RECORD.size:
        raise BatchError(f"a control batch of {len(batch)} bytes is not one of this log")
    (kind,) = _MARKER_TYPE.unpack_from(batch, _MARKER_TYPE_AT)
    if kind not in (_ABORT, _COMMIT):
        raise BatchError(f"a control batch of type {kind} is unknown")
    return bool(kind == _COMMIT)


def validate_produced(batch: Buffer) -> BatchHeader:
    """Checks everything about a producer's batch that can be checked without looking at its records.

    Raises BatchCorrupt for framing and CRC, BatchError for the rest. Magic is checked before the CRC, because the
    place of the CRC depends on it.
    """
    header = _whole(batch)
    if header.count < 1:
        raise BatchError("a batch holds at least one record")
    if header.last_offset_delta != header.count - 1:
        raise BatchError(f"last offset delta {header.last_offset_delta} does not fit {header.count} records")
    if header.attributes & CONTROL_MASK:
        raise BatchError("control batches are written by the log itself")
    _check_fields(batch, header)
    return header


def validate_mirrored(batch: Buffer) -> BatchHeader:
    """As `validate_produced`, for a batch of another log: it has its offsets, may lack records, or all of them, and may
    be the control batch of a transaction."""
    header = _whole(batch)
    if header.base_offset < 0 or header.last_offset_delta < 0:
        raise BatchError(f"a batch at offset {header.base_offset}, of {header.last_offset_delta + 1} offsets")
    if not 0 <= header.count <= header.last_offset_delta + 1:
        raise BatchError(f"{header.count} records do not fit {header.last_offset_delta + 1} offsets")
    if header.attributes & CONTROL_MASK:
        if not header.attributes & TRANSACTIONAL_MASK or header.producer_id < 0 or header.last_offset_delta:
            raise BatchError("a control batch ends a transaction of a producer, at one offset")
        is_commit_marker(batch)
    else:
        _check_fields(batch, header)
    return header


def _whole(batch: Buffer) -> BatchHeader:
    header = parse_header(batch)
    if header.magic != MAGIC:
        raise BatchError(f"record batch magic {header.magic} is not supported: produce format v2")
    check_crc(batch, header)
    return header


def _check_fields(batch: Buffer, header: BatchHeader) -> None:
    codec = header.attributes & CODEC_MASK
    if codec not in CODEC_NAMES:
        raise BatchError(f"compression codec {codec} is unknown")
    if header.attributes & TRANSACTIONAL_MASK and header.producer_id < 0:
        raise BatchError("a transactional batch needs a producer id")
    if header.producer_id >= 0 and (header.producer_epoch < 0 or header.base_sequence < 0):
        raise BatchError("an idempotent batch needs a producer epoch and a sequence >= 0")
    bytes_max = (len(batch) - HEADER_BYTES) * _EXPANSION_MAX[codec]
    if header.count > min(bytes_max // RECORD_BYTES_MIN, _RECORDS_MAX):
        raise BatchError(f"{header.count} records cannot lie in {len(batch)} bytes")


def patched_prefix(base_offset: int, header: BatchHeader, epoch: int) -> bytes:
    """The first 16 bytes of the batch, with its offset and epoch; the CRC does not cover them."""
    return _PREFIX.pack(base_offset, header.length, epoch)


PREFIX_BYTES: Final = _PREFIX.size
_EPOCH_AT: Final = 12


def build_batch(header: BatchHeader, body: Buffer) -> bytes:
    """A batch of these fields over records as they stand, compressed by the header's codec. Length and CRC are
    computed; the header's own do not count."""
    length = HEADER_BYTES - LENGTH_OVERHEAD + len(body)
    h = header
    out = bytearray(
        _HEADER.pack(
            h.base_offset,
            length,
            h.epoch,
            MAGIC,
            0,
            h.attributes,
            h.last_offset_delta,
            h.base_timestamp,
            h.max_timestamp,
            h.producer_id,
            h.producer_epoch,
            h.base_sequence,
            h.count,
        )
    )
    out += body
    _CRC.pack_into(out, _CRC_FIELD, crc32c(memoryview(out)[CRC_START:]))
    return bytes(out)


def empty_batch(base_offset: int, count: int) -> bytes:
    """A batch that holds `count` offsets and no record, as compaction leaves one."""
    return build_batch(BatchHeader(base_offset, 0, 0, MAGIC, 0, 0, count - 1, -1, -1, -1, -1, -1, 0), b"")


def is_same_batch(a: Buffer, b: Buffer) -> bool:
    """Whether two stored batches have the same bytes at the same offset. The epoch is each log's own."""
    return a[:_EPOCH_AT] == b[:_EPOCH_AT] and a[PREFIX_BYTES:] == b[PREFIX_BYTES:]


def with_append_time(batch: Buffer, header: BatchHeader, time_ms: int) -> tuple[bytes, BatchHeader]:
    """The batch and its header with one timestamp for all records, the log's own, and a new CRC."""
    attributes = header.attributes | TIMESTAMP_TYPE_MASK
    out = bytearray(batch)
    _ATTRIBUTES.pack_into(out, CRC_START, attributes)
    _MAX_TIMESTAMP.pack_into(out, _MAX_TIMESTAMP_START, time_ms)
    crc = crc32c(memoryview(out)[CRC_START:])
    _CRC.pack_into(out, _CRC_FIELD, crc)
    return bytes(out), replace(header, attributes=attributes, max_timestamp=time_ms, crc=crc)


def with_body(header: BatchHeader, batch: Buffer, codec: int, body: Buffer) -> bytes:
    """The batch with other bytes in place of its records, of another codec, and a new CRC."""
    out = bytearray(memoryview(batch)[:HEADER_BYTES])
    out += body
    _LENGTH.pack_into(out, _LENGTH_FIELD, len(out) - LENGTH_OVERHEAD)
    _ATTRIBUTES.pack_into(out, CRC_START, (header.attributes & ~CODEC_MASK) | codec)
    _CRC.pack_into(out, _CRC_FIELD, crc32c(memoryview(out)[CRC_START:]))
    return bytes(out)


# ------------------------------------------------------------------------------------------------ records
Headers: TypeAlias = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Record:
    """A decoded record. `timestamp_ms` is the producer's create time."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be written."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers = ()


_import_lock: Final = threading.Lock()
_default_records: Any = None  # aiokafka's module with the compiled codec


def _compiled() -> Any:
    """Imported on first use, by one thread: aiokafka's modules import each other, and of two threads that begin at
    different ones, one would see a module that is not complete."""
    global _default_records
    if _default_records is None:
        with _import_lock:
            from aiokafka.record import default_records

            _default_records = default_records
    return _default_records


def is_transactional(batch: Buffer) -> bool:
    """What the header says, of bytes that nothing has checked yet; False if they are too few for one."""
    return len(batch) >= HEADER_BYTES and bool(_ATTRIBUTES.unpack_from(batch, CRC_START)[0] & TRANSACTIONAL_MASK)


def encode_batch(
    records: Iterable[NewRecord],
    *,
    codec: str = "none",
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
) -> bytes:
    """One v2 batch with base offset 0. ValueError for no records or an unknown codec."""
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: one of {', '.join(CODECS)}")
    builder = _compiled().DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=CODECS[codec],
        is_transactional=is_transactional,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        batch_size=1 << 30,
    )
    count = 0
    for count, record in enumerate(records, 1):
        builder.append(count - 1, record.timestamp_ms, record.key, record.value, list(record.headers))
    if not count:
        raise ValueError("a batch holds at least one record")
    return bytes(builder.build())


class OpenBatch(Protocol):
    """A batch that a producer fills until it is due; each record is encoded as it is added."""

    def append(
        self,
        offset: int,
        timestamp: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: list[tuple[str, bytes | None]],
    ) -> object | None:
        """None if the record no longer fits; the first one always does. `offset` counts from 0."""

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None: ...

    def size(self) -> int:
        """Bytes so far, header included, before compression."""

    def build(self) -> bytearray:
        """The finished batch. Called once."""


def open_batch(*, codec: str, bytes_max: int, is_transactional: bool = False) -> OpenBatch:
    """An empty v2 batch without a producer id. ValueError for an unknown codec."""
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: one of {', '.join(CODECS)}")
    builder: OpenBatch = _compiled().DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=CODECS[codec],
        is_transactional=is_transactional,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=bytes_max,
    )
    return builder


_PRODUCER: Final = struct.Struct(">qhi")  # producer id, producer epoch, base sequence
_PRODUCER_START: Final = 43


def restamped(batch: Buffer, *, producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
    """The same records under another producer id, epoch and sequence, with a new CRC."""
    out = bytearray(batch)
    _PRODUCER.pack_into(out, _PRODUCER_START, producer_id, producer_epoch, base_sequence)
    _CRC.pack_into(out, _CRC_FIELD, crc32c(memoryview(out)[CRC_START:]))
    return bytes(out)


def decode_batch(batch: Buffer) -> Iterator[Record]:
    """The records of one batch, in order, decompressed. BatchCorrupt if they do not decode."""
    codec = _compiled()
    with _refusing():
        for r in codec.DefaultRecordBatch(batch):
            yield Record(r.offset, r.timestamp, r.key, r.value, r.headers)


def from_offset(batch: Buffer, header: BatchHeader, offset: int) -> bytes:
    """The part of a stored batch from an offset on, as a batch: its records keep their offsets, times and content."""
    sequence = (header.base_sequence + offset - header.base_offset) & INT32_MAX if header.producer_id >= 0 else -1
    place = {"base_offset": offset, "last_offset_delta": header.last_offset - offset, "base_sequence": sequence}
    kept = [r for r in decode_batch(batch) if r.offset >= offset] if header.count else []
    if not kept:
        attributes = header.attributes & ~CODEC_MASK
        return build_batch(replace(header, **place, attributes=attributes, count=0, max_timestamp=-1), b"")
    builder = _compiled().DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=header.codec,
        is_transactional=header.is_transactional,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=sequence,
        batch_size=1 << 30,
    )
    for r in kept:
        builder.append(r.offset - offset, r.timestamp_ms, r.key, r.value, list(r.headers))
    built = bytes(builder.build())
    return build_batch(replace(parse_header(built), **place), built[HEADER_BYTES:])


KeyedRecord: TypeAlias = tuple[int, bytes | None, bool]  # offset, key, whether it is a tombstone: it has no value


def keyed_records(batch: Buffer) -> list[KeyedRecord]:
    """As `decode_batch`, without what compaction does not look at: it decodes every record of a log, twice."""
    codec = _compiled()
    with _refusing():
        return [(r.offset, r.key, r.value is None) for r in codec.DefaultRecordBatch(batch)]


@contextmanager
def _refusing() -> Iterator[None]:
    """Only after `_compiled`, which sees to it that one thread imports aiokafka."""
    import zlib

    from aiokafka.errors import CorruptRecordException
    from cramjam import DecompressionError

    # The CRC proves only that the bytes are the producer's. Whether they decompress is up to the codec, and each codec
    # raises its own errors (gzip: EOFError, zlib.error, OSError; snappy's framing: struct.error). MemoryError: for a
    # length near 2^63, aiokafka's check of the bounds overflows.
    refusals = (CorruptRecordException, DecompressionError, zlib.error, struct.error, EOFError, OSError, MemoryError)
    try:
        yield
    except (*refusals, ValueError, OverflowError) as e:
        raise BatchCorrupt(f"the records do not decode: {e}") from e
