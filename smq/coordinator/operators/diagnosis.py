"""What is wrong with a cluster, what that puts at risk, and what an operator does next.

Owns the rules. They judge one look at the cluster: what one node knows of it, and the answer of every node or its
error. The rest is pure. `smq status` and `smq doctor` import it.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from smq.clients.admin import Admin
from smq.clients.types import ClusterDescription, NodeStatus, PartitionDescription
from smq.coordinator.operators.formats import size_text
from smq.raft_state.errors import SmqError

CERTIFICATE_DAYS_FEW: Final = 14
DISK_FREE_SHARE_LOW: Final = 0.1
CLOCK_DIFFERENCE_MS_MAX: Final = 1_000  # beside the time that the answer took
ELECTIONS_MANY: Final = 5  # in the last hour
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one node, asked and received at these Unix times by the asker's clock."""

    asked_ms: int
    received_ms: int
    status: NodeStatus | SmqError


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At the whole cluster. `answers` has a key for each node that is registered."""

    cluster: ClusterDescription
    answers: dict[int, Answer]

    @classmethod
    async def of(cls, admin: Admin) -> "Look":
        """Works without a quorum."""
        cluster = await admin.describe_cluster(is_linearizable=False)

        async def ask(address: str) -> Answer:
            asked = time.time_ns() // 1_000_000
            status: NodeStatus | SmqError
            try:
                status = await admin.node_status(address)
            except SmqError as e:
                status = e
            return Answer(asked_ms=asked, received_ms=time.time_ns() // 1_000_000, status=status)

        answers = await asyncio.gather(*(ask(n.grpc_address) for n in cluster.nodes))
        return cls(cluster=cluster, answers={n.node: a for n, a in zip(cluster.nodes, answers, strict=True)})

    @property
    def statuses(self) -> list[NodeStatus]:
        return [a.status for a in self.answers.values() if isinstance(a.status, NodeStatus)]

    @property
    def has_leader(self) -> bool:
        """Whether a node follows a Raft leader, or is it. Without one, no node knows what leads what."""
        return any(s.raft_leader is not None for s in self.statuses)

    @property
    def away(self) -> set[int]:
        """The nodes that no partition can count on now."""
        fenced = {n.node for n in self.cluster.nodes if n.fenced}
        return fenced | {n for n, a in self.answers.items() if not isinstance(a.status, NodeStatus)}

    def partitions(self) -> Iterator[tuple[str, PartitionDescription]]:
        """Those that have replicas: with storage=external there are none."""
        for topic in self.cluster.topics:
            for partition in topic.partitions:
                if partition.replicas:
                    yield f"{topic.name}/{partition.partition}", partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`text` is a sentence of what is wrong, `next` of what to do. `is_bad`: False for what is good to know."""

    check: str
    text: str
    next: str = ""
    is_bad: bool = True


def findings(look: Look) -> list[Finding]:
    """The worst first."""
    return [
        *quorum(look),
        *_nodes(look),
        *replicas(look),
        *_warnings(look),
        *_disks(look),
        *_certificates(look),
        *_clocks(look),
        *_versions(look),
        *_elections(look),
    ]


def quorum(look: Look) -> Iterator[Finding]:
    if look.has_leader:
        return
    if not look.answers:
        text = "no node has joined yet: a majority of the nodes must run and reach each other first"
        yield Finding(
            check="quorum", text=text, next="start the others (`smq serve`); their logs say what they wait for"
        )
        return
    count, silent = len(look.answers), sorted(n for n, a in look.answers.items() if isinstance(a.status, SmqError))
    majority = count // 2 + 1
    text = (
        f"no Raft leader: {count - len(silent)} of {count} nodes answer, and {majority} must run and reach each other."
        " Nothing can be written, and it is not known which partitions have a leader; acknowledged records are kept"
    )
    if silent:
        yield Finding(
            check="quorum", text=text, next=f"start {_named(silent)} (`smq serve`); one log says why it stopped"
        )
    else:
        yield Finding(check="quorum", text=text, next="wait for the election, then check the network between the nodes")


def _nodes(look: Look) -> Iterator[Finding]:
    fenced = {n.node for n in look.cluster.nodes if n.fenced}
    for node, answer in sorted(look.answers.items()):
        if isinstance(answer.status, SmqError):
            advice = "read its log and start it again; docs/operations.md says how to replace a lost machine"
            yield Finding(check="nodes", text=f"node {node} does not answer: {answer.status.message}", next=advice)
        elif not answer.status.is_ready and look.has_leader:
            why = "it is fenced" if node in fenced else "it is still joining"
            yield Finding(check="nodes", text=f"node {node} runs and is not ready: {why}", next="wait, or read its log")


def replicas(look: Look) -> Iterator[Finding]:
    """What a missing node means for partitions. Nothing while it is not known who leads."""
    if not look.has_leader:
        return
    away = look.away
    short: list[str] = []
    last: list[str] = []
    stopped: list[str] = []
    leaderless: list[str] = []
    for name, partition in look.partitions():
        up, majority = len(set(partition.replicas) - away), len(partition.replicas) // 2 + 1
        if not partition.leader_available:
            leaderless.append(name)
        elif up < majority:
            stopped.append(name)
        elif up < len(partition.replicas):
            (last if up == majority else short).append(name)
    if leaderless:
        text = f"{_counted(leaderless)} without a leader: no replica that holds all committed records is up"
        yield Finding(check="partitions", text=text, next="start the nodes that are away; records are kept there")
    if stopped:
        text = f"{_counted(stopped)} with fewer replicas than a majority: writes wait there, reads go on"
        yield Finding(check="partitions", text=text, next="start the nodes that are away")
    if last:
        text = f"{_counted(last)} with no replica to spare: if one more node stops, writes stop there"
        yield Finding(check="partitions", text=text, next=f"start {_named(sorted(away))} again before other work")
    if short:
        yield Finding(check="partitions", text=f"{_counted(short)} with fewer replicas than asked for")


def _warnings(look: Look) -> Iterator[Finding]:
    for status in look.statuses:
        for warning in status.warnings:
            yield Finding(check="warnings", text=f"node {status.node}: {warning}")


def _disks(look: Look) -> Iterator[Finding]:
    for status in look.statuses:
        free, total = status.disk_free_bytes, status.disk_total_bytes
        if total and free < total * DISK_FREE_SHARE_LOW:
            text = f"node {status.node} has {size_text(free)} of {size_text(total)} free on its disk"
            advice = "delete or trim topics, set retention.bytes or retention.ms, or give it a larger disk"
            yield Finding(check="disks", text=text, next=advice)


def _certificates(look: Look) -> Iterator[Finding]:
    for answer in look.answers.values():
        status = answer.status
        if not isinstance(status, NodeStatus) or status.certificate_ends_ms is None:
            continue
        left = (status.certificate_ends_ms - answer.received_ms) // _DAY_MS
        if left < CERTIFICATE_DAYS_FEW:
            end = datetime.fromtimestamp(status.certificate_ends_ms / 1000, UTC)
            text = f"the TLS certificate of node {status.node} ends on {end:%Y-%m-%d}, in {left} days"
            yield Finding(check="certificates", text=text, next="renew it now (docs/operations.md#tls)")


def _clocks(look: Look) -> Iterator[Finding]:
    for node, answer in sorted(look.answers.items()):
        if not isinstance(answer.status, NodeStatus) or not answer.status.now_ms:
            continue
        now = answer.status.now_ms
        off = now - answer.received_ms if now > answer.received_ms else min(0, now - answer.asked_ms)
        if abs(off) > CLOCK_DIFFERENCE_MS_MAX:
            text = (
                f"the clock of node {node} is {abs(off) / 1000:,.1f} s {'ahead of' if off > 0 else 'behind'} this one"
            )
            advice = "set the clocks by NTP: append times, and retention by time, follow them"
            yield Finding(check="clocks", text=text, next=advice)


def _versions(look: Look) -> Iterator[Finding]:
    by_version: dict[str, list[int]] = {}
    for status in look.statuses:
        by_version.setdefault(status.version or "unknown", []).append(status.node)
    if len(by_version) > 1:
        parts = "; ".join(f"smq {version} on {_named(nodes)}" for version, nodes in sorted(by_version.items()))
        yield Finding(check="versions", text=parts, next="finish the upgrade", is_bad=False)


def _elections(look: Look) -> Iterator[Finding]:
    """Of the last hour, as the node that has seen most of them."""
    most: list[str] = []
    for status in look.statuses:
        recent = [e for e in status.events if e.kind == "raft" and e.at_ms > status.now_ms - _HOUR_MS]
        most = max(most, [e.text for e in recent], key=len)
    if most:
        text = f"Raft's leader changed {len(most)} times in the last hour; the last change: {most[-1]}"
        advice = "look for overload, full disks and lost packets" if len(most) > ELECTIONS_MANY else ""
        yield Finding(check="elections", text=text, next=advice, is_bad=len(most) > ELECTIONS_MANY)


def _named(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _counted(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{len(names):,} partition{'s' if len(names) != 1 else ''} ({', '.join(names[:3])}{more})"
