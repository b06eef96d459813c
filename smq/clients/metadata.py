"""Cluster metadata as a client knows it: leaders from views and hints, and nodes that did not answer.

Owns the client's picture of the cluster, sans-IO: it takes views, hints and failures, and says which node to ask. It
must never connect or read a clock. Everything in `smq.clients` may import it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.clients.arguments import check_kind, invalid, shown
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.ids import Epoch, NodeId

FAILED_NODE_LAST_MS: Final = 10_000.0  # a node that did not answer is asked last for this long, or until it answers

Servers: TypeAlias = str | Iterable[str]  # gRPC addresses: "host:port[,host:port...]", or several of these


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    leader: NodeId
    leader_available: bool
    epoch: Epoch
    replicas: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicView:
    topic_id: bytes
    partitions: tuple[PartitionView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The knowledge of one node, or of several merged by epoch. `addresses` are the nodes' gRPC addresses."""

    cluster_id: str
    addresses: dict[NodeId, str]
    topics: dict[str, TopicView]


def view_from_message(message: pb.DescribeClusterResponse) -> ClusterView:
    return ClusterView(
        cluster_id=message.cluster_id,
        addresses={NodeId(n.node): n.grpc_address for n in message.nodes},
        topics={t.name: _topic_view(t) for t in message.topics},
    )


def _topic_view(topic: pb.TopicInfo) -> TopicView:
    ordered = sorted(topic.partitions, key=lambda p: p.partition)
    partitions = tuple(
        PartitionView(
            leader=NodeId(p.leader),
            leader_available=p.leader_available,
            epoch=Epoch(p.epoch),
            replicas=tuple(NodeId(r) for r in p.replicas),
        )
        for p in ordered
    )
    return TopicView(topic_id=topic.topic_id, partitions=partitions)


def parse_bootstrap(bootstrap: Servers | None, servers: Servers | None = None) -> tuple[str, ...]:
    """`host:port[,host:port...]`, or several of them, under either name. INVALID_REQUEST for anything else."""
    if bootstrap is not None and servers is not None:
        raise invalid("bootstrap and servers mean the same: give one of them")
    bootstrap = bootstrap if servers is None else servers
    given: object = [bootstrap] if isinstance(bootstrap, str) else bootstrap
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise invalid(f"bootstrap must be host:port or a list of such, not {shown(bootstrap)}")
    items = list(given)
    for item in items:
        check_kind("bootstrap", item, str)
    addresses = tuple(dict.fromkeys(p.strip() for item in items for p in item.split(",") if p.strip()))
    for address in addresses:
        _check_address(address)
    if not addresses:
        raise invalid("bootstrap names no node: write host:port[,host:port...]")
    return addresses


def _check_address(address: str) -> None:
    scheme, is_url, rest = address.partition("://")
    if is_url:
        bare = rest.partition("/")[0]
        example = bare if ":" in bare else f"{bare or 'host'}:7401"
        raise invalid(f"bootstrap {address!r} is a URL: write {example} (the gRPC port), without {scheme}://")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise invalid(f"bootstrap {address!r} is not a node's address: write host:port")


class Metadata:
    """The picture. The view of a lagging node never replaces a newer leadership (epochs only grow)."""

    def __init__(self, bootstrap: Sequence[str]) -> None:
        self._bootstrap = tuple(bootstrap)
        self._addresses: dict[NodeId, str] = {}
        self._topics: dict[str, TopicView] = {}
        self._hints: dict[tuple[str, int], NodeId] = {}  # newer than the view; dropped by the next view
        self._suspects: dict[tuple[str, int], Epoch] = {}  # this leadership has been refuted: do not use it again
        self._failed_at_ms: dict[str, float] = {}
        self.cluster_id = ""
        self.leader_changes = 0  # how often a partition's known leader became another node

    # -- feeding

    def update(self, view: ClusterView) -> None:
        """Merges a node's view. Topics that it lacks are kept; `forget_topic` removes one."""
        self.cluster_id = view.cluster_id
        self._addresses.update({node: address for node, address in view.addresses.items() if address})
        for name, seen in view.topics.items():
            known = self._topics.get(name)
            self._topics[name] = seen if known is None else self._merged(name, known, seen)

    def _merged(self, name: str, known: TopicView, seen: TopicView) -> TopicView:
        if known.topic_id != seen.topic_id:  # deleted and created again
            self._drop_hints_and_suspects(name)
            return seen
        merged = list(seen.partitions)
        for index, old in enumerate(known.partitions):
            if index >= len(merged):
                merged.append(old)
            elif old.epoch > merged[index].epoch:
                merged[index] = old
            else:
                self._count_change(name, index, old, merged[index])
        return TopicView(topic_id=seen.topic_id, partitions=tuple(merged))

    def _count_change(self, name: str, index: int, old: PartitionView, new: PartitionView) -> None:
        key = (name, index)
        if new.epoch > old.epoch:
            before = self._hints.pop(key, old.leader)
            self._suspects.pop(key, None)
            self.leader_changes += before != new.leader

    def hint(self, topic: str, partition: int, leader: NodeId, address: str | None) -> bool:
        """A node that is not the leader has named the leader. False if the hint is useless."""
        if address:
            self._addresses[leader] = address
        known = self.partition(topic, partition)
        if known is None or leader not in self._addresses:
            return False
        key = (topic, partition)
        before = self._hints.get(key, known.leader)
        self._suspects.pop(key, None)
        if leader != before:
            self._hints[key] = leader
            self.leader_changes += 1
        return True

    def suspect(self, topic: str, partition: int) -> None:
        """The known leader is no leader or does not answer: wait for a view that names it again, or another node."""
        known = self.partition(topic, partition)
        if known is not None:
            self._hints.pop((topic, partition), None)
            self._suspects[(topic, partition)] = known.epoch

    def suspect_node(self, address: str) -> None:
        """A node does not answer: every partition that it leads waits for the next view."""
        for topic, known in self._topics.items():
            for partition in range(len(known.partitions)):
                if self.leader_address(topic, partition) == address:
                    self.suspect(topic, partition)

    def trust(self, topics: Iterable[str]) -> None:
        """A fresh view has arrived: the leaders that it names for these topics may be tried again."""
        names = frozenset(topics)
        for key in [k for k in self._suspects if k[0] in names]:
            del self._suspects[key]

    def forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._drop_hints_and_suspects(topic)

    def _drop_hints_and_suspects(self, topic: str) -> None:
        for table in (self._hints, self._suspects):
            for key in [k for k in table if k[0] == topic]:
                del table[key]

    def node_failed(self, address: str, now_ms: float) -> None:
        self._failed_at_ms[address] = now_ms

    def node_answered(self, address: str) -> None:
        self._failed_at_ms.pop(address, None)

    # -- asking

    def topics(self) -> list[str]:
        return sorted(self._topics)

    def partition_count(self, topic: str) -> int | None:
        """None if the topic is not known (yet)."""
        known = self._topics.get(topic)
        return None if known is None else len(known.partitions)

    def partition(self, topic: str, partition: int) -> PartitionView | None:
        known = self._topics.get(topic)
        if known is None or not 0 <= partition < len(known.partitions):
            return None
        return known.partitions[partition]

    def leader_address(self, topic: str, partition: int) -> str | None:
        """Where to send; None while no leader is known."""
        known = self.partition(topic, partition)
        if known is None:
            return None
        if not known.replicas:  # storage=external: any node can refuse the records
            return next(iter(self._addresses.values()), None)
        key = (topic, partition)
        hinted = self._hints.get(key)
        if hinted is not None:
            return self._addresses.get(hinted)
        if not known.leader_available or self._suspects.get(key) == known.epoch:
            return None
        return self._addresses.get(known.leader)

    def replica_addresses(self, topic: str, partition: int, now_ms: float) -> list[str]:
        """Where to read: the leader first, then the other replicas; nodes that failed recently come last."""
        known = self.partition(topic, partition)
        if known is None:
            return []
        found = [self.leader_address(topic, partition)]
        found += [self._addresses.get(node) for node in (known.leader, *known.replicas)]
        return self._failed_last(dict.fromkeys(a for a in found if a), now_ms)

    def address(self, node: int) -> str | None:
        return self._addresses.get(NodeId(node))

    def all_addresses(self, now_ms: float) -> list[str]:
        """Every known node, the bootstrap list first; nodes that failed recently come last."""
        return self._failed_last(dict.fromkeys((*self._bootstrap, *self._addresses.values())), now_ms)

    def _failed_last(self, addresses: Iterable[str], now_ms: float) -> list[str]:
        if not self._failed_at_ms:
            return list(addresses)

        def failed_recently(address: str) -> bool:
            return now_ms - self._failed_at_ms.get(address, -math.inf) < FAILED_NODE_LAST_MS

        return sorted(addresses, key=failed_recently)
