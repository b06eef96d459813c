"""What a request for records may ask for, and the addresses of pages that ask for it.

Owns the parameters of such an address: their names, their checks, and how they are written again. `record_pages` and
`following` import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.coordinator.http.console.markup import Markup, address, tag
from smq.coordinator.http.console.refusals import BadRequest
from smq.coordinator.operators.formats import moment_ms

FORMATS: Final = ("text", "json", "hex")
SEARCH_CHARS_MAX: Final = 200
PARTITIONS_MAX: Final = 32  # of one page of all partitions, since each is read for it
ALL: Final = "all"
_DIGITS_MAX: Final = 19

Cursor: TypeAlias = Mapping[int, int]  # partition -> offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`partition` is None for all of them. A page begins `at` a cursor, or ends `before` one; otherwise it begins with
    the first record created at `time_ms` or later, or at `offset`, or has the newest records (`is_newest`), or begins
    at the first record. `to` and `until_ms` end it."""

    partition: int | None = 0
    offset: int | None = None
    time_ms: int | None = None
    is_newest: bool = False
    at: Cursor | None = None
    before: Cursor | None = None
    to: int | None = None
    until_ms: int | None = None
    wanted: str = ""
    format: str = "text"
    is_tail: bool = False


def parse(query: Mapping[str, str]) -> Ask:
    """BadRequest for what is no number, time or format."""
    chosen = query.get("format", "text")
    if chosen not in FORMATS:
        raise BadRequest(f"format must be one of {', '.join(FORMATS)}")
    wanted = query.get("contains", "")
    if len(wanted) > SEARCH_CHARS_MAX:
        raise BadRequest(f"the text to search for may have {SEARCH_CHARS_MAX} characters")
    at, partition, is_tail = _text(query, "offset"), _text(query, "partition"), query.get("tail") == "on"
    has_start = bool(at or _text(query, "time") or query.get("at"))
    return Ask(
        partition=None if partition == ALL else _number(partition or "0", "partition"),
        offset=_number(at, "offset") if at and at != "end" else None,
        time_ms=_time(query, "time"),
        is_newest=at == "end" or (is_tail and not has_start),
        at=_cursor(query, "at"),
        before=_cursor(query, "before"),
        to=_number(_text(query, "to"), "the last offset") if _text(query, "to") else None,
        until_ms=_time(query, "until"),
        wanted=wanted,
        format=chosen,
        is_tail=is_tail,
    )


def _text(query: Mapping[str, str], name: str) -> str:
    return query.get(name, "").strip()


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) < 1 << 63):
        raise BadRequest(f"{what} must be a number of at most {_DIGITS_MAX} digits, not {text[:40]!r}")
    return int(text)


def _time(query: Mapping[str, str], name: str) -> int | None:
    text = _text(query, name)
    try:
        return moment_ms(text) if text else None
    except ValueError as e:
        raise BadRequest(str(e)) from e


def _cursor(query: Mapping[str, str], name: str) -> Cursor | None:
    """0-17.1-40: partition 0 at offset 17, partition 1 at 40."""
    text = _text(query, name)
    if not text:
        return None
    places = text.split(".", PARTITIONS_MAX)
    if len(places) > PARTITIONS_MAX:
        raise BadRequest(f"{name} names more than {PARTITIONS_MAX} partitions")
    found: dict[int, int] = {}
    for place in places:
        partition, _, offset = place.partition("-")
        found[_number(partition, f"a partition of {name}")] = _number(offset, f"an offset of {name}")
    return found


# ----------------------------------------------------------------------------------------------------------- links
def step(title: str, topic: str, ask: Ask, start: Mapping[str, str], *, is_tail: bool | None = None) -> Markup:
    """A link to the same partitions, search and format from another start; it goes on following if `ask` does."""
    query: dict[str, str | int] = {"partition": ALL if ask.partition is None else ask.partition, "format": ask.format}
    if ask.wanted:
        query["contains"] = ask.wanted
    if ask.to is not None:
        query["to"] = ask.to
    if ask.until_ms is not None:
        query["until"] = ask.until_ms
    if ask.is_tail if is_tail is None else is_tail:
        query["tail"] = "on"
    return tag("a", title, href=address("topics", topic, "messages", **query, **start))


def cursor_text(cursor: Cursor) -> str:
    return ".".join(f"{partition}-{offset}" for partition, offset in sorted(cursor.items()))
