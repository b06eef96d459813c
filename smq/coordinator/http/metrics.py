"""/metrics: what Prometheus scrapes, read from the node at the moment of the scrape.

Owns names and labels, except those of partitions and groups. Nothing is counted on a hot path. `http.endpoints` imports
it.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from smq.coordinator.http.partition_metrics import series_pieces
from smq.coordinator.service.transactions import oldest_open_ms
from smq.raft_state.state import ClusterState
from smq.replication.api import NodeApi, NodeStatus


def make_registry(node: NodeApi, *others: Collector) -> CollectorRegistry:
    """One registry per server: two servers in one process (tests) do not share it. `others` collect what is not the
    node's."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    for own in (NodeCollector(node), *others):
        registry.register(own)
    return registry


def pieces(node: NodeApi, registry: CollectorRegistry) -> Iterator[bytes]:
    """The text of a scrape, in pieces of one or two milliseconds' work; a piece may be empty."""
    yield generate_latest(registry)
    yield from series_pieces(node)


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


def _node_metrics(status: NodeStatus, state: ClusterState) -> Iterator[Metric]:
    leads = status.raft_leader == status.node
    fenced = sum(1 for n in state.nodes.values() if n.fenced)
    values = (
        ("smq_node_ready", "1 if the node serves requests.", int(status.is_ready)),
        ("smq_raft_is_leader", "1 if this node leads Raft.", int(leads)),
        ("smq_raft_leader", "Node that leads Raft; 0 if none is known.", status.raft_leader or 0),
        ("smq_raft_term", "Raft's term.", status.raft_term),
        ("smq_raft_applied_index", "Last Raft entry applied.", status.applied_index),
        ("smq_raft_commit_index", "Last Raft entry known to be committed.", status.commit_index),
        ("smq_producers", "Idempotent producers that this node remembers, over all its partitions.", status.producers),
        ("smq_producers_max", "Beyond this number the node refuses new idempotent producers.", status.producers_max),
        ("smq_cluster_nodes", "Nodes that have registered.", len(state.nodes)),
        ("smq_cluster_nodes_fenced", "Registered nodes that are fenced: no heartbeats arrive from them.", fenced),
        ("smq_cluster_feature_level", "The feature level of the cluster.", state.feature_level),
        ("smq_node_feature_level_known", "The highest feature level that this smq knows.", status.feature_level_known),
        (
            "smq_node_waits_for_upgrade",
            "1 if a newer smq wrote what this one does not know: the node has stopped until it is upgraded.",
            int(bool(status.waiting)),
        ),
        ("smq_cluster_topics", "Topics.", len(state.topics)),
        ("smq_cluster_groups", "Consumer groups with commits or members.", len(state.groups)),
        ("smq_cluster_transactional_ids", "Transactional ids.", len(state.transactions)),
        (
            "smq_cluster_oldest_transaction_seconds",
            "How long the oldest open transaction has been open, by the replicated clock; 0: none is.",
            oldest_open_ms(state) / 1000,
        ),
    )
    for name, text, value in values:
        yield GaugeMetricFamily(name, text, value=value)


def _storage_metrics(status: NodeStatus) -> Iterator[Metric]:
    disk = status.storage
    gauges = (
        ("smq_disk_free_bytes", "Free bytes on the file system of the data directory.", disk.free_bytes),
        ("smq_disk_reusable_bytes", "Free bytes inside the data file, reused by later writes.", disk.reusable_bytes),
        ("smq_disk_hung", "1 if the disk has written nothing for a while: the node leads nothing.", int(disk.is_hung)),
        ("smq_disk_full", "1 if the disk is down to its reserve: no records are appended.", int(disk.is_full)),
        ("smq_scrub_pass_bytes", "Bytes read in the scrubber's present pass.", disk.scrub_bytes),
        (
            "smq_scrub_last_pass_timestamp_seconds",
            "End of its last full pass; 0: none.",
            disk.scrub_ended_ms / 1000,
        ),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(name, text, value=value)
    counters = (
        ("smq_scrub_passes", "Complete passes of the scrubber.", disk.scrub_passes),
        ("smq_scrub_damage_found", "Damaged rows that the scrubber found.", disk.scrub_found),
        ("smq_damage_found", "Damaged batches and index rows, found by any reader.", disk.damage_found),
        ("smq_damage_repaired", "Damaged rows fetched again from another replica.", disk.damage_repaired),
        ("smq_damage_unrepaired", "Repair attempts that found no replica to fetch from.", disk.damage_unrepaired),
    )
    for name, text, count in counters:
        yield CounterMetricFamily(name, text, value=count)
