"""The page of a topic's records: by offset, by time or at the end, as text, JSON or hex, with a search.

Owns the form, how a record is shown, and what a request may ask for. `reading` bounds the work. `console.site` imports
it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from smq.coordinator.http.console.markup import Content, Markup, address, joined, table, tag
from smq.coordinator.http.console.overview import moment
from smq.coordinator.http.console.reading import PAGE_RECORDS, Found, Shown, read
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import PartitionState, TopicState
from smq.replication.api import PartitionRange, TimeKind

TIMEOUT_MS: Final = 5_000
TAIL_S: Final = 2
FORMATS: Final = ("text", "json", "hex")
SHOWN_BYTES_MAX: Final = 4_096  # of one value
SEARCH_CHARS_MAX: Final = 200
_DIGITS_MAX: Final = 19


class BadRequest(Exception):
    """The message says what to write instead."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`offset` is None for the end, and negative for none given."""

    partition: int
    offset: int | None
    time_ms: int | None
    wanted: str
    format: str
    is_tail: bool


def parse(query: Mapping[str, str]) -> Ask:
    """BadRequest for what is no number, time or format."""
    chosen = query.get("format", "text")
    if chosen not in FORMATS:
        raise BadRequest(f"format must be one of {', '.join(FORMATS)}")
    wanted = query.get("contains", "")
    if len(wanted) > SEARCH_CHARS_MAX:
        raise BadRequest(f"the text to search for may have {SEARCH_CHARS_MAX} characters")
    at = query.get("offset", "").strip()
    is_tail = query.get("tail") == "on"
    time_ms = _number(query["time"], "time, in milliseconds since 1970,") if query.get("time", "").strip() else None
    offset = None if at == "end" or is_tail else _number(at, "offset") if at else -1
    return Ask(_number(query.get("partition", "0"), "partition"), offset, time_ms, wanted, chosen, is_tail)


def _number(text: str, what: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise BadRequest(f"{what} must be a number of at most {_DIGITS_MAX} digits, not {text[:40]!r}")
    return int(text)


async def messages_page(calls: NodeCalls, topic: TopicState, ask: Ask) -> list[Markup]:
    if ask.partition >= len(topic.partitions):
        raise BadRequest(f"topic {topic.name} has the partitions 0 to {len(topic.partitions) - 1}, not {ask.partition}")
    part = topic.partitions[ask.partition]
    form = _form(topic, ask)
    if part.is_external:
        return [form, tag("p", "The records of this topic are stored elsewhere: smq has their offsets only.")]
    try:
        range_ = await calls.partition_range(topic.name, part.index, TIMEOUT_MS)
        offset = await _start(calls, topic.name, ask, range_)
        found = await read(calls, topic.name, part.index, offset, ask.wanted)
    except SmqError as e:
        return [form, _problem(calls, topic, part, ask, e)]
    return [form, _summary(range_, found, ask), _records(found, ask), _links(topic, ask, offset, found, range_)]


async def _start(calls: NodeCalls, topic: str, ask: Ask, range_: PartitionRange) -> int:
    if ask.time_ms is not None:
        found = await calls.offset_for_time(topic, ask.partition, TimeKind.TIMESTAMP_MS, ask.time_ms, TIMEOUT_MS)
        return found.offset
    if ask.offset is None:
        return max(range_.log_start, range_.lso - PAGE_RECORDS)
    return range_.log_start if ask.offset < 0 else ask.offset


def _problem(calls: NodeCalls, topic: TopicState, part: PartitionState, ask: Ask, error: SmqError) -> Markup:
    """What to do instead: another position, or another node's console."""
    lines: list[Content] = [tag("p", str(error), class_="bad", role="alert")]
    if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
        lines.append(tag("p", _step("From the first record", topic, ask, offset=0, is_first=True)))
        lines.append(tag("p", _step("The newest records", topic, ask)))
    elif error.code in (ErrorCode.NOT_REPLICA, ErrorCode.NOT_LEADER):
        known = calls.node.state.nodes.get(part.leader)
        if known is not None:
            where = known.http_address + address("topics", topic.name, "messages", partition=part.index)
            lines.append(tag("p", f"Node {part.leader} has a copy: open its console at {where}"))
    return joined(lines)


def _summary(range_: PartitionRange, found: Found, ask: Ask) -> Markup:
    shown = f"{len(found.records)} records shown; the partition has offsets {range_.log_start:,} to {range_.hwm - 1:,}."
    if range_.hwm == range_.log_start:
        shown = f"The partition is empty; its next offset is {range_.hwm:,}."
    if ask.wanted:
        shown += f" Searched {found.searched:,} records, up to offset {found.next_offset:,}."
    return tag("p", shown, role="status")


def _records(found: Found, ask: Ask) -> Markup:
    rows = [_row(shown, ask.format) for shown in found.records]
    return table("Records", ("Offset", "Appended", "Created", "Key", "Value", "Headers"), rows)


def _row(shown: Shown, chosen: str) -> tuple[Content, ...]:
    record = shown.record
    appended = moment(shown.ts_ns / 1e9)
    if record is None:
        return str(shown.offset), appended, None, None, tag("span", shown.problem, class_="bad"), None
    headers = [joined((tag("dt", key), tag("dd", _value(value, "text")))) for key, value in record.headers]
    return (
        str(shown.offset),
        appended,
        moment(record.timestamp_ms / 1000) if record.timestamp_ms >= 0 else None,
        _value(record.key, "text"),
        _value(record.value, chosen),
        tag("dl", *headers) if headers else None,
    )


def _value(data: bytes | None, chosen: str) -> Markup:
    if data is None:
        return tag("em", "null")
    cut = data[:SHOWN_BYTES_MAX]
    more = f"\n… {len(data) - len(cut):,} more bytes" if len(cut) < len(data) else ""
    if chosen == "json" and not more:
        try:
            return tag("pre", json.dumps(json.loads(data), indent=2, ensure_ascii=False))
        except (ValueError, RecursionError):
            pass  # shown as text
    if chosen != "hex":
        try:
            return tag("pre", cut.decode("utf-8", "strict" if not more else "ignore") + more)
        except UnicodeDecodeError:
            pass  # no text: hex shows what it is
    return tag("pre", "\n".join(cut[i : i + 16].hex(" ") for i in range(0, len(cut), 16)) + more)


# -------------------------------------------------------------------------------------------------------- the form
def _form(topic: TopicState, ask: Ask) -> Markup:
    offset = "" if ask.offset is None or ask.offset < 0 else str(ask.offset)
    time = "" if ask.time_ms is None else str(ask.time_ms)
    options = [tag("option", name, value=name, selected=name == ask.format) for name in FORMATS]
    fields = (
        _field("Partition", "partition", str(ask.partition)),
        _field("From offset (or: end)", "offset", offset),
        _field("From time (ms since 1970)", "time", time),
        _field("Contains", "contains", ask.wanted),
        tag("label", "Values as", tag("select", *options, name="format")),
        tag("label", "Follow the end", _input("checkbox", "tail", "on", is_checked=ask.is_tail)),
        tag("button", "Show", type="submit"),
    )
    return tag("form", *fields, method="get", action=address("topics", topic.name, "messages"), aria_label="Records")


def _field(title: str, name: str, value: str) -> Markup:
    return tag("label", title, _input("text", name, value))


def _input(kind: str, name: str, value: str, *, is_checked: bool = False) -> Markup:
    element = tag("input", type=kind, name=name, value=value, checked=is_checked)
    return Markup(element.removesuffix("</input>"))


def _links(topic: TopicState, ask: Ask, offset: int, found: Found, range_: PartitionRange) -> Markup:
    links = []
    if offset > range_.log_start:
        before = max(range_.log_start, offset - PAGE_RECORDS)
        links.append(_step("Earlier", topic, ask, offset=before))
    if found.next_offset < found.end:
        links.append(_step("Later", topic, ask, offset=found.next_offset))
    links.append(_step("Newest", topic, ask))
    return tag("nav", tag("ul", *(tag("li", each) for each in links)), aria_label="Other records")


def _step(title: str, topic: TopicState, ask: Ask, *, offset: int | None = None, is_first: bool = False) -> Markup:
    query: dict[str, str | int] = {"partition": ask.partition, "format": ask.format, "contains": ask.wanted}
    if not is_first:
        query["offset"] = "end" if offset is None else offset
    return tag("a", title, href=address("topics", topic.name, "messages", **query))
