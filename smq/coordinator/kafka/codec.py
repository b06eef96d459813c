"""Kafka's messages as bytes: the primitive types, the definitions, and a decoder and an encoder of each version.

Owns the bounds of every length and count that arrives: one that does not fit the bytes, or would cost more objects than
ELEMENTS_MAX, is a CodecError. Owns the reading of the JSON files under messages/, and the plain Python that is compiled
of each version when first needed: one function that calls nothing but the primitives, and reads or writes neighbouring
fixed-size fields by one struct. A decoded message is a dict under the definition's names in snake_case. Fields that the
version lacks have their defaults. Records are not copied on the way in (a memoryview of the request) nor on the way out
(a list of buffers, which become parts of the gather list that `encode` returns). Compiling all versions of all keys in
advance would take half a second. Only `api_keys` compiles; handlers import the types.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

# Array elements and tagged fields per message. Otherwise a request of 101 MiB could name 100 M empty elements, at some
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


Struct: TypeAlias = dict[str, Any]  # Any: the type of a field is in its definition
Decoder: TypeAlias = Callable[[memoryview, int], Struct]
Encoder: TypeAlias = Callable[[Struct], list[Buffer]]

_FIXED: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
_ZERO_UUID: Final = bytes(16)
_COMMENT: Final = re.compile(r"^\s*//.*$", re.MULTILINE)
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VERSION_MAX: Final = 2**15 - 1


# ------------------------------------------------------------------------------------------------ definitions
@dataclass(frozen=True, slots=True)
class Versions:
    """Both ends included; none if `lo` > `hi`."""

    lo: int
    hi: int

    def __contains__(self, version: int) -> bool:
        return self.lo <= version <= self.hi


NONE: Final = Versions(0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """`type` is a primitive's name, or "" for a struct with `fields`. `is_array`: the field is a list of these."""

    name: str  # in snake_case, the key in the decoded dict
    type: str
    is_array: bool
    versions: Versions
    nullable: Versions
    tagged: Versions
    tag: int
    default: str | None
    is_ignorable: bool
    fields: tuple["Field", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    name: str
    api_key: int
    versions: Versions
    flexible: Versions
    fields: tuple[Field, ...]


def load_message(name: str) -> Message:
    """The definition in messages/NAME.json."""
    text = (files("smq.coordinator.kafka") / "messages" / f"{name}.json").read_text()
    raw = json.loads(_COMMENT.sub("", text))
    commons = {common["name"]: common["fields"] for common in raw.get("commonStructs", ())}
    return Message(
        name=name,
        api_key=raw["apiKey"],
        versions=_versions(raw["validVersions"]),
        flexible=_versions(raw["flexibleVersions"]),
        fields=tuple(_field(f, commons) for f in raw["fields"]),
    )


def _versions(text: str) -> Versions:
    if text == "none":
        return NONE
    lo, dash, hi = text.partition("-")
    if lo.endswith("+"):
        return Versions(int(lo[:-1]), _VERSION_MAX)
    return Versions(int(lo), int(hi) if dash else int(lo))


def _field(raw: dict[str, Any], commons: dict[str, list[dict[str, Any]]]) -> Field:
    type_: str = raw["type"]
    is_array = type_.startswith("[]")
    type_ = type_.removeprefix("[]")
    fields = raw.get("fields") or commons.get(type_) or []
    default = raw.get("default")
    return Field(
        name=_HUMP.sub("_", raw["name"]).lower(),
        type="" if fields else type_,
        is_array=is_array,
        versions=_versions(raw.get("versions", "0+")),
        nullable=_versions(raw.get("nullableVersions", "none")),
        tagged=_versions(raw.get("taggedVersions", "none")),
        tag=raw.get("tag", -1),
        default=None if default is None else str(default).lower() if isinstance(default, bool) else str(default),
        is_ignorable=raw.get("ignorable", False),
        fields=tuple(_field(f, commons) for f in fields),
    )


# -------------------------------------------------------------------------------------------------- compiling
class _Source:
    """Source lines so far, the structs that they use, and a supply of unused names."""

    def __init__(self, message: Message, version: int) -> None:
        self.version = version
        self.is_flexible = version in message.flexible
        self.scope: dict[str, Any] = dict(globals())
        self._lines: list[str] = []
        self._indent = 1
        self._names = 0

    def add(self, line: str) -> None:
        self._lines.append("    " * self._indent + line)

    def indent(self, by: int = 1) -> None:
        self._indent += by

    def name(self, prefix: str = "v") -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def struct_of(self, formats: str) -> str:
        name = "S_" + formats.replace("?", "o")
        self.scope[name] = struct.Struct(">" + formats)
        return name

    def compiled(self, head: str, file: str) -> Any:
        source = "\n".join([head, *self._lines]) + "\n"
        exec(compile(source, file, "exec"), self.scope)
        return self.scope["run"]

    def compact(self, name: str) -> str:
        """The reader or writer of this name in this version."""
        return f"{name.replace('*', 'compact_' if self.is_flexible else '')}"


def compile_decoder(message: Message, version: int) -> Decoder:
    """The decoder raises CodecError, and nothing else, if the bytes from the position on are no such message. It
    ignores bytes after the message, as Kafka does: librdkafka sends three after a Metadata v13 that asks for all
    topics."""
    source = _Source(message, version)
    source.add("budget = Budget()")
    result = _decode_struct(source, message.fields)
    source.add(f"return {result}")
    run: Decoder = source.compiled("def run(b, p):", f"<{message.name} v{version} decoder>")

    def decode(data: memoryview, start: int) -> Struct:
        try:
            return run(data, start)
        except CodecError as e:
            raise CodecError(f"{message.name} v{version}: {e}") from None
        except (struct.error, IndexError, UnicodeDecodeError) as e:
            raise CodecError(f"{message.name} v{version} is cut or garbled: {e}") from e

    return decode


def compile_encoder(message: Message, version: int) -> Encoder:
    """The encoder takes the fields of the version. Fields with a default, and ignorable ones, may be left out."""
    source = _Source(message, version)
    source.add("parts = []")
    source.add("w = bytearray()")
    _encode_struct(source, message.fields, "o")
    source.add("parts.append(w)")
    source.add("return parts")
    encoder: Encoder = source.compiled("def run(o):", f"<{message.name} v{version} encoder>")
    return encoder


# --------------------------------------------------------------------------------------------------- decoding
def _decode_struct(source: _Source, fields: tuple[Field, ...]) -> str:
    """Adds the code that reads the fields. Returns the expression for the dict."""
    values: dict[str, str] = {}
    present = [f for f in fields if source.version in f.versions]
    tagged = [f for f in present if source.version in f.tagged]
    run: list[tuple[str, str]] = []  # names and formats of neighbouring fixed-size fields
    for field in present:
        if field in tagged:
            continue
        if field.type in _FIXED and not field.is_array:
            name = source.name()
            run.append((name, _FIXED[field.type]))
            values[field.name] = name
        else:
            _decode_run(source, run)
            values[field.name] = _decode_value(source, field)
    _decode_run(source, run)
    if source.is_flexible:
        values |= _decode_tagged(source, tagged)
    items = (f"{f.name!r}: {values.get(f.name) or default_source(f, source.version)}" for f in fields)
    return "{" + ", ".join(items) + "}"


def _decode_run(source: _Source, run: list[tuple[str, str]]) -> None:
    if run:
        formats = "".join(f for _, f in run)
        names = ", ".join(n for n, _ in run)
        source.add(f"({names},) = {source.struct_of(formats)}.unpack_from(b, p)")
        source.add(f"p += {struct.calcsize('>' + formats)}")
        run.clear()


def _decode_value(source: _Source, field: Field) -> str:
    """Adds the code that reads one value of any size. Returns its name."""
    is_nullable = source.version in field.nullable
    name = source.name()
    if not field.is_array:
        if not field.type:
            _decode_one_struct(source, field, name, is_nullable=is_nullable)
        else:
            kind = "string" if field.type == "string" else "bytes"
            reader = source.compact(f"read_*{'nullable_' if is_nullable else ''}{kind}")
            source.add(f"{name}, p = {reader}(b, p)")
        return name
    count = source.name("n")
    source.add(f"{count}, p = {source.compact('read_*count')}(b, p, budget)")
    if not is_nullable:
        source.add(f"no_null({count})")
    source.add(f"{name} = []")
    source.add(f"for _ in range({count}):")
    source.indent()
    if field.type in _FIXED:
        run = [(source.name(), _FIXED[field.type])]
        element = run[0][0]
        _decode_run(source, run)
    elif field.type:
        element = source.name()
        source.add(f"{element}, p = {source.compact('read_*string')}(b, p)")
    else:
        element = _decode_struct(source, field.fields)
    source.add(f"{name}.append({element})")
    source.indent(-1)
    if is_nullable:
        source.add(f"if {count} < 0:")
        source.add(f"    {name} = None")
    return name


def _decode_one_struct(source: _Source, field: Field, name: str, *, is_nullable: bool) -> None:
    """Adds the code that gives `name` the value of a struct outside an array. A null has a negative byte before it."""
    if not is_nullable:
        source.add(f"{name} = {_decode_struct(source, field.fields)}")
        return
    mark = source.name("n")
    _decode_run(source, [(mark, _FIXED["int8"])])
    source.add(f"{name} = None")
    source.add(f"if {mark} >= 0:")
    source.indent()
    source.add(f"{name} = {_decode_struct(source, field.fields)}")
    source.indent(-1)


def _decode_tagged(source: _Source, fields: list[Field]) -> dict[str, str]:
    """Unknown tags are ignored, as the protocol demands."""
    if not fields:
        source.add("p = p + 1 if b[p] == 0 else read_tags(b, p, budget)[1]")
        return {}
    values = {f.name: source.name() for f in fields}
    for field in fields:
        source.add(f"{values[field.name]} = {default_source(field, source.version)}")
    found, after, tag, end = source.name("f"), source.name("p"), source.name("t"), source.name("e")
    source.add(f"{found}, {after} = read_tags(b, p, budget)")
    source.add(f"for {tag}, p, {end} in {found}:")
    source.indent()
    for field in fields:
        source.add(f"if {tag} == {field.tag}:")
        source.indent()
        if field.type in _FIXED and not field.is_array:
            _decode_run(source, [(values[field.name], _FIXED[field.type])])
        else:
            source.add(f"{values[field.name]} = {_decode_value(source, field)}")
        source.add(f"check_end('a tagged field', p, {end})")
        source.indent(-1)
    source.indent(-1)
    source.add(f"p = {after}")
    return values


def default_source(field: Field, version: int) -> str:
    """The source text of a missing field's value."""
    text = field.default
    if text == "null":
        return "None"
    if field.is_array:
        return "[]"
    if not field.type:
        return "{" + ", ".join(f"{f.name!r}: {default_source(f, version)}" for f in field.fields) + "}"
    if field.type == "bool":
        return "True" if text == "true" else "False"
    if field.type == "uuid":
        return repr(_ZERO_UUID)
    if field.type == "float64":
        return repr(float(text or 0))
    if field.type in _FIXED:
        return repr(int(text or "0", 0))
    if field.type == "string":
        return repr(text or "")
    return "None" if version in field.nullable else "b''"


# --------------------------------------------------------------------------------------------------- encoding
def _encode_struct(source: _Source, fields: tuple[Field, ...], of: str) -> None:
    """Adds the code that writes the dict named `of` to `w`."""
    present = [f for f in fields if source.version in f.versions]
    tagged = [f for f in present if source.version in f.tagged]
    run: list[tuple[str, str]] = []
    for field in present:
        if field in tagged:
            continue
        value = _value_of(field, of, source.version)
        if field.type in _FIXED and not field.is_array:
            run.append((value, _FIXED[field.type]))
        else:
            _encode_run(source, run)
            _encode_value(source, field, value)
    _encode_run(source, run)
    if source.is_flexible:
        _encode_tagged(source, tagged, of)


def _value_of(field: Field, of: str, version: int) -> str:
    if field.default is None and not field.is_ignorable and version not in field.tagged:
        return f"{of}[{field.name!r}]"
    return f"{of}.get({field.name!r}, {default_source(field, version)})"


def _encode_run(source: _Source, run: list[tuple[str, str]]) -> None:
    if run:
        formats = "".join(f for _, f in run)
        source.add(f"w += {source.struct_of(formats)}.pack({', '.join(v for v, _ in run)})")
        run.clear()


def _encode_value(source: _Source, field: Field, value: str) -> None:
    if field.is_array:
        _encode_array(source, field, value)
    elif not field.type:
        _encode_one_struct(source, field, value)
    elif field.type == "records":
        name = source.name()
        source.add(f"{name} = {value}")
        source.add(f"w += {source.compact('*records_size')}({name})")
        source.add(f"if {name}:")
        source.add("    parts.append(w)")
        source.add(f"    parts.extend({name})")
        source.add("    w = bytearray()")
    else:
        writer = source.compact("*string" if field.type == "string" else "*sized")
        source.add(f"w += {writer}({value})")


def _encode_one_struct(source: _Source, field: Field, value: str) -> None:
    """Adds the code that writes a struct outside an array."""
    name = source.name()
    source.add(f"{name} = {value}")
    if source.version not in field.nullable:
        _encode_struct(source, field.fields, name)
        return
    source.add(f"w += b'\\xff' if {name} is None else b'\\1'")
    source.add(f"if {name} is not None:")
    source.indent()
    _encode_struct(source, field.fields, name)
    source.indent(-1)


def _encode_array(source: _Source, field: Field, value: str) -> None:
    name, element = source.name(), source.name()
    source.add(f"{name} = {value}")
    source.add(f"w += {source.compact('*count')}({name})")
    source.add(f"for {element} in {name} or ():")
    source.indent()
    if field.type in _FIXED:
        _encode_run(source, [(element, _FIXED[field.type])])
    elif field.type:
        source.add(f"w += {source.compact('*string')}({element})")
    else:
        _encode_struct(source, field.fields, element)
    source.indent(-1)


def _encode_tagged(source: _Source, fields: list[Field], of: str) -> None:
    """Writes only the fields that differ from their defaults."""
    if not fields:
        source.add("w += b'\\0'")
        return
    found, outer = source.name("t"), source.name("w")
    source.add(f"{found} = []")
    source.add(f"{outer} = w")
    for field in sorted(fields, key=lambda f: f.tag):
        value = source.name()
        source.add(f"{value} = {_value_of(field, of, source.version)}")
        source.add(f"if {value} != {default_source(field, source.version)}:")
        source.indent()
        source.add("w = bytearray()")
        if field.type in _FIXED and not field.is_array:
            _encode_run(source, [(value, _FIXED[field.type])])
        else:
            _encode_value(source, field, value)
        source.add(f"{found}.append(({field.tag}, w))")
        source.indent(-1)
    source.add(f"w = {outer}")
    source.add(f"w += tagged({found})")
