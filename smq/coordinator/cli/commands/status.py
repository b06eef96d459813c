"""`smq status`: the nodes, the leaders, the partitions without one, and when certificates expire.

Owns what the command prints. Everything it does goes through smq.clients. `cli.root` loads it when it is used.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

import click

from smq.clients.types import ClusterDescription, NodeStatus
from smq.coordinator.cli.common import counted, json_option, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.tables import Table, print_table
from smq.coordinator.operators.diagnosis import CERTIFICATE_DAYS_FEW, Look, quorum, replicas
from smq.coordinator.user_errors import EXIT_FAILED
from smq.raft_state.errors import SmqError

_STATUS_TIMEOUT_MS: Final = 2_000.0  # a node that hangs is soon shown as such


@click.command()
@json_option
@bootstrap_option
def status(as_json: bool, bootstrap: str) -> None:
    """Shows the nodes, the Raft leader, and the partitions without a leader. Exit code 1 if something is wrong.

    Example: smq status --json | jq .is_well
    """

    async def work() -> Look:
        async with open_admin(bootstrap, _STATUS_TIMEOUT_MS) as admin:
            return await Look.of(admin)

    look = run(work(), bootstrap)
    cluster, nodes = look.cluster, [answer.status for answer in look.answers.values()]
    # Which partition has a leader is known only while there is one for Raft.
    leaderless = [name for name, p in look.partitions() if not p.leader_available] if look.has_leader else None
    is_healthy = leaderless == [] and all(isinstance(n, NodeStatus) and n.is_ready and not n.warnings for n in nodes)
    if as_json:
        _status_json(cluster, nodes, leaderless, is_healthy)
    else:
        _status_table(cluster, nodes)
        topics = counted(len(cluster.topics), "topic")
        partitions = counted(sum(len(t.partitions) for t in cluster.topics), "partition")
        led = "leaders not known" if leaderless is None else f"{len(leaderless)} without a leader"
        click.echo(f"{topics}, {partitions}, {led}")
        _certificates(nodes)
        for found in (*quorum(look), *replicas(look)):
            click.echo(f"  {found.text}" + (f"\n  next: {found.next}" if found.next else ""))
    if not is_healthy:
        raise SystemExit(EXIT_FAILED)


def _status_table(cluster: ClusterDescription, nodes: list[NodeStatus | SmqError]) -> None:
    click.echo(f"cluster {cluster.cluster_id}, feature level {cluster.feature_level}")
    table = Table("node", "state", "gRPC", "HTTP", "Kafka", "Raft", "term", "applied", "leads", "lag", "level")
    for described, found in zip(cluster.nodes, nodes, strict=True):
        cells = ["-"] * 5
        if isinstance(found, SmqError):
            state = "does not answer"
        else:
            state = "ready" if found.is_ready else "not ready: starting, without a quorum, or see below"
            role = "leader" if found.raft_leader == found.node else f"follows {found.raft_leader or 'no leader'}"
            leads = sum(r.is_leader for r in found.replicas)
            lag = sum(max(r.hwm - r.verified_end, 0) for r in found.replicas)
            cells = [role, str(found.raft_term), str(found.applied_index), str(leads), str(lag)]
        if described.fenced:
            state += ", fenced"
        if described.drained:
            state += ", drained"
        addresses = described.grpc_address, described.http_address, described.kafka_address or "off"
        table.add_row(str(described.node), state, *addresses, *cells, str(described.feature_level))
    print_table(table)
    for node in nodes:
        if isinstance(node, NodeStatus):
            for warning in node.warnings:
                click.echo(f"node {node.node}: {warning}")


def _certificates(nodes: list[NodeStatus | SmqError]) -> None:
    """When the nodes' certificates expire, the first to expire first; nothing without TLS."""
    ends = sorted(
        (n.certificate_ends_ms, n.node)
        for n in nodes
        if isinstance(n, NodeStatus) and n.certificate_ends_ms is not None
    )
    for end_ms, node in ends:
        end = datetime.fromtimestamp(end_ms / 1000, UTC)
        left = (end - datetime.now(UTC)).days
        hint = "; renew it now" if left < CERTIFICATE_DAYS_FEW else ""
        click.echo(f"TLS certificate of node {node} expires {end:%Y-%m-%d %H:%M} UTC, in {counted(left, 'day')}{hint}")


def _status_json(
    cluster: ClusterDescription, nodes: list[NodeStatus | SmqError], leaderless: list[str] | None, is_healthy: bool
) -> None:
    described_nodes = [
        {**asdict(described), "status": None if isinstance(found, SmqError) else asdict(found)}
        for described, found in zip(cluster.nodes, nodes, strict=True)
    ]
    document = {
        "cluster_id": cluster.cluster_id,
        "feature_level": cluster.feature_level,
        "is_well": is_healthy,
        "nodes": described_nodes,
        "without_leader": leaderless,
    }
    click.echo(json.dumps(document, indent=2))
