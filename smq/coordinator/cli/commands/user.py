"""`smq user ...`: users of the Kafka ports that ask for SASL, and their passwords.

Owns what these commands print, and how they take a password: from a terminal without showing it, from a file, or from
standard input. It must never take one from the command line or the environment, which other processes can read. Its
keys are derived in this process. `cli.root` loads it when it is used.
"""

import json
import sys
from dataclasses import asdict
from typing import Final, TextIO

import click

from smq.clients.types import User
from smq.coordinator.cli.common import confirm, done, json_option, open_admin, run, yes_option
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table

_PASSWORD_CHARS_MAX: Final = 4_096  # of a line: a file that is no password is not read through
_password_file = click.option(
    "--password-file",
    type=click.File("r"),
    help="Take the password from the first line of this file, or of standard input (-), and do not ask.",
)


@click.group()
def user() -> None:
    """Creates, lists and deletes the users of ports that ask for SASL, and changes passwords."""


@user.command("create")
@click.argument("name")
@_password_file
@json_option
@bootstrap_option
def user_create(name: str, password_file: TextIO | None, as_json: bool, bootstrap: str) -> None:
    """Creates the user NAME, for SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN. Asks for the password.

    Example: smq user create alice
    """
    password = _password(name, password_file)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.create_user(name, password)

    run(work(), bootstrap)
    done(f"created user {name}", as_json=as_json, user=name, created=True)


@user.command("passwd")
@click.argument("name")
@_password_file
@json_option
@bootstrap_option
def user_passwd(name: str, password_file: TextIO | None, as_json: bool, bootstrap: str) -> None:
    """Changes the password of the user NAME. Connections that came in by the old one end.

    Example: smq user passwd alice
    """
    password = _password(name, password_file)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.change_password(name, password)

    run(work(), bootstrap)
    done(f"changed the password of user {name}", as_json=as_json, user=name, changed=True)


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


def _password(name: str, file: TextIO | None) -> str:
    if file is None and sys.stdin.isatty():  # whatever happens to the rest of the output, nothing may show it
        answer: str = click.prompt(f"password of {name}", hide_input=True, confirmation_prompt=True, err=True)
        return answer
    try:
        line = (file or sys.stdin).readline(_PASSWORD_CHARS_MAX)
    except UnicodeDecodeError as e:
        raise click.UsageError(f"the password is not UTF-8: {e.reason}") from e
    password = line.rstrip("\r\n")
    if not password:
        raise click.UsageError("the password is empty: give it as the first line of standard input or of a file")
    if len(line) >= _PASSWORD_CHARS_MAX:
        raise click.UsageError(f"the password is longer than {_PASSWORD_CHARS_MAX} characters")
    return password
