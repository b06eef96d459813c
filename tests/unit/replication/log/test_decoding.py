"""Bounded decoding: every codec's records survive, bombs are refused, damage is an error, work follows the input."""

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.errors import ErrorCode, LimitExceeded, SmqError
from smq.records import (
    CODECS,
    HEADER_BYTES,
    BatchCorrupt,
    NewRecord,
    build_batch,
    decode_batch,
    encode_batch,
    parse_header,
)
from smq.replication.log import decoding
from smq.replication.log.decoding import (
    GROUP_BYTES,
    LARGE_MAX,
    PIECES_MAX,
    RECORD_HEADERS_MAX,
    SMALL_BYTES,
    RecordSpan,
    compress,
    decode_bounded,
    spans,
)

RECORDS = [
    NewRecord(key=b"k", value=b"v" * 3_000_000, timestamp_ms=5, headers=[("h", b"1"), ("n", None)]),
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


XERIAL = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)


def snappy_block(piece: bytes) -> bytes:
    packed = bytes(cramjam.snappy.compress_raw(piece))
    return struct.pack(">i", len(packed)) + packed


def zstd_blocks(piece: bytes) -> bytes:
    """A frame of raw blocks of one byte."""
    blocks = [struct.pack("<I", 1 << 3)[:3] + piece[at : at + 1] for at in range(len(piece))]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks) + b"\x01\0\0"


# What a stream of each codec may be made of: pieces that may be empty, and any number of them.
STREAMS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"", lambda piece: bytes(compress(piece, CODECS["gzip"]))),
    "snappy": (XERIAL, snappy_block),
    "lz4": (b"", lambda piece: bytes(compress(piece, CODECS["lz4"]))),
    "zstd": (b"", zstd_blocks),
}


def compressed_batch(codec: str, body: bytes, count: int = 1) -> memoryview:
    header = parse_header(encode_batch([NewRecord(None, None, 0)]))
    header.attributes, header.count = CODECS[codec], count
    return memoryview(build_batch(header, body))


class Work:
    """Counts the bytes that the codecs are given, and those that they copy back: the same on every machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        fake_zlib = SimpleNamespace(decompressobj=self._member, error=zlib.error, Z_DEFAULT_COMPRESSION=-1)
        monkeypatch.setattr(decoding, "zlib", fake_zlib)
        modules = {name: SimpleNamespace(**vars(getattr(cramjam, name))) for name in ("snappy", "lz4", "zstd")}
        for module in modules.values():
            for name, function in vars(module).items():
                if name.startswith("decompress") and callable(function):
                    setattr(module, name, self._counted(function))
        error = cramjam.DecompressionError
        monkeypatch.setattr(decoding, "cramjam", SimpleNamespace(DecompressionError=error, **modules))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: bytes, *rest: Any) -> Any:
            self.bytes += len(data)
            return function(data, *rest)

        return call

    def _member(self, wbits: int) -> Any:
        member, work = zlib.decompressobj(wbits=wbits), self

        class Counted:
            unconsumed_tail = property(lambda _: member.unconsumed_tail)
            unused_data = property(lambda _: member.unused_data)
            eof = property(lambda _: member.eof)

            def decompress(self, data: bytes, length: int) -> bytes:
                found = member.decompress(data, length)
                work.bytes += len(data) + len(member.unused_data) + len(member.unconsumed_tail)
                return found

        return Counted()


@pytest.mark.parametrize("codec", STREAMS)
@given(
    pieces=st.lists(st.binary(max_size=30), max_size=8),
    repeats=st.integers(1, 400),
    cut=st.integers(0, 40),
    flip=st.none() | st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)),
)
def test_the_work_of_a_decode_follows_the_bytes_that_were_sent(
    codec: str, pieces: list[bytes], repeats: int, cut: int, flip: tuple[int, int] | None
) -> None:
    start, make = STREAMS[codec]
    body = bytearray(start + b"".join(map(make, pieces)) * repeats)
    del body[max(0, len(body) - cut) :]
    if flip is not None and body:
        body[flip[0] % len(body)] ^= flip[1]
    with pytest.MonkeyPatch.context() as monkeypatch:
        work = Work(monkeypatch)
        with suppress(BatchCorrupt, LimitExceeded):
            list(decode_bounded(compressed_batch(codec, bytes(body)), bytes_max=1 << 20))
    assert work.bytes <= 10 * len(body) + 1_000


@pytest.mark.parametrize(("codec", "piece"), [("gzip", b""), ("snappy", b""), ("zstd", b"x")])
def test_a_batch_in_too_many_pieces_is_refused(codec: str, piece: bytes) -> None:
    start, make = STREAMS[codec]
    with pytest.raises(SmqError, match=f"more than {PIECES_MAX} pieces") as e:
        list(decode_bounded(compressed_batch(codec, start + make(piece) * (PIECES_MAX + 1))))
    assert e.value.code is ErrorCode.LIMIT_EXCEEDED


def test_a_batch_that_takes_too_long_to_decompress_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("smq.replication.log.decoding.time.thread_time", lambda: float(next(ticks)))
    with pytest.raises(SmqError, match="more than 3 s to decompress"):
        list(decode_bounded(batch("gzip")))


def test_a_record_of_very_many_headers_is_refused_and_those_before_it_are_read() -> None:
    many = NewRecord(None, b"v" * GROUP_BYTES, 0, headers=[("", None)] * (RECORD_HEADERS_MAX + 1))
    few = NewRecord(None, b"v" * GROUP_BYTES, 0, headers=[("", None)] * RECORD_HEADERS_MAX)
    records = decode_bounded(memoryview(encode_batch([few, many])))
    assert len(next(records).headers) == RECORD_HEADERS_MAX
    with pytest.raises(SmqError, match=f"a record with {RECORD_HEADERS_MAX + 1} headers"):
        next(records)


def test_only_so_many_large_batches_are_open_at_the_same_time() -> None:
    large = memoryview(encode_batch([NewRecord(None, bytes(SMALL_BYTES), 0)], codec="zstd"))
    open_ones = [decode_bounded(large) for _ in range(LARGE_MAX)]
    for records in open_ones:
        next(records)
    assert not decoding._large.acquire(blocking=False)
    assert len(list(decode_bounded(batch("gzip")))) == 3, "smaller ones do not wait"
    del records, open_ones[0]
    assert len(list(decode_bounded(large))) == 1
    open_ones.clear()
    for _ in range(LARGE_MAX):
        assert decoding._large.acquire(blocking=False)
    for _ in range(LARGE_MAX):
        decoding._large.release()


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
