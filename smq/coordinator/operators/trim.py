"""Deleting the oldest records of a topic: where each partition would begin, and the deletion.

Owns the look-up of each partition's new log start, so that a dry run shows exactly what would go. `smq topic trim`
and the console import it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from smq.clients import Admin, StartAt
from smq.coordinator.user_errors import UserError

ALL_COMMITTED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """Of one partition: `before` is its log start now, `after` the one that it would have."""

    partition: int
    before: int
    after: int


async def planned(
    admin: Admin, topic: str, partitions: Iterable[int], *, before_ms: int | None = None, offset: int | None = None
) -> list[Trim]:
    """Deletes what was created before a time, or what is below an offset (ALL_COMMITTED: everything). No partitions:
    all of them. UserError for an offset that a partition does not have."""
    chosen = sorted(set(partitions)) or [p.partition for p in (await admin.describe_topic(topic)).partitions]
    return [await _planned(admin, topic, partition, before_ms, offset) for partition in chosen]


async def _planned(admin: Admin, topic: str, partition: int, before_ms: int | None, offset: int | None) -> Trim:
    now = await admin.partition_range(topic, partition)
    if before_ms is not None:
        at = StartAt(timestamp_ms=before_ms)
        start = (await admin.list_offsets({(topic, partition): at}))[topic, partition].offset
    else:
        start = now.hwm if offset == ALL_COMMITTED else offset or 0
        if start > now.hwm:
            raise UserError(f"{topic}/{partition} ends at {now.hwm}: it cannot begin at {start}")
    return Trim(partition=partition, before=now.log_start, after=max(start, now.log_start))


async def delete(admin: Admin, topic: str, trims: Iterable[Trim]) -> None:
    for trim in trims:
        if trim.after > trim.before:
            await admin.delete_records(topic, trim.partition, trim.after)
