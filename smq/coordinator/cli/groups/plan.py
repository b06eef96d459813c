"""A change of a group's committed offsets, as it is shown before it is made, and the file that keeps such offsets.

Owns which partitions a change covers, the new offset of each, and the format of the file. It reads the cluster and
changes nothing. `cli.groups.offsets` imports it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from smq.clients import Admin, StartAt
from smq.clients.types import CommittedOffset, GroupDescription, TopicPartition
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError

FILE_BYTES_MAX: Final = 64 << 20  # half a million offsets with their metadata
EXAMPLE: Final = '{"group": "g", "offsets": [{"topic": "t", "partition": 0, "offset": 7, "metadata": ""}]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`before` is None if nothing is committed. `note` says what the user did not ask for, if anything."""

    place: TopicPartition
    before: int | None
    after: CommittedOffset
    note: str = ""


async def described(admin: Admin, group: str) -> GroupDescription | None:
    """None if there is no such group: offsets can be committed for a new one."""
    try:
        return await admin.describe_group(group)
    except SmqError as e:
        if e.code is ErrorCode.UNKNOWN_GROUP:
            return None
        raise


def refuse_active(found: GroupDescription | None) -> None:
    """A member goes on from its own position, and commits it over whatever is set here."""
    if found is None or not found.members:
        return
    names = [f"{m.member_id} ({m.client_host})" for m in found.members[:5]]
    more = f" and {len(found.members) - 5} more" if len(found.members) > 5 else ""
    raise UserError(f"group {found.summary.name} has members: {', '.join(names)}{more}. Stop them first")


async def chosen_places(
    admin: Admin, found: GroupDescription | None, topics: Iterable[str], *, is_all: bool
) -> list[TopicPartition]:
    """The partitions that the user names as TOPIC or TOPIC:0,2; or all for which the group has committed."""
    committed = [(p.topic, p.partition) for p in found.positions if p.offset is not None] if found else []
    if is_all:
        if not committed:
            raise UserError("the group has committed nothing: name topics with --topic")
        return committed
    places: dict[TopicPartition, None] = {}
    for written in topics:
        topic, colon, listed = written.rpartition(":")
        if not colon:
            topic, listed = written, ""
        count = len((await admin.describe_topic(topic)).partitions)
        for partition in _partitions(written, listed) if colon else range(count):
            if partition >= count:
                raise UserError(f"topic {topic} has the partitions 0 to {count - 1}, not {partition}")
            places[topic, partition] = None
    return list(places)


def _partitions(written: str, listed: str) -> list[int]:
    numbers = listed.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise UserError(f"{written!r} names no partitions: write TOPIC, or TOPIC:0,2")
    return [int(number) for number in numbers]


async def resolved(
    admin: Admin, found: GroupDescription | None, starts: Mapping[TopicPartition, StartAt]
) -> list[Change]:
    """Each partition's new offset, within what the partition has."""
    known = {(p.topic, p.partition): p.offset for p in found.positions} if found else {}
    listed = await admin.list_offsets(starts)
    changes = []
    for place, start in starts.items():
        at = listed[place]
        note = f"{start.value} is outside {at.lo} to {at.hi}" if at.clamped else ""
        after = CommittedOffset(offset=at.offset, metadata="")
        changes.append(Change(place=place, before=known.get(place), after=after, note=note))
    return changes


def shifted(found: GroupDescription | None, places: Iterable[TopicPartition], by: int) -> dict[TopicPartition, StartAt]:
    """From the committed offsets. A partition without one has nothing to shift."""
    known = {(p.topic, p.partition): p.offset for p in found.positions} if found else {}
    starts: dict[TopicPartition, StartAt] = {}
    for place in places:
        offset = known.get(place)
        if offset is None:
            topic, partition = place
            raise UserError(f"nothing is committed for {topic}/{partition}: --shift-by has nothing to begin with")
        starts[place] = StartAt(value=max(0, offset + by))
    return starts


# ------------------------------------------------------------------------------------------------------- files
def file_text(found: GroupDescription) -> str:
    """The committed offsets as one JSON document."""
    offsets = [
        {"topic": p.topic, "partition": p.partition, "offset": p.offset, "metadata": p.metadata}
        for p in found.positions
        if p.offset is not None
    ]
    return json.dumps({"group": found.summary.name, "offsets": offsets}, indent=2)


def parse_file(text: str) -> dict[TopicPartition, CommittedOffset]:
    """UserError, with the place, for anything but what `file_text` writes."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"the file is no JSON ({e}): it looks like {EXAMPLE}") from e
    rows = document.get("offsets") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise UserError(f'the file has no list "offsets": it looks like {EXAMPLE}')
    found: dict[TopicPartition, CommittedOffset] = {}
    for number, row in enumerate(rows, 1):
        place, committed = _row(number, row)
        if place in found:
            raise UserError(f"offset {number} of the file repeats {place[0]}/{place[1]}")
        found[place] = committed
    return found


def _row(number: int, row: Any) -> tuple[TopicPartition, CommittedOffset]:
    fields = row if isinstance(row, dict) else {}
    topic, metadata = fields.get("topic"), fields.get("metadata", "")
    numbers = [fields.get(name) for name in ("partition", "offset")]
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not isinstance(topic, str) or not isinstance(metadata, str) or not are_numbers:
        raise UserError(f"offset {number} of the file is none: the file looks like {EXAMPLE}")
    partition, offset = numbers
    return (topic, int(partition or 0)), CommittedOffset(offset=int(offset or 0), metadata=metadata)
