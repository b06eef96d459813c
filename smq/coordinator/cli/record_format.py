"""How `smq consume` writes a record: its value, a line of JSON, or a format of the user's; and how headers are given.

Owns the format's letters. It must never read or write by itself. The commands of records, and `reading`, import it.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from smq.clients import ConsumerRecord
from smq.coordinator.cli.record_json import record_line
from smq.coordinator.user_errors import ConfigError

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
    moment = datetime.fromtimestamp(record.timestamp_ms / 1_000, UTC)
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
