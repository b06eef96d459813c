"""Bytes: a bounded reader, and the kinds of field that all of smq's own binary formats are made of.

Owns two ways to write the fields of a value, big-endian, one encoding per value, so that equal values have equal bytes:
a `Record` is written field by field, each of any kind (commands, replies, snapshots); a `TaggedLayout` is a first byte,
fields of fixed width in one struct, so that they cost one call each way, and what follows them (messages between nodes,
rows on disk). It must never know what a field means, copy a batch, or raise anything but CodecError for bytes that it
reads. Who reads a disk turns that into DataDamaged. The rest of raft_state imports it, and all of replication.
"""

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol, TypeAlias

from smq.raft_state.limits import ITEMS_MAX, TEXT_BYTES_MAX

Buffer: TypeAlias = bytes | bytearray | memoryview


PIECES_MAX: Final = 1 << 20  # in one message; the cap of a frame bounds the bytes
_UINT32_MAX: Final = (1 << 32) - 1  # of rows; memory is taken only for those whose bytes are there


class CodecError(ValueError):
    """The bytes are not what this version writes, or a value does not fit its field. The message says which. Of a
    message from another node: only the session that it came from suffers."""


U8: Final = struct.Struct(">B")
U16: Final = struct.Struct(">H")
U32: Final = struct.Struct(">I")


class Reader:
    """Takes fields from the front of a buffer, never beyond its end."""

    __slots__ = ("_at", "_view")

    def __init__(self, data: Buffer) -> None:
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

    def rest(self) -> memoryview:
        """All that is left, not copied."""
        start, self._at = self._at, len(self._view)
        return self._view[start:]

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
BYTE: Final = Number(U8)
UINT32: Final = Number(U32)
UINT64: Final = Number(struct.Struct(">Q"))


# ------------------------------------------------------------------------------------------- fields of fixed width
@dataclass(frozen=True, slots=True)
class Bounded:
    """An unsigned number of 64 bits that is at most this."""

    maximum: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A member of an enumeration, in one byte."""

    of: type[enum.IntEnum]


FixedWidth: TypeAlias = Number | Fixed | Flag | Bounded | Choice


class Layout:
    """Fields of fixed width, as one struct. An id that is too short is filled up with zeros, as a disk's before it has
    one."""

    __slots__ = ("_checks", "_struct", "pack", "size")

    def __init__(self, *kinds: FixedWidth) -> None:
        self._struct = struct.Struct(">" + "".join(map(_code_of, kinds)))
        self._checks = [(at, check) for at, kind in enumerate(kinds) if (check := _check_of(kind)) is not None]
        self.pack = self._struct.pack
        self.size = self._struct.size

    def unpack(self, data: Buffer) -> Sequence[Any]:
        """The fields of bytes that hold nothing else."""
        if len(data) != self.size:
            raise CodecError(f"{len(data)} bytes, not {self.size}")
        return self._checked(self._struct.unpack(data))

    def read(self, reader: Reader) -> Sequence[Any]:
        """The next fields."""
        return self._checked(reader.unpack(self._struct))

    def read_rows(self, reader: Reader, count: int, make: Callable[[Sequence[Any]], Any]) -> tuple[Any, ...]:
        """What `make` makes of each of the next `count` times the fields."""
        rows = self._struct.iter_unpack(reader.take(count * self.size))
        return tuple([make(row) for row in (map(self._checked, rows) if self._checks else rows)])

    def _checked(self, values: Sequence[Any]) -> Sequence[Any]:
        """The unpacked values as those of the fields. CodecError if one is none."""
        if not self._checks:
            return values
        values = list(values)
        for at, check in self._checks:
            values[at] = check(values[at])
        return values


def _code_of(kind: FixedWidth) -> str:
    match kind:
        case Number(layout):
            return layout.format.removeprefix(">")
        case Fixed(size):
            return f"{size}s"
        case Bounded():
            return "Q"
        case _:
            return "B"


def _check_of(kind: FixedWidth) -> Callable[[int], Any] | None:
    match kind:
        case Flag():
            return _flag
        case Choice(of):
            return partial(_member, of)
        case Bounded(maximum):
            return partial(_at_most, maximum)
        case _:
            return None


def _flag(byte: int) -> bool:
    if byte > 1:
        raise CodecError(f"a flag is 0 or 1, not {byte}")
    return byte == 1


def _member(of: type[enum.IntEnum], number: int) -> enum.IntEnum:
    try:
        return of(number)
    except ValueError as e:
        raise CodecError(str(e)) from e


def _at_most(maximum: int, number: int) -> int:
    if number > maximum:
        raise CodecError(f"{number} is more than {maximum}")
    return number


# ------------------------------------------------------------------------------------------- what follows the fields
class Rest(Protocol):
    """How what follows the fields is written and read."""

    def parts(self, value: Any) -> Sequence[Buffer]:
        """A gather list: what is large is passed on, not copied."""

    def read(self, reader: Reader) -> Any:
        """Raises CodecError only."""


class Bytes:
    """To the end."""

    def parts(self, value: Buffer) -> Sequence[Buffer]:
        return (value,)

    def read(self, reader: Reader) -> Buffer:
        return bytes(reader.rest())


class View(Bytes):
    """As Bytes; a view of what is read, not a copy."""

    def read(self, reader: Reader) -> Buffer:
        return reader.rest()


class Pieces:
    """To the end: the number of pieces of bytes, their lengths, and then the pieces, never copied."""

    def parts(self, value: Sequence[Buffer]) -> Sequence[Buffer]:
        return (U32.pack(len(value)) + packed(map(len, value)), *value)

    def read(self, reader: Reader) -> list[memoryview]:
        (count,) = reader.unpack(U32)
        return cut(reader.rest(), 0, count)


class Rows:
    """Up to `count_max` rows to the end. Each is a tuple of fields of fixed width, made by `make`, or the one field's
    value."""

    def __init__(
        self, *kinds: FixedWidth, make: Callable[[Sequence[Any]], Any] | None = None, count_max: int = _UINT32_MAX
    ) -> None:
        self._layout = Layout(*kinds)
        self._is_single = len(kinds) == 1
        self._make = make or (_only if self._is_single else tuple)
        self._count_max = count_max

    def pack(self, value: Iterable[Any]) -> bytes:
        pack = self._layout.pack
        return b"".join([pack(row) for row in value] if self._is_single else [pack(*row) for row in value])

    def unpack(self, data: Buffer) -> tuple[Any, ...]:
        """Inverse of `pack`."""
        return self._rows(Reader(data), *divmod(len(data), self._layout.size))

    def parts(self, value: Sequence[Any]) -> Sequence[Buffer]:
        return (self.pack(value),)

    def read(self, reader: Reader) -> tuple[Any, ...]:
        return self.unpack(reader.rest())

    def _rows(self, reader: Reader, count: int, too_many_bytes: int = 0) -> tuple[Any, ...]:
        if count > self._count_max:
            raise CodecError(f"{count} rows, at most {self._count_max} are allowed")
        if too_many_bytes:
            raise CodecError(f"{too_many_bytes} bytes are left over after the last row")
        return self._layout.read_rows(reader, count, self._make)


class Items(Rows):
    """As Rows, after their number. More may follow."""

    def parts(self, value: Sequence[Any]) -> Sequence[Buffer]:
        return (U32.pack(len(value)) + self.pack(value),)

    def read(self, reader: Reader) -> tuple[Any, ...]:
        return self._rows(reader, *reader.unpack(U32))


def _only(values: Sequence[Any]) -> Any:
    return values[0]


def packed(lengths: Iterable[int]) -> bytes:
    return b"".join([U32.pack(length) for length in lengths])


def cut(payload: memoryview, offset: int, count: int) -> list[memoryview]:
    """At `offset`, `count` lengths and then pieces of these lengths, to the payload's end. CodecError otherwise."""
    at = offset + count * U32.size
    if count > PIECES_MAX or at > len(payload):
        raise CodecError(f"{count} pieces do not fit {len(payload)} bytes")
    pieces: list[memoryview] = []
    for (length,) in U32.iter_unpack(payload[offset:at]):
        pieces.append(payload[at : at + length])
        at += length
    if at != len(payload):
        raise CodecError(f"the pieces end at byte {at} of {len(payload)}")
    return pieces


# ------------------------------------------------------------------------------------------- with a first byte
class TaggedLayout:
    """A value with a first byte that says of which kind or version it is: a row of a table of messages, or one kind of
    row on disk."""

    __slots__ = ("_check", "_layout", "_names", "_rest", "_values", "cls", "tag")

    def __init__(
        self,
        tag: int,
        cls: type,
        *fields: tuple[str, FixedWidth],
        rest: Sequence[tuple[str, Rest]] = (),
        check: Callable[[Any], None] | None = None,
    ) -> None:
        """`check` raises CodecError for a value whose fields do not fit each other."""
        self.tag = tag
        self.cls = cls
        self._names = tuple(name for name, _ in fields)
        self._layout = Layout(BYTE, *(kind for _, kind in fields))
        self._values = _getter(self._names)
        self._rest = tuple(rest)
        self._check = check

    def encode(self, value: Any) -> list[Buffer]:
        """The value as a gather list."""
        parts: list[Buffer] = [self._layout.pack(self.tag, *self._values(value))]
        for name, kind in self._rest:
            parts += kind.parts(getattr(value, name))
        return parts

    def decode(self, data: Buffer) -> Any:
        """Inverse of `encode`. CodecError for anything else."""
        if not data or data[0] != self.tag:
            raise CodecError(f"kind or version {data[0]}, not {self.tag}" if data else "it is empty")
        if self._rest:
            reader = Reader(data)
            fields = dict(zip(self._names, self._layout.read(reader)[1:], strict=True))
            for name, kind in self._rest:
                fields[name] = kind.read(reader)
            reader.finish()
        else:
            fields = dict(zip(self._names, self._layout.unpack(data)[1:], strict=True))
        value = self.cls(**fields)
        if self._check is not None:
            self._check(value)
        return value


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple([getattr(message, name) for name in names])
