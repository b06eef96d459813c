"""A group as an operator sees it: members, assignments, committed offsets and lag.

Owns the one definition of a group's lag, for gRPC, the command line and the metrics. Only reads the state.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.protocols import CONSUMER, metadata_of, subscribed_topics
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import ClusterState, CommittedOffset, GroupPhase, GroupState, PartitionState

PHASES: Final = {
    GroupPhase.EMPTY: "Empty",
    GroupPhase.PREPARING: "PreparingRebalance",
    GroupPhase.COMPLETING: "CompletingRebalance",
    GroupPhase.STABLE: "Stable",
}
_PARTITIONS_MAX: Final = 1_000_000  # far more than an assignment's own cap allows


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """`committed` is None if the group has committed nothing for a partition that a member was assigned."""

    topic: str
    part: PartitionState
    committed: CommittedOffset | None

    @property
    def position(self) -> Offset | None:
        """The next offset that the group reads."""
        return self.committed.position if self.committed is not None else None

    def unread_from(self, log_start: Offset) -> Offset:
        """Where its lag begins. Only a member knows where it starts without a commit, so that is the first record."""
        position = self.position
        return position if position is not None else log_start

    def lag_at(self, log_start: Offset, hwm: Offset) -> int:
        """Never negative, although a commit may name an offset that does not exist yet."""
        return max(0, hwm - self.unread_from(log_start))


def assigned_partitions(group: GroupState, assignment: bytes) -> list[tuple[str, int]]:
    """The partitions of a consumer's assignment (version i16, topics with partitions, ...); empty if it does not
    parse."""
    if group.protocol_type != CONSUMER:
        return []
    found: list[tuple[str, int]] = []
    try:
        (topics,) = struct.unpack_from(">i", assignment, 2)
        at = 6
        for _ in range(min(topics, _PARTITIONS_MAX)):
            (size,) = struct.unpack_from(">h", assignment, at)
            topic = str(assignment[at + 2 : at + 2 + size], "utf-8")
            (count,) = struct.unpack_from(">i", assignment, at + 2 + size)
            at += 6 + size
            if size < 0 or not 0 <= count <= _PARTITIONS_MAX:
                return []
            found += [(topic, index) for index in struct.unpack_from(f">{count}i", assignment, at)]
            at += 4 * count
    except (struct.error, UnicodeDecodeError):
        return []
    return found


def subscriptions(group: GroupState) -> frozenset[str] | None:
    """The topics that the members subscribe to. None if they are no consumers, or their metadata does not name topics
    as that of consumers does."""
    topics: frozenset[str] = frozenset()
    for m in group.members.values():
        found = subscribed_topics(metadata_of(m.member, group.protocol)) if group.protocol_type == CONSUMER else None
        if found is None:
            return None
        topics |= found
    return topics


def positions(state: ClusterState, group: GroupState) -> Iterator[GroupPosition]:
    """All partitions that the group has committed for or was assigned, in order of topic and partition."""
    found = [(pid, state.partition(pid)) for pid in partitions_of(state, group)]
    named = [(state.topic_names[part.topic_id], part.index, pid, part) for pid, part in found if part is not None]
    for topic, _, pid, part in sorted(named, key=lambda row: row[:2]):
        yield GroupPosition(topic, part, group.offsets.get(pid))


def partitions_of(state: ClusterState, group: GroupState) -> Iterator[PartitionId]:
    """Those that the group has committed for, then further ones that exist and that a member was assigned. The caller
    may take its time."""
    seen: dict[PartitionId, None] = dict.fromkeys(group.offsets)
    yield from list(seen)
    for m in list(group.members.values()):
        for topic, index in assigned_partitions(group, m.assignment):
            known = state.topics.get(topic)
            if known is None or not 0 <= index < len(known.partitions):
                continue
            pid = known.partitions[index].pid
            if pid not in seen:
                seen[pid] = None
                yield pid
