"""`smq config ...`: the settings of the whole cluster.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from dataclasses import asdict

import click

from smq.clients.types import ClusterSetting
from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import done, json_option, open_admin, parse_settings, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML


@click.group(cls=CommandGroup)
def config() -> None:
    """Shows and changes the settings of the whole cluster, which have Kafka's names."""


@config.command("list")
@json_option
@bootstrap_option
def config_list(as_json: bool, bootstrap: str) -> None:
    """Lists all settings: their values, and where each comes from.

    Example: smq config list
    """

    async def work() -> list[ClusterSetting]:
        async with open_admin(bootstrap) as admin:
            return await admin.cluster_config()

    settings = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps([asdict(s) for s in settings], indent=2))
        return
    table = Table("setting", "value", "from", "meaning")
    for s in settings:
        meaning = CLUSTER_CONFIG[s.key].meaning if s.key in CLUSTER_CONFIG else ""
        table.add_row(s.key, s.value, _source(s), meaning)
    print_table(table)


def _source(setting: ClusterSetting) -> str:
    if setting.is_set:
        return "the cluster"
    return "default (or node.toml)" if setting.key in IN_NODE_TOML else "default"


@config.command("set")
@click.argument("settings", metavar="KEY=VALUE...", nargs=-1, required=True)
@json_option
@bootstrap_option
def config_set(settings: tuple[str, ...], as_json: bool, bootstrap: str) -> None:
    """Sets KEY to VALUE for the whole cluster, all pairs or none. It takes precedence over every node.toml.

    Example: smq config set num.partitions=6
    """
    changes = parse_settings(settings)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_cluster_config(set=changes)

    run(work(), bootstrap)
    done(f"set {', '.join(changes)}", as_json=as_json, set=changes)


@config.command("unset")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@json_option
@bootstrap_option
def config_unset(keys: tuple[str, ...], as_json: bool, bootstrap: str) -> None:
    """Resets KEY to the value of each node's node.toml, or to the default.

    Example: smq config unset num.partitions
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_cluster_config(unset=keys)

    run(work(), bootstrap)
    done(f"reset {', '.join(keys)}", as_json=as_json, unset=list(keys))
