"""`smq group ...`: consumer groups, their members, their lag and their committed offsets.

Owns the deletion of a group, and the list of the commands that `cli.groups` holds. Everything they do goes through
smq.clients. `cli.root` loads it when it is used.
"""

import click

from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import confirm, done, json_option, open_admin, run, yes_option
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.describe import group_describe, group_list, named_as_kafka_does
from smq.coordinator.cli.groups.offset_changes import delete_offsets, export_offsets, import_offsets, reset_offsets
from smq.coordinator.cli.groups.watch import group_watch
from smq.coordinator.cli.parameters import GROUP


@click.group(cls=CommandGroup)
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
            with named_as_kafka_does(name):
                await admin.delete_group(name)

    run(work(), bootstrap)
    done(f"deleted group {name}", as_json=as_json, group=name, deleted=True)
