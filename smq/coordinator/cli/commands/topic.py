"""`smq topic ...`: creates, lists, describes, changes, exports, trims and deletes topics.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from dataclasses import asdict
from typing import Final

import click

from smq.clients.admin import REPLICATION_DEFAULT
from smq.clients.types import TopicDescription
from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import (
    confirm,
    counted,
    done,
    end_text,
    json_option,
    open_admin,
    parse_settings,
    run,
    yes_option,
)
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.parameters import MOMENT, TOPIC
from smq.coordinator.cli.tables import Table, print_table
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import PartitionIndex, ring_range

# Its module loads the codec of records, which `smq topic list` need not wait for.
_LAZY: Final = {"export": "smq.coordinator.cli.export:topic_export"}


@click.group(cls=CommandGroup, lazy=_LAZY)
def topic() -> None:
    """Creates, lists, describes, changes, exports, trims and deletes topics."""


@topic.command("create")
@click.argument("name")
@click.option("--partitions", type=int, default=1, show_default=True, help="How many partitions.")
@click.option(
    "--replication-factor",
    type=click.IntRange(min=1),
    help="Copies of each partition. Default: default.replication.factor (if not set: 3, or all nodes if fewer).",
)
@click.option(
    "--config", "--set", "settings", metavar="KEY=VALUE", multiple=True, help="A topic setting; may be repeated."
)
@click.option(
    "--storage",
    type=click.Choice(["log", "external"]),
    help="external: smq stores no records, only offsets.",
)
@click.option("--start-offset", type=int, default=0, help="First offset of every partition.")
@click.option("--if-not-exists", is_flag=True, help="Succeed if the topic already exists.")
@json_option
@bootstrap_option
def topic_create(
    name: str,
    partitions: int,
    replication_factor: int | None,
    settings: tuple[str, ...],
    storage: str | None,
    start_offset: int,
    if_not_exists: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Creates the topic NAME.

    Example: smq topic create events --partitions 6 --config retention.ms=604800000
    """
    config = parse_settings(settings) | ({"storage": storage} if storage is not None else {})

    async def work() -> bool:
        async with open_admin(bootstrap) as admin:
            try:
                await admin.create_topic(
                    name,
                    partitions,
                    replication_factor=replication_factor or REPLICATION_DEFAULT,
                    config=config,
                    start_offset=start_offset,
                )
            except SmqError as e:
                if e.code is ErrorCode.TOPIC_EXISTS and if_not_exists:
                    return False
                raise
            return True

    is_new = run(work(), bootstrap)
    text = f"created topic {name} with {counted(partitions, 'partition')}" if is_new else f"topic {name} already exists"
    done(text, as_json=as_json, topic=name, created=is_new)


@topic.command("list")
@json_option
@bootstrap_option
def topic_list(as_json: bool, bootstrap: str) -> None:
    """Lists all topics.

    Example: smq topic list --json | jq -r '.[].name'
    """

    async def work() -> list[TopicDescription]:
        async with open_admin(bootstrap) as admin:
            return await admin.list_topics()

    topics = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps([_topic_json(t) for t in topics], indent=2))
        return
    table = Table("topic", "partitions", "replicas", "records", "settings")
    for t in topics:
        records = sum(p.hwm - p.log_start for p in t.partitions)
        table.add_row(t.name, str(len(t.partitions)), str(t.replication_factor), f"{records:,}", _settings(t))
    print_table(table) if topics else click.echo("there are no topics: create one with `smq topic create NAME`")


@topic.command("describe")
@click.argument("name", type=TOPIC)
@json_option
@bootstrap_option
def topic_describe(name: str, as_json: bool, bootstrap: str) -> None:
    """Shows the partitions of the topic NAME: leaders, replicas, offsets, ring slots.

    Ring slots: the keys of a topic lie on a ring of 32 slots for each partition. A key's slot comes from the hash by
    which Kafka's default partitioner chooses its partition, so a partition's slots are those of its keys.

    Example: smq topic describe events
    """

    async def work() -> TopicDescription:
        async with open_admin(bootstrap) as admin:
            return await admin.describe_topic(name)

    t = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps(_topic_json(t), indent=2))
        return
    partitions, replicas = counted(len(t.partitions), "partition"), counted(t.replication_factor, "replica")
    click.echo(f"{t.name}: {partitions}, {replicas}, settings {_settings(t)}")
    table = Table("partition", "leader", "epoch", "replicas", "log start", "high water mark", "ring slots")
    for p in t.partitions:
        start, stop = ring_range(PartitionIndex(p.partition))
        leader = str(p.leader) if p.leader_available else f"{p.leader} (not available)" if p.replicas else "-"
        replicas = ", ".join(map(str, p.replicas))
        table.add_row(
            str(p.partition),
            leader,
            str(p.epoch),
            replicas,
            str(p.log_start),
            end_text(p.hwm, is_known=p.is_end_known),
            f"{start}-{stop - 1}",
        )
    print_table(table)


@topic.command("delete")
@click.argument("name", type=TOPIC)
@yes_option
@json_option
@bootstrap_option
def topic_delete(name: str, is_sure: bool, as_json: bool, bootstrap: str) -> None:
    """Deletes the topic NAME with all its records and the groups' offsets in it. Asks first, on a terminal.

    Example: smq topic delete events --yes
    """
    confirm(f"Delete the topic {name} with all its records?", is_sure=is_sure)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.delete_topic(name)

    run(work(), bootstrap)
    done(f"deleted topic {name}", as_json=as_json, topic=name, deleted=True)


@topic.command("alter")
@click.argument("name", type=TOPIC)
@click.option(
    "--set", "--config", "settings", metavar="KEY=VALUE", multiple=True, help="A setting to change; may be repeated."
)
@click.option("--unset", metavar="KEY", multiple=True, help="A setting to reset to its default; may be repeated.")
@click.option("--partitions", type=int, help="The new number of partitions; it can only grow.")
@json_option
@bootstrap_option
def topic_alter(
    name: str, settings: tuple[str, ...], unset: tuple[str, ...], partitions: int | None, as_json: bool, bootstrap: str
) -> None:
    """Changes settings of the topic NAME, or adds partitions.

    Example: smq topic alter events --set retention.ms=86400000
    """
    config = parse_settings(settings)
    if not config and not unset and partitions is None:
        raise click.UsageError("nothing to change: pass --set, --unset or --partitions")

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            if config or unset:
                await admin.alter_topic(name, set=config, unset=unset)
            if partitions is not None:
                await admin.add_partitions(name, partitions)

    run(work(), bootstrap)
    done(f"changed topic {name}", as_json=as_json, topic=name, set=config, unset=list(unset), partitions=partitions)


@topic.command("trim")
@click.argument("name", type=TOPIC)
@click.option(
    "--before",
    "before_ms",
    metavar="TIME",
    type=MOMENT,
    help="Delete what was created before TIME (UTC, or 12h or 7d ago).",
)
@click.option(
    "--offset", type=click.IntRange(min=-1), help="Delete what is below this offset; -1: all committed records."
)
@click.option(
    "--partition", "partitions", type=int, multiple=True, help="Only this one; may be repeated. Default: all."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@yes_option
@json_option
@bootstrap_option
def topic_trim(
    name: str,
    before_ms: int | None,
    offset: int | None,
    partitions: tuple[int, ...],
    dry_run: bool,
    is_sure: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Deletes the oldest records of the topic NAME: those before the first one created at --before or later, or those
    below --offset. Deleted records do not come back.

    Example: smq topic trim events --before 30d --dry-run
    """
    if (before_ms is None) == (offset is None):
        raise click.UsageError("pass either --before or --offset")
    if not dry_run:
        confirm(f"Delete the oldest records of {name}? (--dry-run shows which)", is_sure=is_sure)

    from smq.coordinator.operators.trim import Trim, delete, planned  # it loads the codec of records

    async def work() -> list[Trim]:
        async with open_admin(bootstrap) as admin:
            found = await planned(admin, name, partitions, before_ms=before_ms, offset=offset)
            if not dry_run:
                await delete(admin, name, found)
            return found

    found = run(work(), bootstrap)
    if as_json:
        rows = [{"partition": t.partition, "log_start_before": t.before, "log_start": t.after} for t in found]
        click.echo(json.dumps({"topic": name, "dry_run": dry_run, "partitions": rows}))
        return
    table = Table("partition", "began at", "would begin at" if dry_run else "begins at", "offsets")
    for t in found:
        table.add_row(str(t.partition), str(t.before), str(t.after), f"{t.after - t.before:,}")
    print_table(table)
    # Compaction, aborted transactions and control batches leave offsets without a record: their number is not known.
    deleted = counted(sum(t.after - t.before for t in found), "offset")
    click.echo(f"{deleted} would be deleted from {name}" if dry_run else f"deleted {deleted} from {name}")


# ------------------------------------------------------------------------------------------------------ output
def _topic_json(t: TopicDescription) -> dict[str, object]:
    return {**asdict(t), "topic_id": t.topic_id.hex()}


def _settings(t: TopicDescription) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(t.config.items())) or "default"
