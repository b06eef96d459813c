"""The bytes of the log on disk: keys, the envelope around a batch, and the batch's index row. Pure.

Owns every layout of the tables BATCHES and TIMES (docs/formats.md); the layout of a checkpoint is in `log_state`.
LMDB has no page checksums, so every value carries a CRC-32C, and everything that decodes here has been checked. It
must never touch a disk. The log store imports it, and so does the replication stream, which ships whole stored values.

    BATCHES  partition(20) base(8)                 -> envelope(16) batch
    TIMES    partition(20) 0 ts_ns(8) base(8)      -> index row: all that a fold needs of the batch, without its records
    TIMES    partition(20) 1 create_ms(8) base(8)  -> nothing; only for a batch with the largest create time so far
    TIMES    partition(20) 2 marker(8) first(8)    -> an aborted transaction; see `aborted`
"""

import enum
import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from smq.raft_state.ids import Epoch, Offset, PartitionId, ProducerEpoch, ProducerId, Sequence, TsNs, split_partition_id
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.records import (
    CONTROL_MASK,
    CRC_START,
    HEADER_BYTES,
    LENGTH_OVERHEAD,
    PREFIX_BYTES,
    TRANSACTIONAL_MASK,
    BatchError,
    BatchHeader,
    Buffer,
    check_crc,
    is_commit_marker,
    parse_header,
    patched_prefix,
)
from smq.replication.ports import DataDamaged

ENVELOPE_VERSION: Final = 1
_ENVELOPE: Final = struct.Struct(">BBHIq")  # version, flags, zero, CRC, ts_ns
# Under the envelope's CRC, before the batch's first 21 bytes, its base offset among them. The partition is not stored:
# a batch that a damaged page number puts into another partition fails the check there, even at the same offset.
_COVERED: Final = struct.Struct(">20sBBq")  # partition, version, flags, ts_ns
ENVELOPE_BYTES: Final = _ENVELOPE.size
_STORED: Final = struct.Struct(">BBHIqqiibIhi")  # the envelope, and the batch's header up to its last offset delta
_CRC_AT: Final = ENVELOPE_BYTES + CRC_START  # where the part under the batch's own CRC begins
_SUMMARY: Final = struct.Struct(">h12xqqhi")  # attributes, max timestamp, producer id and epoch, sequence: from there

TIME_APPEND: Final = 0  # kind of a TIMES row: the leader's append time
TIME_CREATE: Final = 1  # kind of a TIMES row: the largest create time so far
TIME_ABORTED: Final = 2  # kind of a TIMES row: an aborted transaction, by the offset of its marker
_SIGN: Final = 1 << 63  # create times may be negative: with the sign bit flipped they sort as unsigned
INT64_MAX: Final = (1 << 63) - 1
_UINT64_MAX: Final = (1 << 64) - 1

_BATCH_KEY: Final = struct.Struct(">20sQ")
_TIME_KEY: Final = struct.Struct(">20sBQQ")
# CRC, size, epoch, records, max create time, producer id, producer epoch, sequence, kind
_INDEX: Final = struct.Struct(">IIiiqqhiB")
_INDEX_CRC_BYTES: Final = 4


class BatchDamaged(DataDamaged):
    """A stored batch or its index row fails its CRC or is missing. `offset` lies in the batch; `row` is the key of the
    index row if that is the damaged one."""

    def __init__(self, pid: PartitionId, offset: Offset, what: str, row: bytes | None = None) -> None:
        table = "batches" if row is None else "times"
        super().__init__(f"{partition_name(pid)}, offset {offset}, in table {table}: {what}")
        self.pid = pid
        self.offset = offset
        self.row = row


class StoredValue(NamedTuple):
    """One stored batch. `value` is envelope and batch: the exact bytes on disk and in the replication stream."""

    base: Offset
    end: Offset
    epoch: Epoch
    ts_ns: TsNs
    value: bytes

    @property
    def batch(self) -> memoryview:
        """The RecordBatch v2, without a copy."""
        return memoryview(self.value)[ENVELOPE_BYTES:]


class BatchKind(enum.IntEnum):
    PLAIN = 0
    TRANSACTIONAL = 1  # part of its producer's open transaction
    COMMIT = 2  # a control batch: its producer's transaction ends here
    ABORT = 3


class BatchInfo(NamedTuple):
    """A batch without its records: all that lineage, producer state, time look-ups and sizes need."""

    base: Offset
    end: Offset
    epoch: Epoch
    ts_ns: TsNs
    max_timestamp_ms: int
    size: int  # of the stored value, bytes
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    base_sequence: Sequence
    kind: int = BatchKind.PLAIN  # a BatchKind; a plain number, as there are millions of them

    def ts_ns_at(self, offset: Offset) -> TsNs:
        """Of the record at `offset`."""
        return TsNs(self.ts_ns + offset - self.base)

    @property
    def last_ts_ns(self) -> TsNs:
        """Of the last record."""
        return self.ts_ns_at(Offset(self.end - 1))


# ------------------------------------------------------------------------------------------------ batches
def build_value(pid: PartitionId, batch: Buffer, header: BatchHeader, base: Offset, epoch: Epoch, ts_ns: TsNs) -> bytes:
    """Envelope and batch as one object, copied once, with offset and epoch patched in."""
    view = memoryview(batch)
    prefix = patched_prefix(base, header, epoch)
    covered = _COVERED.pack(pid, ENVELOPE_VERSION, 0, ts_ns) + prefix + view[PREFIX_BYTES:CRC_START]
    return b"".join((_ENVELOPE.pack(ENVELOPE_VERSION, 0, 0, crc32c(covered), ts_ns), prefix, view[PREFIX_BYTES:]))


def parse_header_of(value: bytes, *, verify: PartitionId | None) -> tuple[TsNs, BatchHeader]:
    """(ts_ns, header) of a stored value. DataDamaged if it does not decode or, with the partition to `verify` it for,
    fails a CRC."""
    if len(value) < ENVELOPE_BYTES + HEADER_BYTES:
        raise DataDamaged(f"a stored batch of {len(value)} bytes is truncated")
    version, flags, zero, crc, ts_ns = _ENVELOPE.unpack_from(value)
    if version != ENVELOPE_VERSION or zero:
        raise DataDamaged(f"an envelope of version {version} (reserved: {zero}) is unknown")
    batch = memoryview(value)[ENVELOPE_BYTES:]
    try:
        header = parse_header(batch)
        if verify is not None:
            if crc32c(_COVERED.pack(verify, version, flags, ts_ns) + batch[:CRC_START]) != crc:
                raise DataDamaged("the CRC-32C of the envelope does not match its bytes and its partition")
            check_crc(batch, header)
    except BatchError as e:
        raise DataDamaged(str(e)) from e
    return ts_ns, header


def parse_value(pid: PartitionId, value: bytes) -> StoredValue:
    """The batch in a stored value of this partition, from disk or from the leader's stream. Raises DataDamaged. As
    `parse_header_of`, but without the header, which costs as much as everything else here: readers do not need it."""
    size = len(value) - ENVELOPE_BYTES
    if size < HEADER_BYTES:
        raise DataDamaged(f"a stored batch of {len(value)} bytes is truncated")
    version, flags, zero, crc, ts_ns, base, length, epoch, _, batch_crc, _, last_delta = _STORED.unpack_from(value)
    if version != ENVELOPE_VERSION or zero:
        raise DataDamaged(f"an envelope of version {version} (reserved: {zero}) is unknown")
    if crc32c(_COVERED.pack(pid, version, flags, ts_ns) + value[ENVELOPE_BYTES:_CRC_AT]) != crc:
        raise DataDamaged("the CRC-32C of the envelope does not match its bytes and its partition")
    if length + LENGTH_OVERHEAD != size:
        raise DataDamaged(f"the header says {length + LENGTH_OVERHEAD} bytes, there are {size}")
    if crc32c(memoryview(value)[_CRC_AT:]) != batch_crc:
        raise DataDamaged("the CRC-32C of the batch does not match its bytes")
    return StoredValue(base, base + last_delta + 1, epoch, ts_ns, value)


def info_of(ts_ns: TsNs, header: BatchHeader, base: Offset, epoch: Epoch, value: Buffer) -> BatchInfo:
    """The summary of a batch that is stored as `value` at `base` in `epoch`. DataDamaged for a control batch that this
    log cannot have written."""
    return BatchInfo(
        base,
        Offset(base + header.last_offset_delta + 1),
        epoch,
        ts_ns,
        header.max_timestamp,
        len(value),
        ProducerId(header.producer_id),
        ProducerEpoch(header.producer_epoch),
        Sequence(header.base_sequence),
        _kind_of(header.attributes, value) if header.attributes & TRANSACTIONAL_MASK else BatchKind.PLAIN,
    )


def info_of_stored(stored: StoredValue) -> BatchInfo:
    """As `info_of`, of a batch that `parse_value` has checked, without an object for its header."""
    base, end, epoch, ts_ns, value = stored
    attributes, max_timestamp_ms, producer_id, producer_epoch, sequence = _SUMMARY.unpack_from(value, _CRC_AT)
    kind = _kind_of(attributes, value) if attributes & TRANSACTIONAL_MASK else BatchKind.PLAIN
    return BatchInfo(base, end, epoch, ts_ns, max_timestamp_ms, len(value), producer_id, producer_epoch, sequence, kind)


def _kind_of(attributes: int, value: Buffer) -> BatchKind:
    if not attributes & CONTROL_MASK:
        return BatchKind.TRANSACTIONAL
    try:
        return BatchKind.COMMIT if is_commit_marker(memoryview(value)[ENVELOPE_BYTES:]) else BatchKind.ABORT
    except BatchError as e:
        raise DataDamaged(str(e)) from e


# --------------------------------------------------------------------------------------------------- keys
def batch_key(pid: PartitionId, base: int) -> bytes:
    return _BATCH_KEY.pack(pid, base)


def base_of_key(key: bytes) -> Offset:
    return Offset(int.from_bytes(key[-8:], "big"))


def append_time_key(pid: PartitionId, ts_ns: int, base: int) -> bytes:
    return _TIME_KEY.pack(pid, TIME_APPEND, ts_ns, base)


def append_time_of_key(key: bytes) -> TsNs:
    return TsNs(int.from_bytes(key[-16:-8], "big"))


def create_time_key(pid: PartitionId, create_ms: int, base: int) -> bytes:
    return _TIME_KEY.pack(pid, TIME_CREATE, create_ms + _SIGN, base)


def create_ms_of_key(key: bytes) -> int:
    """Inverse of `create_time_key`."""
    return int.from_bytes(key[-16:-8], "big") - _SIGN


def after_append_time(pid: PartitionId, ts_ns: int) -> bytes:
    """Sorts after every row of that append time and before any later one."""
    return append_time_key(pid, ts_ns, _UINT64_MAX)


def after_create_time(pid: PartitionId, create_ms: int) -> bytes:
    """Sorts after every row of that create time and before any later one."""
    return create_time_key(pid, create_ms, _UINT64_MAX)


def times_range(pid: PartitionId, kind: int) -> tuple[bytes, bytes]:
    """[start, stop) of the TIMES rows of that kind."""
    return pid + bytes((kind,)), pid + bytes((kind + 1,))


def partition_stop(pid: PartitionId) -> bytes:
    """Sorts after every key of the partition in any table: after the id comes a kind or an offset's first byte."""
    return pid + b"\xff"


def partition_name(pid: PartitionId) -> str:
    """Topic id and index, for messages; the raw bytes if damage has made them no partition id."""
    if len(pid) != PARTITION_ID_BYTES:
        return f"partition {pid.hex()}"
    topic, index = split_partition_id(pid)
    return f"partition {topic.hex()}-{index}"


def envelope_crc(value: bytes) -> int:
    """Of a stored value that has been checked."""
    crc: int = _ENVELOPE.unpack_from(value)[3]
    return crc


# ---------------------------------------------------------------------------------------------- index rows
def index_row(pid: PartitionId, info: BatchInfo) -> tuple[bytes, bytes]:
    """Key and value of a batch's TIMES row."""
    key = _TIME_KEY.pack(pid, TIME_APPEND, info.ts_ns, info.base)
    row = _INDEX.pack(
        0,
        info.size,
        info.epoch,
        info.end - info.base,
        info.max_timestamp_ms,
        info.producer_id,
        info.producer_epoch,
        info.base_sequence,
        info.kind,
    )[_INDEX_CRC_BYTES:]
    return key, crc32c(key + row).to_bytes(_INDEX_CRC_BYTES, "big") + row


def parse_index_row(key: bytes, value: bytes) -> BatchInfo:
    """Inverse of `index_row`; DataDamaged if the CRC differs."""
    if len(value) != _INDEX.size or crc32c(key + value[_INDEX_CRC_BYTES:]) != int.from_bytes(value[:4], "big"):
        raise DataDamaged(f"the row at {key.hex()} of table times does not match its CRC-32C")
    _, _, ts_ns, base = _TIME_KEY.unpack(key)
    _, size, epoch, count, max_timestamp, producer_id, producer_epoch, sequence, kind = _INDEX.unpack(value)
    return BatchInfo(
        base, Offset(base + count), epoch, TsNs(ts_ns), max_timestamp, size, producer_id, producer_epoch, sequence, kind
    )
