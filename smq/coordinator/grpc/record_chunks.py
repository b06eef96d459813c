"""Stored batches as streamed records: decoding, cutting to the reader's position, grouping into responses.

No node, no stream: what decodes here runs on a thread. `grpc.subscribe` and `grpc.search` import it.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.errors import ErrorCode, LimitExceeded, SmqError
from smq.raft_state.ids import Offset
from smq.records import BatchCorrupt, Record, parse_header
from smq.replication.api import Fetched, StoredBatch
from smq.replication.log.decoding import DECODED_BATCH_BYTES_MAX, decode_bounded, plain_batch, records_of

_RECORD_OVERHEAD_BYTES: Final = 32  # what a record costs on the wire besides its key, value and headers


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response's records, the position after them, and their approximate size in bytes."""

    records: list[pb.Record]
    next_offset: Offset
    size: int


class NeedsRoom(Exception):
    """The next batch takes more memory than there is for it."""


class Reading:
    """What one fetch has read, as records from `position` up to `stop`. It keeps no batch that it has passed."""

    def __init__(self, fetched: Fetched, position: Offset, stop: Offset) -> None:
        self._batches = deque((batch, is_visible(fetched, batch)) for batch in fetched.batches)
        self._records: Iterator[tuple[pb.Record, int]] | None = None  # of the first batch, with their sizes
        self._opened_bytes = 0  # of the first batch, decompressed
        self._position = position
        self._stop = stop
        self._error: SmqError | None = None

    @property
    def held_bytes(self) -> int:
        """Of the batches in both forms. Not while `next_chunk` runs."""
        return sum(len(batch.data) for batch, _ in self._batches) + self._opened_bytes

    @property
    def is_open(self) -> bool:
        """Whether the next record needs no further memory."""
        return self._records is not None

    @property
    def is_over(self) -> bool:
        return not self._batches or self._position >= self._stop

    def next_chunk(self, bytes_max: int, opened_max: int) -> Chunk | None:
        """Records of about `bytes_max` in all; None if there are no more. NeedsRoom if the next batch takes more than
        `opened_max` decompressed. An error of a batch comes after the records before it. Runs on a thread, one call at
        a time."""
        if self._error is not None:
            raise self._error
        start, records, size = self._position, list[pb.Record](), 0
        try:
            while not self.is_over and size < bytes_max:
                size += self._take(records, bytes_max - size, opened_max)
        except (NeedsRoom, SmqError) as e:
            if self._position == start:
                raise
            self._error = e if isinstance(e, SmqError) else None
        return Chunk(records, self._position, size) if self._position > start else None

    def _take(self, records: list[pb.Record], bytes_max: int, opened_max: int) -> int:
        """Takes from the first batch, which goes at its end. Returns the size of what it took."""
        batch, has_records = self._batches[0]
        if has_records and self._records is None:
            self._records = self._opened(batch, opened_max)
        size = 0
        for record, record_size in self._records or ():
            records.append(record)
            size += record_size
            self._position = Offset(record.offset + 1)
            if size >= bytes_max:
                return size
        # Past the batch, not only past its last record: offsets may have gaps.
        self._position = max(self._position, min(Offset(batch.last_offset + 1), self._stop))
        self._records, self._opened_bytes = None, 0
        self._batches.popleft()
        return size

    def _opened(self, batch: StoredBatch, opened_max: int) -> Iterator[tuple[pb.Record, int]]:
        header = parse_header(batch.data)
        with _naming(batch):
            try:
                plain = plain_batch(header, batch.data, opened_max)
            except LimitExceeded:
                if opened_max >= DECODED_BATCH_BYTES_MAX:
                    raise
                raise NeedsRoom from None
        self._opened_bytes = len(plain) if header.codec else 0
        return _wanted(batch, records_of(plain, header), self._position, self._stop)


def _wanted(
    batch: StoredBatch, records: Iterator[Record], start: Offset, stop: Offset
) -> Iterator[tuple[pb.Record, int]]:
    """Batches are not cut: the first one may begin before `start`. No method of what holds it: the two would form a
    cycle, and stay in memory until the garbage collector finds it."""
    with _naming(batch):
        for record in records:
            if record.offset >= stop:
                return
            if record.offset >= start:
                yield to_pb(record, batch.ts_ns + record.offset - batch.base_offset), record_bytes(record)


def decode_stored(batch: StoredBatch) -> Iterator[Record]:
    """The records of one stored batch; INVALID_BATCH if they do not decode."""
    with _naming(batch):
        yield from decode_bounded(batch.data)


@contextmanager
def _naming(batch: StoredBatch) -> Iterator[None]:
    """The store has verified the checksum, so a batch that does not decode was written so by its producer:
    INVALID_BATCH, which says how to read on."""
    try:
        yield
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
