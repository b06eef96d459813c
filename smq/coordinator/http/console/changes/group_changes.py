"""Changes of a group's committed offsets: to reset them, and to forget them.

Owns the forms and what they show; `operators.group_offsets` plans and makes them. `changes.pages` imports it.
"""

from collections.abc import Mapping
from typing import Final

from smq.clients import Admin, StartAt
from smq.clients.types import CommittedOffset, GroupDescription, TopicPartition
from smq.coordinator.http.console.changes.plan import Action, Change, Plan, check_rows, field
from smq.coordinator.http.console.markup import Content, table, tag
from smq.coordinator.http.console.refusals import BadRequest
from smq.coordinator.operators.formats import moment_ms
from smq.coordinator.operators.group_offsets import (
    chosen_places,
    commit,
    described,
    forgettable,
    refuse_active,
    resolved,
    shifted,
)
from smq.coordinator.user_errors import UserError

WAYS: Final = {
    "earliest": "the first record that is there",
    "latest": "the end: skip everything",
    "offset": "this offset",
    "time": "the first record created at this time or later",
    "shift": "this many offsets on, or back if negative",
}


async def _found(admin: Admin, name: str, query: Mapping[str, str]) -> tuple[GroupDescription, list[TopicPartition]]:
    found = await described(admin, name)
    if found is None:
        raise UserError(f"there is no group {name!r}")
    topics = query.get("topics", "").split()
    places = await chosen_places(admin, found, topics, is_all=not topics)
    check_rows(len(places))
    return found, places


async def _plan_reset(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    found, places = await _found(admin, name, query)
    refuse_active(found)
    way, value = query.get("way", ""), query.get("value", "").strip()
    changes = await resolved(admin, found, _starts(found, places, way, value))
    rows = [
        (
            c.place[0],
            str(c.place[1]),
            c.before,
            c.after.offset,
            f"{c.after.offset - c.before:+,}" if c.before is not None else None,
            c.note,
        )
        for c in changes
    ]
    return Plan(
        content=[
            table("Offsets that would change", ("Topic", "Partition", "Committed", "Would be", "Step", "Note"), rows)
        ],
        change=[[*c.place, c.after.offset] for c in changes],
        button=f"Change {len(changes)} offsets",
    )


def _starts(
    found: GroupDescription, places: list[TopicPartition], way: str, value: str
) -> dict[TopicPartition, StartAt]:
    """BadRequest for a way that does not exist, or a value that is none."""
    try:
        if way == "shift":
            return shifted(found, places, int(value))
        if way == "time":
            return dict.fromkeys(places, StartAt(timestamp_ms=moment_ms(value)))
        if way == "offset":
            if not (value.isascii() and value.isdigit() and int(value) < 1 << 63):
                raise ValueError(f"{value[:40]!r} is no offset: write a number")
            return dict.fromkeys(places, StartAt(value=int(value)))
    except ValueError as e:
        raise BadRequest(f"the value does not fit: {e}") from e
    if way not in WAYS:
        raise BadRequest(f"the way must be one of {', '.join(WAYS)}")
    return dict.fromkeys(places, StartAt(type=f"RESET_TO_{way.upper()}"))


async def _make_reset(admin: Admin, name: str, change: Change) -> str:
    """The offsets that were shown, whatever has been written meanwhile."""
    refuse_active(await described(admin, name))
    await commit(admin, name, {(t, p): CommittedOffset(offset=o, metadata="") for t, p, o in change})
    places = ", ".join(f"{t}/{p} to {o:,}" for t, p, o in change[:3])
    more = f" and {len(change) - 3} more" if len(change) > 3 else ""
    return f"group {name}: offsets reset, {places}{more}"


async def _plan_forget(admin: Admin, name: str, query: Mapping[str, str]) -> Plan:
    found, places = await _found(admin, name, query)
    refuse_active(found)
    gone = forgettable(found, places)
    rows = [(t, str(p), offset) for (t, p), offset in gone]
    return Plan(
        content=[table("Offsets that would be forgotten", ("Topic", "Partition", "Committed"), rows)],
        change=[list(place) for place, _ in gone] or None,
        button=f"Forget {len(gone)} offsets",
    )


async def _make_forget(admin: Admin, name: str, change: Change) -> str:
    refuse_active(await described(admin, name))
    await admin.delete_offsets(name, [(t, p) for t, p in change])
    return f"group {name}: {len(change)} offsets forgotten"


RESET: Final = Action(
    section="groups", verb="reset", title="Change where the group goes on", plan=_plan_reset, make=_make_reset
)
FORGET: Final = Action(
    section="groups", verb="forget", title="Forget committed offsets", plan=_plan_forget, make=_make_forget
)


def group_forms(name: str) -> list[Content]:
    """On the group's page."""
    options = [tag("option", text, value=way) for way, text in WAYS.items()]
    topics = "Topics, as TOPIC or TOPIC:0,2 (none: all that it has committed)"
    way = tag("label", "It goes on at", tag("select", *options, name="way"))
    value = field("Offset, time (2h, 2026-01-31T12:00Z) or step", "value")
    return [
        tag("h2", "Changes"),
        RESET.form(name, way, value, field(topics, "topics")),
        FORGET.form(name, field(topics, "topics")),
    ]
