"""/metrics: what Prometheus scrapes, read from the node at the moment of the scrape.

Owns the gauges of the node and its disk, the order of a scrape, and the count of what it leaves out. Partitions and
groups, connections, and what is counted while the node works have modules of their own. `http.endpoints` imports it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from smq.coordinator.http.exposition import Omitted, family
from smq.coordinator.http.group_metrics import backlog_pieces, group_pieces
from smq.coordinator.http.partition_metrics import partition_pieces
from smq.coordinator.service.lag_monitor import Backlogs
from smq.coordinator.service.transaction_states import all_open_ms
from smq.raft_state.limits import APPS_MAX
from smq.raft_state.state import ClusterState
from smq.replication.api import NodeApi, NodeStatus, StorageStatus

# What may have no series for the limits on their number: `smq_metrics_omitted` counts it.
OMITTED: Final = ("partitions", "groups", "group_offsets", "group_backlogs")
OMITTED_HELP: Final = "What has no series here, because the limit on their number is reached."


def make_registry(node: NodeApi, *others: Collector) -> CollectorRegistry:
    """One registry per server: two servers in one process (tests) do not share it. `others` collect what is not the
    node's."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    for own in (NodeCollector(node), *others):
        registry.register(own)
    return registry


def pieces(node: NodeApi, registry: CollectorRegistry, backlogs: Backlogs) -> Iterator[bytes]:
    """The text of a scrape, in pieces of one or two milliseconds' work; a piece may be empty."""
    yield generate_latest(registry)
    yield from series_pieces(node, backlogs, time.time_ns())


def series_pieces(node: NodeApi, backlogs: Backlogs, now_ns: int) -> Iterator[bytes]:
    """Of partitions and groups. `now_ns` is by the wall clock."""
    omitted = Omitted(dict.fromkeys(OMITTED, 0))
    yield from partition_pieces(node, omitted)
    yield from group_pieces(node, omitted)
    omitted["group_backlogs"] = backlogs.omitted
    yield from backlog_pieces(node.state, backlogs.found, now_ns)
    yield from family("metrics_omitted", OMITTED_HELP, ((f'{{of="{of}"}}', count) for of, count in omitted.items()))


CLUSTER_INFO: Final = ("smq_cluster_info", "Always 1: the label names the cluster that this node belongs to.")
# name, help, reader of (the node's own view, the replicated state)
NODE_GAUGES: Final[tuple[tuple[str, str, Callable[[NodeStatus, ClusterState], float]], ...]] = (
    ("smq_node_ready", "1 if the node serves requests.", lambda n, s: int(n.is_ready)),
    ("smq_raft_is_leader", "1 if this node leads Raft.", lambda n, s: int(n.raft_leader == n.node)),
    ("smq_raft_leader", "Node that leads Raft; 0 if none is known.", lambda n, s: n.raft_leader or 0),
    ("smq_raft_term", "Raft's term.", lambda n, s: n.raft_term),
    ("smq_raft_applied_index", "Last Raft entry applied.", lambda n, s: n.applied_index),
    ("smq_raft_commit_index", "Last Raft entry known to be committed.", lambda n, s: n.commit_index),
    (
        "smq_raft_snapshot_index",
        "Last Raft entry in this node's newest snapshot; 0: none.",
        lambda n, s: n.snapshot_index,
    ),
    ("smq_raft_snapshot_bytes", "Size of this node's newest snapshot of the state.", lambda n, s: n.snapshot_bytes),
    (
        "smq_raft_snapshot_age_seconds",
        "Time since this process took, received or loaded its newest snapshot.",
        lambda n, s: n.snapshot_age_ms / 1000,
    ),
    (
        "smq_producers",
        "Idempotent producers that this node remembers, over all its partitions.",
        lambda n, s: n.producers,
    ),
    (
        "smq_producers_max",
        "Beyond this number the node refuses new idempotent producers.",
        lambda n, s: n.producers_max,
    ),
    (
        "smq_compaction_dirty_bytes",
        "What compaction has to look at yet, of partitions that this node leads, as found by its last looks.",
        lambda n, s: n.compaction_dirty_bytes,
    ),
    (
        "smq_compaction_age_seconds",
        "The longest time since a whole pass of compaction over a partition that this node leads; 0 without one.",
        lambda n, s: n.compaction_age_ms / 1000,
    ),
    ("smq_cluster_nodes", "Nodes that have registered.", lambda n, s: len(s.nodes)),
    (
        "smq_cluster_nodes_fenced",
        "Registered nodes that are fenced: no heartbeats arrive from them.",
        lambda n, s: sum(1 for node in s.nodes.values() if node.fenced),
    ),
    ("smq_cluster_feature_level", "The feature level of the cluster.", lambda n, s: s.feature_level),
    (
        "smq_node_feature_level_known",
        "The highest feature level that this smq knows.",
        lambda n, s: n.feature_level_known,
    ),
    (
        "smq_node_waits_for_upgrade",
        "1 if a newer smq wrote what this one does not know: the node has stopped until it is upgraded.",
        lambda n, s: int(bool(n.waiting)),
    ),
    ("smq_node_warnings", "Conditions that `smq status` reports to the operator.", lambda n, s: len(n.warnings)),
    ("smq_cluster_topics", "Topics.", lambda n, s: len(s.topics)),
    ("smq_cluster_groups", "Consumer groups with commits or members.", lambda n, s: len(s.groups)),
    ("smq_cluster_transactional_ids", "Transactional ids.", lambda n, s: len(s.transactions)),
    (
        "smq_cluster_apps",
        "Apps that commit batches (Spark's queries): `smq txn apps` lists them.",
        lambda n, s: len(s.apps),
    ),
    ("smq_cluster_apps_max", "Beyond this number new apps are refused.", lambda n, s: APPS_MAX),
    (
        "smq_cluster_open_transactions",
        "Open transactions: begun in some partition or group, and not decided.",
        lambda n, s: len(all_open_ms(s)),
    ),
    (
        "smq_cluster_oldest_transaction_seconds",
        "How long the oldest open transaction has been open, by the replicated clock; 0: none is.",
        lambda n, s: max(all_open_ms(s), default=0) / 1000,
    ),
)
# name, help, reader of the node's disk
STORAGE_GAUGES: Final[tuple[tuple[str, str, Callable[[StorageStatus], float]], ...]] = (
    ("smq_disk_free_bytes", "Free bytes on the file system of the data directory.", lambda d: d.free_bytes),
    ("smq_disk_total_bytes", "Size of the file system of the data directory.", lambda d: d.total_bytes),
    (
        "smq_disk_reusable_bytes",
        "Free bytes inside the data file, reused by later writes.",
        lambda d: d.reusable_bytes,
    ),
    (
        "smq_disk_hung",
        "1 if the disk has written nothing for a while: the node leads nothing.",
        lambda d: int(d.is_hung),
    ),
    (
        "smq_disk_full",
        "1 if the disk is down to its reserve: no records are appended.",
        lambda d: int(d.is_full),
    ),
    ("smq_scrub_pass_bytes", "Bytes read in the scrubber's present pass.", lambda d: d.scrub_bytes),
    (
        "smq_scrub_last_pass_timestamp_seconds",
        "End of its last full pass; 0: none.",
        lambda d: d.scrub_ended_ms / 1000,
    ),
)
STORAGE_COUNTERS: Final[tuple[tuple[str, str, Callable[[StorageStatus], int]], ...]] = (
    ("smq_scrub_passes", "Complete passes of the scrubber.", lambda d: d.scrub_passes),
    ("smq_scrub_damage_found", "Damaged rows that the scrubber found.", lambda d: d.scrub_found),
    ("smq_damage_found", "Damaged batches and index rows, found by any reader.", lambda d: d.damage_found),
    ("smq_damage_repaired", "Damaged rows fetched again from another replica.", lambda d: d.damage_repaired),
    ("smq_damage_unrepaired", "Repair attempts that found no replica to fetch from.", lambda d: d.damage_unrepaired),
)


class NodeCollector(Collector):
    def __init__(self, node: NodeApi) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is read before the first scrape

    def collect(self) -> Iterator[Metric]:
        status, state = self._node.status(), self._node.state
        info = GaugeMetricFamily(*CLUSTER_INFO, labels=["cluster_id"])
        info.add_metric([state.cluster_id], 1)
        yield info
        for name, text, of_node in NODE_GAUGES:
            yield GaugeMetricFamily(name, text, value=of_node(status, state))
        for name, text, of_disk in STORAGE_GAUGES:
            yield GaugeMetricFamily(name, text, value=of_disk(status.storage))
        for name, text, counted in STORAGE_COUNTERS:
            yield CounterMetricFamily(name, text, value=counted(status.storage))
