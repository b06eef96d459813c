"""Metrics of each partition: thousands of series, written piece by piece.

Owns their names, labels and text. A scrape first reads the values, then writes them family by family, as the format
demands. Other tasks run between two pieces, so partitions may come and go during a scrape. `http.metrics` imports it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

from smq.coordinator.http.exposition import READ_PER_PIECE, Omitted, escaped, family
from smq.coordinator.limits import METRICS_PARTITIONS_MAX
from smq.coordinator.service.name_lookup import has_leader
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import NodeApi, ReplicaStatus
from smq.replication.monitoring.measures import Traffic

# name, help, reader of (replicated state of the partition, high water mark as this node knows it): all that there is of
# a partition with storage=external
_OFFSET_GAUGES: Final[tuple[tuple[str, str, Callable[[PartitionState, Offset], int]], ...]] = (
    ("log_start_offset", "First offset in the log.", lambda p, hwm: p.log_start),
    ("high_water_mark", "First offset that readers cannot see yet.", lambda p, hwm: hwm),
    (
        "next_offset",
        "Leader's log end when Raft last moved the high water mark; with storage=external the next offset to assign.",
        lambda p, hwm: max(p.next_offset, hwm),
    ),
)
# name, help, reader of (replicated state of the partition, this node's copy of it)
_REPLICA_GAUGES: Final[tuple[tuple[str, str, Callable[[PartitionState, ReplicaStatus], int]], ...]] = (
    ("leader_epoch", "Epoch of the partition's leadership.", lambda p, r: p.epoch),
    ("leader", "Node that leads the partition.", lambda p, r: p.leader),
    ("last_stable_offset", "First offset that read-committed readers cannot see yet.", lambda p, r: r.lso),
    (
        "lso_lag",
        "Offsets from the last stable offset to the high water mark: they wait for an open transaction, or its marker.",
        lambda p, r: max(0, r.hwm - r.lso),
    ),
    ("size_bytes", "Size of this node's copy.", lambda p, r: r.size_bytes),
    ("is_leader", "1 if this node leads the partition.", lambda p, r: int(r.is_leader)),
    ("durable_end_offset", "End of this node's copy on disk.", lambda p, r: r.durable_end),
    (
        "verified_end_offset",
        "End of this node's copy that belongs to the partition's history.",
        lambda p, r: r.verified_end,
    ),
)
# name, help, reader of (replicated state of the partition, the whole state)
_HEALTH_GAUGES: Final[tuple[tuple[str, str, Callable[[PartitionState, ClusterState], int]], ...]] = (
    (
        "under_replicated",
        "Replicas whose node is fenced or unknown.",
        lambda p, s: sum(1 for n in p.replicas if _is_away(n, s)),
    ),
    (
        "incomplete_replicas",
        "Replicas whose logs may lack what they had acknowledged, until they have caught up (rule 22).",
        lambda p, s: sum(1 for n in p.replicas if n in p.incomplete),
    ),
    ("without_leader", "1 if no running process leads the partition.", lambda p, s: int(not has_leader(p, s))),
)
# name, help, reader of what this node has counted since its start
_TRAFFIC_COUNTERS: Final[tuple[tuple[str, str, Callable[[Traffic], int]], ...]] = (
    ("produced_bytes_total", "Bytes of batches that this node took in as the leader.", lambda t: t.produced_bytes),
    ("fetched_bytes_total", "Bytes of batches that readers took from this node.", lambda t: t.fetched_bytes),
)
# name, labels, kind and help of every family that this module writes
FAMILIES: Final = (
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _OFFSET_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _REPLICA_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _HEALTH_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "counter", text) for name, text, _ in _TRAFFIC_COUNTERS),
)


def partition_pieces(node: NodeApi, omitted: Omitted) -> Iterator[bytes]:
    """Series of the partitions that this node holds. With storage=external, that is every node and every partition."""
    offsets: list[tuple[str, tuple[int, ...]]] = []
    copies: list[tuple[str, tuple[int, ...]]] = []
    held = ((PartitionId(replica.pid), replica) for replica in node.replica_statuses())
    external = ((pid, None) for pid in _external_partitions(node.state))
    for number, (pid, replica) in enumerate(chain(held, external), 1):
        state = node.state
        partition = state.partition(pid)
        if number > METRICS_PARTITIONS_MAX:
            omitted["partitions"] += 1
        elif partition is not None:
            labels = _partition_labels(state.topic_names[partition.topic_id], partition)
            hwm = node.known_hwm(partition)
            offsets.append((labels, tuple(read(partition, hwm) for _, _, read in _OFFSET_GAUGES)))
            if replica is not None:
                values = [read(partition, replica) for _, _, read in _REPLICA_GAUGES]
                values += [read_health(partition, state) for _, _, read_health in _HEALTH_GAUGES]
                traffic = node.traffic(pid)
                values += [read_traffic(traffic) for _, _, read_traffic in _TRAFFIC_COUNTERS]
                copies.append((labels, tuple(values)))
        if number % READ_PER_PIECE == 0:
            yield b""
    yield from _columns([(name, text) for name, text, _ in _OFFSET_GAUGES], offsets)
    gauges = [(name, text) for name, text, *_ in (*_REPLICA_GAUGES, *_HEALTH_GAUGES)]
    yield from _columns([*gauges, *((name, text) for name, text, _ in _TRAFFIC_COUNTERS)], copies)


def _external_partitions(state: ClusterState) -> Iterator[PartitionId]:
    """Of the topics at the time of the first call: they may come and go while the caller takes its time."""
    for topic in [topic for topic in state.topics.values() if topic.partitions[0].is_external]:
        for partition in list(topic.partitions):
            yield partition.pid


def _columns(families: Sequence[tuple[str, str]], rows: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[bytes]:
    for column, (name, text) in enumerate(families):
        yield from family(f"partition_{name}", text, ((labels, values[column]) for labels, values in rows))


def _partition_labels(topic: str, partition: PartitionState) -> str:
    return f'{{topic="{escaped(topic)}",partition="{partition.index}"}}'


def _is_away(node: NodeId, state: ClusterState) -> bool:
    known = state.nodes.get(node)
    return known is None or known.fenced
