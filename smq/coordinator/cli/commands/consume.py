"""`smq consume`: writes records of a topic to standard output, starting at an offset, a time or any offset type.

Owns the command, its output and its rule for commits: it commits what it has written or passed over, and nothing
beyond, however it ends. If it follows and commits for a group, it is a member of the group, and shares the topic with
the others. `cli.root` loads it when it is used.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, Final

import click

from smq.clients import (
    OFFSET_TYPES,
    Admin,
    Consumer,
    ConsumerRecord,
    IllegalGeneration,
    RebalanceInProgress,
    StartAt,
    UnknownMember,
)
from smq.clients.membership.subscribing import Resume
from smq.clients.types import ISOLATIONS, Isolation, TopicPartition
from smq.coordinator.cli.common import CALL_TIMEOUT_MS, CONNECT_TIMEOUT_MS, answered, json_option, open_admin, run
from smq.coordinator.cli.completions import GROUP, TOPIC
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.moments import MOMENT
from smq.coordinator.cli.record_format import (
    FORMAT_HELP,
    Filter,
    WriteFn,
    format_line,
    json_line,
    parse_headers,
    value_line,
)

POLL_MS: Final = 500.0  # how often a waiting command checks whether it is done or should commit
COMMIT_INTERVAL_S: Final = 5.0  # while following
_TYPES: Final = ("earliest", "latest", *OFFSET_TYPES)
_OF_GROUPS: Final = (None, "RESUME_OR_EARLIEST", "RESUME_OR_LATEST")


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--partition", "-p", "partitions", type=int, multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--offset", "-o", help="Where to start: earliest, latest, an offset, or -N for N before the end of each partition."
)
@click.option("--since", type=MOMENT, help="Start at the first record created at TIME or later (UTC), or 1h or 7d ago.")
@click.option("--until", type=MOMENT, help="Stop before the first record created at TIME or later.")
@click.option("--until-offset", type=click.IntRange(min=0), help="Stop before this offset of each partition.")
@click.option(
    "--offset-type",
    type=click.Choice(_TYPES, case_sensitive=False),
    help="Where to start. Default: RESUME_OR_EARLIEST with --group, otherwise RESET_TO_EARLIEST.",
)
@click.option("--offset-value", type=int, help="For EXACT_OFFSET, RESET_TO_OFFSET (an offset) and EXACT_TS_NS.")
@click.option("--group", "-g", type=GROUP, help="The group whose committed offsets RESUME_* starts from.")
@click.option(
    "--commit",
    is_flag=True,
    help="Commit the offsets of what was written, for the group. With --follow, and without --partition or a start of"
    " its own, the command joins the group: several of them share the topic's partitions.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new records. Default: stop at the present end.")
@click.option("--max-records", "-n", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--key", help="Only records with this key.")
@click.option("--header", "headers", metavar="NAME[=VALUE]", multiple=True, help="Only with this; may be repeated.")
@click.option("--output", "format_text", metavar="FORMAT", help=FORMAT_HELP)
@click.option(
    "--isolation",
    type=click.Choice(tuple(ISOLATIONS)),
    default="read_committed",
    show_default=True,
    help="read_uncommitted: the records of open and aborted transactions, too.",
)
@click.option("--from-replica", type=int, metavar="NODE", help="Read only from this node's copy.")
@json_option
@bootstrap_option
def consume(
    topic: str,
    partitions: tuple[int, ...],
    offset: str | None,
    since: int | None,
    until: int | None,
    until_offset: int | None,
    offset_type: str | None,
    offset_value: int | None,
    group: str | None,
    commit: bool,
    follow: bool,
    max_records: int | None,
    key: str | None,
    headers: tuple[str, ...],
    format_text: str | None,
    isolation: Isolation,
    from_replica: int | None,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Writes the records of TOPIC, one per line: the value, with --json all fields, or what --output says.

    \b
    Examples:
      smq consume events --since 1h --json
      smq consume events -f -g readers --commit   (in several terminals: they share the work)
      smq consume events -p 0 -o -10 --output '%o %k %v'
      smq consume events --key user-7 --header type=login
    """
    _check(offset, since, offset_type, group, commit, as_json, format_text)
    _check_end(until, until_offset, follow)
    start = StartAt(timestamp_ms=since) if since is not None else _start(offset_type, offset_value, group)
    chosen = Filter(key=None if key is None else key.encode(errors="surrogateescape"), headers=parse_headers(headers))
    write = _writer(as_json, format_text)
    has_own_start = offset is not None or since is not None or offset_type not in _OF_GROUPS
    is_member = follow and commit and not partitions and from_replica is None and not has_own_start

    async def work() -> None:
        async with Consumer(
            bootstrap,
            group=group,
            isolation=isolation,
            from_replica=from_replica,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
            request_timeout_ms=CALL_TIMEOUT_MS,
            stall_timeout_ms=CALL_TIMEOUT_MS,
        ) as consumer:
            reading = _Reading(consumer, max_records, write=write, chosen=chosen, commits=commit and group is not None)
            if is_member:
                await consumer.subscribe(
                    topic,
                    start=_resume(offset_type),
                    on_assigned=reading.begin,
                    on_revoked=reading.give_up,
                    on_lost=reading.forget,
                )
                answered()
                await reading.to_the_end()
                return
            async with open_admin(bootstrap) as admin:
                assigned = [(topic, p) for p in partitions] or await _all_partitions(admin, topic)
                if offset is None:
                    starts: Mapping[TopicPartition, StartAt | None] = dict.fromkeys(assigned, start)
                else:
                    starts = await _starts(admin, assigned, offset, isolation)
                positions = await consumer.assign({tp: _or_default(s, group) for tp, s in starts.items()})
                ends = None if follow else await _ends(admin, assigned, until, until_offset, isolation)
            answered()
            for tp, position in positions.items():
                _report_moved(tp, starts[tp], position)
            reading.begin(assigned, ends)
            await reading.to_the_end()

    _run_until_ended(work(), bootstrap, is_end_normal=follow)


def _run_until_ended(work: Coroutine[object, object, None], bootstrap: str, *, is_end_normal: bool) -> None:
    """A signal is the normal end of --follow: what was written has been committed."""
    try:
        run(work, bootstrap)
    except (KeyboardInterrupt, asyncio.CancelledError) as e:
        if not is_end_normal:
            raise SystemExit(128 + (signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM)) from None


def _check(
    offset: str | None,
    since: int | None,
    offset_type: str | None,
    group: str | None,
    commit: bool,
    as_json: bool,
    format_text: str | None,
) -> None:
    """UsageError for options that contradict each other."""
    if sum(given is not None for given in (offset, since, offset_type)) > 1:
        raise click.UsageError("--offset, --since and --offset-type all say where to start: pass one of them")
    if group is not None and not group:
        raise click.UsageError("--group is empty: name a group, or leave it out")
    if commit and not group:
        raise click.UsageError("--commit needs --group: the group to commit for")
    if as_json and format_text is not None:
        raise click.UsageError("--json and --output both say how to write a record: pass one of them")


def _check_end(until: int | None, until_offset: int | None, follow: bool) -> None:
    """UsageError for more than one end."""
    given = [name for name, end in (("--until", until), ("--until-offset", until_offset)) if end is not None]
    if len(given) > 1:
        raise click.UsageError("--until and --until-offset both say where to stop: pass one of them")
    if follow and given:
        raise click.UsageError(f"--follow never ends, and {given[0]} does: pass one of them")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: in order, with a commit."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _writer(is_json: bool, format_text: str | None) -> WriteFn:
    if format_text is not None:
        return format_line(format_text)
    return json_line if is_json else value_line


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


def _resume(offset_type: str | None) -> Resume:
    return "RESUME_OR_LATEST" if offset_type == "RESUME_OR_LATEST" else "RESUME_OR_EARLIEST"


async def _starts(
    admin: Admin, partitions: list[TopicPartition], text: str, isolation: Isolation
) -> Mapping[TopicPartition, StartAt | None]:
    """What --offset means for each partition."""
    if text.lower() in ("earliest", "latest"):
        return {tp: StartAt(type=text) for tp in partitions}
    try:
        number = int(text)
    except ValueError:
        message = f"--offset {text!r}: write earliest, latest, an offset, or -N for N before the end"
        raise click.UsageError(message) from None
    if number >= 0:
        return {tp: StartAt(value=number) for tp in partitions}
    latest = dict.fromkeys(partitions, StartAt(type="RESET_TO_LATEST"))
    listed = await admin.list_offsets(latest, isolation=isolation)
    return {tp: StartAt(value=max(found.offset + number, found.lo)) for tp, found in listed.items()}


def _or_default(start: StartAt | None, group: str | None) -> StartAt:
    return start or StartAt(type="RESUME_OR_EARLIEST" if group else "RESET_TO_EARLIEST")


def _report_moved(tp: TopicPartition, start: StartAt | None, position: int) -> None:
    """Says so if RESET_TO_OFFSET starts elsewhere: at the nearest valid offset."""
    if start is not None and start.type == "RESET_TO_OFFSET" and start.timestamp_ms is None and start.value != position:
        click.echo(f"{tp[0]}/{tp[1]}: offset {start.value} is out of range, reading from {position}", err=True)


async def _all_partitions(admin: Admin, topic: str) -> list[TopicPartition]:
    return [(topic, p.partition) for p in (await admin.describe_topic(topic)).partitions]


async def _ends(
    admin: Admin, partitions: list[TopicPartition], until_ms: int | None, until_offset: int | None, isolation: Isolation
) -> dict[TopicPartition, int]:
    """At most the present ends."""
    start = StartAt(type="RESET_TO_LATEST") if until_ms is None else StartAt(timestamp_ms=until_ms)
    listed = await admin.list_offsets(dict.fromkeys(partitions, start), isolation=isolation)
    return {
        tp: found.offset if until_offset is None else min(found.offset, until_offset) for tp, found in listed.items()
    }


class _Reading:
    """One run of the command."""

    def __init__(
        self,
        consumer: Consumer,
        max_records: int | None,
        *,
        write: WriteFn,
        chosen: Filter,
        commits: bool,
    ) -> None:
        self._consumer = consumer
        self._ends: Mapping[TopicPartition, int] | None = None
        self._left = max_records
        self._line = write
        self._chosen = chosen
        self._commits = commits
        self._next: dict[TopicPartition, int] = {}  # to commit: after the last record written or passed over
        self._committed: dict[TopicPartition, int] = {}
        self._committed_at = time.monotonic()
        self._out: BinaryIO = sys.stdout.buffer

    def begin(self, partitions: Iterable[TopicPartition], ends: Mapping[TopicPartition, int] | None = None) -> None:
        """These partitions are read from now on, perhaps beside others."""
        self._ends = ends
        starts = {tp: self._consumer.position(*tp) for tp in partitions}
        self._next.update(starts)
        self._committed.update(starts)

    async def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Other members go on with them."""
        self._out.flush()
        await self._commit()
        self.forget(partitions)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._next.pop(tp, None)
            self._committed.pop(tp, None)

    async def to_the_end(self) -> None:
        """Until it is done, or a signal ends it. Then what was written is flushed and committed."""
        try:
            with _ended_by_sigterm():
                await self._read()
        finally:
            await self._finish()

    async def _read(self) -> None:
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
            if self._chosen.admits(record):
                self._out.write(self._line(record))
                if self._left is not None:
                    self._left -= 1
            self._next[tp] = record.offset + 1

    async def _finish(self) -> None:
        self._out.flush()
        if self._commits:
            await self._commit()

    async def _commit(self) -> None:
        moved = {tp: offset for tp, offset in self._next.items() if offset != self._committed[tp]}
        if moved:
            try:
                await self._consumer.commit(moved)
            except (IllegalGeneration, RebalanceInProgress, UnknownMember) as e:
                click.echo(f"not committed, so other members will write these records again: {e}", err=True)
            else:
                self._committed.update(moved)
        self._committed_at = time.monotonic()
