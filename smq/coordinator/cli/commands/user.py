"""`smq user ...`: users of the Kafka ports that ask for SASL, and their passwords.

Owns what these commands print. The keys of a password are derived in this process. `cli.root` loads it when it is
used.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import click

from smq.clients.types import User
from smq.coordinator.cli.common import confirm, done, json_option, open_admin, run, yes_option
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.passwords import new_password_file, password_of
from smq.coordinator.cli.starting import config_option
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.config.node_toml import load_config
from smq.coordinator.user_errors import UserError


@click.group()
def user() -> None:
    """Creates, lists and deletes the users of ports that ask for SASL, and changes passwords."""


@user.command("create")
@click.argument("name")
@new_password_file
@json_option
@bootstrap_option
def user_create(name: str, password_from: TextIO | None, as_json: bool, bootstrap: str) -> None:
    """Creates the user NAME, for SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN. Asks for the password.

    Example: smq user create alice
    """
    password = password_of(name, password_from)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.create_user(name, password)

    run(work(), bootstrap)
    done(f"created user {name}", as_json=as_json, user=name, created=True)


@user.command("passwd")
@click.argument("name")
@new_password_file
@json_option
@bootstrap_option
def user_passwd(name: str, password_from: TextIO | None, as_json: bool, bootstrap: str) -> None:
    """Changes the password of the user NAME. Connections that came in by the old one end.

    Example: smq user passwd alice
    """
    password = password_of(name, password_from)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.change_password(name, password)

    run(work(), bootstrap)
    done(f"changed the password of user {name}", as_json=as_json, user=name, changed=True)


@user.command("bootstrap")
@click.argument("name")
@config_option
@new_password_file
@json_option
def user_bootstrap(name: str, config_path: Path | None, password_from: TextIO | None, as_json: bool) -> None:
    """Sets the password of the super user NAME without a login, when this machine's node next starts.

    For the first user of a cluster, and for an administrator whose password is lost. Run it as the user of the node,
    while the node is stopped; the other nodes may run. NAME must be one of super_users of node.toml.

    Example: smq user bootstrap alice --config /etc/smq/node.toml
    """
    from smq.coordinator.service.users import leave_user  # what it needs of the server is slow to import
    from smq.replication.storage.directory import DiskOpenError, make_directory

    config = load_config(config_path, insecure=True, environment=os.environ)
    if name not in config.super_users:
        known = ", ".join(config.super_users) or "none"
        raise UserError(f"{name!r} is not one of super_users ({known}): add it there on every node, or create it later")
    password = password_of(name, password_from)
    try:
        make_directory(config.data_dir)
        if config.data_dir.stat().st_uid != os.geteuid():
            raise PermissionError(
                f"{config.data_dir} belongs to another user, who could not read what this leaves there"
            )
        leave_user(config.data_dir, name, password)
    except (OSError, DiskOpenError) as e:
        raise UserError(f"{e}; run this as the user of the node, on its machine") from e
    done(
        f"node {config.node_id} sets the password of {name} when it next starts",
        as_json=as_json,
        user=name,
        node=config.node_id,
    )


@user.command("delete")
@click.argument("name")
@yes_option
@json_option
@bootstrap_option
def user_delete(name: str, is_sure: bool, as_json: bool, bootstrap: str) -> None:
    """Deletes the user NAME. Its open connections end.

    Example: smq user delete alice
    """
    confirm(f"Delete user {name}, and end its connections?", is_sure=is_sure)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.delete_user(name)

    run(work(), bootstrap)
    done(f"deleted user {name}", as_json=as_json, user=name, deleted=True)


@user.command("list")
@json_option
@bootstrap_option
def user_list(as_json: bool, bootstrap: str) -> None:
    """Lists all users, with the mechanisms by which each may log in.

    Example: smq user list
    """

    async def work() -> list[User]:
        async with open_admin(bootstrap) as admin:
            return await admin.list_users()

    found = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps([asdict(u) for u in found], ensure_ascii=False))
        return
    if not found:
        click.echo("there are no users: `smq user create NAME` makes the first")
        return
    table = Table("user", "mechanisms")
    for u in found:
        table.add_row(u.name, ", ".join(u.mechanisms))
    print_table(table)
