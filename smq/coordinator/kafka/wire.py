"""Kafka's primitive types, read from memoryviews and written to bytes.

Owns the bounds of every length and count that arrives. One that does not fit the bytes, or would cost more objects than
ELEMENTS_MAX, is a CodecError. Reading functions take a buffer and a position, and return a value and the position after
it. The compiled decoders and encoders call nothing else.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

# Array elements and tagged fields per message. Otherwise a request of 100 MiB could name 100 M empty elements, at some
# 200 bytes of memory each. 10,000 partitions with their offsets and epochs are a tenth of this.
ELEMENTS_MAX: Final = 100_000
_VARINT_BYTES_MAX: Final = 5  # 32 bits, seven per byte

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")


class CodecError(ValueError):
    """The bytes are not a message of this key and version. The text says where they stop making sense."""


class Budget:
    """How many more elements the message may hold."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = ELEMENTS_MAX

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise CodecError(f"more than {ELEMENTS_MAX} elements")


# ---------------------------------------------------------------------------------------------------- reading
def read_uvarint(b: memoryview, p: int) -> tuple[int, int]:
    value = b[p]
    if value < 0x80:
        return value, p + 1
    value &= 0x7F
    for i in range(1, _VARINT_BYTES_MAX):
        byte = b[p + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value > 0xFFFFFFFF:
                break
            return value, p + i + 1
    raise CodecError("a varint of more than 32 bits")


def _take(b: memoryview, p: int, size: int) -> int:
    """The position after `size` bytes from `p` on."""
    end = p + size
    if end > len(b):
        raise CodecError(f"a length of {size} bytes, but only {len(b) - p} bytes follow")
    return end


def _present(size: int) -> int:
    if size < 0:
        raise CodecError("null for a field that is not nullable")
    return size


def _size16(b: memoryview, p: int) -> tuple[int, int]:
    return _INT16.unpack_from(b, p)[0], p + 2


def _size32(b: memoryview, p: int) -> tuple[int, int]:
    return _INT32.unpack_from(b, p)[0], p + 4


def _size_compact(b: memoryview, p: int) -> tuple[int, int]:
    size = b[p]
    if size < 0x80:  # as nearly all are
        return size - 1, p + 1
    size, p = read_uvarint(b, p)
    return size - 1, p


def read_string(b: memoryview, p: int) -> tuple[str, int]:
    size, p = _size16(b, p)
    end = _take(b, p, _present(size))
    return str(b[p:end], "utf-8"), end


def read_nullable_string(b: memoryview, p: int) -> tuple[str | None, int]:
    return (None, p + 2) if _size16(b, p)[0] < 0 else read_string(b, p)


def read_compact_string(b: memoryview, p: int) -> tuple[str, int]:
    size, p = _size_compact(b, p)
    end = _take(b, p, _present(size))
    return str(b[p:end], "utf-8"), end


def read_compact_nullable_string(b: memoryview, p: int) -> tuple[str | None, int]:
    return (None, p + 1) if b[p] == 0 else read_compact_string(b, p)


def read_bytes(b: memoryview, p: int) -> tuple[memoryview, int]:
    size, p = _size32(b, p)
    end = _take(b, p, _present(size))
    return b[p:end], end


def read_nullable_bytes(b: memoryview, p: int) -> tuple[memoryview | None, int]:
    return (None, p + 4) if _size32(b, p)[0] < 0 else read_bytes(b, p)


def read_compact_bytes(b: memoryview, p: int) -> tuple[memoryview, int]:
    size, p = _size_compact(b, p)
    end = _take(b, p, _present(size))
    return b[p:end], end


def read_compact_nullable_bytes(b: memoryview, p: int) -> tuple[memoryview | None, int]:
    return (None, p + 1) if b[p] == 0 else read_compact_bytes(b, p)


def _counted(b: memoryview, count: int, p: int, budget: Budget) -> tuple[int, int]:
    if count > len(b) - p:  # an element has at least one byte
        raise CodecError(f"a count of {count} elements, but only {len(b) - p} bytes follow")
    if count > 0:
        budget.spend(count)
    return count, p


def read_count(b: memoryview, p: int, budget: Budget) -> tuple[int, int]:
    """The length of an array; -1 for null."""
    return _counted(b, *_size32(b, p), budget)


def read_compact_count(b: memoryview, p: int, budget: Budget) -> tuple[int, int]:
    return _counted(b, *_size_compact(b, p), budget)


def no_null(count: int) -> None:
    _present(count)


def read_tags(b: memoryview, p: int, budget: Budget) -> tuple[Sequence[tuple[int, int, int]], int]:
    """(tag, start, end) of each tagged field, in ascending order, and the position after the last."""
    if b[p] == 0:
        return (), p + 1
    count, p = read_uvarint(b, p)
    _counted(b, count, p, budget)
    found: list[tuple[int, int, int]] = []
    last = -1
    for _ in range(count):
        tag, p = read_uvarint(b, p)
        size, p = read_uvarint(b, p)
        if tag <= last:
            raise CodecError(f"tagged field {tag} comes after {last}")
        end = _take(b, p, size)
        found.append((tag, p, end))
        last, p = tag, end
    return found, p


def check_end(what: str, p: int, end: int) -> None:
    if p != end:
        raise CodecError(f"{what} ends at byte {end}, but its content at byte {p}")


# ---------------------------------------------------------------------------------------------------- writing
def uvarint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def string(value: str | None) -> bytes:
    if value is None:
        return b"\xff\xff"
    data = value.encode()
    return _INT16.pack(len(data)) + data


def compact_string(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    data = value.encode()
    return uvarint(len(data) + 1) + data


def sized(value: Buffer | None) -> bytes:
    return b"\xff\xff\xff\xff" if value is None else _INT32.pack(len(value)) + value


def compact_sized(value: Buffer | None) -> bytes:
    return b"\0" if value is None else uvarint(len(value) + 1) + value


def count(items: Sequence[object] | None) -> bytes:
    return _INT32.pack(-1 if items is None else len(items))


def compact_count(items: Sequence[object] | None) -> bytes:
    return b"\0" if items is None else uvarint(len(items) + 1)


def records_size(parts: Iterable[Buffer] | None) -> bytes:
    """The length of a gather list of record batches."""
    return _INT32.pack(-1 if parts is None else sum(map(len, parts)))


def compact_records_size(parts: Iterable[Buffer] | None) -> bytes:
    return b"\0" if parts is None else uvarint(sum(map(len, parts)) + 1)


def tagged(fields: Sequence[tuple[int, Buffer]]) -> bytes:
    """`fields` are in ascending order of their tags."""
    return uvarint(len(fields)) + b"".join(uvarint(tag) + uvarint(len(data)) + data for tag, data in fields)
