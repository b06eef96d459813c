"""The page of a topic's records: by offset, by time or the newest, as text, JSON or hex, with a search.

Owns the form, and how a record is shown. `asking` has what a request may ask for, `merging` reads. `console.site` and
`following` import it.
"""

import json
from typing import Final

from smq.coordinator.http.console.asking import ALL, FORMATS, Ask, cursor_text, step
from smq.coordinator.http.console.markup import Content, Markup, address, joined, long_table, tag, void
from smq.coordinator.http.console.merging import Merged, Plan, page_of, planned
from smq.coordinator.http.console.overview import moment
from smq.coordinator.http.console.record_reads import Shown
from smq.coordinator.service.calls import NodeCalls
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import TopicState

SHOWN_BYTES_MAX: Final = 4_096  # of one value
HEADS: Final = ("Partition", "Offset", "Appended", "Created", "Key", "Value", "Headers")


async def messages_page(calls: NodeCalls, topic: TopicState, ask: Ask) -> list[Markup]:
    shown = form(topic, ask)
    if topic.partitions[0].is_external:
        return [shown, tag("p", "The records of this topic are stored elsewhere: smq has their offsets only.")]
    plan = await planned(calls, topic, ask)
    merged = await page_of(calls, topic.name, ask, plan)
    problems = [_problem(calls, topic, partition, ask, e) for partition, e in sorted(merged.problems.items())]
    if not merged.ends:
        return [shown, *problems]
    rows = await long_table("Records", HEADS, (record_row(record, ask.format) for record in merged.records))
    return [shown, *problems, _summary(plan, merged, ask), rows, _links(topic.name, ask, plan, merged)]


def _problem(calls: NodeCalls, topic: TopicState, partition: int, ask: Ask, error: SmqError) -> Markup:
    """What to do instead: another position, or another node's console."""
    lines: list[Content] = [tag("p", f"Partition {partition}: {error}", class_="bad", role="alert")]
    if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
        lines.append(tag("p", step("From the first record", topic.name, ask, {})))
        lines.append(tag("p", step("The newest records", topic.name, ask, {"offset": "end"})))
    elif error.code in (ErrorCode.NOT_REPLICA, ErrorCode.NOT_LEADER):
        known = calls.node.state.nodes.get(topic.partitions[partition].leader)
        if known is not None:
            where = known.http_address + address("topics", topic.name, "messages", partition=partition)
            lines.append(tag("p", f"Node {known.node} has a copy: open its console at {where}"))
    return joined(lines)


def _summary(plan: Plan, merged: Merged, ask: Ask) -> Markup:
    shown = f"{len(merged.records)} records shown; "
    if ask.partition is None:
        count = sum(r.hwm - r.log_start for r in plan.ranges.values())
        shown += f"the {len(plan.ranges)} partitions have {count:,} offsets."
    else:
        (range_,) = plan.ranges.values()
        shown += f"the partition has offsets {range_.log_start:,} to {range_.hwm - 1:,}."
        if range_.hwm == range_.log_start:
            shown = f"The partition is empty; its next offset is {range_.hwm:,}."
    if ask.wanted:
        places = ", ".join(f"{offset:,}" for _, offset in sorted(merged.next.items()))
        shown += f" Searched {merged.searched:,} records, up to offset {places}."
    return tag("p", shown, role="status")


def record_row(shown: Shown, chosen: str) -> tuple[Content, ...]:
    record = shown.record
    place, appended = (str(shown.partition), str(shown.offset)), moment(shown.ts_ns / 1e9)
    if record is None:
        return *place, appended, None, None, tag("span", shown.problem, class_="bad"), None
    headers = [joined((tag("dt", key), tag("dd", _value(value, "text")))) for key, value in record.headers]
    return (
        *place,
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
def form(topic: TopicState, ask: Ask) -> Markup:
    options = [tag("option", name, value=name, selected=name == ask.format) for name in FORMATS]
    start = "end" if ask.is_newest and not ask.is_tail else _shown(ask.offset)
    fields = (
        _field("Partition (or: all)", "partition", ALL if ask.partition is None else str(ask.partition)),
        _field("From offset (or: end)", "offset", start),
        _field("From time", "time", _written(ask.time_ms)),
        _field("To offset", "to", _shown(ask.to)),
        _field("To time", "until", _written(ask.until_ms)),
        _field("Contains", "contains", ask.wanted),
        tag("label", "Values as", tag("select", *options, name="format")),
        tag("label", "Follow the end", void("input", type="checkbox", name="tail", value="on", checked=ask.is_tail)),
        tag("button", "Show", type="submit"),
        tag("p", "Times: 30m, 12h or 7d ago, 2026-01-31T12:00Z, or milliseconds since 1970.", class_="hint"),
    )
    return tag("form", *fields, method="get", action=address("topics", topic.name, "messages"), aria_label="Records")


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)


def _written(time_ms: int | None) -> str:
    return "" if time_ms is None else str(time_ms)


def _field(title: str, name: str, value: str) -> Markup:
    return tag("label", title, void("input", type="text", name=name, value=value))


def _links(topic: str, ask: Ask, plan: Plan, merged: Merged) -> Markup:
    links = []
    if any(offset > plan.ranges[partition].log_start for partition, offset in merged.first.items()):
        links.append(step("Earlier", topic, ask, {"before": cursor_text(merged.first)}))
    if merged.has_more:
        links.append(step("Later", topic, ask, {"at": cursor_text(merged.next)}))
    links.append(step("Newest", topic, ask, {"offset": "end"}))
    links.append(step("Follow the end", topic, ask, {"at": cursor_text(merged.next)}, is_tail=True))
    return tag("nav", tag("ul", *(tag("li", each) for each in links)), aria_label="Other records")
