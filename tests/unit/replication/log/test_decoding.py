"""Bounded decoding: every codec's records survive, bombs are refused, damage is an error."""

import struct

import cramjam
import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import CODECS, HEADER_BYTES, BatchCorrupt, NewRecord, decode_batch, encode_batch
from smq.replication.log.decoding import decode_bounded

RECORDS = [
    NewRecord(key=b"k", value=b"v" * 100_000, timestamp_ms=5, headers=[("h", b"1"), ("n", None)]),
    NewRecord(key=None, value=None, timestamp_ms=7),
    NewRecord(key=b"", value=b"", timestamp_ms=9),
]


def batch(codec: str) -> memoryview:
    return memoryview(encode_batch(RECORDS, codec=codec))


@pytest.mark.parametrize("codec", CODECS)
def test_records_equal_those_that_the_codec_library_decodes(codec: str) -> None:
    assert list(decode_bounded(batch(codec))) == list(decode_batch(batch(codec)))


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"none"}))
def test_a_batch_that_expands_past_the_cap_is_refused(codec: str) -> None:
    with pytest.raises(SmqError, match="uncompressed") as e:
        list(decode_bounded(batch(codec), bytes_max=50_000))
    assert e.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"none"}))
def test_the_cap_itself_is_allowed(codec: str) -> None:
    plain = len(encode_batch(RECORDS)) - HEADER_BYTES
    assert len(list(decode_bounded(batch(codec), bytes_max=plain))) == 3


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"none"}))
def test_truncated_compressed_bytes_are_corrupt(codec: str) -> None:
    with pytest.raises(BatchCorrupt):
        list(decode_bounded(batch(codec)[:-10]))


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"none"}))
def test_garbage_instead_of_compressed_bytes_is_corrupt(codec: str) -> None:
    damaged = bytearray(batch(codec))
    damaged[HEADER_BYTES:] = b"\x5a" * (len(damaged) - HEADER_BYTES)
    with pytest.raises(BatchCorrupt):
        list(decode_bounded(memoryview(damaged)))


def test_snappy_without_javas_framing_is_also_read() -> None:
    plain = encode_batch(RECORDS)
    raw = bytes(cramjam.snappy.compress_raw(plain[HEADER_BYTES:]))
    head = bytearray(plain[:HEADER_BYTES])
    struct.pack_into(">h", head, 21, CODECS["snappy"])
    assert list(decode_bounded(memoryview(bytes(head) + raw))) == list(decode_batch(plain))
