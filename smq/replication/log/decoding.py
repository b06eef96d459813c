"""Decodes the records of a batch under a size cap: a decompression bomb is refused before it fills memory.

Owns the bounded decompression in front of smq.records.decode_batch, the conversion of a batch to another codec, and
where each record of a body lies. In the server, only this module calls the codecs' libraries. It must never touch a
log. Only code that must see records imports it: look-ups by time, the conversion of produced batches, compaction, and
services.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import cramjam
from aiokafka.codec import gzip_encode, snappy_encode, zstd_encode

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import (
    CODEC_MASK,
    CODECS,
    HEADER_BYTES,
    LENGTH_OVERHEAD,
    BatchCorrupt,
    BatchHeader,
    Buffer,
    Record,
    decode_batch,
    parse_header,
    with_body,
)

# The largest batch (100 MiB) uncompressed, or a default batch of 1 MiB compressed 128-fold. A batch that expands
# further is taken for a bomb; it can still be fetched raw.
DECODED_BATCH_BYTES_MAX: Final = 128 << 20
_FIRST_GUESS_BYTES: Final = 64 << 10
_GUESS_FACTOR: Final = 4  # how much larger the next attempt's buffer is
_XERIAL_HEADER: Final = b"\x82SNAPPY\x00"  # Java's framing of snappy, which Kafka's clients use
_XERIAL_HEADER_BYTES: Final = 16
_LZ4_LEVEL: Final = 9  # Kafka's default
_LZ4_BLOCK_BYTES: Final = 64 << 10  # of the frames that this compressor makes
_LENGTH_AT: Final = 8
_ATTRIBUTES_AT: Final = 21

_Into = Callable[[memoryview, bytearray], int]


def decode_bounded(batch: memoryview, bytes_max: int = DECODED_BATCH_BYTES_MAX) -> Iterator[Record]:
    """As `decode_batch`; LIMIT_EXCEEDED if the records would take more than `bytes_max` uncompressed."""
    return decode_batch(plain_batch(parse_header(batch), batch, bytes_max))


def plain_batch(header: BatchHeader, batch: memoryview, bytes_max: int = DECODED_BATCH_BYTES_MAX) -> Buffer:
    """The batch with its records decompressed, to be decoded: its CRC is that of the compressed one. BatchCorrupt, or
    LIMIT_EXCEEDED."""
    if header.codec == CODECS["none"]:
        return batch
    plain = plain_records(header, batch, bytes_max)
    head = bytearray(batch[:HEADER_BYTES])
    struct.pack_into(">i", head, _LENGTH_AT, HEADER_BYTES + len(plain) - LENGTH_OVERHEAD)
    struct.pack_into(">h", head, _ATTRIBUTES_AT, header.attributes & ~CODEC_MASK)
    return bytes(head) + plain


def converted(batch: Buffer, header: BatchHeader, codec: int, level: int | None) -> bytes:
    """The same records in another codec. BatchCorrupt if they do not decompress; LIMIT_EXCEEDED as `decode_bounded`."""
    body = plain_records(header, memoryview(batch), DECODED_BATCH_BYTES_MAX)
    return with_body(header, batch, codec, compress(body, codec, level))


def compress(body: Buffer, codec: int, level: int | None = None) -> Buffer:
    """As Kafka's clients expect it: snappy in Java's framing, lz4 in blocks that are not linked."""
    if codec == CODECS["gzip"]:
        made = gzip_encode(body, level if level is not None else zlib.Z_DEFAULT_COMPRESSION)
    elif codec == CODECS["snappy"]:
        made = snappy_encode(body)
    elif codec == CODECS["lz4"]:
        made = _lz4(body, level if level is not None else _LZ4_LEVEL)
    elif codec == CODECS["zstd"]:
        made = zstd_encode(body, level)
    else:
        return body
    return bytes(made)


def _lz4(body: Buffer, level: int) -> Buffer:
    """As aiokafka's, but block by block: this compressor keeps Python's lock, and the loop needs it meanwhile."""
    compressor = cramjam.lz4.Compressor(level=level, content_checksum=False, block_linked=False)
    view = memoryview(body)
    for at in range(0, len(view), _LZ4_BLOCK_BYTES):
        compressor.compress(bytes(view[at : at + _LZ4_BLOCK_BYTES]))
    return bytes(compressor.finish())


def plain_records(header: BatchHeader, batch: memoryview, bytes_max: int = DECODED_BATCH_BYTES_MAX) -> bytes:
    """The records of a batch, decompressed, one after another. BatchCorrupt, or LIMIT_EXCEEDED."""
    body = batch[HEADER_BYTES:]
    if header.codec == CODECS["none"]:
        return bytes(body)
    try:
        if header.codec == CODECS["gzip"]:
            return _gunzip(body, bytes_max)
        if header.codec == CODECS["snappy"]:
            return _unsnappy(body, bytes_max)
        module = cramjam.lz4 if header.codec == CODECS["lz4"] else cramjam.zstd
        return _by_guessing(module.decompress_into, body, bytes_max)
    except (zlib.error, cramjam.DecompressionError, struct.error) as e:
        raise BatchCorrupt(f"the batch at offset {header.base_offset} does not decompress: {e}") from e


def _too_large(bytes_max: int) -> SmqError:
    return SmqError(
        ErrorCode.LIMIT_EXCEEDED, f"a batch takes more than {bytes_max} bytes uncompressed; fetch it raw instead"
    )


def _gunzip(body: memoryview, bytes_max: int) -> bytes:
    out = bytearray()
    rest: bytes | memoryview = body
    while rest:  # a gzip stream may have several members
        member = zlib.decompressobj(wbits=31)
        out += member.decompress(rest, bytes_max + 1 - len(out))
        if len(out) > bytes_max:
            raise _too_large(bytes_max)
        if not member.eof:
            raise zlib.error("the stream is truncated")
        rest = member.unused_data
    return bytes(out)


def _unsnappy(body: memoryview, bytes_max: int) -> bytes:
    if bytes(body[: len(_XERIAL_HEADER)]) != _XERIAL_HEADER:
        return _unsnappy_block(body, bytes_max)
    out = bytearray()
    at = _XERIAL_HEADER_BYTES
    while at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        if size < 0 or at + 4 + size > len(body):
            raise struct.error("a snappy block is truncated")
        out += _unsnappy_block(body[at + 4 : at + 4 + size], bytes_max - len(out))
        at += 4 + size
    return bytes(out)


def _unsnappy_block(block: memoryview, bytes_max: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > bytes_max:
        raise _too_large(bytes_max)
    return bytes(cramjam.snappy.decompress_raw(block))


def _by_guessing(into: _Into, body: memoryview, bytes_max: int) -> bytes:
    """lz4 and zstd need not declare the size of their output: try growing buffers, up to the cap."""
    size = min(max(_FIRST_GUESS_BYTES, _GUESS_FACTOR * len(body)), bytes_max)
    while True:
        buffer = bytearray(size)
        try:
            return bytes(memoryview(buffer)[: into(body, buffer)])
        except cramjam.DecompressionError as e:
            if "whole buffer" not in str(e):
                raise
            if size >= bytes_max:
                raise _too_large(bytes_max) from None
            size = min(size * _GUESS_FACTOR, bytes_max)


class RecordSpan(NamedTuple):
    """One record in the decompressed body of a batch: its bytes are [start, stop)."""

    start: int
    stop: int
    offset_delta: int
    timestamp_delta: int
    key: bytes | None
    is_tombstone: bool  # it has no value


def spans(body: bytes, count: int) -> Iterator[RecordSpan]:
    """The records of a body, in order. BatchCorrupt if it does not hold exactly `count`."""
    at = 0
    for _ in range(count):
        start = at
        length, at = varint(body, at)
        stop = at + length
        if length < 0 or stop > len(body):
            raise BatchCorrupt(f"a record at byte {start} of {len(body)} does not end inside the batch")
        timestamp_delta, at = varint(body, at + 1)  # after the record's attributes
        offset_delta, at = varint(body, at)
        size, at = varint(body, at)
        key = None
        if size >= 0:
            key = body[at : at + size]
            at += size
        size, at = varint(body, at)
        if at + max(size, 0) > stop:
            raise BatchCorrupt(f"a record at byte {start} is longer than it says")
        yield RecordSpan(start, stop, offset_delta, timestamp_delta, key, size < 0)
        at = stop
    if at != len(body):
        raise BatchCorrupt(f"{len(body) - at} bytes after the last record")


def varint(data: Buffer, at: int) -> tuple[int, int]:
    """A zigzag number, and where it ends."""
    try:
        byte = data[at]
        if byte < 0x80:
            return (byte >> 1) ^ -(byte & 1), at + 1
        raw, shift = byte & 0x7F, 7
        while True:
            at += 1
            byte = data[at]
            raw |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (raw >> 1) ^ -(raw & 1), at + 1
            shift += 7
            if shift > 63:
                raise BatchCorrupt("a number of more than ten bytes")
    except IndexError:
        raise BatchCorrupt("a record is truncated") from None
