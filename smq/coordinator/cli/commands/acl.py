"""`smq acl ...`: what users may do.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, TypeVar

import click

from smq.clients.types import Acl, AclDecision
from smq.coordinator.cli.common import done, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table

F = TypeVar("F", bound=Callable[..., Any])
OPERATIONS: Final = (
    *("all", "read", "write", "create", "delete", "alter", "describe"),
    *("describe_configs", "alter_configs", "idempotent_write"),
)
RESOURCES: Final = ("topic", "group", "cluster", "transactional_id")
_CLUSTER: Final = "kafka-cluster"  # Kafka's name of the one cluster


def _what(command: F) -> F:
    """USER OPERATION RESOURCE [NAME]."""
    for argument in (
        click.argument("name", default=""),
        click.argument("resource", metavar="RESOURCE", type=click.Choice(RESOURCES)),
        click.argument("operation", metavar="OPERATION", type=click.Choice(OPERATIONS)),
        click.argument("user"),
    ):
        command = argument(command)
    return command


def _rule(command: F) -> F:
    for option in (
        click.option("--host", default="*", help="Only from this address."),
        click.option("--deny", is_flag=True, help="A rule that denies. It beats every rule that allows."),
        click.option("--prefix", is_flag=True, help="For all names that begin with NAME."),
    ):
        command = option(command)
    return _what(command)


@click.group()
def acl() -> None:
    """Grants, revokes, lists and tests what users may do."""


@acl.command("grant")
@_rule
@json_option
@bootstrap_option
def acl_grant(as_json: bool, bootstrap: str, **given: Any) -> None:
    """Lets USER do OPERATION on the RESOURCE of that NAME; "*" is every user or name. The cluster needs no NAME.

    OPERATION: all, read, write, create, delete, alter, describe, describe_configs, alter_configs or idempotent_write.
    RESOURCE: topic, group, cluster or transactional_id.

    Example: smq acl grant alice read topic orders
    """
    rule = _acl(**given)

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.alter_acls(add=[rule])

    run(work(), bootstrap)
    done(f"added: {_sentence(rule)}", as_json=as_json, added=asdict(rule))


@acl.command("revoke")
@_rule
@json_option
@bootstrap_option
def acl_revoke(as_json: bool, bootstrap: str, **given: Any) -> None:
    """Removes the rule that `smq acl grant` with the same words has added.

    Example: smq acl revoke alice read topic orders
    """
    rule = _acl(**given)

    async def work() -> bool:
        async with open_admin(bootstrap) as admin:
            is_there = rule in await admin.list_acls()
            await admin.alter_acls(remove=[rule])
            return is_there

    is_there = run(work(), bootstrap)
    text = f"removed: {_sentence(rule)}" if is_there else f"there is no such rule: {_sentence(rule)} (`smq acl list`)"
    done(text, as_json=as_json, removed=asdict(rule) if is_there else None)


@acl.command("list")
@json_option
@bootstrap_option
def acl_list(as_json: bool, bootstrap: str) -> None:
    """Lists all rules. Super users need none.

    Example: smq acl list
    """

    async def work() -> list[Acl]:
        async with open_admin(bootstrap) as admin:
            return await admin.list_acls()

    found = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps([asdict(rule) for rule in found], ensure_ascii=False))
        return
    if not found:
        click.echo("there are no rules: users may do nothing, except super users. `smq acl grant` adds the first")
        return
    table = Table("user", "may", "operation", "resource", "name", "host")
    for rule in found:
        name = f"{rule.name}..." if rule.pattern == "prefixed" else rule.name
        table.add_row(rule.user, rule.permission, rule.operation, rule.resource, name, rule.host)
    print_table(table)


@acl.command("test")
@_what
@click.option("--host", default="127.0.0.1", help="The address that the user comes from.")
@json_option
@bootstrap_option
def acl_test(user: str, operation: str, resource: str, name: str, host: str, as_json: bool, bootstrap: str) -> None:
    """Says whether USER may do OPERATION on the RESOURCE of that NAME, and which rule decides.

    Example: smq acl test alice read topic orders
    """
    named = _named(resource, name)

    async def work() -> AclDecision:
        async with open_admin(bootstrap) as admin:
            return await admin.test_acl(user, operation, resource, named, host=host)

    found = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps(asdict(found), ensure_ascii=False))
        return
    if found.is_super_user:
        click.echo(f"yes: {user} is a super user")
    elif found.rule is not None:
        click.echo(f"{'yes' if found.is_allowed else 'no'}: {_sentence(found.rule)}")
    else:
        grant = shlex.join(["smq", "acl", "grant", user, operation, resource, named])
        click.echo(f"no: no rule allows it; grant it with `{grant}`")


def _acl(*, user: str, operation: str, resource: str, name: str, prefix: bool, deny: bool, host: str) -> Acl:
    return Acl(
        user=user,
        operation=operation,
        resource=resource,
        name=_named(resource, name),
        pattern="prefixed" if prefix else "literal",
        permission="deny" if deny else "allow",
        host=host,
    )


def _named(resource: str, name: str) -> str:
    if resource == "cluster":
        return name or _CLUSTER
    if not name:
        raise click.UsageError(f"name the {resource}, or * for all")
    return name


def _sentence(rule: Acl) -> str:
    who = "every user" if rule.user == "*" else rule.user
    what = f"every {rule.resource}" if rule.name == "*" else f"{rule.resource} {rule.name}"
    what += "..." if rule.pattern == "prefixed" else ""
    where = "" if rule.host == "*" else f" from {rule.host}"
    return f"{who} may{' not' if rule.permission == 'deny' else ''} {rule.operation} {what}{where}"
