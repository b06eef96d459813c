"""`smq group ...`: consumer groups, their members, their lag and their committed offsets.

Owns the deletion of a group, and the list of the commands that `cli.groups` holds. Everything they do goes through
smq.clients. `cli.main` loads it when it is used.
"""

import click

from smq.coordinator.cli.common import open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.lag import group_describe, group_list, group_watch
from smq.coordinator.cli.groups.offsets import delete_offsets, export_offsets, import_offsets, reset_offsets


@click.group()
def group() -> None:
    """Lists, watches, changes and deletes consumer groups. A Kafka client's group g is kafka-cg-g here."""


for _command in (
    group_list,
    group_describe,
    group_watch,
    reset_offsets,
    delete_offsets,
    export_offsets,
    import_offsets,
):
    group.add_command(_command)


@group.command("delete")
@click.argument("name")
@bootstrap_option
def group_delete(name: str, bootstrap: str) -> None:
    """Deletes the group NAME and all its committed offsets. Refused while it has members."""

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.delete_group(name)

    run(work(), bootstrap)
    click.echo(f"deleted group {name}")
