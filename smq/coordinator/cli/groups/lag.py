"""`smq group list`, `describe` and `watch`: how far groups are behind, in records, bytes and time.

Owns what these commands print, and the exit code of `--fail-above`. The figures come from the cluster. `cli.group`
imports it.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from smq.clients import Admin
from smq.clients.types import KAFKA_GROUP_PREFIX, GroupDescription, GroupMember, GroupPosition
from smq.coordinator.amounts import age_text, size_text
from smq.coordinator.cli.common import answered, end_text, json_option, open_admin, run
from smq.coordinator.cli.completions import GROUP
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.thresholds import NOTATION, Threshold, parse_threshold
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.user_errors import UserError
from smq.raft_state.errors import ErrorCode, SmqError

if TYPE_CHECKING:
    from rich.live import Live

EXIT_ABOVE: Final = 3  # a group's lag is above --fail-above: unlike 1, the command itself has not failed


def _threshold(_ctx: click.Context, _option: click.Parameter, text: str | None) -> Threshold | None:
    try:
        return parse_threshold(text) if text is not None else None
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


fail_above_option = click.option(
    "--fail-above",
    "limit",
    metavar="LIMIT",
    callback=_threshold,
    help=f"End with exit code {EXIT_ABOVE} if a partition's lag is above LIMIT: {NOTATION}.",
)


@click.command("list")
@click.option("--lag", "with_lag", is_flag=True, help="Also show each group's lag.")
@fail_above_option
@json_option
@bootstrap_option
def group_list(with_lag: bool, limit: Threshold | None, as_json: bool, bootstrap: str) -> None:
    """Lists all groups.

    Example: smq group list --json | jq -r '.[].name'
    """
    with_lag = with_lag or limit is not None

    async def work() -> list[GroupDescription]:
        async with open_admin(bootstrap) as admin:
            groups = await admin.list_groups()
            if with_lag:
                return [await admin.describe_group(g.name, with_sizes=True) for g in groups]
            return [
                GroupDescription(summary=g, protocol="", coordinator=None, members=(), positions=()) for g in groups
            ]

    found = run(work(), bootstrap)
    if as_json:
        lags = [{"lag": g.lag, **_totals(g.positions)} if with_lag else {} for g in found]
        click.echo(json.dumps([asdict(g.summary) | lag for g, lag in zip(found, lags, strict=True)]))
    elif not found:
        click.echo("there are no groups: the first commit or member creates one")
    else:
        table = Table("group", "state", "members", "generation", "protocol type", *(_LAG_COLUMNS if with_lag else ()))
        for g in found:
            s = g.summary
            cells = (s.name, s.state, str(s.members), str(s.generation), s.protocol_type or "-")
            table.add_row(*cells, *(total_cells(g.positions) if with_lag else ()))
        print_table(table)
    for g in found:
        _check(g, limit)


@click.command("describe")
@click.argument("name", type=GROUP)
@fail_above_option
@json_option
@bootstrap_option
def group_describe(name: str, limit: Threshold | None, as_json: bool, bootstrap: str) -> None:
    """Shows the members of the group NAME, and its lag in each partition in records, bytes and time.

    A Kafka client's group g is kafka-cg-g here. A lag of "beyond the end" is a commit that no record has reached yet.

    Example, for a script: smq group describe invoices --fail-above 10m
    """
    found = run(_described(name, bootstrap), bootstrap)
    if as_json:
        click.echo(_document(found))
    else:
        click.echo(_headline(found))
        if found.members:
            print_table(_member_table(found))
        print_table(_lag_table(found)) if found.positions else click.echo("nothing is committed yet")
    _check(found, limit)


@click.command("watch")
@click.argument("name", type=GROUP)
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Look so many times. Default: until Ctrl-C.")
@fail_above_option
@json_option
@bootstrap_option
def group_watch(
    name: str, interval: float, count: int | None, limit: Threshold | None, as_json: bool, bootstrap: str
) -> None:
    """Shows the lag of the group NAME again and again, and how fast it changes.

    With --fail-above it ends when the limit is passed. With --json each look is one line.

    Example: smq group watch readers --interval 5
    """

    async def work() -> None:
        before: tuple[float, int] | None = None
        looks = 0
        async with open_admin(bootstrap) as admin:
            with _screen(is_wanted=not as_json) as show:
                while True:
                    found = await describe(admin, name)
                    answered()
                    now = time.monotonic()
                    show(_look(found, before, now, as_json=as_json))
                    before, looks = (now, found.lag), looks + 1
                    _check(found, limit)
                    if looks == count:
                        return
                    await asyncio.sleep(interval)

    try:
        run(work(), bootstrap)
    except KeyboardInterrupt:
        return


class _Show:
    """On a terminal each look replaces the one before; elsewhere it is a line of text."""

    def __init__(self, live: "Live | None") -> None:
        self._live = live

    def __call__(self, look: "_Look") -> None:
        if self._live is not None:
            self._live.update("\n".join((look.line, *look.table.lines())), refresh=True)
        else:
            click.echo(look.line)


class _Look:
    def __init__(self, table: Table, line: str) -> None:
        self.table, self.line = table, line


@contextmanager
def _screen(*, is_wanted: bool) -> Iterator[_Show]:
    from rich.console import Console  # slow to import, and only this needs it
    from rich.live import Live

    console = Console(markup=False, highlight=False)
    if not is_wanted or not console.is_terminal:
        yield _Show(None)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _Show(live)


def _look(found: GroupDescription, before: tuple[float, int] | None, now: float, *, as_json: bool) -> _Look:
    if as_json:
        return _Look(_lag_table(found), _document(found))
    speed = ""
    if before is not None and now > before[0]:
        speed = f", {(found.lag - before[1]) / (now - before[0]):+,.0f} records/s"
    totals = _totals(found.positions)
    moment = datetime.now(UTC).strftime("%H:%M:%S")
    parts = f"{size_text(totals['lag_bytes'])}, {age_text(totals['lag_ms'])}"
    line = f"{moment} {found.summary.name}: {found.summary.state}, lag {found.lag:,} ({parts}){speed}"
    return _Look(_lag_table(found), line)


async def _described(name: str, bootstrap: str) -> GroupDescription:
    async with open_admin(bootstrap) as admin:
        return await describe(admin, name)


async def describe(admin: Admin, name: str) -> GroupDescription:
    with named_as_kafka_does(name):
        return await admin.describe_group(name, with_sizes=True)


def _document(found: GroupDescription) -> str:
    return json.dumps(asdict(found) | {"lag": found.lag, **_totals(found.positions)})


@contextmanager
def named_as_kafka_does(name: str) -> Iterator[None]:
    """A user who knows the group from a Kafka client misses the prefix: the error names it."""
    try:
        yield
    except SmqError as e:
        if e.code is not ErrorCode.UNKNOWN_GROUP or name.startswith(KAFKA_GROUP_PREFIX):
            raise
        hint = f"a Kafka client's group {name!r} is {KAFKA_GROUP_PREFIX + name!r} here"
        raise SmqError(e.code, f"{e.message} ({hint})", e.details) from e


def _check(found: GroupDescription, limit: Threshold | None) -> None:
    """Ends the command if the group is above its limit, or if that is not known."""
    if limit is None:
        return
    above = limit.above(found.positions)
    if above:
        places = ", ".join(f"{p.topic}/{p.partition}" for p in above[:5])
        more = f" and {len(above) - 5} more" if len(above) > 5 else ""
        click.echo(f"smq: group {found.summary.name} is more than {limit.text} behind in {places}{more}", err=True)
        raise SystemExit(EXIT_ABOVE)
    if unknown := limit.unknown(found.positions):
        p = unknown[0]
        raise UserError(
            f"the lag of group {found.summary.name} in {p.topic}/{p.partition} is not known, because its leader does"
            " not answer: `smq status` shows the partitions without a leader"
        )


def _headline(found: GroupDescription) -> str:
    summary = found.summary
    coordinator = f", coordinated by node {found.coordinator}" if found.coordinator is not None else ""
    protocol = f", assignor {found.protocol}" if found.protocol else ""
    return f"{summary.name}: {summary.state}, generation {summary.generation}{protocol}{coordinator}; lag {found.lag:,}"


def _member_table(found: GroupDescription) -> Table:
    table = Table("member", "instance", "client", "host", "session", "partitions", "lag")
    lags = {(p.topic, p.partition): p.lag or 0 for p in found.positions}
    for m in found.members:
        client, host, session = m.client_id or "-", m.client_host or "-", f"{m.session_timeout_ms} ms"
        lag = sum(lags.get(place, 0) for place in m.partitions)
        table.add_row(m.member_id, m.instance_id or "-", client, host, session, _partitions(m), f"{lag:,}")
    return table


_LAG_COLUMNS: Final = ("lag", "bytes", "time")


def _lag_table(found: GroupDescription) -> Table:
    table = Table("topic", "partition", "committed", "high water mark", *_LAG_COLUMNS, "member")
    for p in found.positions:
        owner = next((m.member_id for m in found.members if (p.topic, p.partition) in m.partitions), "-")
        end = end_text(p.hwm, is_known=p.is_end_known)
        lag = (_lag(p), size_text(p.lag_bytes), age_text(p.lag_ms))
        table.add_row(p.topic, str(p.partition), _number(p.offset), end, *lag, owner)
    return table


def _totals(positions: tuple[GroupPosition, ...]) -> dict[str, int | None]:
    """Bytes of all partitions, and the age of the oldest record that is not read. None if a part is not known."""
    sizes = [p.lag_bytes for p in positions if p.offset is not None]
    ages = [p.lag_ms for p in positions if p.offset is not None]
    known_sizes, known_ages = [s for s in sizes if s is not None], [a for a in ages if a is not None]
    return {
        "lag_bytes": sum(known_sizes) if len(known_sizes) == len(sizes) else None,
        "lag_ms": max(known_ages, default=0) if len(known_ages) == len(ages) else None,
    }


def total_cells(positions: tuple[GroupPosition, ...]) -> tuple[str, str, str]:
    totals = _totals(positions)
    return f"{sum(p.lag or 0 for p in positions):,}", size_text(totals["lag_bytes"]), age_text(totals["lag_ms"])


def _partitions(member: GroupMember) -> str:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in member.partitions:
        by_topic.setdefault(topic, []).append(partition)
    return "; ".join(f"{topic} {', '.join(map(str, parts))}" for topic, parts in by_topic.items()) or "-"


def _number(value: int | None) -> str:
    return f"{value:,}" if value is not None else "-"


def _lag(p: GroupPosition) -> str:
    if p.offset is not None and p.is_end_known and p.offset > p.hwm:
        return f"{p.offset - p.hwm:,} beyond the end"
    return _number(p.lag)
