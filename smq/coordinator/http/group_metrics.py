"""Metrics of each group: members, committed offsets, and lag in offsets, bytes and time.

Owns their names, labels and text. `lag_monitor` says which groups have series. Other tasks run between two pieces, so
groups may come and go during a scrape. `http.metrics` imports it.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from smq.coordinator.http.exposition import READ_PER_PIECE, Omitted, escaped, family
from smq.coordinator.limits import METRICS_PARTITIONS_MAX
from smq.coordinator.service.group_lag import GroupPosition, partitions_of
from smq.coordinator.service.lag_monitor import shown_groups
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import ClusterState, GroupState
from smq.replication.api import Backlog, NodeApi

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
    *((f"smq_{name}", "group", "gauge", text) for name, text in _GROUP_GAUGES),
    *((f"smq_{name}", "group, topic, partition", "gauge", text) for name, text in _GROUP_OFFSET_GAUGES),
    *((f"smq_{name}", "group, topic, partition", "gauge", text) for name, text in _BACKLOG_GAUGES),
)


def group_pieces(node: NodeApi, omitted: Omitted) -> Iterator[bytes]:
    """Series of the groups that this node coordinates, so that a sum over the nodes counts each once. If no node could
    coordinate, Raft's leader shows them all."""
    members, generations = list[tuple[str, int]](), list[tuple[str, int]]()
    offsets = list[tuple[str, Offset | None, int]]()
    status = node.status()
    leads = status.raft_leader == status.node
    read = 0
    for name, owner, is_shown in shown_groups(node):
        read += 1
        if read % READ_PER_PIECE == 0:
            yield b""
        group = node.state.groups.get(name)
        if group is None or not (owner == node.node_id if owner else leads):
            continue
        if not is_shown:
            omitted["groups"] += 1
            continue
        labels = f'group="{escaped(name)}"'
        members.append((f"{{{labels}}}", len(group.members)))
        generations.append((f"{{{labels}}}", group.generation))
        for at in _positions(node, group):
            read += 1
            if read % READ_PER_PIECE == 0:
                yield b""
            if len(offsets) < METRICS_PARTITIONS_MAX:
                offsets.append(_offsets(node, at, labels))
            else:
                omitted["group_offsets"] += 1
    for (name, text), rows in zip(_GROUP_GAUGES, (members, generations), strict=True):
        yield from family(name, text, rows)
    (committed, committed_text), (lag, lag_text) = _GROUP_OFFSET_GAUGES
    yield from family(committed, committed_text, ((at, offset) for at, offset, _ in offsets if offset is not None))
    yield from family(lag, lag_text, ((at, behind) for at, _, behind in offsets))


def _positions(node: NodeApi, group: GroupState) -> Iterator[GroupPosition]:
    """In no order: to sort those of a large group would take too long for one piece."""
    for pid in partitions_of(node.state, group):
        part = node.state.partition(pid)
        if part is not None:
            yield GroupPosition(node.state.topic_names[part.topic_id], part, group.offsets.get(pid))


def _offsets(node: NodeApi, at: GroupPosition, labels: str) -> tuple[str, Offset | None, int]:
    """As this node knows the end: a scrape waits for no other node. Without a commit there is a lag, from the log
    start on, and no committed offset."""
    place = f'{{{labels},topic="{escaped(at.topic)}",partition="{at.part.index}"}}'
    return place, at.position, at.lag_at(at.part.log_start, node.known_hwm(at.part))


def backlog_pieces(
    state: ClusterState, backlogs: Mapping[tuple[str, PartitionId], Backlog], now_ns: int
) -> Iterator[bytes]:
    rows: list[tuple[str, tuple[float, ...]]] = []
    for number, ((group, pid), backlog) in enumerate(backlogs.items(), 1):
        part = state.partition(pid)
        if part is not None:
            topic = escaped(state.topic_names[part.topic_id])
            age_ms = max(0, now_ns - backlog.ts_ns) // 1_000_000 if backlog.ts_ns >= 0 else 0
            labels = f'{{group="{escaped(group)}",topic="{topic}",partition="{part.index}"}}'
            rows.append((labels, (backlog.size_bytes, age_ms / 1000)))
        if number % READ_PER_PIECE == 0:
            yield b""
    for column, (name, text) in enumerate(_BACKLOG_GAUGES):
        yield from family(name, text, ((labels, values[column]) for labels, values in rows))
