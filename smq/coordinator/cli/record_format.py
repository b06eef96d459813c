"""How `smq consume` writes a record: its value, a line of JSON, or a format of the user's; and how headers are given.

Owns the format's letters. It must never read or write by itself. The commands of records, and `consume_runs`, import
it.

A record as one line of JSON is what `smq consume --json` and `smq topic export --format jsonl` write: bytes that are
UTF-8 as text under their own name, anything else as base64 under `<name>_base64`. So each line says which it is, and
`smq produce --format records` reads it back. Integers are written in full: a reader that keeps numbers as doubles
cannot hold ts_ns exactly.
"""

import base64
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from smq.clients import ConsumerRecord
from smq.coordinator.user_errors import ConfigError


def record_line(record: ConsumerRecord, *, offset_name: str) -> bytes:
    """The line without its line end. `offset_name` is the name of the offset's field."""
    fields: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        offset_name: record.offset,
        "ts_ns": record.ts_ns,
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }
    if record.headers:
        fields["headers"] = [{"key": key, **_text("value", value)} for key, value in record.headers]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _text(name: str, given: bytes | None) -> dict[str, str | None]:
    if given is None:
        return {name: None}
    try:
        return {name: given.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(given).decode()}


WriteFn = Callable[[ConsumerRecord], bytes]  # the record as bytes, with its line end

FORMAT_HELP: Final = (
    "%t topic, %p partition, %o offset, %k key, %v value, %h headers (a=b,c=d), %T create time in ms, %D the same as a "
    "date, %s append time in ns, %% a percent sign; \\n and \\t. A line end is added."
)


def value_line(record: ConsumerRecord) -> bytes:
    return (record.value or b"") + b"\n"


def json_line(record: ConsumerRecord) -> bytes:
    return record_line(record, offset_name="offset") + b"\n"


def _headers(record: ConsumerRecord) -> bytes:
    return b",".join(key.encode() + b"=" + (value or b"") for key, value in record.headers)


def _date(record: ConsumerRecord) -> bytes:
    """The number itself if it is no date: a producer may send any, such as nanoseconds."""
    try:
        moment = datetime.fromtimestamp(record.timestamp_ms / 1_000, UTC)
    except (OverflowError, ValueError, OSError):
        return b"%d" % record.timestamp_ms
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z").encode()


_LETTERS: Final[dict[str, WriteFn]] = {
    "t": lambda r: r.topic.encode(),
    "p": lambda r: b"%d" % r.partition,
    "o": lambda r: b"%d" % r.offset,
    "k": lambda r: r.key or b"",
    "v": lambda r: r.value or b"",
    "h": _headers,
    "T": lambda r: b"%d" % r.timestamp_ms,
    "D": _date,
    "s": lambda r: b"%d" % r.ts_ns,
    "%": lambda r: b"%",
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "\\": b"\\"}


def format_line(text: str) -> WriteFn:
    """ConfigError for a letter that means nothing."""
    parts: list[WriteFn] = []
    at = 0
    while at < len(text):
        char, following = text[at], text[at + 1 : at + 2]
        if char == "%" and following not in _LETTERS:
            known = ", ".join(f"%{letter}" for letter in _LETTERS)
            raise ConfigError(f"--output: {char + following!r} means nothing: use {known}")
        if char == "%":
            parts.append(_LETTERS[following])
            at += 2
        elif char == "\\" and following in _ESCAPES:
            parts.append(_plain(_ESCAPES[following]))
            at += 2
        else:
            parts.append(_plain(char.encode(errors="surrogateescape")))
            at += 1
    return lambda record: b"".join(part(record) for part in parts) + b"\n"


def _plain(text: bytes) -> WriteFn:
    return lambda _: text


def parse_headers(texts: Sequence[str]) -> list[tuple[str, bytes | None]]:
    """NAME=VALUE as (NAME, VALUE), and NAME alone as (NAME, None)."""
    found: list[tuple[str, bytes | None]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise ConfigError(f"{text!r} is no header: write NAME=VALUE")
        found.append((name, value.encode(errors="surrogateescape") if equals else None))
    return found
