"""The replicated state: plain records that only `machine` may change.

Any module on the node may read them between two applies; only the machine may write them. After a class comes the
record of those of its fields that a snapshot writes one after another, in that order.
Invariant of a partition: log_start <= hwm <= next_offset, and hwm never goes back. A majority of logs
commits, and the hwm follows: what is committed may lie beyond it, and seals decide who may lead.
"""

import enum
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from smq.raft_state.binary import FLAG, INT16, INT32, INT64, TEXT, U32, Blob, Fixed, Record
from smq.raft_state.commands import (
    NO_FINGERPRINT,
    NO_LEADER_EPOCH,
    Acl,
    Fingerprint,
    GroupMember,
    Listener,
    Partitions,
    Quota,
    ScramCredential,
    Subscription,
)
from smq.raft_state.fields import (
    ANY_ID,
    CREDENTIALS,
    FINGERPRINT,
    GROUP_MEMBER,
    LISTENERS,
    PARTITION_LISTS,
    SUBSCRIPTION,
)
from smq.raft_state.ids import (
    NO_BIRTH,
    NO_PRODUCER,
    BirthId,
    DiskId,
    Epoch,
    Generation,
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
from smq.raft_state.limits import (
    BIRTH_ID_BYTES,
    COORDINATOR_SLOTS,
    DISK_ID_BYTES,
    GROUP_BYTES_MAX,
    MEMBER_BYTES_OVERHEAD,
    PRODUCER_EPOCH_RETIRED,
    TOPIC_ID_BYTES,
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
    drained: bool = False  # by an operator; a restart of the node keeps it
    rack: str = ""  # the failure zone, by the name that Kafka clients use; "" for none
    feature_level: int = 1  # the highest that its process knows
    listeners: tuple[Listener, ...] = ()  # by name, beside the addresses above


NODE: Final = Record(
    NodeState,
    (
        ("node", INT32),
        ("incarnation", INT64),
        ("disk", Fixed(DISK_ID_BYTES)),
        ("grpc_address", TEXT),
        ("http_address", TEXT),
        ("kafka_address", TEXT),
        ("fenced", FLAG),
        ("drained", FLAG),
        ("rack", TEXT),
        ("feature_level", INT32),
        ("listeners", LISTENERS),
    ),
)


@dataclass(frozen=True, slots=True)
class EpochStart:
    epoch: Epoch
    start: Offset


@dataclass(frozen=True, slots=True)
class ProducerMark:
    """The high water mark when the clock of expiry showed a time."""

    clock_ms: int
    hwm: Offset


_NO_OFFSET = Offset(0)
_NO_NODES: frozenset[NodeId] = frozenset()


NOT_IN_STEP_MS: Final = 1 << 62  # never over, also for a node that does not know it


class Segment(NamedTuple):
    """A stretch of a compacted log, whole batches from `start` to the next segment. `digest` is of the stored values
    that every replica ends with. `tombstones_ms` is the expiry clock when no replica had what the tombstones in it
    delete, NOT_IN_STEP_MS before that is known, 0 if there are none. A dirty segment is compacted again from its own
    records on."""

    start: Offset
    digest: bytes
    tombstones_ms: int = 0
    is_dirty: bool = False


@dataclass(slots=True, kw_only=True)
class PartitionState:
    """`history` ascends in epoch, its last entry is the current epoch. It lacks epochs without records, but for the
    oldest known and the current one, so starts ascend, and only the first two may be equal. Batches that end at or
    below `producers_start` no longer make their producers known. `is_opening`: a mirror no longer writes, but its
    leader may not know it yet, so producers write from the next epoch on.

    A partition of external storage has no records here: no replicas, no leader, always epoch 0 (rule 19)."""

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
    ts_ns: TsNs  # of the last record below the hwm; 0 before the first
    producers_start: Offset = _NO_OFFSET
    producer_marks: list[ProducerMark] = field(default_factory=list)  # oldest first: where it moves when they expire
    is_opening: bool = False
    incomplete: frozenset[NodeId] = _NO_NODES  # replicas whose logs may lack what they acknowledged (rule 22)
    segments: list[Segment] = field(default_factory=list)  # what has been compacted, up to `compacted_end`
    compacted_end: Offset = _NO_OFFSET
    compactions: int = 0  # how often `segments` has changed by a compaction

    @property
    def pid(self) -> PartitionId:
        return partition_id(self.topic_id, self.index)

    @property
    def is_external(self) -> bool:
        return not self.replicas

    def segment_end(self, number: int) -> Offset:
        """Where the segment of this number in `segments` ends."""
        return self.segments[number + 1].start if number + 1 < len(self.segments) else self.compacted_end

    def epoch_range(self, epoch: Epoch) -> tuple[Offset, Offset | None] | None:
        """[start, end) of an epoch, end None for the current epoch; None if it is pruned, had no records, or is in the
        future."""
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


# Its partitions and its config follow.
TOPIC: Final = Record(
    TopicState,
    (
        ("name", TEXT),
        ("topic_id", Fixed(TOPIC_ID_BYTES)),
        ("replication_factor", INT32),
        ("created_ms", INT64),
    ),
)


class Assigned(NamedTuple):
    """The offsets that a request received: `count` offsets from `base` on."""

    partition: PartitionId
    base: Offset
    count: int  # type: ignore[assignment] # as in Assignment


@dataclass(slots=True, kw_only=True)
class CommittedOffset:
    """Of a group, or staged in a transaction. `order` counts commits and stagings, of all groups: a transaction's end
    replaces no offset that is newer than its own."""

    offset: Offset
    metadata: str
    committed_ms: int
    leader_epoch: int = NO_LEADER_EPOCH
    order: int = 0

    @property
    def position(self) -> Offset | None:
        """Where a reader resumes. None for a negative offset, by which Kafka clients say "no position"."""
        return self.offset if self.offset >= 0 else None


_NO_GENERATION = Generation(0)


class GroupKind(enum.IntEnum):
    """The protocol of a group's members. A group without members takes that of the next one to join."""

    CLASSIC = 0  # generations, of which a member makes the assignment
    CONSUMER = 1  # KIP-848: epochs, of which the coordinator makes the assignment


class GroupPhase(enum.IntEnum):
    """The part of a rebalance that must outlive the coordinator. An upcoming rebalance is in its memory only. Consumer
    groups are EMPTY or STABLE: each member has an epoch, which says how far it is."""

    EMPTY = 0  # no members
    PREPARING = 1  # members were removed: the remaining ones must join again
    COMPLETING = 2  # a generation that waits for its assignment
    STABLE = 3


AWAY_EPOCH: Final = -2  # of a static member that has given up everything, and will be back: Kafka's number
_NO_SUBSCRIPTION: Final = Subscription()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """What follows the assignment is of a consumer group. The member may use the partitions that are `assigned` to it,
    and is on its way to its `target`. What it is `revoking` is free once it says that it has given it up."""

    member: GroupMember
    assignment: bytes = b""
    subscription: Subscription = _NO_SUBSCRIPTION
    epoch: int = 0
    previous_epoch: int = 0
    target: Partitions = ()
    assigned: Partitions = ()
    revoking: Partitions = ()

    @property
    def metadata_bytes(self) -> int:
        """The cost of a member without its assignment: names and metadata. A character counts as four bytes, which is
        cheaper than encoding it."""
        m, s = self.member, self.subscription
        texts = len(m.member_id) + len(m.instance_id) + len(m.client_id) + len(m.client_host)
        texts += len(s.pattern) + len(s.assignor) + len(s.rack)
        texts += sum(1 + len(name) for name in (*s.topics, *s.matched))
        return MEMBER_BYTES_OVERHEAD + 4 * texts + sum(4 * len(name) + len(data) for name, data in m.protocols)

    @property
    def assignment_bytes(self) -> int:
        lists = (self.target, self.assigned, self.revoking)
        return len(self.assignment) + sum(20 + 4 * len(indexes) for topics in lists for _, indexes in topics)


MEMBER: Final = Record(
    MemberState,
    (
        ("member", GROUP_MEMBER),
        ("assignment", Blob(U32, GROUP_BYTES_MAX)),
        ("subscription", SUBSCRIPTION),
        ("epoch", INT32),
        ("previous_epoch", INT32),
        ("target", PARTITION_LISTS),
        ("assigned", PARTITION_LISTS),
        ("revoking", PARTITION_LISTS),
    ),
)


def members_bytes(members: dict[str, MemberState]) -> int:
    """The cost of the members of one group."""
    return sum(m.metadata_bytes + m.assignment_bytes for m in members.values())


def held(member: MemberState) -> list[tuple[TopicId, int]]:
    """The partitions that no other member of its group may have now."""
    return [(topic_id, i) for topic_id, indexes in (*member.assigned, *member.revoking) for i in indexes]


@dataclass(slots=True, kw_only=True)
class GroupState:
    """`members` are in the order of joining; `generation` is 0 before the first. Of a consumer group it is the epoch of
    the group, `target_epoch` that of its target assignment, and `protocol` the assignor that made it."""

    name: str
    kind: GroupKind = GroupKind.CLASSIC
    generation: Generation = _NO_GENERATION
    target_epoch: Generation = _NO_GENERATION
    phase: GroupPhase = GroupPhase.EMPTY
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    emptied_ms: int = 0  # when the last member left; 0 if there never was one
    changes: int = 0  # how often its coordinators have changed it, and groups of its name before it (see `fencing`)
    was_unused: bool = False  # at the clock's last step, and nothing has come since
    members: dict[str, MemberState] = field(default_factory=dict)
    offsets: dict[PartitionId, CommittedOffset] = field(default_factory=dict)
    # Derived: the id of the member that holds a partition, by the topic's id and the index.
    owners: dict[tuple[TopicId, int], str] = field(default_factory=dict)

    @property
    def is_unused(self) -> bool:
        """It has neither offsets nor members."""
        return not self.offsets and not self.members

    def static_member(self, instance_id: str) -> MemberState | None:
        """The member that has this instance id."""
        return next((m for m in self.members.values() if m.member.instance_id == instance_id), None)


# Name, kind and phase come before; members and offsets follow.
GROUP: Final = Record(
    GroupState,
    (
        ("generation", INT32),
        ("target_epoch", INT32),
        ("protocol_type", TEXT),
        ("protocol", TEXT),
        ("leader", TEXT),
        ("emptied_ms", INT64),
        ("changes", INT64),
        ("was_unused", FLAG),
    ),
)


class TransactionPhase(enum.IntEnum):
    EMPTY = 0  # no transaction is open, and the logs say how the last one has ended
    ONGOING = 1
    COMMITTING = 2  # decided; the leaders of its partitions are still writing the markers
    ABORTING = 3


class TransactionOutcome(enum.IntEnum):
    NONE = 0  # the present producer has not ended any
    COMMITTED = 1
    ABORTED = 2


@dataclass(slots=True, kw_only=True)
class TransactionState:
    """A transactional id, its producer, and its open transaction or the last decided one. Of a decided one,
    `partitions` are those whose logs do not yet say so; its staged offsets have become the groups', or nothing.

    `ended_id` and `ended_epoch` are those by which a producer last ended a transaction, and -1 once its epoch has grown
    by anything else. If they are still the present ones, the epoch has outlived that transaction (Kafka's first
    protocol). If not, the end has moved the producer on (the second), and its repetition is known by them."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    last_epoch: ProducerEpoch = ProducerEpoch(-1)  # the one before, if its producer may go on with the present one
    ended_id: ProducerId = NO_PRODUCER
    ended_epoch: ProducerEpoch = ProducerEpoch(-1)
    timeout_ms: int
    is_temporary: bool = False  # forgotten once its transaction has ended
    phase: TransactionPhase = TransactionPhase.EMPTY
    outcome: TransactionOutcome = TransactionOutcome.NONE  # of the last transaction
    changes: int = 0  # how often its coordinators have changed it, and those of its id before it (see `fencing`)
    started_ms: int = 0  # by the clock of expiry, at its first step after the start; 0 before that step
    used_ms: int = 0  # by the clock of expiry, at the last change
    partitions: set[PartitionId] = field(default_factory=set)  # sorted wherever the order could matter
    offsets: dict[str, dict[PartitionId, CommittedOffset]] = field(default_factory=dict)  # staged, by group

    @property
    def is_ending(self) -> bool:
        return self.phase in (TransactionPhase.COMMITTING, TransactionPhase.ABORTING)

    @property
    def has_outlived_one(self) -> bool:
        """A transaction has ended in the present epoch."""
        return (self.ended_id, self.ended_epoch) == (self.producer_id, self.producer_epoch)

    @property
    def marked_as(self) -> tuple[ProducerId, ProducerEpoch]:
        """The producer and epoch in the control batches of a decided transaction: the epoch after the decision. If the
        producer has left its last epoch and gone on under another id, the one that belongs to no producer."""
        if self.ended_id in (NO_PRODUCER, self.producer_id):
            return self.producer_id, self.producer_epoch
        return self.ended_id, ProducerEpoch(PRODUCER_EPOCH_RETIRED)

    @property
    def producer_ids(self) -> frozenset[ProducerId]:
        """Those that lead to this transactional id: the present one, and the one whose markers are being written."""
        return frozenset({self.producer_id, self.marked_as[0]} if self.is_ending else {self.producer_id})

    @property
    def items(self) -> int:
        """What counts against the cluster's limit."""
        return len(self.partitions) + sum(1 + len(staged) for staged in self.offsets.values())


# Phase, outcome, partitions and staged offsets follow.
TRANSACTION: Final = Record(
    TransactionState,
    (
        ("transactional_id", TEXT),
        ("producer_id", INT64),
        ("producer_epoch", INT16),
        ("last_epoch", INT16),
        ("ended_id", INT64),
        ("ended_epoch", INT16),
        ("timeout_ms", INT32),
        ("is_temporary", FLAG),
        ("changes", INT64),
        ("started_ms", INT64),
        ("used_ms", INT64),
    ),
)


@dataclass(slots=True, kw_only=True)
class AppState:
    """The last batch that an app has committed, and when it last committed or repeated one, by the clock of expiry."""

    batch_id: int
    used_ms: int
    fingerprint: Fingerprint = NO_FINGERPRINT


# Its name comes before.
APP: Final = Record(AppState, (("batch_id", INT64), ("used_ms", INT64), ("fingerprint", FINGERPRINT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserState:
    """Of clients. Its credentials are in order of mechanism, and there is at least one."""

    name: str
    credentials: tuple[ScramCredential, ...]


USER: Final = Record(UserState, (("name", TEXT), ("credentials", CREDENTIALS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSlot:
    """The coordinator of the groups and transactional ids of one slot. The epoch counts the coordinators; 0 before the
    first."""

    node: NodeId
    incarnation: Incarnation
    epoch: Epoch


SLOT: Final = Record(CoordinatorSlot, (("node", INT32), ("incarnation", INT64), ("epoch", INT32)))


_NO_COORDINATOR = CoordinatorSlot(node=NodeId(0), incarnation=Incarnation(0), epoch=Epoch(0))


class Cache(enum.IntEnum):
    """Which cache remembers the reply to a request. A retry is recognised until as many other requests of its own kind
    have come as a cache keeps. Commits over the Kafka port have ids that nodes choose; they push out no reply to a
    client's own request. And a client's commits, of which there are many, do not push out the rare changes that are
    dangerous to repeat, such as a deletion. The value is the cache's place in the state."""

    BY_NODE = 0
    GROUPS_AND_PRODUCERS = 1
    ADMINISTRATION = 2


@dataclass(slots=True)
class ReplyCache:
    """The latest encoded replies, the oldest first, and how many have been remembered since the cluster began."""

    replies: dict[RequestId, bytes] = field(default_factory=dict)
    counted: int = 0


def _no_replies() -> tuple[ReplyCache, ...]:
    return tuple(ReplyCache() for _ in Cache)


@dataclass(slots=True, kw_only=True)
class ClusterState:
    feature_level: int = 1  # of the cluster: what it introduced may be in the log. Never lowered
    cluster_id: str = ""  # "" before InitCluster
    birth: BirthId = NO_BIRTH  # the same in the directory of every node of the cluster (rule 18)
    topics_max: int = 0
    partitions_max: int = 0
    groups_max: int = 0
    replies_max: int = 0
    config: dict[str, str] = field(default_factory=dict)  # the settings that are set: see `cluster_config`
    nodes: dict[NodeId, NodeState] = field(default_factory=dict)
    topics: dict[str, TopicState] = field(default_factory=dict)
    topic_names: dict[TopicId, str] = field(default_factory=dict)
    producers: dict[ProducerId, ProducerEpoch] = field(default_factory=dict)
    next_producer_id: ProducerId = ProducerId(0)
    groups: dict[str, GroupState] = field(default_factory=dict)
    coordinators: list[CoordinatorSlot] = field(default_factory=lambda: [_NO_COORDINATOR] * COORDINATOR_SLOTS)
    expiry_clock_ms: int = 0  # the current time for expiry; 0 before the first AdvanceClock
    # The highest generation of any deleted group. New groups continue from it, so that a command for a former group
    # never fits a new group of the same name.
    generation_floor: Generation = _NO_GENERATION
    offset_commits: int = 0  # how many commits and stagings of offsets there have been: see `CommittedOffset`
    changes_floor: int = 0  # above the changes of every deleted group; new groups continue from it, for the same reason
    member_bytes: int = 0  # cost of all groups' members: derived, kept to avoid adding it up
    transactions: dict[str, TransactionState] = field(default_factory=dict)  # by transactional id
    transaction_changes_floor: int = 0  # as changes_floor, of transactional ids
    # Derived from `transactions`: the id of each producer, the producers whose markers a partition lacks, the items.
    transactional_ids: dict[ProducerId, str] = field(default_factory=dict)
    endings: dict[PartitionId, set[ProducerId]] = field(default_factory=dict)
    transaction_items: int = 0
    apps: dict[str, AppState] = field(default_factory=dict)  # by the name that their batches give
    users: Mapping[str, UserState] = field(default_factory=dict)  # another object after each change
    acls: tuple[Acl, ...] = ()  # sorted, and another object after each change
    quotas: tuple[Quota, ...] = ()  # as the rules
    decoy_secret: bytes = field(default=b"", repr=False)  # of the salts that unknown users seem to have
    replies: tuple[ReplyCache, ...] = field(default_factory=_no_replies)  # by `Cache`
    assigned: OrderedDict[RequestId, Assigned] = field(default_factory=OrderedDict)  # the latest ones, oldest first
    # Per partition, the end of the newest assignment that has been dropped from `assigned`.
    assigned_before: dict[PartitionId, Offset] = field(default_factory=dict)

    def partition(self, pid: PartitionId) -> PartitionState | None:
        """The partition with this id, or None once its topic is deleted."""
        name = self.topic_names.get(TopicId(pid[:16]))
        if name is None:
            return None
        index = int.from_bytes(pid[16:], "big")
        partitions = self.topics[name].partitions
        return partitions[index] if index < len(partitions) else None

    def transaction_of(self, producer_id: ProducerId) -> TransactionState | None:
        """The transactional id of a producer, or None if it has none, or no longer."""
        name = self.transactional_ids.get(producer_id)
        return self.transactions[name] if name is not None else None

    def partition_of(self, topic: str, index: int) -> PartitionState | None:
        """The partition of a topic, or None if either does not exist in this state."""
        found = self.topics.get(topic)
        return found.partitions[index] if found is not None and 0 <= index < len(found.partitions) else None


# Settings, nodes, topics and all other collections follow (see `snapshot`).
CLUSTER: Final = Record(
    ClusterState,
    (
        ("cluster_id", TEXT),
        ("birth", Fixed(BIRTH_ID_BYTES)),
        ("topics_max", INT64),
        ("partitions_max", INT64),
        ("groups_max", INT64),
        ("replies_max", INT64),
        ("next_producer_id", INT64),
        ("expiry_clock_ms", INT64),
        ("generation_floor", INT32),
        ("offset_commits", INT64),
        ("changes_floor", INT64),
        ("transaction_changes_floor", INT64),
        ("decoy_secret", ANY_ID),
    ),
)
