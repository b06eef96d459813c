"""Changes of a topic: to delete its oldest records, and to delete it.

Owns the forms and what they show; `operators.trim` plans and makes the first. `changes.pages` imports it.
"""

from collections.abc import Mapping
from typing import Final

from smq.clients import Admin
from smq.coordinator.http.console.changes.plan import Action, Change, Plan, check_rows, field
from smq.coordinator.http.console.markup import Content, table, tag
from smq.coordinator.http.console.refusals import BadRequest
from smq.coordinator.operators.formats import moment_ms
from smq.coordinator.operators.trim import ALL_COMMITTED, Trim, delete, planned


async def _plan_trim(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    before, offset = query.get("before", "").strip(), query.get("offset", "").strip()
    if bool(before) == bool(offset):
        raise BadRequest("write either a time or an offset")
    check_rows(len((await admin.describe_topic(name)).partitions))
    try:
        before_ms = moment_ms(before) if before else None
    except ValueError as e:
        raise BadRequest(str(e)) from e
    trims = await planned(admin, name, (), before_ms=before_ms, offset=_offset(offset) if offset else None)
    due = [t for t in trims if t.after > t.before]
    rows = [(str(t.partition), t.before, t.after, t.after - t.before) for t in trims]
    total = sum(t.after - t.before for t in due)
    heads = ("Partition", "Begins at", "Would begin at", "Offsets")
    return Plan(
        content=[table("Offsets that would be deleted", heads, rows), tag("p", "Deleted records do not come back.")],
        change=[[t.partition, t.before, t.after] for t in due] or None,
        button=f"Delete {total:,} offsets",
    )


def _offset(text: str) -> int:
    if text == "end":
        return ALL_COMMITTED
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadRequest(f"{text[:40]!r} is no offset: write a number, or end")
    return int(text)


async def _make_trim(admin: Admin, name: str, change: Change) -> str:
    trims = [Trim(partition=p, before=before, after=after) for p, before, after in change]
    await delete(admin, name, trims)
    return f"topic {name}: {sum(t.after - t.before for t in trims):,} offsets deleted"


async def _plan_delete(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    found = await admin.describe_topic(name)
    records = sum(p.hwm - p.log_start for p in found.partitions)
    text = (
        f"Topic {name} has {len(found.partitions)} partitions with {records:,} offsets. It would be deleted with its "
        "records, and with what groups have committed for it. Nothing brings it back."
    )
    return Plan(content=[tag("p", text)], change={"topic_id": found.topic_id.hex()}, button="Delete the topic")


async def _make_delete(admin: Admin, name: str, change: Change) -> str:
    found = await admin.describe_topic(name)
    if found.topic_id.hex() != change["topic_id"]:
        raise BadRequest(f"topic {name} has been made again since this was shown: look at it first")
    await admin.delete_topic(name)
    return f"topic {name}: deleted"


TRIM: Final = Action(
    section="topics", verb="trim", title="Delete the oldest records", plan=_plan_trim, make=_make_trim, is_typed=True
)
DELETE: Final = Action(
    section="topics", verb="delete", title="Delete the topic", plan=_plan_delete, make=_make_delete, is_typed=True
)


def topic_forms(name: str) -> list[Content]:
    """On the topic's page."""
    fields = (
        field("Those created before (30d, 2026-01-31T12:00Z)", "before"),
        field("or below offset (or: end)", "offset"),
    )
    return [tag("h2", "Changes"), TRIM.form(name, *fields), tag("p", DELETE.link("Delete this topic", name))]
