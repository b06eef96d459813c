"""`smq group reset-offsets`, `delete-offsets`, `export` and `import`: a group's committed offsets, changed by hand.

Owns the commands. Each shows what it would do and does it only with `--execute`; `operators.group_offsets` says what
that is. `commands.group` alone imports it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import click

from smq.clients import Admin, StartAt
from smq.clients.types import CommittedOffset, GroupDescription, TopicPartition
from smq.coordinator.cli.common import counted, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.describe import named_as_kafka_does
from smq.coordinator.cli.parameters import GROUP, MOMENT
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.operators.group_offsets import (
    Change,
    chosen_places,
    commit,
    described,
    forgettable,
    refuse_active,
    resolved,
    shifted,
)
from smq.coordinator.user_errors import UserError

FILE_BYTES_MAX: Final = 64 << 20  # half a million offsets with their metadata
EXAMPLE: Final = '{"group": "g", "offsets": [{"topic": "t", "partition": 0, "offset": 7, "metadata": ""}]}'


def file_text(found: GroupDescription) -> str:
    """The committed offsets as one JSON document."""
    offsets = [
        {"topic": p.topic, "partition": p.partition, "offset": p.offset, "metadata": p.metadata}
        for p in found.positions
        if p.offset is not None
    ]
    return json.dumps({"group": found.summary.name, "offsets": offsets}, indent=2)


def parse_file(text: str) -> dict[TopicPartition, CommittedOffset]:
    """UserError, with the place, for anything but what `file_text` writes."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"the file is no JSON ({e}): it looks like {EXAMPLE}") from e
    rows = document.get("offsets") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise UserError(f'the file has no list "offsets": it looks like {EXAMPLE}')
    found: dict[TopicPartition, CommittedOffset] = {}
    for number, row in enumerate(rows, 1):
        place, committed = _row(number, row)
        if place in found:
            raise UserError(f"offset {number} of the file repeats {place[0]}/{place[1]}")
        found[place] = committed
    return found


def _row(number: int, row: Any) -> tuple[TopicPartition, CommittedOffset]:
    fields = row if isinstance(row, dict) else {}
    topic, metadata = fields.get("topic"), fields.get("metadata", "")
    numbers = [fields.get(name) for name in ("partition", "offset")]
    are_numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not isinstance(topic, str) or not isinstance(metadata, str) or not are_numbers:
        raise UserError(f"offset {number} of the file is none: the file looks like {EXAMPLE}")
    partition, offset = numbers
    return (topic, int(partition or 0)), CommittedOffset(offset=int(offset or 0), metadata=metadata)


execute_option = click.option("--execute", is_flag=True, help="Do it. Without it, only show what would be done.")
topic_option = click.option(
    "--topic", "topics", metavar="TOPIC[:0,2]", multiple=True, help="A topic or some partitions; may be repeated."
)
all_option = click.option("--all-topics", "is_all", is_flag=True, help="Every partition that the group has committed.")


@click.command("reset-offsets")
@click.argument("name", type=GROUP)
@topic_option
@all_option
@click.option("--to-earliest", is_flag=True, help="To the first record that is there.")
@click.option("--to-latest", is_flag=True, help="To the end: skip everything.")
@click.option("--to-offset", type=click.IntRange(min=0), help="To this offset.")
@click.option(
    "--to-time",
    "time_ms",
    metavar="TIME",
    type=MOMENT,
    help="To the first record created at TIME or later (UTC, or 12h or 7d ago).",
)
@click.option("--shift-by", type=int, help="By this number of offsets from the committed one; negative goes back.")
@click.option("--from-file", type=click.File("r"), help="To the offsets of a file that `smq group export` wrote.")
@execute_option
@json_option
@bootstrap_option
def reset_offsets(
    name: str,
    topics: tuple[str, ...],
    is_all: bool,
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    time_ms: int | None,
    shift_by: int | None,
    from_file: TextIO | None,
    execute: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Changes where the group NAME goes on reading. Refused while it has members. Offsets outside what a partition has
    become its first or its end.

    Example: smq group reset-offsets invoices --topic orders --to-time 2h --execute
    """
    ways = (to_earliest, to_latest, to_offset is not None, time_ms is not None, shift_by is not None, bool(from_file))
    if sum(ways) != 1:
        raise click.UsageError(
            "pass exactly one of --to-earliest, --to-latest, --to-offset, --to-time, --shift-by and --from-file"
        )
    text = _read(from_file) if from_file is not None else None
    _check_selection(topics, is_all, is_needed=text is None)

    async def plan(admin: Admin, found: GroupDescription | None) -> list[Change]:
        if text is not None:
            return await _file_changes(admin, found, text)
        places = await chosen_places(admin, found, topics, is_all=is_all)
        if shift_by is not None:
            return await resolved(admin, found, shifted(found, places, shift_by))
        start = _start(to_earliest, to_latest, to_offset, time_ms)
        return await resolved(admin, found, dict.fromkeys(places, start))

    async def work() -> list[Change]:
        async with open_admin(bootstrap) as admin:
            found = await described(admin, name)
            refuse_active(found)
            changes = await plan(admin, found)
            if execute:
                await commit(admin, name, {c.place: c.after for c in changes})
            return changes

    _print(name, run(work(), bootstrap), execute=execute, as_json=as_json)


def _start(to_earliest: bool, to_latest: bool, to_offset: int | None, time_ms: int | None) -> StartAt:
    if to_earliest or to_latest:
        return StartAt(type="RESET_TO_EARLIEST" if to_earliest else "RESET_TO_LATEST")
    return StartAt(value=to_offset) if to_offset is not None else StartAt(timestamp_ms=time_ms)


@click.command("import")
@click.argument("name", type=GROUP)
@click.argument("file", type=click.File("r"))
@execute_option
@json_option
@bootstrap_option
def import_offsets(name: str, file: TextIO, execute: bool, as_json: bool, bootstrap: str) -> None:
    """Commits the offsets of FILE, which `smq group export` wrote, for the group NAME, with their metadata. The group
    may be a new one. Refused while it has members.

    Example: smq group import readers offsets.json --execute
    """
    text = _read(file)

    async def work() -> list[Change]:
        async with open_admin(bootstrap) as admin:
            found = await described(admin, name)
            refuse_active(found)
            changes = await _file_changes(admin, found, text)
            if execute:
                await commit(admin, name, {c.place: c.after for c in changes})
            return changes

    _print(name, run(work(), bootstrap), execute=execute, as_json=as_json)


@click.command("export")
@click.argument("name", type=GROUP)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: standard output.")
@bootstrap_option
def export_offsets(name: str, output: Path | None, bootstrap: str) -> None:
    """Writes the committed offsets of the group NAME as JSON, for `smq group import` or `reset-offsets --from-file`.

    Example: smq group export readers --output offsets.json
    """

    async def work() -> GroupDescription:
        async with open_admin(bootstrap) as admin:
            with named_as_kafka_does(name):
                return await admin.describe_group(name)

    text = file_text(run(work(), bootstrap))
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{output} cannot be written: {e.strerror}") from e
    click.echo(f"wrote the offsets of {name} to {output}", err=True)


@click.command("delete-offsets")
@click.argument("name", type=GROUP)
@topic_option
@all_option
@execute_option
@json_option
@bootstrap_option
def delete_offsets(
    name: str, topics: tuple[str, ...], is_all: bool, execute: bool, as_json: bool, bootstrap: str
) -> None:
    """Forgets what the group NAME has committed for these partitions. Refused for topics that a member subscribes to.
    The group then begins there as a new one would.

    Example: smq group delete-offsets readers --topic flights --execute
    """
    _check_selection(topics, is_all, is_needed=True)

    async def work() -> list[tuple[TopicPartition, int]]:
        async with open_admin(bootstrap) as admin:
            with named_as_kafka_does(name):
                found = await admin.describe_group(name)
            gone = forgettable(found, await chosen_places(admin, found, topics, is_all=is_all))
            if execute and gone:
                await admin.delete_offsets(name, [place for place, _ in gone])
            return gone

    gone = run(work(), bootstrap)
    if as_json:
        rows = [{"topic": t, "partition": p, "offset": offset} for (t, p), offset in gone]
        click.echo(json.dumps({"group": name, "executed": execute, "deleted": rows}))
        return
    table = Table("topic", "partition", "committed")
    for (topic, partition), offset in gone:
        table.add_row(topic, str(partition), f"{offset:,}")
    if gone:
        print_table(table)
    done = f"deleted {counted(len(gone), 'offset')} of {name}"
    click.echo(done if execute else f"{counted(len(gone), 'offset')} of {name} would be deleted: pass --execute")


def _check_selection(topics: Sequence[str], is_all: bool, *, is_needed: bool) -> None:
    if is_needed and bool(topics) == is_all:
        raise click.UsageError("pass either --topic, or --all-topics")
    if not is_needed and (topics or is_all):
        raise click.UsageError("the file names the partitions: leave --topic and --all-topics out")


def _read(file: TextIO) -> str:
    try:
        text = str(file.read(FILE_BYTES_MAX + 1))
    except UnicodeDecodeError as e:
        raise UserError("the file is no text: pass one that `smq group export` wrote") from e
    if len(text) > FILE_BYTES_MAX:
        raise UserError(f"the file has more than {FILE_BYTES_MAX >> 20} MiB: no group has so many offsets")
    return text


async def _file_changes(admin: Admin, found: GroupDescription | None, text: str) -> list[Change]:
    """Offsets outside what a partition has are shown and moved as for any reset; the metadata stays."""
    wanted = parse_file(text)
    if not wanted:
        raise UserError("the file has no offsets: nothing would change")
    starts = {place: StartAt(value=committed.offset) for place, committed in wanted.items()}
    changes = await resolved(admin, found, starts)
    return [
        Change(
            place=c.place,
            before=c.before,
            after=type(c.after)(offset=c.after.offset, metadata=wanted[c.place].metadata),
            note=c.note,
        )
        for c in changes
    ]


def _print(name: str, changes: Sequence[Change], *, execute: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {"topic": c.place[0], "partition": c.place[1], "before": c.before, "after": c.after.offset, "note": c.note}
            for c in changes
        ]
        click.echo(json.dumps({"group": name, "executed": execute, "changes": rows}))
        return
    table = Table("topic", "partition", "committed", "would be" if not execute else "is now", "records", "note")
    for c in changes:
        (topic, partition), before = c.place, c.before
        step = f"{c.after.offset - before:+,}" if before is not None else "-"
        table.add_row(
            topic, str(partition), f"{before:,}" if before is not None else "-", f"{c.after.offset:,}", step, c.note
        )
    print_table(table)
    done = f"changed {counted(len(changes), 'offset')} of {name}"
    click.echo(done if execute else f"{counted(len(changes), 'offset')} of {name} would change: pass --execute")
