"""Stored batches as streamed records: decoding, cutting to the reader's position, grouping into responses.

Pure, apart from decompression: no node, no stream. `grpc.subscribe` and `grpc.search` import it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.limits import DECODE_CHUNK_RECORDS
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset
from smq.records import BatchCorrupt, Record
from smq.replication.api import Fetched, StoredBatch
from smq.replication.log.decoding import decode_bounded

_RECORD_OVERHEAD_BYTES: Final = 32  # what a record costs on the wire besides its key, value and headers


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response's records, the position after them, and their approximate size in bytes."""

    records: list[pb.Record]
    next_offset: Offset
    size: int


def chunks(fetched: Fetched, position: Offset, stop: Offset, bytes_max: int) -> Iterator[Chunk | None]:
    """The records in [position, stop), in chunks of about `bytes_max`. None marks a good moment to let other tasks run,
    because decoding never waits."""
    records: list[pb.Record] = []
    size = 0
    chunk_start = position
    for batch in fetched.batches:
        if position >= stop:
            break
        for i, record in enumerate(decode_stored(batch) if is_visible(fetched, batch) else ()):
            if i % DECODE_CHUNK_RECORDS == DECODE_CHUNK_RECORDS - 1:
                yield None
            if record.offset < position:
                continue  # batches are not cut: the first may begin before the position
            if record.offset >= stop:
                break
            records.append(to_pb(record, batch.ts_ns + record.offset - batch.base_offset))
            size += record_bytes(record)
            position = Offset(record.offset + 1)
            if size >= bytes_max:
                yield Chunk(records, position, size)
                records, size, chunk_start = [], 0, position
        # Past the batch, not only past its last record: offsets may have gaps.
        position = max(position, min(Offset(batch.last_offset + 1), stop))
    if position > chunk_start:
        yield Chunk(records, position, size)


def decode_stored(batch: StoredBatch) -> Iterator[Record]:
    """The records of one stored batch. The store has verified the checksum, so a batch that
    does not decode was written so by its producer: INVALID_BATCH, which says how to read on."""
    try:
        yield from decode_bounded(batch.data)
    except BatchCorrupt as e:
        raise SmqError(
            ErrorCode.INVALID_BATCH,
            f"the producer's records at offsets {batch.base_offset} to {batch.last_offset} do not decode ({e}); "
            f"seek to {batch.last_offset + 1} to read on",
        ) from e


def to_pb(record: Record, ts_ns: int) -> pb.Record:
    """A record as it is streamed."""
    out = pb.Record(
        offset=record.offset, ts_ns=ts_ns, timestamp_ms=record.timestamp_ms, key=record.key, value=record.value
    )
    for key, value in record.headers:
        out.headers.append(pb.Header(key=key, value=value))
    return out


def record_bytes(record: Record) -> int:
    """About what a record costs on the wire."""
    size = len(record.key or b"") + len(record.value or b"") + _RECORD_OVERHEAD_BYTES
    for key, value in record.headers:
        size += len(key) + len(value or b"") + _RECORD_OVERHEAD_BYTES
    return size
