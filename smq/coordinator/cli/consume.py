"""`smq consume`: writes records of a topic to standard output, starting at any of the seven offset types.

Owns the command, its output and its rule for commits: it commits what it has written, and nothing beyond. `cli.main`
loads it when it is used.
"""

import sys
import time
from collections.abc import Mapping
from typing import BinaryIO, Final

import click

from smq.clients import OFFSET_TYPES, Consumer, ConsumerRecord, StartAt
from smq.clients.types import TopicPartition
from smq.coordinator.cli.common import CALL_TIMEOUT_MS, CONNECT_TIMEOUT_MS, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.record_json import record_line

POLL_MS: Final = 500.0  # how often a waiting command checks whether it is done or should commit
COMMIT_INTERVAL_S: Final = 5.0  # while following


@click.command()
@click.argument("topic")
@click.option("--partition", "partitions", type=int, multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--offset-type",
    type=click.Choice(OFFSET_TYPES, case_sensitive=False),
    help="Where to start. Default: RESUME_OR_EARLIEST with --group, otherwise RESET_TO_EARLIEST.",
)
@click.option("--offset-value", type=int, help="For EXACT_OFFSET, RESET_TO_OFFSET (an offset) and EXACT_TS_NS.")
@click.option("--group", help="The group whose committed offsets RESUME_* starts from and --commit moves.")
@click.option("--commit", is_flag=True, help="Commit the offsets of what was written, for the group.")
@click.option("--follow", is_flag=True, help="Wait for new records. Default: stop at the present end.")
@click.option("--max-records", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--from-replica", type=int, metavar="NODE", help="Read only from this node's copy.")
@json_option
@bootstrap_option
def consume(
    topic: str,
    partitions: tuple[int, ...],
    offset_type: str | None,
    offset_value: int | None,
    group: str | None,
    commit: bool,
    follow: bool,
    max_records: int | None,
    from_replica: int | None,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Writes the records of TOPIC, one per line: the value, or with --json all fields."""
    start = _start(offset_type, offset_value, group)
    if commit and not group:
        raise click.UsageError("--commit needs --group: the group to commit for")

    async def work() -> None:
        async with Consumer(
            bootstrap,
            group=group,
            from_replica=from_replica,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
            stall_timeout_ms=CALL_TIMEOUT_MS,
        ) as consumer:
            assigned = [(topic, p) for p in partitions] or await _all_partitions(bootstrap, topic)
            positions = await consumer.assign(assigned, start)
            _report_moved(start, positions)
            ends = None if follow else await _ends(bootstrap, assigned)
            reading = _Reading(consumer, positions, ends, max_records, as_json, group if commit else None)
            try:
                await reading.run()
            finally:
                await reading.finish()

    try:
        run(work(), bootstrap)
    except KeyboardInterrupt:
        pass  # the normal end of --follow: what was written has been committed


def _start(offset_type: str | None, offset_value: int | None, group: str | None) -> StartAt | None:
    if offset_type is None:
        if offset_value is not None:
            raise click.UsageError("--offset-value needs --offset-type, such as RESET_TO_OFFSET")
        return None
    needs_value = offset_type in ("EXACT_OFFSET", "RESET_TO_OFFSET", "EXACT_TS_NS")
    if needs_value != (offset_value is not None):
        raise click.UsageError(f"{offset_type} {'needs --offset-value' if needs_value else 'takes no --offset-value'}")
    if offset_type.startswith("RESUME") and not group:
        raise click.UsageError(f"{offset_type} needs --group: the group that has committed")
    return StartAt(type=offset_type, value=offset_value or 0)


def _report_moved(start: StartAt | None, positions: Mapping[TopicPartition, int]) -> None:
    """Says so if RESET_TO_OFFSET starts elsewhere: at the nearest valid offset."""
    if start is None or start.type != "RESET_TO_OFFSET":
        return
    for (topic, partition), position in positions.items():
        if position != start.value:
            click.echo(f"{topic}/{partition}: offset {start.value} is out of range, reading from {position}", err=True)


async def _all_partitions(bootstrap: str, topic: str) -> list[TopicPartition]:
    async with open_admin(bootstrap) as admin:
        return [(topic, p.partition) for p in (await admin.describe_topic(topic)).partitions]


async def _ends(bootstrap: str, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
    async with open_admin(bootstrap) as admin:
        listed = await admin.list_offsets(dict.fromkeys(partitions, "RESET_TO_LATEST"))
    return {tp: found.offset for tp, found in listed.items()}


class _Reading:
    """One run of the command."""

    def __init__(
        self,
        consumer: Consumer,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int] | None,
        max_records: int | None,
        as_json: bool,
        commit_for: str | None,
    ) -> None:
        self._consumer = consumer
        self._ends = ends
        self._left = max_records
        self._as_json = as_json
        self._commits = commit_for is not None
        self._next = dict(positions)  # to commit: the offset after the last record written
        self._committed = dict(positions)
        self._committed_at = time.monotonic()
        self._out: BinaryIO = sys.stdout.buffer

    async def run(self) -> None:
        while not self._is_done():
            found = await self._consumer.getmany(1, POLL_MS)
            for tp, records in found.items():
                self._write(tp, records)
            self._out.flush()
            if self._commits and time.monotonic() - self._committed_at >= COMMIT_INTERVAL_S:
                await self._commit()

    def _is_done(self) -> bool:
        if self._left == 0:
            return True
        ends = self._ends
        return ends is not None and all(self._consumer.position(*tp) >= end for tp, end in ends.items())

    def _write(self, tp: TopicPartition, records: list[ConsumerRecord]) -> None:
        end = None if self._ends is None else self._ends[tp]
        for record in records:
            if self._left == 0 or (end is not None and record.offset >= end):
                return
            self._out.write(
                (record_line(record, offset_name="offset") if self._as_json else record.value or b"") + b"\n"
            )
            self._next[tp] = record.offset + 1
            if self._left is not None:
                self._left -= 1

    async def finish(self) -> None:
        self._out.flush()
        if self._commits:
            await self._commit()

    async def _commit(self) -> None:
        moved = {tp: offset for tp, offset in self._next.items() if offset != self._committed[tp]}
        if moved:
            await self._consumer.commit(moved)
            self._committed.update(moved)
        self._committed_at = time.monotonic()
