"""`smq node ...`: lists nodes, and drains one before maintenance.

Owns what these commands print. Everything they do goes through smq.clients. `cli.root` loads it when it is used.
"""

import asyncio
import json
import time
from typing import Any, Final

import click

from smq.clients import Admin
from smq.clients.types import ClusterDescription
from smq.coordinator.cli.command_group import CommandGroup
from smq.coordinator.cli.common import answered, counted, done, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table
from smq.raft_state.errors import ErrorCode, SmqError

_POLL_S: Final = 0.2
_DRAIN_TIMEOUT_S: Final = 60.0  # thousands of leaderships, at some hundreds per second


@click.group(cls=CommandGroup)
def node() -> None:
    """Lists nodes; drains a node before maintenance, and undrains it."""


@node.command("list")
@json_option
@bootstrap_option
def node_list(as_json: bool, bootstrap: str) -> None:
    """Lists all nodes: whether they are drained, their racks, and how many partitions they lead.

    Example: smq node list
    """

    async def work() -> ClusterDescription:
        async with open_admin(bootstrap) as admin:
            return await admin.describe_cluster(is_linearizable=False)

    rows = _rows(run(work(), bootstrap))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("node", "state", "rack", "leads", "replicas", "gRPC")
    for row in rows:
        states = [word for word in ("fenced", "drained") if row[word]] or ["in service"]
        state, rack = ", ".join(states), row["rack"] or "-"
        table.add_row(*map(str, (row["node"], state, rack, row["leads"], row["replicas"], row["grpc_address"])))
    print_table(table)


def _rows(cluster: ClusterDescription) -> list[dict[str, Any]]:
    partitions = [p for topic in cluster.topics for p in topic.partitions]
    return [
        {
            "node": n.node,
            "fenced": n.fenced,
            "drained": n.drained,
            "rack": n.rack,
            "leads": sum(p.leader == n.node for p in partitions),
            "replicas": sum(n.node in p.replicas for p in partitions),
            "grpc_address": n.grpc_address,
        }
        for n in cluster.nodes
    ]


@node.command("drain")
@click.argument("number", type=int)
@click.option("--no-wait", is_flag=True, help="Return immediately, while the leaderships still move.")
@json_option
@bootstrap_option
def node_drain(number: int, no_wait: bool, as_json: bool, bootstrap: str) -> None:
    """Moves all leaderships off node NUMBER. It gets no new ones, even after a restart, until it is undrained.

    The node goes on storing its replicas. Waits until it leads nothing that another replica could lead.

    Example: smq node drain 2
    """

    async def work() -> str:
        async with open_admin(bootstrap) as admin:
            await admin.set_node_drained(number, True)
            answered()
            if no_wait:
                return f"node {number} is being drained: `smq node list` shows what it still leads"
            return await _wait_drained(admin, number)

    done(run(work(), bootstrap), as_json=as_json, node=number, drained=True, waited=not no_wait)


async def _wait_drained(admin: Admin, number: int) -> str:
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S
    while True:
        cluster = await admin.describe_cluster()
        away = {n.node for n in cluster.nodes if n.fenced or n.drained}
        led = [p for t in cluster.topics for p in t.partitions if p.leader == number]
        left = sum(any(replica not in away for replica in p.replicas) for p in led)
        if not left:
            stays = f", except {counted(len(led), 'partition')} that no other node can lead" if led else ""
            return f"node {number} is drained: it leads nothing{stays}"
        if time.monotonic() > deadline:
            leads = counted(left, "partition")
            reason = f"node {number} still leads {leads}: the other nodes lag or are unhealthy (`smq status`)"
            raise SmqError(ErrorCode.TIMED_OUT, reason)
        await asyncio.sleep(_POLL_S)


@node.command("undrain")
@click.argument("number", type=int)
@json_option
@bootstrap_option
def node_undrain(number: int, as_json: bool, bootstrap: str) -> None:
    """Lets node NUMBER lead again. It gets its leaderships back within seconds.

    Example: smq node undrain 2
    """

    async def work() -> None:
        async with open_admin(bootstrap) as admin:
            await admin.set_node_drained(number, False)

    run(work(), bootstrap)
    done(f"node {number} is in service", as_json=as_json, node=number, drained=False)
