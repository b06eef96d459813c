"""A batch with a valid checksum and malformed records harms only its own readers."""

import struct
import tracemalloc
import zlib
from dataclasses import replace

import pytest
from crc32c import crc32c

from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.ids import Offset
from smq.records import (
    CRC_START,
    HEADER_BYTES,
    LENGTH_OVERHEAD,
    BatchError,
    NewRecord,
    encode_batch,
    parse_header,
    validate_produced,
)
from smq.replication.api import TimeKind, TimeOffset
from smq.replication.log.decoding import DECODED_BATCH_BYTES_MAX
from smq.replication.partition.log_search import _first_record
from tests.unit.replication.partition.test_reads import Reader
from tests.unit.replication.support import batch


def with_body(body: bytes, codec: int) -> bytes:
    """A batch of one record, created at 1,000 ms, whose records are `body`."""
    data = bytearray(batch()[:HEADER_BYTES] + body)
    struct.pack_into(">i", data, 8, len(data) - LENGTH_OVERHEAD)
    struct.pack_into(">h", data, CRC_START, codec)
    struct.pack_into(">I", data, 17, crc32c(memoryview(data)[CRC_START:]))
    return bytes(data)


def bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    mib = b"\0" * (1 << 20)
    parts = [packer.compress(mib) for _ in range(1 + (DECODED_BATCH_BYTES_MAX >> 20))]
    return b"".join([*parts, packer.flush()])


@pytest.mark.parametrize("codec", range(5))
def test_a_look_up_by_create_time_points_at_a_batch_that_does_not_decode(codec: int) -> None:
    reader = Reader()
    reader.commit(batch(count=2), with_body(b"\x07nonsense", codec))
    assert reader.host.offset_at(TimeKind.TIMESTAMP_MS, 1_000) == 0
    reader = Reader()
    reader.commit(with_body(b"\x07nonsense", codec))
    assert reader.host.offset_at(TimeKind.TIMESTAMP_MS, 1_000) == 0


def test_a_look_up_by_create_time_does_not_unpack_a_bomb() -> None:
    reader = Reader()
    reader.commit(with_body(bomb(), 1))
    found = reader.host.find_time(TimeKind.TIMESTAMP_MS, 1_000)
    assert isinstance(found, TimeOffset)
    assert (found.offset, found.timestamp_ms) == (0, 1_000)


def test_a_look_up_does_not_keep_the_records_of_a_batch() -> None:
    """Records that hold nothing take 7 bytes in the batch, and some 200 in memory."""
    reader = Reader()
    records = [NewRecord(None, None, 1_000), *[NewRecord(None, None, 900)] * 99_999]
    reader.commit(encode_batch(records, codec="zstd"))
    reader.host.apply(AdvanceLogStart(partition=reader.host.part.pid, offset=Offset(1)))
    reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0)  # what the first one imports is not of the batch
    tracemalloc.start()
    try:
        assert reader.host.offset_at(TimeKind.MAX_TIMESTAMP, 0) == 1
        assert tracemalloc.get_traced_memory()[1] < 20 * len(records)
    finally:
        tracemalloc.stop()


def claiming(data: bytes, count: int) -> bytes:
    """The same batch with another number of records in its header."""
    changed = bytearray(data)
    struct.pack_into(">i", changed, 23, count - 1)
    struct.pack_into(">i", changed, 57, count)
    struct.pack_into(">I", changed, 17, crc32c(memoryview(changed)[CRC_START:]))
    return bytes(changed)


def test_a_backlog_counts_from_a_batch_with_gaps_that_does_not_decode() -> None:
    data = memoryview(with_body(b"\x07nonsense", 1))
    header = replace(parse_header(data), last_offset_delta=2)
    assert _first_record(data, header, Offset(1)) == 1


def test_a_batch_that_claims_more_records_than_fit_takes_no_offsets() -> None:
    with pytest.raises(BatchError, match="2000000000 records cannot lie in"):
        validate_produced(claiming(batch(count=3), 2_000_000_000))
    assert validate_produced(claiming(batch(count=3), 3)).count == 3
    smallest = encode_batch([NewRecord(None, None, 0)] * 10)
    assert validate_produced(smallest).count == 10
    with pytest.raises(BatchError):
        validate_produced(claiming(smallest, 11))
