"""A group as an operator sees it: members, assignments, committed offsets and lag.

Owns the one definition of a group's lag, for gRPC, the command line and the metrics. Only reads the state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from smq.coordinator.groups.protocols import CONSUMER, assigned_indexes
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.state import ClusterState, CommittedOffset, GroupPhase, GroupState, PartitionState

PHASES: Final = {
    GroupPhase.EMPTY: "Empty",
    GroupPhase.PREPARING: "PreparingRebalance",
    GroupPhase.COMPLETING: "CompletingRebalance",
    GroupPhase.STABLE: "Stable",
}


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
    """The partitions of a consumer's assignment; empty if it does not parse."""
    found = assigned_indexes(assignment) if group.protocol_type == CONSUMER else None
    return [(topic, index) for topic, indexes in found or () for index in indexes]


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
