"""Metrics of each partition and each group: thousands of series, written piece by piece.

Owns their names, labels and text. A scrape first reads the values, then writes them family by family, as the format
demands. Other tasks run between two pieces, so partitions and groups may come and go during a scrape. `http.metrics`
imports it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, TypeAlias

from smq.coordinator.groups.view import positions
from smq.coordinator.limits import METRICS_GROUPS_MAX, METRICS_PARTITIONS_MAX
from smq.coordinator.service.lookup import has_leader
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.ids import NodeId, Offset, PartitionId
from smq.raft_state.state import ClusterState, GroupState, PartitionState
from smq.replication.api import Backlog, NodeApi, ReplicaStatus
from smq.replication.measures import Traffic

READ_PER_PIECE: Final = 250  # partitions or commits: less than two milliseconds
LINES_PER_PIECE: Final = 1_000  # about 60 KB, less than a millisecond

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
    ("without_leader", "1 if no running process leads the partition.", lambda p, s: int(not has_leader(p, s))),
)
# name, help, reader of what this node has counted since its start
_TRAFFIC_COUNTERS: Final[tuple[tuple[str, str, Callable[[Traffic], int]], ...]] = (
    ("produced_bytes_total", "Bytes of batches that this node took in as the leader.", lambda t: t.produced_bytes),
    ("fetched_bytes_total", "Bytes of batches that readers took from this node.", lambda t: t.fetched_bytes),
)
_GROUP_GAUGES: Final = (
    ("group_members", "Members of the group."),
    ("group_generation", "Generation of the group: grows by one with each rebalance."),
)
_GROUP_OFFSET_GAUGES: Final = (
    ("group_committed_offset", "Next offset that the group reads, as committed."),
    (
        "group_lag",
        "Offsets to the high water mark that the group has not committed; without a commit from the log start.",
    ),
)
_BACKLOG_GAUGES: Final = (
    ("group_lag_bytes", "Stored size of the batches that the group has not read. Of partitions that this node leads."),
    (
        "group_lag_seconds",
        "Time since the next record that the group has not read was appended; 0 without one. As above.",
    ),
)
# name, labels, kind and help of every family that this module writes
FAMILIES: Final = (
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _OFFSET_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _REPLICA_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "gauge", text) for name, text, _ in _HEALTH_GAUGES),
    *((f"smq_partition_{name}", "topic, partition", "counter", text) for name, text, _ in _TRAFFIC_COUNTERS),
    *((f"smq_{name}", "group", "gauge", text) for name, text in _GROUP_GAUGES),
    *((f"smq_{name}", "group, topic, partition", "gauge", text) for name, text in _GROUP_OFFSET_GAUGES),
    *((f"smq_{name}", "group, topic, partition", "gauge", text) for name, text in _BACKLOG_GAUGES),
)
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


Backlogs: TypeAlias = Mapping[tuple[str, PartitionId], Backlog]


def series_pieces(node: NodeApi, backlogs: Backlogs, now_ns: int) -> Iterator[bytes]:
    """The text of all series; a piece may be empty. `backlogs` by group and partition, `now_ns` by the wall clock."""
    yield from _partition_pieces(node)
    yield from _group_pieces(node)
    yield from _backlog_pieces(node.state, backlogs, now_ns)


def _partition_pieces(node: NodeApi) -> Iterator[bytes]:
    """Series of the partitions that this node holds. With storage=external, that is every node and every partition."""
    offsets: list[tuple[str, tuple[int, ...]]] = []
    copies: list[tuple[str, tuple[int, ...]]] = []
    held = ((PartitionId(replica.pid), replica) for replica in node.replica_statuses())
    external = ((pid, None) for pid in _external_partitions(node.state))
    for number, (pid, replica) in enumerate(islice(chain(held, external), METRICS_PARTITIONS_MAX), 1):
        state = node.state
        partition = state.partition(pid)
        if partition is not None:
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
        yield from _family(f"partition_{name}", text, ((labels, values[column]) for labels, values in rows))


def _group_pieces(node: NodeApi) -> Iterator[bytes]:
    """Series of the groups that this node coordinates, so that a sum over the nodes counts each once. If no node has a
    Kafka listener, Raft's leader shows them all."""
    members, generations = list[tuple[str, int]](), list[tuple[str, int]]()
    offsets = list[tuple[str, Offset | None, int]]()
    status = node.status()
    leads = status.raft_leader == status.node
    read = 0
    for name in sorted(node.state.groups):
        if read >= READ_PER_PIECE:
            read = 0
            yield b""
        read += 1
        group = node.state.groups.get(name)
        owner = coordinator_of(node.state, name).node
        if group is None or not (owner == node.node_id if owner else leads):
            continue
        labels = f'group="{_escaped(name)}"'
        members.append((f"{{{labels}}}", len(group.members)))
        generations.append((f"{{{labels}}}", group.generation))
        if len(offsets) < METRICS_PARTITIONS_MAX:
            offsets += islice(_offsets(node, group, labels), METRICS_PARTITIONS_MAX - len(offsets))
            read += len(group.offsets)
        if len(members) == METRICS_GROUPS_MAX:
            break
    for (name, text), rows in zip(_GROUP_GAUGES, (members, generations), strict=True):
        yield from _family(name, text, rows)
    (committed, committed_text), (lag, lag_text) = _GROUP_OFFSET_GAUGES
    yield from _family(committed, committed_text, ((at, offset) for at, offset, _ in offsets if offset is not None))
    yield from _family(lag, lag_text, ((at, behind) for at, _, behind in offsets))


def _offsets(node: NodeApi, group: GroupState, labels: str) -> Iterator[tuple[str, Offset | None, int]]:
    """As this node knows the ends: a scrape waits for no other node. Without a commit there is a lag, from the log
    start on, and no committed offset."""
    for at in positions(node.state, group):
        place = f'{{{labels},topic="{_escaped(at.topic)}",partition="{at.part.index}"}}'
        yield place, at.position, at.lag_at(at.part.log_start, node.known_hwm(at.part))


def _backlog_pieces(state: ClusterState, backlogs: Backlogs, now_ns: int) -> Iterator[bytes]:
    rows: list[tuple[str, tuple[float, ...]]] = []
    for number, ((group, pid), backlog) in enumerate(backlogs.items(), 1):
        part = state.partition(pid)
        if part is not None:
            topic = _escaped(state.topic_names[part.topic_id])
            age_ms = max(0, now_ns - backlog.ts_ns) // 1_000_000 if backlog.ts_ns >= 0 else 0
            labels = f'{{group="{_escaped(group)}",topic="{topic}",partition="{part.index}"}}'
            rows.append((labels, (backlog.size_bytes, age_ms / 1000)))
        if number % READ_PER_PIECE == 0:
            yield b""
    for column, (name, text) in enumerate(_BACKLOG_GAUGES):
        yield from _family(name, text, ((labels, values[column]) for labels, values in rows))


def _family(name: str, text: str, rows: Iterable[tuple[str, float]]) -> Iterator[bytes]:
    left = iter(rows)
    kind = "counter" if name.endswith("_total") else "gauge"
    head = f"# HELP smq_{name} {text}\n# TYPE smq_{name} {kind}\n"
    while lines := [f"smq_{name}{labels} {value}\n" for labels, value in islice(left, LINES_PER_PIECE)]:
        yield (head + "".join(lines)).encode()
        head = ""
    if head:
        yield head.encode()


def _partition_labels(topic: str, partition: PartitionState) -> str:
    return f'{{topic="{_escaped(topic)}",partition="{partition.index}"}}'


def _escaped(value: str) -> str:
    return value.translate(_ESCAPES)


def _is_away(node: NodeId, state: ClusterState) -> bool:
    known = state.nodes.get(node)
    return known is None or known.fenced
