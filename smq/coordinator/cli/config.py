"""`smq config ...`: the settings of the whole cluster.

Owns what these commands print. Everything they do goes through smq.clients. `cli.main` loads it when it is used.
"""

import json
from dataclasses import asdict

import click
from rich.table import Table

from smq.clients.types import ClusterSetting
from smq.coordinator.cli.common import json_option, open_admin, parse_settings, print_table, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.raft_state.cluster_config import CLUSTER_CONFIG, IN_NODE_TOML


@click.group()
def config() -> None:
    """Shows and changes the settings of the whole cluster, which have Kafka's names."""


@config.command("list")
@json_option
@bootstrap_option
def config_list(as_json: bool, bootstrap: str) -> None:
    """Lists all settings: their values, and where each comes from."""

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
@bootstrap_option
def config_set(settings: tuple[str, ...], bootstrap: str) -> None:
    """Sets KEY to VALUE for the whole cluster, all pairs or none. It takes precedence over every node.toml."""
    changes = parse_settings(settings)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_cluster_config(set=changes)

    run(work(), bootstrap)
    click.echo(f"set {', '.join(changes)}")


@config.command("unset")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@bootstrap_option
def config_unset(keys: tuple[str, ...], bootstrap: str) -> None:
    """Resets KEY to the value of each node's node.toml, or to the default."""

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_cluster_config(unset=keys)

    run(work(), bootstrap)
    click.echo(f"reset {', '.join(keys)}")
