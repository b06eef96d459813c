"""`smq group ...`: consumer groups, their members and their lag.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from smq.clients.types import KAFKA_GROUP_PREFIX, GroupDescription, GroupMember, GroupPosition
from smq.coordinator.cli.common import confirm, done, end_text, json_option, open_admin, run, yes_option
from smq.coordinator.cli.completions import GROUP
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups import CommandGroup
from smq.coordinator.cli.tables import Table, print_table
from smq.raft_state.errors import ErrorCode, SmqError


@click.group(cls=CommandGroup)
def group() -> None:
    """Lists, describes and deletes consumer groups. A Kafka client's group g is kafka-cg-g here."""


@group.command("list")
@json_option
@bootstrap_option
def group_list(as_json: bool, bootstrap: str) -> None:
    """Lists all groups.

    Example: smq group list --json | jq -r '.[].name'
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            groups = await admin.list_groups()
        if as_json:
            click.echo(json.dumps([asdict(g) for g in groups]))
            return
        table = Table("group", "state", "members", "generation", "protocol type")
        for g in groups:
            table.add_row(g.name, g.state, str(g.members), str(g.generation), g.protocol_type or "-")
        print_table(table) if groups else click.echo("there are no groups: the first commit or member creates one")

    run(work(), bootstrap)


@group.command("describe")
@click.argument("name", type=GROUP)
@json_option
@bootstrap_option
def group_describe(name: str, as_json: bool, bootstrap: str) -> None:
    """Shows the members of the group NAME, and its lag in each partition.

    A Kafka client's group g is kafka-cg-g here. A lag of "beyond the end" is a commit that no record has reached yet.

    Example: smq group describe readers
    """

    async def work() -> GroupDescription:
        async with open_admin(bootstrap) as admin:
            with _named_as_kafka_does(name):
                return await admin.describe_group(name)

    found = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"lag": found.lag}))
        return
    summary = found.summary
    coordinator = f", coordinated by node {found.coordinator}" if found.coordinator is not None else ""
    click.echo(
        f"{summary.name}: {summary.state}, generation {summary.generation}"
        f"{f', assignor {found.protocol}' if found.protocol else ''}{coordinator}; lag {found.lag:,}"
    )
    if found.members:
        members = Table("member", "instance", "client", "host", "session", "partitions")
        for m in found.members:
            client, host, session = m.client_id or "-", m.client_host or "-", f"{m.session_timeout_ms} ms"
            members.add_row(m.member_id, m.instance_id or "-", client, host, session, _partitions(m))
        print_table(members)
    offsets = Table("topic", "partition", "committed", "high water mark", "lag", "member")
    for p in found.positions:
        owner = next((m.member_id for m in found.members if (p.topic, p.partition) in m.partitions), "-")
        offsets.add_row(
            p.topic,
            str(p.partition),
            _number(p.offset),
            end_text(p.hwm, is_known=p.is_end_known),
            _lag(p),
            owner,
        )
    print_table(offsets) if found.positions else click.echo("nothing is committed yet")


def _partitions(member: GroupMember) -> str:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in member.partitions:
        by_topic.setdefault(topic, []).append(partition)
    return "; ".join(f"{topic} {', '.join(map(str, parts))}" for topic, parts in by_topic.items()) or "-"


def _number(value: int | None) -> str:
    return f"{value:,}" if value is not None else "-"


@group.command("delete")
@click.argument("name", type=GROUP)
@yes_option
@json_option
@bootstrap_option
def group_delete(name: str, is_sure: bool, as_json: bool, bootstrap: str) -> None:
    """Deletes the group NAME and all its committed offsets. Refused while it has members. Asks first, on a terminal.

    Example: smq group delete readers --yes
    """
    confirm(f"Delete the group {name} with its committed offsets?", is_sure=is_sure)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            with _named_as_kafka_does(name):
                await admin.delete_group(name)

    run(work(), bootstrap)
    done(f"deleted group {name}", as_json=as_json, group=name, deleted=True)


@contextmanager
def _named_as_kafka_does(name: str) -> Iterator[None]:
    """A user who knows the group from a Kafka client misses the prefix: the error names it."""
    try:
        yield
    except SmqError as e:
        if e.code is not ErrorCode.UNKNOWN_GROUP or name.startswith(KAFKA_GROUP_PREFIX):
            raise
        hint = f"a Kafka client's group {name!r} is {KAFKA_GROUP_PREFIX + name!r} here"
        raise SmqError(e.code, f"{e.message} ({hint})", e.details) from e


def _lag(p: GroupPosition) -> str:
    if p.offset is not None and p.is_end_known and p.offset > p.hwm:
        return f"{p.offset - p.hwm:,} beyond the end"
    return _number(p.lag)
