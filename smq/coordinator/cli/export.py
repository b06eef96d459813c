"""`smq topic export`: writes committed records of a topic to one file, with their offsets.

Owns the command, its progress bar, and the ranges that it reads: one partition after another, so that memory stays
bounded and the file's order is always the same. The range is fixed at the start, and is exported completely or not at
all: if retention removes some of its records meanwhile, the command fails. `commands.topic` imports it, and
`disk_export`, for the bar.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from smq.clients import Consumer, StartAt
from smq.coordinator.cli.common import (
    CALL_TIMEOUT_MS,
    CONNECT_TIMEOUT_MS,
    answered,
    counted,
    json_option,
    open_admin,
    run,
)
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.export_files import FORMATS, RecordFile, record_file
from smq.coordinator.cli.parameters import TOPIC
from smq.coordinator.user_errors import Interrupted, UserError

if TYPE_CHECKING:
    from rich.progress import Progress

POLL_MS: Final = 1_000.0  # the consumer itself gives up after CALL_TIMEOUT_MS without progress
CHUNK_RECORDS: Final = 10_000  # passed to the file in one call
_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRange:
    """Offsets [lo, hi) of one partition."""

    partition: int
    lo: int
    hi: int


@click.command("export")
@click.argument("topic", type=TOPIC)
@click.option(
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file. It appears under this name once it is complete.",
)
@click.option("--format", "format_name", type=click.Choice(FORMATS), help="Default: by the file's suffix.")
@click.option("--partition", "partitions", type=int, multiple=True, help="Only this one; may be repeated.")
@click.option("--from", "first", type=click.IntRange(min=0), help="First offset; needs a single partition.")
@click.option("--to", "end", type=click.IntRange(min=0), help="Offset to stop before; needs a single partition.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@json_option
@bootstrap_option
def topic_export(
    topic: str,
    path: Path,
    format_name: str | None,
    partitions: tuple[int, ...],
    first: int | None,
    end: int | None,
    force: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Writes the records of TOPIC that are committed now to a file, with offsets (_index), ts_ns and headers.

    Example: smq topic export events --output events.parquet
    """
    chosen = format_name or _SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise click.UsageError(f"{path.name} has no suffix of a known format: pass --format {' or '.join(FORMATS)}")
    if path.exists() and not force:
        raise UserError(f"{path} already exists: choose another name, or replace it with --force")

    async def work() -> list[ExportRange]:
        ranges = await _ranges(bootstrap, topic, partitions, first, end)
        answered()
        with record_file(path, chosen) as file:
            await _copy(bootstrap, topic, ranges, file)
        return ranges

    try:
        ranges = run(work(), bootstrap)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {path} was not written, as it would not be complete") from None
    records = sum(r.hi - r.lo for r in ranges)
    if as_json:
        rows = [{"partition": r.partition, "lo": r.lo, "hi": r.hi} for r in ranges]
        size = path.stat().st_size
        click.echo(json.dumps({"topic": topic, "path": str(path), "bytes": size, "partitions": rows}))
        return
    parts = ", ".join(f"{topic}/{r.partition} [{r.lo}, {r.hi})" for r in ranges)
    click.echo(f"wrote {counted(records, 'offset')} to {path} ({path.stat().st_size:,} bytes): {parts}", err=True)


async def _ranges(
    bootstrap: str, topic: str, partitions: tuple[int, ...], first: int | None, end: int | None
) -> list[ExportRange]:
    async with open_admin(bootstrap) as admin:
        chosen = sorted(set(partitions)) or [p.partition for p in (await admin.describe_topic(topic)).partitions]
        if len(chosen) != 1 and (first is not None or end is not None):
            raise click.UsageError("--from and --to are offsets of one partition: name one with --partition")
        listed = await admin.list_offsets({(topic, p): "RESET_TO_LATEST" for p in chosen})
    ranges = []
    for partition in chosen:
        found = listed[topic, partition]
        lo = found.lo if first is None else first
        hi = found.offset if end is None else end
        if not found.lo <= lo <= hi <= found.offset:
            raise UserError(
                f"[{lo}, {hi}) is not a range of {topic}/{partition}, which holds offsets [{found.lo}, {found.offset})"
            )
        ranges.append(ExportRange(partition=partition, lo=lo, hi=hi))
    return ranges


async def _copy(bootstrap: str, topic: str, ranges: list[ExportRange], file: RecordFile) -> None:
    consumer = Consumer(bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS, stall_timeout_ms=CALL_TIMEOUT_MS)
    async with consumer:
        with progress(sum(r.hi - r.lo for r in ranges)) as advance:
            for r in ranges:
                if r.lo == r.hi:
                    continue
                await consumer.assign([(topic, r.partition)], StartAt(type="EXACT_OFFSET", value=r.lo))
                position = r.lo
                while position < r.hi:
                    taken = await consumer.getmany(CHUNK_RECORDS, POLL_MS)
                    records = taken.get((topic, r.partition), [])
                    file.write([record for record in records if record.offset < r.hi])
                    reached = min(consumer.position(topic, r.partition), r.hi)
                    advance(reached - position)
                    position = reached


class Advance:
    """Advances the progress bar, if there is one."""

    def __init__(self, progress: "Progress | None", total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("export", total=total) if progress is not None else None

    def __call__(self, offsets: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=offsets)


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console  # slow to import, and `smq topic list` needs none of it
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Advance(None, total)
        return
    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} offsets"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Advance(progress, total)
