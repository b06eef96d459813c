"""`smq top`: the cluster at a glance, again and again: nodes, the busiest topics, the groups that are furthest behind.

Owns what is shown and how rates are made of two looks. It reads only, works without a quorum as far as it can, and asks
for the lag of a bounded number of groups per look, in turns. `cli.root` loads it when it is used.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from smq.clients import Admin
from smq.clients.types import (
    ClusterDescription,
    GroupDescription,
    NodeDescription,
    NodeStatus,
    ReplicaStatus,
    TransactionSummary,
)
from smq.coordinator.cli.common import answered, counted, open_admin, run
from smq.coordinator.cli.connect import bootstrap_option
from smq.coordinator.cli.groups.figures import TOTAL_COLUMNS, total_cells
from smq.coordinator.cli.tables import Table
from smq.coordinator.operators.formats import age_text, size_text
from smq.coordinator.operators.time_line import Seen, merged
from smq.raft_state.errors import SmqError

_ANSWER_MS: Final = 2_000.0  # a node that hangs is soon shown as such
GROUPS_MAX: Final = 50  # whose lag is asked for per look: a few milliseconds each
WATCHED_MAX: Final = 25  # of these, the ones that were furthest behind; the others take turns
ASKED_AT_ONCE: Final = 10
EVENTS_SHOWN: Final = 5
_NO_CONTROLS: Final = dict.fromkeys((*range(32), *range(0x7F, 0xA0)))  # names come from strangers


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The cluster at one moment. A node without an answer is None; `groups` is None without a quorum."""

    at_s: float
    cluster: ClusterDescription
    nodes: dict[int, NodeStatus | None]
    groups: list[GroupDescription] | None
    groups_left: int  # that have not been asked for yet
    transactions: list[TransactionSummary] | None = None  # that are open, the oldest first; None without a quorum

    def led(self) -> dict[tuple[str, int], ReplicaStatus]:
        """The leaders' own copies, which know the most."""
        found = (r for status in self.nodes.values() if status is not None for r in status.replicas if r.is_leader)
        return {(r.topic, r.partition): r for r in found}


@click.command()
@click.option("--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this number of refreshes. Default: until Ctrl-C.")
@click.option("--rows", type=click.IntRange(min=1), default=10, show_default=True, help="Topics and groups shown.")
@bootstrap_option
def top(interval: float, count: int | None, rows: int, bootstrap: str) -> None:
    """Shows nodes, busy topics, the groups that are furthest behind and the newest events, again and again.

    Example: smq top --interval 5 --rows 20
    """
    console = Console()
    live = Live(console=console, auto_refresh=False, screen=count is None) if console.is_terminal else None

    async def work() -> None:
        before: Look | None = None
        looks, groups = 0, Groups()
        async with open_admin(bootstrap, _ANSWER_MS) as admin:
            while True:
                now = await look(admin, groups)
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


async def look(admin: Admin, groups: "Groups") -> Look:
    cluster = await admin.describe_cluster(is_linearizable=False)
    statuses = await asyncio.gather(*(_status(admin, node) for node in cluster.nodes))
    (found, left), transactions = await asyncio.gather(groups.look(admin), _open_transactions(admin))
    nodes = {node.node: status for node, status in zip(cluster.nodes, statuses, strict=True)}
    return Look(
        at_s=time.monotonic(),
        cluster=cluster,
        nodes=nodes,
        groups=found,
        groups_left=left,
        transactions=transactions,
    )


async def _status(admin: Admin, node: NodeDescription) -> NodeStatus | None:
    try:
        return await admin.node_status(node.grpc_address)
    except SmqError:
        return None


async def _open_transactions(admin: Admin) -> list[TransactionSummary] | None:
    try:
        found = await admin.list_transactions()
    except SmqError:
        return None
    return sorted((t for t in found if t.open_ms is not None), key=lambda t: -(t.open_ms or 0))


class Groups:
    """The lag of all groups, of which each look asks for some: those that were furthest behind, and the next ones in
    order of name. So a few looks cover all of them, and what is far behind is always up to date."""

    def __init__(self) -> None:
        self._known: dict[str, GroupDescription] = {}
        self._last = ""  # up to which the turn has come

    async def look(self, admin: Admin) -> tuple[list[GroupDescription] | None, int]:
        """What is known now, and how many groups have not had their turn. None without a quorum."""
        try:
            names = sorted(group.name for group in await admin.list_groups())
        except SmqError:
            return None, 0
        self._known = {name: self._known[name] for name in names if name in self._known}
        due = self._due(names)
        places = asyncio.Semaphore(ASKED_AT_ONCE)
        found = await asyncio.gather(*(_described(admin, name, places) for name in due))
        for name, group in zip(due, found, strict=True):
            if group is not None:
                self._known[name] = group
            else:
                self._known.pop(name, None)
        gone = sum(group is None for group in found)
        return list(self._known.values()), max(0, len(names) - gone - len(self._known))

    def _due(self, names: list[str]) -> list[str]:
        if len(names) <= GROUPS_MAX:
            return names
        worst = sorted(self._known, key=lambda name: (-_behind(self._known[name]), name))[:WATCHED_MAX]
        watched = set(worst)
        rest = [name for name in names if name not in watched]
        split = bisect_right(rest, self._last)
        turn = (rest[split:] + rest[:split])[: GROUPS_MAX - len(worst)]
        self._last = turn[-1]
        return worst + turn


async def _described(admin: Admin, name: str, places: asyncio.Semaphore) -> GroupDescription | None:
    """None if the group is gone: that may happen between two requests."""
    async with places:
        try:
            return await admin.describe_group(name, with_sizes=True)
        except SmqError:
            return None


def _behind(group: GroupDescription) -> int:
    return group.lag_total.offsets.at_least


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
    parts += [_text(_topic_table(now, speed, rows)), _group_part(now, rows), *_event_part(now)]
    return Group(*parts)


def _headline(now: Look, speed: float, *, is_known: bool) -> str:
    ready = sum(status is not None and status.is_ready for status in now.nodes.values())
    leader = next((s.raft_leader for s in now.nodes.values() if s is not None and s.raft_leader), None)
    raft = f"Raft leader {leader}" if leader else "no Raft leader: nothing can be written"
    rate = f", {speed:,.0f} records/s" if is_known else ""
    nodes = f"{ready} of {counted(len(now.nodes), 'node')} ready"
    return f"cluster {now.cluster.cluster_id}: {nodes}, {raft}{rate}{_transactions_text(now)}"


def _transactions_text(now: Look) -> str:
    if not now.transactions:
        return "" if now.transactions is None else ", no open transactions"
    oldest = now.transactions[0]
    count = counted(len(now.transactions), "open transaction")
    return f", {count}, the oldest {oldest.transactional_id} for {age_text(oldest.open_ms)}"


def _node_table(now: Look, speed: Mapping[tuple[str, int], float]) -> Table:
    table = Table(
        "node", "state", "Raft", "term", "leads", "records/s", "replicas behind", "stored", "disk free", "warnings"
    )
    for node in now.cluster.nodes:
        status = now.nodes[node.node]
        if status is None:
            table.add_row(str(node.node), "does not answer", *["-"] * 8)
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
            _free_text(status),
            str(len(status.warnings) or "-"),
        )
    return table


def _free_text(status: NodeStatus) -> str:
    if not status.disk_total_bytes:
        return "-"
    share = status.disk_free_bytes / status.disk_total_bytes
    return f"{size_text(status.disk_free_bytes)} ({share:.0%})"


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
    groups = sorted(now.groups, key=lambda g: (-_behind(g), g.summary.name))
    for group in groups[:rows]:
        summary = group.summary
        table.add_row(summary.name, summary.state, str(summary.members), *total_cells(group.lag_total))
    left = len(groups) - len(groups[:rows]) + now.groups_left
    if left:
        table.add_row(f"and {left} more", *[""] * 5)
    return _text(table)


def _event_part(now: Look) -> list[RenderableType]:
    """The newest of all nodes."""
    statuses = [(node, status) for node, status in now.nodes.items() if status is not None]
    seen = [Seen(e.at_ms, node, e.kind, e.text) for node, status in statuses for e in status.events]
    table = Table("event at (UTC)", "seen by", "kind", "what")
    for event in reversed(merged(seen)[-EVENTS_SHOWN:]):
        at = datetime.fromtimestamp(event.at_ms / 1000, UTC)
        table.add_row(f"{at:%m-%d %H:%M:%S}", f"node {event.node}", event.kind, event.text.translate(_NO_CONTROLS))
    return [_text(table)] if seen else []


def _text(table: Table) -> Text:
    return Text("\n".join(("", *table.lines())))
