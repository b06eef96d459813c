"""Bounded decoding: every codec's records survive, bombs are refused, damage is an error."""

import struct

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import CODECS, HEADER_BYTES, BatchCorrupt, NewRecord, decode_batch, encode_batch
from smq.replication.log.decoding import RecordSpan, decode_bounded, spans

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


def test_spans_find_keys_and_tombstones() -> None:
    batch = encode_batch([NewRecord(b"a", b"1", 5), NewRecord(None, None, 7), NewRecord(b"", b"", 6)])
    found = list(spans(bytes(batch[61:]), 3))
    assert [(s.offset_delta, s.timestamp_delta, s.key, s.is_tombstone) for s in found] == [
        (0, 0, b"a", False),
        (1, 2, None, True),
        (2, 1, b"", False),
    ]


@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_records_or_corrupt(body: bytes, count: int) -> None:
    try:
        found = list(spans(body, count))
    except BatchCorrupt:
        return
    assert len(found) == count
    assert all(isinstance(span, RecordSpan) and span.stop <= len(body) for span in found)
