"""`smq topic trim`: deletes the oldest records of a topic, before an offset or a time, or shows what it would delete.

Owns the command; `changes.trim` says what would go. `cli.topic` alone imports it.
"""

import json

import click

from smq.coordinator.cli.common import confirm, counted, json_option, open_admin, run, yes_option
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.parameters import MOMENT, TOPIC
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.operators.trim import Trim, delete, planned


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
