"""Bytes: a bounded reader and the few kinds of field that commands, replies and snapshots are made of.

Owns the encoding of integers, strings and lists: big-endian, fixed width, one encoding per value, so that equal values
have equal bytes. It must never know what a field means, and never raise anything but CodecError for bytes that it
reads. The rest of raft_state imports it, and the messages between nodes
(replication/net/layout.py, replication/net/wire.py, replication/raft/messages.py).
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from smq.raft_state.limits import ITEMS_MAX, TEXT_BYTES_MAX

Bytes: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")


class CodecError(ValueError):
    """The bytes are not what this version writes, or a value does not fit its field. The message says which."""


U8: Final = struct.Struct(">B")
U16: Final = struct.Struct(">H")
U32: Final = struct.Struct(">I")


class Reader:
    """Takes fields from the front of a buffer, never beyond its end."""

    __slots__ = ("_at", "_view")

    def __init__(self, data: Bytes) -> None:
        self._view = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, not copied."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._view):
            raise CodecError(f"cut short: {size} bytes needed at {start}, the end is at {len(self._view)}")
        return self._view[start : self._at]

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """The next fields by a fixed layout."""
        start, self._at = self._at, self._at + layout.size
        if self._at > len(self._view):
            raise CodecError(f"cut short: {layout.size} bytes needed at {start}, the end is at {len(self._view)}")
        return layout.unpack_from(self._view, start)

    def finish(self) -> None:
        """CodecError if bytes are left over."""
        if self._at != len(self._view):
            raise CodecError(f"{len(self._view) - self._at} bytes are left over after the last field")


class Kind(Protocol):
    """How to write and read one field. `write` may raise CodecError, struct.error or UnicodeEncodeError; the codec
    turns them into CodecError. `read` raises CodecError only."""

    def write(self, out: bytearray, value: Any) -> None: ...

    def read(self, reader: Reader) -> Any: ...


@dataclass(frozen=True, slots=True)
class Number:
    layout: struct.Struct

    def write(self, out: bytearray, value: int) -> None:
        out += self.layout.pack(value)

    def read(self, reader: Reader) -> int:
        number: int = reader.unpack(self.layout)[0]
        return number


@dataclass(frozen=True, slots=True)
class Fixed:
    """Exactly `size` bytes, without a length. A wrong size is refused; struct would pad or cut it silently."""

    size: int

    def write(self, out: bytearray, value: bytes) -> None:
        if len(value) != self.size:
            raise CodecError(f"an id must have {self.size} bytes, not {len(value)}")
        out += value

    def read(self, reader: Reader) -> bytes:
        return bytes(reader.take(self.size))


@dataclass(frozen=True, slots=True)
class Blob:
    """Up to `size_max` bytes after their length."""

    prefix: struct.Struct
    size_max: int

    def write(self, out: bytearray, value: bytes) -> None:
        if len(value) > self.size_max:
            raise CodecError(f"at most {self.size_max} bytes are allowed, not {len(value)}")
        out += self.prefix.pack(len(value))
        out += value

    def read(self, reader: Reader) -> bytes:
        (size,) = reader.unpack(self.prefix)
        if size > self.size_max:
            raise CodecError(f"at most {self.size_max} bytes are allowed, not {size}")
        return bytes(reader.take(size))


_TEXT_BYTES: Final = Blob(U16, TEXT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Text:
    def write(self, out: bytearray, value: str) -> None:
        _TEXT_BYTES.write(out, value.encode())

    def read(self, reader: Reader) -> str:
        try:
            return _TEXT_BYTES.read(reader).decode()
        except UnicodeDecodeError as e:
            raise CodecError(f"a string is not UTF-8: {e}") from e


@dataclass(frozen=True, slots=True)
class Flag:
    def write(self, out: bytearray, value: bool) -> None:
        out.append(1 if value else 0)

    def read(self, reader: Reader) -> bool:
        byte = reader.unpack(U8)[0]
        if byte > 1:
            raise CodecError(f"a flag is 0 or 1, not {byte}")
        return bool(byte)


@dataclass(frozen=True, slots=True)
class Group:
    """Several kinds one after another: a tuple of fixed length."""

    kinds: tuple[Kind, ...]

    def write(self, out: bytearray, value: tuple[Any, ...]) -> None:
        for kind, part in zip(self.kinds, value, strict=True):
            kind.write(out, part)

    def read(self, reader: Reader) -> tuple[Any, ...]:
        return tuple(kind.read(reader) for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of up to ITEMS_MAX items. Reading allocates item by item, so a false count costs nothing."""

    kind: Kind

    def write(self, out: bytearray, value: tuple[Any, ...]) -> None:
        write_count(out, len(value))
        for item in value:
            self.kind.write(out, item)

    def read(self, reader: Reader) -> tuple[Any, ...]:
        return tuple(self.kind.read(reader) for _ in range(read_count(reader)))


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass, field by field in the order given here, which never changes within a version."""

    cls: type
    fields: tuple[tuple[str, Kind], ...] = ()

    def write(self, out: bytearray, value: Any) -> None:
        for name, kind in self.fields:
            kind.write(out, getattr(value, name))

    def read(self, reader: Reader) -> Any:
        return self.cls(**{name: kind.read(reader) for name, kind in self.fields})


def write_count(out: bytearray, count: int) -> None:
    """The length of a list."""
    if count > ITEMS_MAX:
        raise CodecError(f"at most {ITEMS_MAX} items are allowed, not {count}")
    out += U32.pack(count)


def read_count(reader: Reader) -> int:
    """Inverse of `write_count`."""
    count: int = reader.unpack(U32)[0]
    if count > ITEMS_MAX:
        raise CodecError(f"at most {ITEMS_MAX} items are allowed, not {count}")
    return count


INT16: Final = Number(struct.Struct(">h"))
INT32: Final = Number(struct.Struct(">i"))
INT64: Final = Number(struct.Struct(">q"))
TEXT: Final = Text()
FLAG: Final = Flag()
