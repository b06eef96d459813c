"""Records from text: lines, JSONL, CSV, and the JSON that `smq consume --json` writes.

Owns the formats of `smq produce`. It reads a file descriptor piece by piece, so that slow input, typed or piped, is
sent as it arrives. `commands.produce` alone imports it.
"""

import base64
import binascii
import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from smq.coordinator.user_errors import UserError

READ_BYTES: Final = 256 << 10
CHUNK_RECORDS_MAX: Final = 5_000
LINE_BYTES_MAX: Final = 64 << 20  # an endless line would take all memory; no record may be that large anyway
_SUFFIXES: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
FORMATS: Final = ("lines", "jsonl", "csv", "records")


class InputError(UserError):
    """A line of the input does not match its format."""


@dataclass(slots=True)
class InputRecord:
    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    timestamp_ms: int | None = None


def format_of(path: str, requested: str | None) -> str:
    """The requested format, otherwise that of the file's suffix."""
    return requested or _SUFFIXES.get(os.path.splitext(path)[1].lower(), "lines")


class LineSource:
    """The lines of a file descriptor, without line ends. `is_at_edge`: the next line may take long to arrive."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.number = 0  # of the line read last, from 1
        self.first = 1  # lines before this number are read and left out
        self.bytes_read = 0
        self.is_at_edge = False
        self._fd = fd
        self._lines: list[bytes] = []  # in reverse, of one read
        self._rest = b""

    def __iter__(self) -> Iterator[bytes]:
        while self._lines or self._read():
            line = self._lines.pop()
            self.number += 1
            self.is_at_edge = not self._lines
            if self.number >= self.first:
                yield line.removesuffix(b"\r")

    def _read(self) -> bool:
        while not self._lines:
            piece = os.read(self._fd, READ_BYTES)
            self.bytes_read += len(piece)
            if not piece:
                self._lines, self._rest = ([self._rest] if self._rest else []), b""
                return bool(self._lines)
            *complete, self._rest = (self._rest + piece).split(b"\n")
            self._lines = complete[::-1]
            if len(self._rest) > LINE_BYTES_MAX:
                raise self.error(f"the line has more than {LINE_BYTES_MAX} bytes", ahead=1)
        return True

    def error(self, reason: str, *, ahead: int = 0) -> InputError:
        return InputError(f"{self.name}, line {self.number + ahead}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the input looks like, and what every record gets."""

    format_name: str
    key_column: str | None = None
    key: bytes | None = None
    key_separator: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    from_line: int = 1  # records of lines before are left out

    def check(self) -> None:
        """InputError for options that contradict each other."""
        if self.key_column is not None and self.format_name not in ("jsonl", "csv"):
            raise InputError(f"--key-column needs --format jsonl or csv: {self.format_name} has no columns")
        if self.key_separator is not None and self.format_name != "lines":
            raise InputError(f"--key-separator needs --format lines: {self.format_name} has no separator")
        if self.key_separator == b"":
            raise InputError("--key-separator is empty: write the text between key and value, such as ':'")
        if sum(given is not None for given in (self.key, self.key_column, self.key_separator)) > 1:
            raise InputError("--key, --key-column and --key-separator all say what the key is: pass one of them")

    def applied(self, source: "LineSource", record: "InputRecord") -> "InputRecord":
        if self.key_separator is not None:
            key, separator, value = (record.value or b"").partition(self.key_separator)
            if not separator:
                shown = self.key_separator.decode(errors="replace")
                raise source.error(f"there is no {shown!r} between key and value")
            record.key, record.value = key, value
        elif self.key is not None:
            record.key = self.key
        record.headers += self.headers
        return record


def read_records(source: LineSource, shape: Shape) -> Iterator[tuple[list[InputRecord], int]]:
    """Chunks of the records that are there, at most CHUNK_RECORDS_MAX each, with the number of their last line.
    InputError names the line."""
    shape.check()
    chunk: list[InputRecord] = []
    line = 0
    try:
        for record in _PARSERS[shape.format_name](source, shape):
            chunk.append(shape.applied(source, record))
            line = source.number
            if source.is_at_edge or len(chunk) >= CHUNK_RECORDS_MAX:
                yield chunk, line
                chunk = []
    except InputError:
        if chunk:
            yield chunk, line  # the records before the mistake are sent, and the message counts them
        raise
    if chunk:
        yield chunk, line


def _lines(source: LineSource, shape: Shape) -> Iterator[InputRecord]:
    source.first = shape.from_line
    for line in source:
        yield InputRecord(line)


def _jsonl(source: LineSource, shape: Shape) -> Iterator[InputRecord]:
    source.first, key_column = shape.from_line, shape.key_column
    for line in source:
        if not line.strip():
            continue
        row = _parsed(source, line)
        if key_column is None:
            yield InputRecord(line)
        elif isinstance(row, dict) and key_column in row:
            yield InputRecord(line, _key_text(row[key_column]))
        else:
            raise source.error(f"there is no field {key_column!r} for the key")


def _csv(source: LineSource, shape: Shape) -> Iterator[InputRecord]:
    key_column = shape.key_column
    rows = csv.reader(_texts(source), strict=True)
    try:
        names = next(rows, None)
        if names is None:
            return
        if key_column is not None and key_column not in names:
            raise source.error(f"there is no column {key_column!r} for the key; there are {', '.join(names)}")
        source.first = shape.from_line  # not before: the first line has the names
        for row in rows:
            if not row:
                continue
            if len(row) != len(names):
                raise source.error(f"the row has {len(row)} fields, the first line names {len(names)}")
            named = dict(zip(names, row, strict=True))
            value = json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode()
            yield InputRecord(value, None if key_column is None else named[key_column].encode())
    except csv.Error as e:
        raise source.error(f"not CSV: {e}") from e


def _texts(source: LineSource) -> Iterator[str]:
    for line in source:
        try:
            yield line.decode("utf-8-sig" if source.number == 1 else "utf-8") + "\n"
        except UnicodeDecodeError as e:
            raise source.error(f"not UTF-8: {e.reason} at byte {e.start}") from e


def _records(source: LineSource, shape: Shape) -> Iterator[InputRecord]:
    source.first = shape.from_line
    for line in source:
        if not line.strip():
            continue
        row = _parsed(source, line)
        if not isinstance(row, dict) or not {"value", "value_base64"} & row.keys():
            raise source.error(
                'a record is an object with "value" (or "value_base64"), and optionally "key" and "headers"'
            )
        headers = row.get("headers") or []
        if not isinstance(headers, list) or not all(
            isinstance(h, dict) and isinstance(h.get("key"), str) for h in headers
        ):
            raise source.error('"headers" is a list of {"key": ..., "value": ...}')
        when = row.get("timestamp_ms")
        if when is not None and (isinstance(when, bool) or not isinstance(when, int)):
            raise source.error('"timestamp_ms" must be a whole number of milliseconds')
        pairs = [(h["key"], _field(source, h, "value")) for h in headers]
        yield InputRecord(_field(source, row, "value"), _field(source, row, "key"), pairs, when)


def _field(source: LineSource, row: dict[str, object], name: str) -> bytes | None:
    """A text, its base64 under `<name>_base64`, or null."""
    coded = row.get(f"{name}_base64")
    if isinstance(coded, str):
        try:
            return base64.b64decode(coded, validate=True)
        except binascii.Error as e:
            raise source.error(f'"{name}_base64" is not base64: {e}') from e
    text = row.get(name)
    if text is None or isinstance(text, str):
        return None if text is None else text.encode()
    return json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()


def _parsed(source: LineSource, line: bytes) -> object:
    try:
        parsed: object = json.loads(line)
    except ValueError as e:  # JSONDecodeError, UnicodeDecodeError
        raise source.error(f"not JSON: {e}") from e
    return parsed


def _key_text(given: object) -> bytes | None:
    if given is None:
        return None
    return (given if isinstance(given, str) else json.dumps(given, separators=(",", ":"))).encode()


_PARSERS: Final[dict[str, Callable[[LineSource, Shape], Iterator[InputRecord]]]] = {
    "lines": _lines,
    "jsonl": _jsonl,
    "csv": _csv,
    "records": _records,
}
