"""`smq topic trim`: deletes the oldest records of a topic, before an offset or a time, or shows what it would delete.

Owns the command and how a time is written. Each partition's new log start is looked up first, so that a dry run shows
exactly what would go. `cli.topic` imports it, and `cli.groups.offsets` for its notation of times.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import click
from rich.table import Table

from smq.clients import Admin, StartAt
from smq.coordinator.cli.common import counted, open_admin, print_table, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.user_errors import UserError

_AGE: Final = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def milliseconds(_ctx: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Since 1970, of "7d" (ago) or "2026-01-31T12:00Z"."""
    if text is None:
        return None
    try:
        if (age := _AGE.fullmatch(text)) is not None:
            moment = datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        else:
            moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is no time: write an age (30m, 12h, 7d) or 2026-01-31T12:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1_000)


@click.command("trim")
@click.argument("name")
@click.option(
    "--before",
    "before_ms",
    metavar="TIME",
    callback=milliseconds,
    help="Delete what was created before TIME (UTC, or 12h or 7d ago).",
)
@click.option(
    "--offset", type=click.IntRange(min=-1), help="Delete what is below this offset; -1: all committed records."
)
@click.option(
    "--partition", "partitions", type=int, multiple=True, help="Only this one; may be repeated. Default: all."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@bootstrap_option
def topic_trim(
    name: str, before_ms: int | None, offset: int | None, partitions: tuple[int, ...], dry_run: bool, bootstrap: str
) -> None:
    """Deletes the oldest records of the topic NAME: those before the first one created at --before or later, or those
    below --offset. Deleted records do not come back.

    Example: smq topic trim events --before 30d --dry-run
    """
    if (before_ms is None) == (offset is None):
        raise click.UsageError("pass either --before or --offset")

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
    table = Table("partition", "began at", "would begin at" if dry_run else "begins at", "records")
    for partition, lo, start in found:
        table.add_row(str(partition), str(lo), str(start), f"{start - lo:,}")
    print_table(table)
    deleted = counted(sum(start - lo for _, lo, start in found), "record")
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
