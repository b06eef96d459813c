"""/metrics: what Prometheus scrapes, read from the node at the moment of the scrape.

Owns names and labels. Nothing is counted on a hot path. `http` imports it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from smq.coordinator.groups.view import positions
from smq.coordinator.limits import METRICS_GROUPS_MAX, METRICS_PARTITIONS_MAX
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import NodeId, PartitionId
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import NodeApi, NodeStatus, ReplicaStatus

_LABELS = ("topic", "partition")

# name, help, reader of (replicated state of the partition, this node's copy of it)
_REPLICA_GAUGES: Final[tuple[tuple[str, str, Callable[[PartitionState, ReplicaStatus], int]], ...]] = (
    ("log_start_offset", "First offset that is there.", lambda p, r: p.log_start),
    ("high_water_mark", "First offset that readers cannot see yet.", lambda p, r: p.hwm),
    ("last_stable_offset", "First offset that read-committed readers cannot see yet.", lambda p, r: p.lso),
    ("next_offset", "Leader's log end as of the last advance.", lambda p, r: p.next_offset),
    ("leader_epoch", "Leadership of the partition.", lambda p, r: p.epoch),
    ("leader", "Node that leads the partition.", lambda p, r: p.leader),
    ("size_bytes", "Size of this node's copy.", lambda p, r: r.size_bytes),
    ("is_leader", "1 where this node leads the partition.", lambda p, r: int(r.is_leader)),
    ("durable_end_offset", "End of this node's copy on disk.", lambda p, r: r.durable_end),
    (
        "verified_end_offset",
        "End of this node's copy that belongs to the partition's history.",
        lambda p, r: r.verified_end,
    ),
)


def make_registry(node: NodeApi, *others: Collector) -> CollectorRegistry:
    """One registry a server: two servers in one process (tests) do not share it. `others` tell of what is not the
    node's."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    for own in (NodeCollector(node), *others):
        registry.register(own)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


class NodeCollector(Collector):
    def __init__(self, node: NodeApi) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        status = self._node.status()
        state = self._node.state
        yield from _node_metrics(status, state)
        yield from _storage_metrics(status)
        yield from _partition_metrics(self._node, state)
        yield from _group_metrics(status, state)


def _node_metrics(status: NodeStatus, state: ClusterState) -> Iterator[Metric]:
    leads = status.raft_leader == status.node
    fenced = sum(1 for n in state.nodes.values() if n.fenced)
    values = (
        ("smq_node_ready", "1 where the node serves requests.", int(status.is_ready)),
        ("smq_raft_is_leader", "1 where this node leads Raft.", int(leads)),
        ("smq_raft_leader", "Node that leads Raft as this one last heard; 0 where unknown.", status.raft_leader or 0),
        ("smq_raft_term", "Raft's term.", status.raft_term),
        ("smq_raft_applied_index", "Last Raft entry applied.", status.applied_index),
        ("smq_raft_commit_index", "Last Raft entry known to be committed.", status.commit_index),
        ("smq_cluster_nodes", "Nodes that have registered.", len(state.nodes)),
        ("smq_cluster_nodes_fenced", "Nodes that are not heard of.", fenced),
        ("smq_cluster_topics", "Topics.", len(state.topics)),
        ("smq_cluster_groups", "Consumer groups with commits or members.", len(state.groups)),
    )
    for name, text, value in values:
        yield GaugeMetricFamily(name, text, value=value)


def _storage_metrics(status: NodeStatus) -> Iterator[Metric]:
    disk = status.storage
    gauges = (
        ("smq_disk_free_bytes", "Free on the file system of the data directory.", disk.free_bytes),
        ("smq_disk_reusable_bytes", "Freed inside the data file, for what is written next.", disk.reusable_bytes),
        ("smq_disk_full", "1 where the disk is down to its reserve: no records are appended.", int(disk.is_full)),
        ("smq_scrub_pass_bytes", "Read in the scrubber's present pass.", disk.scrub_bytes),
        ("smq_scrub_last_pass_timestamp_seconds", "End of its last whole pass; 0: none.", disk.scrub_ended_ms / 1000),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(name, text, value=value)
    counters = (
        ("smq_scrub_passes", "Whole passes of the scrubber.", disk.scrub_passes),
        ("smq_scrub_damage_found", "Damaged rows that the scrubber met.", disk.scrub_found),
        ("smq_damage_found", "Damaged batches and index rows, whoever met them.", disk.damage_found),
        ("smq_damage_repaired", "Those that were fetched again from another replica.", disk.damage_repaired),
        ("smq_damage_unrepaired", "Attempts that found no replica to help.", disk.damage_unrepaired),
    )
    for name, text, count in counters:
        yield CounterMetricFamily(name, text, value=count)


def _partition_metrics(node: NodeApi, state: ClusterState) -> Iterator[Metric]:
    """Of the partitions that this node holds."""
    held = list(_held(islice(node.replica_statuses(), METRICS_PARTITIONS_MAX), state))
    for name, text, read in _REPLICA_GAUGES:
        family = GaugeMetricFamily(f"smq_partition_{name}", text, labels=_LABELS)
        for topic, partition, replica in held:
            family.add_metric((topic, str(partition.index)), read(partition, replica))
        yield family
    missing = GaugeMetricFamily(
        "smq_partition_under_replicated", "Replicas whose node is fenced or unknown.", labels=_LABELS
    )
    for topic, partition, _ in held:
        missing.add_metric((topic, str(partition.index)), sum(1 for n in partition.replicas if _is_away(n, state)))
    yield missing


def _group_metrics(status: NodeStatus, state: ClusterState) -> Iterator[Metric]:
    """Of the groups that this node coordinates, so that a sum over the nodes counts each once; where no node has a
    Kafka listener, of all at Raft's leader."""
    leads = status.raft_leader == status.node
    owners = ((group, coordinator_of(state, name).node) for name, group in sorted(state.groups.items()))
    mine = [g for g, owner in owners if owner == status.node or (not owner and leads)][:METRICS_GROUPS_MAX]
    members = GaugeMetricFamily("smq_group_members", "Members of the group.", labels=("group",))
    generation = GaugeMetricFamily(
        "smq_group_generation", "Generation of the group: grows by one with each rebalance.", labels=("group",)
    )
    lag = GaugeMetricFamily(
        "smq_group_lag", "Records up to the high water mark that are not committed.", labels=("group", *_LABELS)
    )
    series = 0
    for group in mine:
        members.add_metric((group.name,), len(group.members))
        generation.add_metric((group.name,), group.generation)
        for at in positions(state, group):
            if at.lag is not None and series < METRICS_PARTITIONS_MAX:
                series += 1
                lag.add_metric((group.name, at.topic, str(at.part.index)), at.lag)
    yield from (members, generation, lag)


def _held(
    replicas: Iterable[ReplicaStatus], state: ClusterState
) -> Iterator[tuple[str, PartitionState, ReplicaStatus]]:
    for replica in replicas:
        partition = state.partition(PartitionId(replica.pid))
        if partition is not None:
            yield state.topic_names[partition.topic_id], partition, replica


def _is_away(node: NodeId, state: ClusterState) -> bool:
    known = state.nodes.get(node)
    return known is None or known.fenced
