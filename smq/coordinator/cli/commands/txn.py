"""`smq txn ...`: transactional ids, their transactions, the abort of one that hangs, and the apps that commit batches.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from dataclasses import asdict

import click

from smq.clients.types import TransactionDescription, TransactionSummary
from smq.coordinator.cli.common import done, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.operators.formats import age_text


@click.group()
def txn() -> None:
    """Lists, describes and aborts transactions. Those of Kafka's clients keep their transactional ids here."""


@txn.command("list")
@json_option
@bootstrap_option
def txn_list(as_json: bool, bootstrap: str) -> None:
    """Lists all transactional ids, with the transaction of each.

    Example: smq txn list --json | jq -r '.[] | select(.open_ms != null) | .transactional_id'
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            found = await admin.list_transactions()
        if as_json:
            click.echo(json.dumps([asdict(t) for t in found]))
            return
        table = Table("transactional id", "state", "producer", "epoch", "open for", "timeout")
        for t in found:
            table.add_row(
                t.transactional_id, t.state, str(t.producer_id), str(t.producer_epoch), _open(t), _seconds(t.timeout_ms)
            )
        print_table(table) if found else click.echo("there are no transactional ids: the first producer makes one")

    run(work(), bootstrap)


@txn.command("describe")
@click.argument("transactional_id")
@json_option
@bootstrap_option
def txn_describe(transactional_id: str, as_json: bool, bootstrap: str) -> None:
    """Shows the transaction of TRANSACTIONAL_ID: its partitions and groups.

    Example: smq txn describe payments-1
    """

    async def work() -> TransactionDescription:
        async with open_admin(bootstrap) as admin:
            return await admin.describe_transaction(transactional_id)

    found = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    summary = found.summary
    coordinator = f", coordinated by node {found.coordinator}" if found.coordinator is not None else ""
    click.echo(
        f"{summary.transactional_id}: {summary.state}, producer {summary.producer_id} in epoch"
        f" {summary.producer_epoch}{coordinator}; open for {_open(summary)}, aborted after"
        f" {_seconds(summary.timeout_ms)}"
    )
    if found.partitions:
        table = Table("topic", "partition")
        for topic, partition in found.partitions:
            table.add_row(topic, str(partition))
        print_table(table)
    for group in found.groups:
        click.echo(f"offsets of group {group} are committed with it")


@txn.command("abort")
@click.argument("transactional_id")
@json_option
@bootstrap_option
def txn_abort(transactional_id: str, as_json: bool, bootstrap: str) -> None:
    """Aborts the open transaction of TRANSACTIONAL_ID. Its producer can do nothing more, and has to start again.

    Example: smq txn abort payments-1
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.abort_transaction(transactional_id)

    run(work(), bootstrap)
    text = f"aborted the transaction of {transactional_id}"
    done(text, as_json=as_json, transactional_id=transactional_id, aborted=True)


@txn.command("apps")
@json_option
@bootstrap_option
def txn_apps(as_json: bool, bootstrap: str) -> None:
    """Lists the apps that commit batches, such as Spark's queries, each with the last batch that it has committed.

    A batch that is not newer is taken for a repetition. An app that commits nothing for offsets.retention.minutes is
    forgotten.

    Example: smq txn apps --json | jq -r '.[] | select(.idle_ms > 86400000) | .app'
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            found = await admin.list_apps()
        if as_json:
            click.echo(json.dumps([asdict(app) for app in found]))
            return
        table = Table("app", "last batch", "idle for", "forgotten in")
        for app in found:
            expires = "never" if app.expires_ms is None else age_text(app.expires_ms)
            table.add_row(app.app, str(app.batch_id), age_text(app.idle_ms), expires)
        print_table(table) if found else click.echo("there are no apps: the first batch of one makes it")

    run(work(), bootstrap)


def _open(transaction: TransactionSummary) -> str:
    return _seconds(transaction.open_ms) if transaction.open_ms is not None else "-"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:,.0f} s"
