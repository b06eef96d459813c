"""A change of a group's committed offsets: as it is shown before it is made, and how it is made.

Owns which partitions a change covers, and the new offset of each. `cli.groups` and the console import it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from smq.clients import Admin, StartAt
from smq.clients.types import CommittedOffset, GroupDescription, TopicPartition
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError


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
            raise UserError(f"nothing is committed for {topic}/{partition}: a shift has nothing to begin with")
        starts[place] = StartAt(value=max(0, offset + by))
    return starts


async def commit(admin: Admin, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
    """All or none."""
    try:
        await admin.commit_offsets(group, offsets)
    except SmqError as e:
        if e.code in (ErrorCode.UNKNOWN_MEMBER, ErrorCode.ILLEGAL_GENERATION):
            message = f"a member has joined group {group} meanwhile, and nothing was changed: stop it and try again"
            raise UserError(message) from e
        raise


def forgettable(found: GroupDescription, places: Iterable[TopicPartition]) -> list[tuple[TopicPartition, int]]:
    """What the group would forget there: the partitions that it has committed for, with their offsets."""
    wanted = set(places)
    return [
        ((p.topic, p.partition), p.offset)
        for p in found.positions
        if p.offset is not None and (p.topic, p.partition) in wanted
    ]
