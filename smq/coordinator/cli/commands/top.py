"""`smq top`: the cluster at a glance, again and again: nodes, the busiest topics, the groups that are furthest behind.

Owns what is shown and how rates are made of two looks. It reads only, works without a quorum as far as it can, and asks
for the lag of a bounded number of groups per look. `cli.root` loads it when it is used.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from smq.clients import Admin
from smq.clients.types import ClusterDescription, GroupDescription, NodeDescription, NodeStatus, ReplicaStatus
from smq.coordinator.amounts import size_text
from smq.coordinator.cli.common import answered, counted, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.figures import TOTAL_COLUMNS, total_cells
from smq.coordinator.cli.tables import Table
from smq.raft_state.errors import SmqError

_ANSWER_MS: Final = 2_000.0  # a node that hangs is soon shown as such
GROUPS_MAX: Final = 50  # whose lag is asked for per look: a few milliseconds each


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The cluster at one moment. A node without an answer is None; `groups` is None without a quorum."""

    at_s: float
    cluster: ClusterDescription
    nodes: dict[int, NodeStatus | None]
    groups: list[GroupDescription] | None
    groups_left: int  # that were not asked for

    def led(self) -> dict[tuple[str, int], ReplicaStatus]:
        """The leaders' own copies, which know the most."""
        found = (r for status in self.nodes.values() if status is not None for r in status.replicas if r.is_leader)
        return {(r.topic, r.partition): r for r in found}


@click.command()
@click.option("--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Look so often. Default: until Ctrl-C.")
@click.option("--rows", type=click.IntRange(min=1), default=10, show_default=True, help="Topics and groups shown.")
@bootstrap_option
def top(interval: float, count: int | None, rows: int, bootstrap: str) -> None:
    """Shows nodes, the busiest topics and the groups that are furthest behind, again and again.

    Example: smq top --interval 5 --rows 20
    """
    console = Console()
    live = Live(console=console, auto_refresh=False, screen=count is None) if console.is_terminal else None

    async def work() -> None:
        before: Look | None = None
        looks = 0
        async with open_admin(bootstrap, _ANSWER_MS) as admin:
            while True:
                now = await look(admin)
                answered()
                if live is not None:
                    live.update(render(now, before, rows), refresh=True)
                else:
                    Console(width=160).print(render(now, before, rows))
                before, looks = now, looks + 1
                if looks == count:
                    return
                await asyncio.sleep(interval)

    try:
        if live is not None:
            with live:
                run(work(), bootstrap)
        else:
            run(work(), bootstrap)
    except KeyboardInterrupt:
        return


async def look(admin: Admin) -> Look:
    cluster = await admin.describe_cluster(is_linearizable=False)
    statuses = await asyncio.gather(*(_status(admin, node) for node in cluster.nodes))
    groups, left = await _groups(admin)
    nodes = {node.node: status for node, status in zip(cluster.nodes, statuses, strict=True)}
    return Look(at_s=time.monotonic(), cluster=cluster, nodes=nodes, groups=groups, groups_left=left)


async def _status(admin: Admin, node: NodeDescription) -> NodeStatus | None:
    try:
        return await admin.node_status(node.grpc_address)
    except SmqError:
        return None


async def _groups(admin: Admin) -> tuple[list[GroupDescription] | None, int]:
    """The lag of the groups, which needs a quorum. A group may go between the two requests."""
    try:
        names = [group.name for group in await admin.list_groups()]
    except SmqError:
        return None, 0
    found = []
    for name in names[:GROUPS_MAX]:
        try:
            found.append(await admin.describe_group(name, with_sizes=True))
        except SmqError:
            continue
    return found, max(0, len(names) - GROUPS_MAX)


# ------------------------------------------------------------------------------------------------------- rates
def rates(now: Look, before: Look | None) -> dict[tuple[str, int], float]:
    """Committed records per second of each partition that had a leader in both looks. A high water mark that is lower
    than before belongs to a new topic of that name, which has no rate yet."""
    if before is None or now.at_s <= before.at_s:
        return {}
    old, seconds = before.led(), now.at_s - before.at_s
    return {
        place: (replica.hwm - old[place].hwm) / seconds
        for place, replica in now.led().items()
        if place in old and replica.hwm >= old[place].hwm
    }


def by_topic(values: Mapping[tuple[str, int], float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for (topic, _), value in values.items():
        totals[topic] = totals.get(topic, 0.0) + value
    return totals


# ------------------------------------------------------------------------------------------------------- tables
def render(now: Look, before: Look | None, rows: int) -> RenderableType:
    speed = rates(now, before)
    parts: list[RenderableType] = [
        Text(_headline(now, sum(speed.values()), is_known=before is not None)),
        _text(_node_table(now, speed)),
    ]
    parts += [_text(_topic_table(now, speed, rows)), _group_part(now, rows)]
    return Group(*parts)


def _headline(now: Look, speed: float, *, is_known: bool) -> str:
    ready = sum(status is not None and status.is_ready for status in now.nodes.values())
    leader = next((s.raft_leader for s in now.nodes.values() if s is not None and s.raft_leader), None)
    raft = f"Raft leader {leader}" if leader else "no Raft leader: nothing can be written"
    rate = f", {speed:,.0f} records/s" if is_known else ""
    return f"cluster {now.cluster.cluster_id}: {ready} of {counted(len(now.nodes), 'node')} ready, {raft}{rate}"


def _node_table(now: Look, speed: Mapping[tuple[str, int], float]) -> Table:
    table = Table("node", "state", "Raft", "term", "leads", "records/s", "replicas behind", "stored", "warnings")
    for node in now.cluster.nodes:
        status = now.nodes[node.node]
        if status is None:
            table.add_row(str(node.node), "does not answer", *["-"] * 7)
            continue
        led = [r for r in status.replicas if r.is_leader]
        state = "ready" if status.is_ready else "not ready"
        state += ", fenced" if node.fenced else ", drained" if node.drained else ""
        table.add_row(
            str(node.node),
            state,
            "leader" if status.raft_leader == node.node else "follows",
            str(status.raft_term),
            str(len(led)),
            f"{sum(speed.get((r.topic, r.partition), 0.0) for r in led):,.0f}",
            f"{sum(max(r.hwm - r.verified_end, 0) for r in status.replicas):,}",
            size_text(sum(r.size_bytes for r in status.replicas)),
            str(len(status.warnings) or "-"),
        )
    return table


def _topic_table(now: Look, speed: Mapping[tuple[str, int], float], rows: int) -> Table:
    table = Table("topic", "partitions", "without leader", "records/s", "records", "stored per copy")
    totals, led = by_topic(speed), now.led()
    records = by_topic({place: float(r.hwm - r.log_start) for place, r in led.items()})
    sizes = by_topic({place: float(r.size_bytes) for place, r in led.items()})
    topics = sorted(now.cluster.topics, key=lambda t: (-totals.get(t.name, 0.0), -sizes.get(t.name, 0.0), t.name))
    for topic in topics[:rows]:
        without = sum(bool(p.replicas) and not p.leader_available for p in topic.partitions)
        figures = [f"{totals.get(topic.name, 0.0):,.0f}", f"{records.get(topic.name, 0.0):,.0f}"]
        size = size_text(int(sizes.get(topic.name, 0.0)))
        table.add_row(topic.name, str(len(topic.partitions)), str(without or "-"), *figures, size)
    if len(topics) > rows:
        table.add_row(f"and {len(topics) - rows} more", *[""] * 5)
    return table


def _group_part(now: Look, rows: int) -> RenderableType:
    if now.groups is None:
        return Text("groups: not known without a quorum")
    table = Table("group", "state", "members", *TOTAL_COLUMNS)
    groups = sorted(now.groups, key=lambda g: (-g.lag_total.offsets.at_least, g.summary.name))
    for group in groups[:rows]:
        summary = group.summary
        table.add_row(summary.name, summary.state, str(summary.members), *total_cells(group.lag_total))
    left = len(groups) - len(groups[:rows]) + now.groups_left
    if left:
        table.add_row(f"and {left} more", *[""] * 5)
    return _text(table)


def _text(table: Table) -> Text:
    return Text("\n".join(("", *table.lines())))
