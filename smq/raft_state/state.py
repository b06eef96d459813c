"""The replicated state: plain records that only `machine` may change.

Everybody on the node may read them between two applies; nobody but the machine may write them.
Invariant of a partition: log_start <= lso <= hwm <= next_offset, and hwm never goes back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from smq.raft_state.ids import (
    DiskId,
    Epoch,
    Incarnation,
    NodeId,
    Offset,
    PartitionId,
    PartitionIndex,
    ProducerEpoch,
    ProducerId,
    RequestId,
    TopicId,
    TsNs,
    partition_id,
)


@dataclass(slots=True, kw_only=True)
class NodeState:
    node: NodeId
    incarnation: Incarnation
    disk: DiskId
    grpc_address: str
    http_address: str
    kafka_address: str
    fenced: bool
    drained: bool = False  # by an operator; a new process of the node keeps it


@dataclass(frozen=True, slots=True)
class EpochStart:
    epoch: Epoch
    start: Offset


@dataclass(slots=True, kw_only=True)
class PartitionState:
    """`history` ascends in epoch, its last entry is the current epoch; starts never descend and may be equal.

    Of external storage there are no records here: no replicas, no leader, epoch 0 for ever (rule 19)."""

    topic_id: TopicId
    index: PartitionIndex
    replicas: tuple[NodeId, ...]  # the first is the preferred leader
    leader: NodeId
    leader_incarnation: Incarnation
    epoch: Epoch
    history: list[EpochStart]
    next_offset: Offset
    hwm: Offset
    log_start: Offset
    ts_ns: TsNs  # of the last batch below the hwm; 0 before the first

    @property
    def pid(self) -> PartitionId:
        return partition_id(self.topic_id, self.index)

    @property
    def is_external(self) -> bool:
        return not self.replicas

    @property
    def lso(self) -> Offset:
        """Last stable offset: the hwm, as there are no transactions yet."""
        return self.hwm

    def epoch_range(self, epoch: Epoch) -> tuple[Offset, Offset | None] | None:
        """[start, end) of an epoch, end None for the current one; None for one unknown, pruned or to come."""
        for i in range(len(self.history) - 1, -1, -1):
            entry = self.history[i]
            if entry.epoch == epoch:
                end = self.history[i + 1].start if i + 1 < len(self.history) else None
                return entry.start, end
            if entry.epoch < epoch:
                return None
        return None


@dataclass(slots=True, kw_only=True)
class TopicState:
    name: str
    topic_id: TopicId
    replication_factor: int
    config: dict[str, str]  # only the keys that differ from the default
    created_ms: int
    partitions: list[PartitionState]


@dataclass(frozen=True, slots=True)
class Assigned:
    """What a request id was given: `count` offsets from `base` on."""

    partition: PartitionId
    base: Offset
    count: int


@dataclass(slots=True, kw_only=True)
class CommittedOffset:
    offset: Offset
    metadata: str
    committed_ms: int


@dataclass(slots=True, kw_only=True)
class GroupState:
    name: str
    offsets: dict[PartitionId, CommittedOffset] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ClusterState:
    schema_version: int
    cluster_id: str = ""  # "" before InitCluster
    topics_max: int = 0
    partitions_max: int = 0
    groups_max: int = 0
    replies_max: int = 0
    nodes: dict[NodeId, NodeState] = field(default_factory=dict)
    topics: dict[str, TopicState] = field(default_factory=dict)
    topic_names: dict[TopicId, str] = field(default_factory=dict)
    producers: dict[ProducerId, ProducerEpoch] = field(default_factory=dict)
    next_producer_id: ProducerId = ProducerId(0)
    groups: dict[str, GroupState] = field(default_factory=dict)
    replies: dict[RequestId, bytes] = field(default_factory=dict)  # encoded replies, oldest first
    assigned: OrderedDict[RequestId, Assigned] = field(default_factory=OrderedDict)  # the last ones, oldest first
    # Of a partition, the end of the newest assignment that is no longer in `assigned`.
    assigned_before: dict[PartitionId, Offset] = field(default_factory=dict)

    def partition(self, pid: PartitionId) -> PartitionState | None:
        """The partition with this id, or None once its topic is deleted."""
        name = self.topic_names.get(TopicId(pid[:16]))
        if name is None:
            return None
        index = int.from_bytes(pid[16:], "big")
        partitions = self.topics[name].partitions
        return partitions[index] if index < len(partitions) else None
