"""Messages between nodes as bytes: a tag, fields of fixed width, and what follows them.

Owns how a row of a table of messages is written and read; the kinds of field are those of commands
(raft_state/binary.py). A message's first byte is its tag. Its fields of fixed width are one struct, so they cost one
call each way, and one field may take the rest. Parsing is bounded: for any input, `decode` returns a message or raises
WireError or struct.error. It must never know what a message means, nor copy a batch. `wire` and Raft's messages import
it.
"""

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol, TypeAlias

from smq.raft_state.binary import INT32, INT64, U8, U32, Fixed, Flag, Number
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.ports import Buffer

ITEMS_MAX: Final = 1 << 20  # in one message; the frame cap bounds the bytes


class WireError(ValueError):
    """The bytes are not a message of ours."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """An unsigned number of 64 bits that is at most this."""

    maximum: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A member of an enumeration, in one byte."""

    of: type[enum.IntEnum]


FixedWidth: TypeAlias = Number | Fixed | Flag | Bounded | Choice

BYTE: Final = Number(U8)
UINT32: Final = Number(U32)
UINT64: Final = Number(struct.Struct(">Q"))
PARTITION: Final = Fixed(PARTITION_ID_BYTES)
EPOCH: Final = INT32
OFFSET: Final = INT64
_COUNT: Final = U32


class Layout:
    """Fields of fixed width, as one struct. An id that is too short is filled up with zeros, as a disk's before it has
    one."""

    __slots__ = ("_checks", "struct")

    def __init__(self, kinds: Sequence[FixedWidth], prefix: str = "") -> None:
        self.struct = struct.Struct(">" + prefix + "".join(map(_code_of, kinds)))
        self._checks = [(at, check) for at, kind in enumerate(kinds) if (check := _check_of(kind)) is not None]

    def checked(self, values: Sequence[Any]) -> Sequence[Any]:
        """The unpacked values as those of the fields. WireError if one is none."""
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
        raise WireError(f"a flag is 0 or 1, not {byte}")
    return byte == 1


def _member(of: type[enum.IntEnum], number: int) -> enum.IntEnum:
    try:
        return of(number)
    except ValueError as e:
        raise WireError(str(e)) from e


def _at_most(maximum: int, number: int) -> int:
    if number > maximum:
        raise WireError(f"{number} is more than {maximum}")
    return number


# ------------------------------------------------------------------------------------------- what follows the fields
class Rest(Protocol):
    """How the rest of a message is written and read."""

    def write(self, value: Any) -> tuple[bytes, Sequence[Buffer]]:
        """What is joined to the fields, and what is sent after them as it is."""

    def read(self, payload: memoryview) -> Any: ...


class Bytes:
    """To the message's end."""

    def write(self, value: Buffer) -> tuple[bytes, Sequence[Buffer]]:
        return b"", (value,)

    def read(self, payload: memoryview) -> Buffer:
        return bytes(payload)


class View(Bytes):
    """As Bytes; a view of the frame, not a copy."""

    def read(self, payload: memoryview) -> Buffer:
        return payload


class Pieces:
    """Several pieces of bytes: their number, their lengths, and then the pieces, never copied."""

    def write(self, value: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        return _COUNT.pack(len(value)) + packed(map(len, value)), value

    def read(self, payload: memoryview) -> list[memoryview]:
        return cut(payload, _COUNT.size, _COUNT.unpack_from(payload)[0])


class Items:
    """A tuple of up to `count_max` items after their number. Each is a tuple of fields of fixed width, made by
    `make`, or the one field's value."""

    def __init__(
        self, *kinds: FixedWidth, make: Callable[[Sequence[Any]], Any] | None = None, count_max: int = ITEMS_MAX
    ) -> None:
        self._layout = Layout(kinds)
        self._is_single = len(kinds) == 1
        self._make = make or (_only if self._is_single else tuple)
        self._count_max = count_max

    def write(self, value: Sequence[Any]) -> tuple[bytes, Sequence[Buffer]]:
        pack = self._layout.struct.pack
        items = b"".join([pack(item) for item in value] if self._is_single else [pack(*item) for item in value])
        return _COUNT.pack(len(value)), (items,)

    def read(self, payload: memoryview) -> tuple[Any, ...]:
        count, body = _COUNT.unpack_from(payload)[0], payload[_COUNT.size :]
        if count > self._count_max:
            raise WireError(f"{count} items, at most {self._count_max} are allowed")
        if len(body) != count * self._layout.struct.size:
            raise WireError(f"{count} items do not fit {len(body)} bytes")
        make, checked = self._make, self._layout.checked
        return tuple(make(checked(values)) for values in self._layout.struct.iter_unpack(body))


def _only(values: Sequence[Any]) -> Any:
    return values[0]


def packed(lengths: Iterable[int]) -> bytes:
    return b"".join([_COUNT.pack(length) for length in lengths])


def cut(payload: memoryview, offset: int, count: int) -> list[memoryview]:
    """At `offset`, `count` lengths and then pieces of these lengths, to the payload's end. WireError otherwise."""
    at = offset + count * _COUNT.size
    if count > ITEMS_MAX or at > len(payload):
        raise WireError(f"{count} pieces do not fit {len(payload)} bytes")
    pieces: list[memoryview] = []
    for (length,) in _COUNT.iter_unpack(payload[offset:at]):
        pieces.append(payload[at : at + length])
        at += length
    if at != len(payload):
        raise WireError(f"the pieces end at byte {at} of {len(payload)}")
    return pieces


# --------------------------------------------------------------------------------------------------------- messages
class MessageLayout:
    """One kind of message: a row of its table."""

    __slots__ = ("_check", "_layout", "_names", "_rest", "_rest_name", "_values", "cls", "tag")

    def __init__(
        self,
        tag: int,
        cls: type,
        *fields: tuple[str, FixedWidth],
        rest: tuple[str, Rest] | None = None,
        check: Callable[[Any], None] | None = None,
    ) -> None:
        """`check` raises WireError for a message whose fields do not fit each other."""
        self.tag = tag
        self.cls = cls
        self._names = tuple(name for name, _ in fields)
        self._layout = Layout([kind for _, kind in fields], prefix="B")
        self._values = _getter(self._names)
        self._rest_name = rest[0] if rest is not None else ""
        self._rest = rest[1] if rest is not None else None
        self._check = check

    def encode(self, message: Any) -> list[Buffer]:
        """The message as a gather list."""
        head = self._layout.struct.pack(self.tag, *self._values(message))
        if self._rest is None:
            return [head]
        prefix, parts = self._rest.write(getattr(message, self._rest_name))
        return [head + prefix, *parts]

    def decode(self, payload: memoryview) -> Any:
        """Inverse of `encode`. WireError or struct.error for anything else."""
        layout = self._layout.struct
        values = layout.unpack(payload) if self._rest is None else layout.unpack_from(payload)
        fields = dict(zip(self._names, self._layout.checked(values[1:]), strict=True))
        if self._rest is not None:
            fields[self._rest_name] = self._rest.read(payload[layout.size :])
        message = self.cls(**fields)
        if self._check is not None:
            self._check(message)
        return message


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple([getattr(message, name) for name in names])
