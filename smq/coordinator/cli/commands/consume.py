"""`smq consume`: writes records of a topic to standard output, starting at an offset, a time or any offset type.

Owns the command and its options, and which of the two ways to read they mean (`consume_runs`): with a filter the nodes
search. If the command follows and commits for a group, it is a member of the group, and shares the topic with the
others. `cli.root` loads it when it is used.
"""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Final

import click

from smq.clients import OFFSET_TYPES, Admin, Consumer, StartAt
from smq.clients import RecordFilter as Wanted
from smq.clients.groups.subscribing import Resume
from smq.clients.types import ISOLATIONS, Isolation, TopicPartition
from smq.coordinator.cli.common import CALL_TIMEOUT_MS, CONNECT_TIMEOUT_MS, answered, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.consume_runs import Fetching, Searching
from smq.coordinator.cli.parameters import GROUP, MOMENT, TOPIC
from smq.coordinator.cli.record_format import (
    FORMAT_HELP,
    WriteFn,
    format_line,
    json_line,
    parse_headers,
    value_line,
)
from smq.coordinator.service.record_filter import RecordFilter

FETCH_WAIT_MS: Final = 500
SEARCH_WAIT_MS: Final = CALL_TIMEOUT_MS / 2  # a call for each partition: the longest that a node waits in one
_TYPES: Final = ("earliest", "latest", *OFFSET_TYPES)
_RESUMING: Final = ("RESUME_OR_EARLIEST", "RESUME_OR_LATEST")


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--partition", "-p", "partitions", type=int, multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--offset", "-o", help="Where to start: earliest, latest, an offset, or -N for N before the end of each partition."
)
@click.option("--since", type=MOMENT, help="Start at the first record created at TIME or later (UTC), or 1h or 7d ago.")
@click.option(
    "--until-time", "--until", "until", type=MOMENT, help="Stop before the first record created at TIME or later."
)
@click.option(
    "--until-offset",
    type=click.IntRange(min=0),
    help="Stop before this offset of each partition. With --until-time, the lower of the two is the end.",
)
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
@click.option("--key-prefix", help="Only records whose key begins with this.")
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
    key_prefix: str | None,
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
      smq consume events -f --key-prefix user-
    """
    _check(offset, since, offset_type, group, commit, as_json, format_text)
    _check_end(until, until_offset, follow)
    if key is not None and key_prefix is not None:
        raise click.UsageError("--key and --key-prefix both say which keys: pass one of them")
    asked = _Asked(
        bootstrap=bootstrap,
        topic=topic,
        partitions=partitions,
        offset=offset,
        start=StartAt(timestamp_ms=since) if since is not None else _start(offset_type, offset_value, group),
        until=until,
        until_offset=until_offset,
        group=group,
        commits=commit and group is not None,
        follow=follow,
        max_records=max_records,
        chosen=RecordFilter(key=_bytes(key), key_prefix=_bytes(key_prefix), headers=tuple(parse_headers(headers))),
        write=_writer(as_json, format_text),
        isolation=isolation,
        from_replica=from_replica,
    )
    _run_until_ended(asked.read(), bootstrap, is_end_normal=follow)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the options ask for."""

    bootstrap: str
    topic: str
    partitions: tuple[int, ...]
    offset: str | None
    start: StartAt | None
    until: int | None
    until_offset: int | None
    group: str | None
    commits: bool
    follow: bool
    max_records: int | None
    chosen: RecordFilter
    write: WriteFn
    isolation: Isolation
    from_replica: int | None

    async def read(self) -> None:
        """With a filter the nodes search. Not so for a member, which filters what it fetches: the consumer's fetches
        follow the group from one assignment to the next, and its searches do not."""
        is_searching = self._has_filter and not self._is_member
        async with Consumer(
            self.bootstrap,
            group=self.group,
            isolation=self.isolation,
            from_replica=self.from_replica,
            max_wait_ms=SEARCH_WAIT_MS if is_searching else FETCH_WAIT_MS,
            connect_timeout_ms=CONNECT_TIMEOUT_MS,
            request_timeout_ms=CALL_TIMEOUT_MS,
            stall_timeout_ms=CALL_TIMEOUT_MS,
        ) as consumer:
            if self._is_member:
                await self._share(consumer)
            elif is_searching:
                await self._search(consumer)
            else:
                await self._fetch(consumer)

    @property
    def _has_filter(self) -> bool:
        return self.chosen != RecordFilter()

    @property
    def _is_member(self) -> bool:
        names_a_start = self.offset is not None or (self.start is not None and self.start.type not in _RESUMING)
        is_bound = bool(self.partitions) or self.from_replica is not None
        return self.follow and self.commits and not names_a_start and not is_bound

    async def _share(self, consumer: Consumer) -> None:
        """As a member of the group."""
        reading = self._fetching(consumer)
        await consumer.subscribe(
            self.topic,
            start=_resume(self.start),
            on_assigned=reading.begin,
            on_revoked=reading.give_up,
            on_lost=reading.forget,
        )
        answered()
        await reading.to_the_end()

    async def _fetch(self, consumer: Consumer) -> None:
        async with open_admin(self.bootstrap) as admin:
            starts = await self._starts(admin)
            positions = await consumer.assign(starts)
            ends = await self._ends(admin, list(starts))
        self._begin(starts, positions)
        reading = self._fetching(consumer)
        reading.begin(starts, ends)
        await reading.to_the_end()

    async def _search(self, consumer: Consumer) -> None:
        async with open_admin(self.bootstrap) as admin:
            starts = await self._starts(admin)
            listed = await admin.list_offsets(starts, group=self.group, isolation=self.isolation)
            ends = await self._ends(admin, list(starts))
        positions = {tp: found.offset for tp, found in listed.items()}
        self._begin(starts, positions)
        reading = Searching(
            consumer,
            self.max_records,
            write=self.write,
            commits=self.commits,
            wanted=Wanted(key=self.chosen.key, key_prefix=self.chosen.key_prefix, headers=self.chosen.headers),
            positions=positions,
            ends=ends,
        )
        await reading.to_the_end()

    def _fetching(self, consumer: Consumer) -> Fetching:
        return Fetching(consumer, self.max_records, write=self.write, commits=self.commits, chosen=self.chosen)

    async def _starts(self, admin: Admin) -> dict[TopicPartition, StartAt]:
        partitions = [(self.topic, p) for p in self.partitions] or await _all_partitions(admin, self.topic)
        if self.offset is not None:
            return await _starts(admin, partitions, self.offset, self.isolation)
        default = StartAt(type="RESUME_OR_EARLIEST" if self.group else "RESET_TO_EARLIEST")
        return dict.fromkeys(partitions, self.start or default)

    async def _ends(self, admin: Admin, partitions: list[TopicPartition]) -> dict[TopicPartition, int] | None:
        """At most the present ends. None: it follows."""
        if self.follow:
            return None
        start = StartAt(type="RESET_TO_LATEST") if self.until is None else StartAt(timestamp_ms=self.until)
        listed = await admin.list_offsets(dict.fromkeys(partitions, start), isolation=self.isolation)
        last = self.until_offset
        return {tp: found.offset if last is None else min(found.offset, last) for tp, found in listed.items()}

    def _begin(self, starts: Mapping[TopicPartition, StartAt], positions: Mapping[TopicPartition, int]) -> None:
        """The cluster has answered, and reading begins."""
        answered()
        for tp, position in positions.items():
            _report_moved(tp, starts[tp], position)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode(errors="surrogateescape")


def _run_until_ended(work: Coroutine[object, object, None], bootstrap: str, *, is_end_normal: bool) -> None:
    """SIGTERM ends it as Ctrl-C does, in order and with a commit. A signal is the normal end of --follow."""
    try:
        run(work, bootstrap, (signal.SIGINT, signal.SIGTERM))
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
    """UsageError if an end is given for a read that never ends."""
    given = [name for name, end in (("--until-time", until), ("--until-offset", until_offset)) if end is not None]
    if follow and given:
        raise click.UsageError(f"--follow never ends, and {given[0]} does: pass one of them")


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


def _resume(start: StartAt | None) -> Resume:
    return "RESUME_OR_LATEST" if start is not None and start.type == "RESUME_OR_LATEST" else "RESUME_OR_EARLIEST"


async def _starts(
    admin: Admin, partitions: list[TopicPartition], text: str, isolation: Isolation
) -> dict[TopicPartition, StartAt]:
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


def _report_moved(tp: TopicPartition, start: StartAt, position: int) -> None:
    """Says so if RESET_TO_OFFSET starts elsewhere: at the nearest valid offset."""
    if start.type == "RESET_TO_OFFSET" and start.timestamp_ms is None and start.value != position:
        click.echo(f"{tp[0]}/{tp[1]}: offset {start.value} is out of range, reading from {position}", err=True)


async def _all_partitions(admin: Admin, topic: str) -> list[TopicPartition]:
    return [(topic, p.partition) for p in (await admin.describe_topic(topic)).partitions]
