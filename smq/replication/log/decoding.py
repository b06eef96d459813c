"""Decodes the records of a batch within bounds: whatever its producer wrote, a reader's cost has a limit.

Owns the bounds of every decode: bytes, time, pieces of a stream, headers of a record, and how many large batches are
open at the same time. Owns the conversion of a batch to another codec, and where each record of a body lies. In the
server, only this module calls the codecs' libraries. It must never touch a log, and it decompresses on threads, never
on the event loop. Only code that must see records imports it: look-ups by time, the conversion of produced batches,
compaction, and services.
"""

import mmap
import struct
import threading
import time
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
# Of the thread that decompresses one batch. The largest needs half a second if a client has made it. But a deflate
# block without content takes 14 bytes and 1.5 us, so 100 MiB of them would take 11 s.
DECODE_CPU_S_MAX: Final = 3.0
# Members, frames and blocks of one batch: as many as snappy's smallest blocks in Java, 1 KiB, in the largest batch. A
# piece may cost 10 us and hold nothing.
PIECES_MAX: Final = 1 << 17
SMALL_BYTES: Final = 8 << 20  # decompressed; a batch that takes more is a large one
LARGE_MAX: Final = 2  # that threads have open at the same time, in all 256 MiB
GROUP_BYTES: Final = (
    64 << 10
)  # of records, decoded at a time: the smallest header has two bytes, and takes 80 in memory
RECORD_HEADERS_MAX: Final = 10_000  # of a record that is larger than that
_FIRST_BYTES: Final = 64 << 10  # of the first attempt to decompress what does not say how large it is, at least
_FIRST_FACTOR: Final = 4  # and so many times the compressed size
_GZIP_IN_MIN: Final = 64  # given to zlib at a time: it copies the bytes beyond a member's end
_GZIP_IN_MAX: Final = 64 << 10  # 8 ms of work at most: the time is looked at after each
_GZIP_OUT: Final = 1 << 20  # taken from zlib at a time
_XERIAL_HEADER: Final = b"\x82SNAPPY\x00"  # Java's framing of snappy, which Kafka's clients use
_XERIAL_HEADER_BYTES: Final = 16
_ZSTD_FRAME: Final = struct.Struct("<IB")  # magic, descriptor
_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A5  # and four bits
_LZ4_LEVEL: Final = 9  # Kafka's default
_LZ4_BLOCK_BYTES: Final = 64 << 10  # of the frames that this compressor makes
_LENGTH_AT: Final = 8
_ATTRIBUTES_AT: Final = 21
_COUNT_AT: Final = 57

_Into = Callable[[memoryview, memoryview], int]
_large: Final = threading.BoundedSemaphore(LARGE_MAX)


class _Budget:
    """Of one decode, on one thread. It ends with the `with` block, and so does the use of what was decompressed."""

    def __init__(self, bytes_max: int, cpu_s_max: float = DECODE_CPU_S_MAX) -> None:
        self.bytes_max = bytes_max
        self._until_s = time.thread_time() + cpu_s_max  # CPU time: a busy machine makes no batch a bad one
        self._is_large = False

    def __enter__(self) -> "_Budget":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_large:
            _large.release()

    def check(self, size: int) -> None:
        """Call it before `size` bytes are in memory. Waits for a place if they make this one of the large ones."""
        if size > self.bytes_max:
            raise _refusal(f"takes more than {self.bytes_max} bytes uncompressed")
        if time.thread_time() > self._until_s:
            raise _refusal(f"takes more than {DECODE_CPU_S_MAX:g} s to decompress")
        if size > SMALL_BYTES and not self._is_large:
            _large.acquire()
            self._is_large = True


def _refusal(problem: str) -> SmqError:
    return SmqError(ErrorCode.LIMIT_EXCEEDED, f"a batch {problem}; fetch it raw instead")


def decode_bounded(batch: memoryview, bytes_max: int = DECODED_BATCH_BYTES_MAX) -> Iterator[Record]:
    """As `decode_batch`, one record at a time. LIMIT_EXCEEDED if they would take more than `bytes_max` uncompressed, or
    more time or headers than any client's do."""
    with _Budget(bytes_max) as budget:
        header = parse_header(batch)
        yield from records_of(_plain(header, batch, budget), header)


def plain_batch(
    header: BatchHeader,
    batch: memoryview,
    bytes_max: int = DECODED_BATCH_BYTES_MAX,
    *,
    cpu_s_max: float = DECODE_CPU_S_MAX,
) -> Buffer:
    """The batch with its records decompressed, to be decoded: its CRC is that of the compressed one. BatchCorrupt, or
    LIMIT_EXCEEDED. The caller sees to it that few of these are in memory."""
    with _Budget(bytes_max, cpu_s_max) as budget:
        return _plain(header, batch, budget)


def converted(batch: Buffer, header: BatchHeader, codec: int, level: int | None) -> bytes:
    """The same records in another codec. BatchCorrupt if they do not decompress; LIMIT_EXCEEDED as `decode_bounded`."""
    with _Budget(DECODED_BATCH_BYTES_MAX) as budget:
        body = memoryview(_plain(header, memoryview(batch), budget))[HEADER_BYTES:]
        return with_body(header, batch, codec, compress(body, codec, level))


def bounded_spans(batch: Buffer, header: BatchHeader) -> Iterator["RecordSpan"]:
    """As `spans`, of a batch; errors as `decode_bounded`."""
    with _Budget(DECODED_BATCH_BYTES_MAX) as budget:
        yield from spans(memoryview(_plain(header, memoryview(batch), budget))[HEADER_BYTES:], header.count)


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


def _plain(header: BatchHeader, batch: memoryview, budget: _Budget) -> Buffer:
    """Header and decompressed records, in one piece of memory that is written once."""
    if header.codec == CODECS["none"]:
        return batch
    body = batch[HEADER_BYTES:]
    out: bytearray | memoryview
    try:
        if header.codec == CODECS["gzip"]:
            out, size = _gunzipped(body, budget)
        elif header.codec == CODECS["snappy"]:
            out, size = _unsnappied(body, budget)
        else:
            if header.codec == CODECS["zstd"]:
                _check_pieces(_zstd_pieces(body))
            module = cramjam.lz4 if header.codec == CODECS["lz4"] else cramjam.zstd
            out, size = _by_guessing(module.decompress_into, body, budget)
    except (zlib.error, cramjam.DecompressionError, struct.error) as e:
        raise BatchCorrupt(f"the batch at offset {header.base_offset} does not decompress: {e}") from e
    plain = memoryview(out)[: HEADER_BYTES + size]
    plain[:HEADER_BYTES] = batch[:HEADER_BYTES]
    struct.pack_into(">i", plain, _LENGTH_AT, len(plain) - LENGTH_OVERHEAD)
    struct.pack_into(">h", plain, _ATTRIBUTES_AT, header.attributes & ~CODEC_MASK)
    return plain


def _buffer(size: int) -> memoryview:
    """Room for the header and `size` bytes. The memory of a large one is taken only as far as it is written to."""
    size += HEADER_BYTES
    return memoryview(
        bytearray(size) if size <= _FIRST_BYTES else mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )


def _check_pieces(count: int) -> None:
    if count > PIECES_MAX:
        raise _refusal(f"is compressed in more than {PIECES_MAX} pieces")


def _gunzipped(body: memoryview, budget: _Budget) -> tuple[bytearray, int]:
    out = bytearray(HEADER_BYTES)
    at = members = 0
    while at < len(body):  # a gzip stream may have several members
        members += 1
        _check_pieces(members)
        at = _gunzip_member(body, at, out, budget)
    return out, len(out) - HEADER_BYTES


def _gunzip_member(body: memoryview, at: int, out: bytearray, budget: _Budget) -> int:
    """Adds what the member at `at` holds, and returns where it ends. Gives zlib little at first: it hands back a copy
    of what it has not used, so a body of short members would be copied once per member."""
    member = zlib.decompressobj(wbits=31)
    given = _GZIP_IN_MIN
    while not member.eof:
        if at == len(body):
            raise zlib.error("the stream is truncated")
        piece: Buffer = body[at : at + given]
        at += len(piece)
        given = min(2 * given, _GZIP_IN_MAX)
        while True:
            left = budget.bytes_max - (len(out) - HEADER_BYTES)
            more = member.decompress(piece, min(_GZIP_OUT, left + 1))
            budget.check(len(out) - HEADER_BYTES + len(more))
            out += more
            piece = member.unconsumed_tail
            if member.eof or (not piece and len(more) < _GZIP_OUT):
                break
    return at - len(member.unused_data)


def _unsnappied(body: memoryview, budget: _Budget) -> tuple[memoryview, int]:
    if bytes(body[: len(_XERIAL_HEADER)]) == _XERIAL_HEADER:
        blocks = [body[start:stop] for start, stop in _xerial_blocks(body)]
    else:
        blocks = [body]
    size = sum(map(cramjam.snappy.decompress_raw_len, blocks))
    budget.check(size)
    out = _buffer(size)
    at = HEADER_BYTES
    for block in blocks:
        at += cramjam.snappy.decompress_raw_into(block, out[at:])
    return out, at - HEADER_BYTES


def _xerial_blocks(body: memoryview) -> Iterator[tuple[int, int]]:
    at, count = _XERIAL_HEADER_BYTES, 0
    while at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        start, at = at + 4, at + 4 + size
        if size < 0 or at > len(body):
            raise struct.error("a snappy block is truncated")
        count += 1
        _check_pieces(count)
        yield start, at


def _zstd_pieces(body: memoryview) -> int:
    """How many frames and blocks there are, up to a few more than may be. What is malformed ends the count: the codec
    says so."""
    at = count = 0
    while at + 8 <= len(body) and count <= PIECES_MAX:
        count += 1
        magic, descriptor = _ZSTD_FRAME.unpack_from(body, at)
        if magic >> 4 == _ZSTD_SKIPPABLE:
            at += 8 + int.from_bytes(body[at + 4 : at + 8], "little")
            continue
        if magic != _ZSTD_MAGIC:
            break
        is_single = descriptor >> 5 & 1
        content_size_bytes = (is_single, 2, 4, 8)[descriptor >> 6]
        at += _ZSTD_FRAME.size + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3] + content_size_bytes
        is_last = 0
        while not is_last and at + 3 <= len(body) and count <= PIECES_MAX:
            count += 1
            block = int.from_bytes(body[at : at + 3], "little")
            is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
            at += 3 + (1 if kind == 1 else size)  # a run is one byte
        at += 4 * (descriptor >> 2 & 1)  # the checksum
    return count


def _by_guessing(into: _Into, body: memoryview, budget: _Budget) -> tuple[memoryview, int]:
    """lz4 and zstd need not say how large their output is: at most three attempts, the last with all that may be."""
    first = max(_FIRST_BYTES, _FIRST_FACTOR * len(body))
    for size in sorted({min(size, budget.bytes_max) for size in (first, max(first, SMALL_BYTES), budget.bytes_max)}):
        budget.check(size)
        out = _buffer(size)
        try:
            return out, into(body, out[HEADER_BYTES:])
        except cramjam.DecompressionError as e:
            if "whole buffer" not in str(e):
                raise
    raise _refusal(f"takes more than {budget.bytes_max} bytes uncompressed")


def records_of(plain: Buffer, header: BatchHeader) -> Iterator[Record]:
    """The records of a `plain_batch`, one at a time."""
    for group in record_groups(plain, header):
        yield from decode_batch(group)


def record_groups(plain: Buffer, header: BatchHeader) -> Iterator[Buffer]:
    """A plain batch as batches of whole records: what is decoded at a time is then small, however long a header's
    numbers are. BatchCorrupt, or LIMIT_EXCEEDED for a record that has more headers than RECORD_HEADERS_MAX."""
    body = memoryview(plain)[HEADER_BYTES:]
    if len(body) <= GROUP_BYTES:
        yield plain
        return
    start = at = count = 0
    for number in range(1, header.count + 1):
        length, stop = varint(body, at)
        stop += length
        if length < 0 or stop > len(body):
            raise BatchCorrupt(f"a record at byte {at} of {len(body)} does not end inside the batch")
        if stop - start > GROUP_BYTES and count:
            yield _group(plain, start, at, count)
            start, count = at, 0
        if stop - at > GROUP_BYTES and (headers := _header_count(body, at)) > RECORD_HEADERS_MAX:
            raise _refusal(f"has a record with {headers} headers, of at most {RECORD_HEADERS_MAX}")
        at, count = stop, count + 1
        if number == header.count and at != len(body):
            raise BatchCorrupt(f"{len(body) - at} bytes after the last record")
    yield _group(plain, start, at, count)


def _group(plain: Buffer, start: int, stop: int, count: int) -> bytearray:
    """A batch of the records in these bytes of the body. Its CRC is not right."""
    out = bytearray(memoryview(plain)[:HEADER_BYTES])
    out += memoryview(plain)[HEADER_BYTES + start : HEADER_BYTES + stop]
    struct.pack_into(">i", out, _LENGTH_AT, len(out) - LENGTH_OVERHEAD)
    struct.pack_into(">i", out, _COUNT_AT, count)
    return out


def _header_count(body: memoryview, at: int) -> int:
    """Of the record at `at`."""
    _, at = varint(body, at)
    _, at = varint(body, at + 1)  # after the record's attributes
    _, at = varint(body, at)
    for _field in ("key", "value"):
        size, at = varint(body, at)
        at += max(size, 0)
    return varint(body, at)[0]


class RecordSpan(NamedTuple):
    """One record in the decompressed body of a batch: its bytes are [start, stop)."""

    start: int
    stop: int
    offset_delta: int
    timestamp_delta: int
    key: bytes | None
    is_tombstone: bool  # it has no value


def spans(body: Buffer, count: int) -> Iterator[RecordSpan]:
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
            key = bytes(body[at : at + size])
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
