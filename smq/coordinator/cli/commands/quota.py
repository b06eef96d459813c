"""`smq quota ...`: what clients may use.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, TypeVar

import click

from smq.clients.types import Quota
from smq.coordinator.cli.common import done, json_option, open_admin, parse_settings, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table

F = TypeVar("F", bound=Callable[..., Any])
_EACH: Final = "*"  # that has no quota of its own


def _whose(command: F) -> F:
    for option in (
        click.option("--ip", metavar="ADDRESS", help='Of this address; "*": of each without a quota of its own.'),
        click.option("--client-id", metavar="ID", help='Of this client id; "*": as above.'),
        click.option(
            "--user", metavar="NAME", help='Of this user, or of the user\'s clients of that id; "*": as above.'
        ),
    ):
        command = option(command)
    return command


@click.group()
def quota() -> None:
    """Sets, removes and lists how much of a node clients may use."""


@quota.command("set")
@click.argument("quotas", metavar="KEY=VALUE...", nargs=-1, required=True)
@_whose
@json_option
@bootstrap_option
def quota_set(quotas: tuple[str, ...], as_json: bool, bootstrap: str, **whose: str | None) -> None:
    """Sets quotas of each node, all pairs or none.

    KEY: producer_byte_rate, consumer_byte_rate (per second), request_percentage (of one core), controller_mutation_rate
    (partitions made or deleted per second); with --ip connection_creation_rate (per second).

    Example: smq quota set producer_byte_rate=1048576 --user alice
    """
    changes = {key: _number(key, value) for key, value in parse_settings(quotas).items()}
    _alter(changes, bootstrap, whose)
    done(f"set {', '.join(changes)} of {_sentence(whose)}", as_json=as_json, set=changes, **whose)


@quota.command("unset")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@_whose
@json_option
@bootstrap_option
def quota_unset(keys: tuple[str, ...], as_json: bool, bootstrap: str, **whose: str | None) -> None:
    """Removes quotas.

    Example: smq quota unset producer_byte_rate --user alice
    """
    _alter(dict.fromkeys(keys, 0.0), bootstrap, whose)
    done(f"removed {', '.join(keys)} of {_sentence(whose)}", as_json=as_json, unset=list(keys), **whose)


@quota.command("list")
@json_option
@bootstrap_option
def quota_list(as_json: bool, bootstrap: str) -> None:
    """Lists all quotas.

    Example: smq quota list
    """

    async def work() -> list[Quota]:
        async with open_admin(bootstrap) as admin:
            return await admin.list_quotas()

    found = [
        asdict(row) | {kind: _shown(getattr(row, kind)) for kind in ("user", "client_id", "ip")}
        for row in run(work(), bootstrap)
    ]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    if not found:
        click.echo("there are no quotas: `smq quota set` adds the first")
        return
    table = Table("user", "client id", "address", "key", "value")
    for row in found:
        table.add_row(*(row[kind] or "" for kind in ("user", "client_id", "ip")), row["key"], f"{row['value']:.15g}")
    print_table(table)


def _alter(changes: dict[str, float], bootstrap: str, whose: dict[str, str | None]) -> None:
    named = {kind: "" if name == _EACH else name for kind, name in whose.items() if name is not None}
    if not named or "" in (name for kind, name in whose.items() if name is not None):
        raise click.UsageError('name whose quota it is: --user, --client-id, both, or --ip; "*" for each')

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_quotas([Quota(key=key, value=value, **named) for key, value in changes.items()])

    run(work(), bootstrap)


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise click.UsageError(f"{key}={value}: a quota is a number") from None
    if not number > 0:
        raise click.UsageError(f"{key}={value}: a quota is above 0 (`smq quota unset` removes one)")
    return number


def _shown(name: str | None) -> str | None:
    return _EACH if name == "" else name


def _sentence(whose: dict[str, str | None]) -> str:
    kinds = {"user": "user", "client_id": "client id", "ip": "address"}
    named = [(kinds[kind], name) for kind, name in whose.items() if name is not None]
    return " with ".join(f"each {kind}" if name == _EACH else f"{kind} {name}" for kind, name in named)
