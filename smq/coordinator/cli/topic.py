"""`smq topic ...` and `smq status`; and the registration of all commands that talk to a cluster as its clients do.

Owns what these commands print. Whatever they do goes through smq.clients. `cli` alone imports it.
"""

import asyncio
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

import click
from rich.table import Table

from smq.clients import Admin
from smq.clients.admin import REPLICATION_DEFAULT
from smq.clients.types import ClusterDescription, NodeDescription, NodeStatus, PartitionDescription, TopicDescription
from smq.coordinator.cli.common import (
    CALL_TIMEOUT_MS,
    CONNECT_TIMEOUT_MS,
    counted,
    json_option,
    parse_settings,
    print_table,
    run,
)
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.consume import consume
from smq.coordinator.cli.export import topic_export
from smq.coordinator.cli.group import group as group_commands
from smq.coordinator.cli.node import node as node_group
from smq.coordinator.cli.node import offsets
from smq.coordinator.cli.produce import produce
from smq.coordinator.user_errors import EXIT_FAILED
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ring_range

_STATUS_TIMEOUT_MS: Final = 2_000.0  # a node that hangs is shown as such, soon
_CERTIFICATE_DAYS_FEW: Final = 14


def register(group: click.Group) -> None:
    """Adds the data commands to the `smq` command."""
    for command in (topic, group_commands, produce, consume, node_group, offsets, status):
        group.add_command(command)


def _admin(bootstrap: str, timeout_ms: float = CALL_TIMEOUT_MS) -> Admin:
    return Admin(bootstrap, timeout_ms=timeout_ms, connect_timeout_ms=CONNECT_TIMEOUT_MS)


# ------------------------------------------------------------------------------------------------------ topics
@click.group()
def topic() -> None:
    """Creates, lists, describes, changes, exports and deletes topics."""


@topic.command("create")
@click.argument("name")
@click.option("--partitions", type=int, default=1, show_default=True, help="How many partitions.")
@click.option(
    "--replication-factor",
    type=click.IntRange(min=1),
    help="Copies of each partition; 3 (or all nodes) without.",
)
@click.option("--config", "settings", metavar="KEY=VALUE", multiple=True, help="A topic setting; may be repeated.")
@click.option("--storage", type=click.Choice(["log", "external"]), help="external: smq numbers the records only.")
@click.option("--start-offset", type=int, default=0, help="First offset of every partition.")
@click.option("--if-not-exists", is_flag=True, help="Succeed where the topic is there already.")
@bootstrap_option
def topic_create(
    name: str,
    partitions: int,
    replication_factor: int | None,
    settings: tuple[str, ...],
    storage: str | None,
    start_offset: int,
    if_not_exists: bool,
    bootstrap: str,
) -> None:
    """Creates the topic NAME."""
    config = parse_settings(settings) | ({"storage": storage} if storage is not None else {})

    async def work() -> str:
        async with _admin(bootstrap) as admin:
            try:
                await admin.create_topic(
                    name,
                    partitions,
                    replication_factor=replication_factor or REPLICATION_DEFAULT,
                    config=config,
                    start_offset=start_offset,
                )
            except SmqError as e:
                if e.code is ErrorCode.TOPIC_EXISTS and if_not_exists:
                    return f"topic {name} is there already"
                raise
            return f"created topic {name} with {counted(partitions, 'partition')}"

    click.echo(run(work(), bootstrap))


@topic.command("list")
@json_option
@bootstrap_option
def topic_list(as_json: bool, bootstrap: str) -> None:
    """Lists all topics."""

    async def work() -> list[TopicDescription]:
        async with _admin(bootstrap) as admin:
            return await admin.list_topics()

    topics = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps([_topic_json(t) for t in topics], indent=2))
        return
    table = Table("topic", "partitions", "replicas", "records", "settings")
    for t in topics:
        records = sum(p.hwm - p.log_start for p in t.partitions)
        table.add_row(t.name, str(len(t.partitions)), str(t.replication_factor), f"{records:,}", _settings(t))
    print_table(table) if topics else click.echo("there are no topics: create one with `smq topic create NAME`")


@topic.command("describe")
@click.argument("name")
@json_option
@bootstrap_option
def topic_describe(name: str, as_json: bool, bootstrap: str) -> None:
    """Shows the partitions of the topic NAME: leaders, replicas, offsets, ring slots."""

    async def work() -> TopicDescription:
        async with _admin(bootstrap) as admin:
            return await admin.describe_topic(name)

    t = run(work(), bootstrap)
    if as_json:
        click.echo(json.dumps(_topic_json(t), indent=2))
        return
    partitions, replicas = counted(len(t.partitions), "partition"), counted(t.replication_factor, "replica")
    click.echo(f"{t.name}: {partitions}, {replicas}, settings {_settings(t)}")
    table = Table("partition", "leader", "epoch", "replicas", "log start", "high water mark", "ring slots")
    for p in t.partitions:
        start, stop = ring_range_of(p)
        leader = str(p.leader) if p.leader_available else f"{p.leader} (not available)" if p.replicas else "-"
        replicas = ", ".join(map(str, p.replicas))
        table.add_row(
            str(p.partition), leader, str(p.epoch), replicas, str(p.log_start), str(p.hwm), f"{start}-{stop - 1}"
        )
    print_table(table)


@topic.command("delete")
@click.argument("name")
@bootstrap_option
def topic_delete(name: str, bootstrap: str) -> None:
    """Deletes the topic NAME with all its records and the groups' offsets in it."""

    async def work() -> None:
        async with _admin(bootstrap) as admin:
            await admin.delete_topic(name)

    run(work(), bootstrap)
    click.echo(f"deleted topic {name}")


@topic.command("alter")
@click.argument("name")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="A setting to change; may be repeated.")
@click.option("--unset", metavar="KEY", multiple=True, help="A setting to put back to its default; may be repeated.")
@click.option("--partitions", type=int, help="The new number of partitions; never fewer than there are.")
@bootstrap_option
def topic_alter(
    name: str, settings: tuple[str, ...], unset: tuple[str, ...], partitions: int | None, bootstrap: str
) -> None:
    """Changes settings of the topic NAME, or adds partitions."""
    config = parse_settings(settings)
    if not config and not unset and partitions is None:
        raise click.UsageError("say what to change: --set, --unset or --partitions")

    async def work() -> None:
        async with _admin(bootstrap) as admin:
            if config or unset:
                await admin.alter_topic(name, set=config, unset=unset)
            if partitions is not None:
                await admin.add_partitions(name, partitions)

    run(work(), bootstrap)
    click.echo(f"changed topic {name}")


@topic.command("delete-records")
@click.argument("name")
@click.option("--partition", type=int, required=True, help="The partition.")
@click.option("--before", type=int, required=True, help="Records below this offset go; -1: all committed ones.")
@bootstrap_option
def topic_delete_records(name: str, partition: int, before: int, bootstrap: str) -> None:
    """Deletes the oldest records of one partition of the topic NAME."""

    async def work() -> int:
        async with _admin(bootstrap) as admin:
            return await admin.delete_records(name, partition, before)

    click.echo(f"{name}/{partition} begins at offset {run(work(), bootstrap)} now")


topic.add_command(topic_export)


def ring_range_of(partition: PartitionDescription) -> tuple[int, int]:
    from smq.raft_state.ids import PartitionIndex

    return ring_range(PartitionIndex(partition.partition))


# ------------------------------------------------------------------------------------------------------ status
@click.command()
@json_option
@bootstrap_option
def status(as_json: bool, bootstrap: str) -> None:
    """Shows the nodes, who leads, and which partitions have no leader. Exit code 1 where something is wrong."""

    async def work() -> tuple[ClusterDescription, list[NodeStatus | SmqError]]:
        async with _admin(bootstrap, _STATUS_TIMEOUT_MS) as admin:
            cluster = await admin.describe_cluster(is_linearizable=False)  # it must work without a quorum
            return cluster, await asyncio.gather(*(_node_status(admin, n) for n in cluster.nodes))

    cluster, nodes = run(work(), bootstrap)
    # Without replicas (storage=external) a partition needs no leader.
    led = [(t, p) for t in cluster.topics for p in t.partitions if p.replicas]
    headless = [f"{t.name}/{p.partition}" for t, p in led if not p.leader_available]
    is_well = not headless and all(isinstance(n, NodeStatus) and n.is_ready for n in nodes)
    if as_json:
        _status_json(cluster, nodes, headless, is_well)
    else:
        _status_table(cluster, nodes)
        topics = counted(len(cluster.topics), "topic")
        partitions = counted(sum(len(t.partitions) for t in cluster.topics), "partition")
        click.echo(f"{topics}, {partitions}, {len(headless)} without a leader")
        _certificates(nodes)
        if not any(isinstance(n, NodeStatus) and n.raft_leader is not None for n in nodes):
            click.echo("  no Raft leader: nothing is written before a majority of the nodes runs and is connected")
        for name in headless[:10]:
            click.echo(f"  no leader: {name} (no replica that holds all committed records is up)")
    if not is_well:
        raise SystemExit(EXIT_FAILED)


async def _node_status(admin: Admin, node: NodeDescription) -> NodeStatus | SmqError:
    try:
        return await admin.node_status(node.grpc_address)
    except SmqError as e:
        return e


def _status_table(cluster: ClusterDescription, nodes: list[NodeStatus | SmqError]) -> None:
    click.echo(f"cluster {cluster.cluster_id}")
    table = Table("node", "state", "gRPC", "HTTP", "Raft", "term", "applied", "leads", "lag")
    for described, found in zip(cluster.nodes, nodes, strict=True):
        cells = ["-"] * 5
        if isinstance(found, SmqError):
            state = "does not answer"
        else:
            state = "ready" if found.is_ready else "not ready: starting, or without a quorum"
            role = "leader" if found.raft_leader == found.node else f"follows {found.raft_leader or 'nobody'}"
            leads = sum(r.is_leader for r in found.replicas)
            lag = sum(max(r.hwm - r.verified_end, 0) for r in found.replicas)
            cells = [role, str(found.raft_term), str(found.applied_index), str(leads), str(lag)]
        if described.fenced:
            state += ", fenced"
        if described.drained:
            state += ", drained"
        table.add_row(str(described.node), state, described.grpc_address, described.http_address, *cells)
    print_table(table)
    for node in nodes:
        if isinstance(node, NodeStatus):
            for warning in node.warnings:
                click.echo(f"node {node.node}: {warning}")


def _certificates(nodes: list[NodeStatus | SmqError]) -> None:
    """When those of the nodes end, the first to end first; nothing without TLS."""
    ends = sorted(
        (n.certificate_ends_ms, n.node)
        for n in nodes
        if isinstance(n, NodeStatus) and n.certificate_ends_ms is not None
    )
    for end_ms, node in ends:
        end = datetime.fromtimestamp(end_ms / 1000, UTC)
        left = (end - datetime.now(UTC)).days
        hint = "; renew it now" if left < _CERTIFICATE_DAYS_FEW else ""
        click.echo(f"TLS certificate of node {node} ends {end:%Y-%m-%d %H:%M} UTC, in {counted(left, 'day')}{hint}")


def _status_json(
    cluster: ClusterDescription, nodes: list[NodeStatus | SmqError], headless: list[str], is_well: bool
) -> None:
    told = [
        {**asdict(described), "status": None if isinstance(found, SmqError) else asdict(found)}
        for described, found in zip(cluster.nodes, nodes, strict=True)
    ]
    whole = {"cluster_id": cluster.cluster_id, "is_well": is_well, "nodes": told, "without_leader": headless}
    click.echo(json.dumps(whole, indent=2))


# ------------------------------------------------------------------------------------------------------ output
def _topic_json(t: TopicDescription) -> dict[str, object]:
    return {**asdict(t), "topic_id": t.topic_id.hex()}


def _settings(t: TopicDescription) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(t.config.items())) or "as by default"
