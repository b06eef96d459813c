"""`smq group list` and `describe`: how far groups are behind, in records, bytes and time.

Owns these two commands; `figures` has what they print, `lag_limit` how they end. `commands.group` imports it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from smq.clients import Admin
from smq.clients.types import KAFKA_GROUP_PREFIX, GroupDescription
from smq.coordinator.cli.common import json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.figures import (
    TOTAL_COLUMNS,
    document,
    headline,
    lag_table,
    member_table,
    total_cells,
    total_fields,
)
from smq.coordinator.cli.groups.lag_limit import Threshold, check, fail_above_option
from smq.coordinator.cli.parameters import GROUP
from smq.coordinator.cli.tables import Table, print_table
from smq.raft_state.errors import ErrorCode, SmqError


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
                described = [await _describe_if_there(admin, g.name) for g in groups]
                return [group for group in described if group is not None]
            return [
                GroupDescription(summary=g, protocol="", coordinator=None, members=(), positions=()) for g in groups
            ]

    found = run(work(), bootstrap)
    if as_json:
        lags = [total_fields(g.lag_total) if with_lag else {} for g in found]
        click.echo(json.dumps([asdict(g.summary) | lag for g, lag in zip(found, lags, strict=True)]))
    elif not found:
        click.echo("there are no groups: the first commit or member creates one")
    else:
        table = Table("group", "state", "members", "generation", "protocol type", *(TOTAL_COLUMNS if with_lag else ()))
        for g in found:
            s = g.summary
            cells = (s.name, s.state, str(s.members), str(s.generation), s.protocol_type or "-")
            table.add_row(*cells, *(total_cells(g.lag_total) if with_lag else ()))
        print_table(table)
    check(found, limit)


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

    async def work() -> GroupDescription:
        async with open_admin(bootstrap) as admin:
            return await describe(admin, name)

    found = run(work(), bootstrap)
    if as_json:
        click.echo(document(found))
    else:
        click.echo(headline(found))
        if found.members:
            print_table(member_table(found))
        print_table(lag_table(found)) if found.positions else click.echo("nothing is committed yet")
    check([found], limit)


async def describe(admin: Admin, name: str) -> GroupDescription:
    with named_as_kafka_does(name):
        return await admin.describe_group(name, with_sizes=True)


async def _describe_if_there(admin: Admin, name: str) -> GroupDescription | None:
    """None if the group has been deleted since it was listed."""
    try:
        return await admin.describe_group(name, with_sizes=True)
    except SmqError as e:
        if e.code is not ErrorCode.UNKNOWN_GROUP:
            raise
        return None


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
