"""`smq topic trim`: deletes the oldest records of a topic, before an offset or a time, or shows what it would delete.

Owns the command. Each partition's new log start is looked up first, so that a dry run shows
exactly what would go. `cli.topic` alone imports it.
"""

import json

import click

from smq.clients import Admin, StartAt
from smq.coordinator.cli.common import confirm, counted, json_option, open_admin, run, yes_option
from smq.coordinator.cli.completions import TOPIC
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.moments import MOMENT
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.user_errors import UserError


@click.command("trim")
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

    async def work() -> list[tuple[int, int, int]]:
        async with open_admin(bootstrap) as admin:
            chosen = sorted(set(partitions)) or [p.partition for p in (await admin.describe_topic(name)).partitions]
            found = [await _start(admin, name, partition, before_ms, offset) for partition in chosen]
            if not dry_run:
                for partition, lo, start in found:
                    if start > lo:
                        await admin.delete_records(name, partition, start)
            return found

    found = run(work(), bootstrap)
    if as_json:
        rows = [{"partition": p, "log_start_before": lo, "log_start": start} for p, lo, start in found]
        click.echo(json.dumps({"topic": name, "dry_run": dry_run, "partitions": rows}))
        return
    table = Table("partition", "began at", "would begin at" if dry_run else "begins at", "offsets")
    for partition, lo, start in found:
        table.add_row(str(partition), str(lo), str(start), f"{start - lo:,}")
    print_table(table)
    # Compaction, aborted transactions and control batches leave offsets without a record: their number is not known.
    deleted = counted(sum(start - lo for _, lo, start in found), "offset")
    click.echo(f"{deleted} would be deleted from {name}" if dry_run else f"deleted {deleted} from {name}")


async def _start(
    admin: Admin, topic: str, partition: int, before_ms: int | None, offset: int | None
) -> tuple[int, int, int]:
    """(partition, its log start, its log start after the deletion)."""
    now = await admin.partition_range(topic, partition)
    if before_ms is not None:
        at = StartAt(timestamp_ms=before_ms)
        start = (await admin.list_offsets({(topic, partition): at}))[topic, partition].offset
    else:
        start = now.hwm if offset == -1 else offset or 0
        if start > now.hwm:
            raise UserError(f"{topic}/{partition} ends at {now.hwm}: it cannot begin at {start}")
    return partition, now.log_start, max(start, now.log_start)
