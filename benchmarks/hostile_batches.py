"""What a node spends on batches that were made to cost much: time and memory of one decode each, in its own process.

    python -m benchmarks.hostile_batches

Owns the batches. Each is small, or has no more bytes than a client may send.
"""

import resource
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Final

import cramjam

from smq.records import CODECS, NewRecord, decode_batch, encode_batch, parse_header, with_body
from smq.replication.log.decoding import decode_bounded

MIB: Final = 1 << 20
_GZIP_HEAD: Final = bytes.fromhex("1f8b0800000000000203")
# Eight deflate blocks that hold nothing, each with the longest tables: 14 bytes of work for zlib.
_EMPTY_BLOCK_BITS: Final = 112


def _gzip(piece: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(piece) + packer.flush()


def _repeated(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


def _empty_dynamic_block() -> bytes:
    """RFC 1951, 3.2.7: 286 and 30 codes, of which two each have a length, and the end of the block."""
    lengths = {18: 1, 1: 2, 0: 2}
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)
    fields = [(0, 1), (2, 2), (29, 5), (29, 5), (14, 4), *((lengths.get(code, 0), 3) for code in order)]
    zeros, one = 0b0, (0b11, 2)
    for run in (138, 118, 0, 0, 28, 0, 0, 28):
        fields += [(zeros, 1), (run - 11, 7)] if run else [one]
    fields.append((0, 1))
    value = at = 0
    for number, bits in fields:
        value |= number << at
        at += bits
    assert at == _EMPTY_BLOCK_BITS
    return value.to_bytes(at // 8, "little")


def _many_headers() -> bytes:
    count = 8 * MIB
    record = b"\0\0\0\1\1" + _zigzag(count) + b"\0\1" * count
    return bytes(cramjam.zstd.compress(_zigzag(len(record)) + record))


def _zigzag(number: int) -> bytes:
    number, out = 2 * number, b""
    while number >= 0x80:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def _empty_blocks() -> bytes:
    return _GZIP_HEAD + _repeated(_empty_dynamic_block(), 16 * MIB) + b"\x03\0" + bytes(8)


_XERIAL: Final = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
BATCHES: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "members without content": ("gzip", lambda: _repeated(_gzip(b""), MIB)),
    "blocks without content": ("gzip", _empty_blocks),
    "120 MB of zeros, gzip": ("gzip", lambda: _gzip(bytes(115 * MIB))),
    "snappy blocks without content": ("snappy", lambda: _XERIAL + _repeated(b"\0\0\0\1\0", MIB)),
    "lz4 frames without content": ("lz4", lambda: _repeated(bytes(cramjam.lz4.compress(b"")), MIB)),
    "120 MB of zeros, lz4": ("lz4", lambda: bytes(cramjam.lz4.compress(bytes(115 * MIB)))),
    "zstd frames without content": ("zstd", lambda: _repeated(bytes(cramjam.zstd.compress(b"")), MIB)),
    "120 MB of zeros, zstd": ("zstd", lambda: bytes(cramjam.zstd.compress(bytes(115 * MIB)))),
    "a record of 8 million headers": ("zstd", _many_headers),
}


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measure(name: str) -> None:
    codec, make = BATCHES[name]
    body = make()
    one = encode_batch([NewRecord(None, b"v", 5)])
    list(decode_batch(one))  # imports the codec
    batch = with_body(parse_header(one), one, CODECS[codec], body)
    before_mib, began = _peak_mib(), time.perf_counter()
    try:
        outcome = f"{sum(1 for _ in decode_bounded(memoryview(batch)))} records"
    except Exception as e:  # noqa: BLE001 - each of them is refused in its own way
        outcome = str(e)[:60]
    took_s, mib = time.perf_counter() - began, _peak_mib() - before_mib
    print(f"{name:30} {len(body):>10,} bytes {took_s:7.3f} s {mib:>5} MiB  {outcome}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for each in BATCHES:
            subprocess.run([sys.executable, "-m", "benchmarks.hostile_batches", each], check=True)
