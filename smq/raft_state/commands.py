"""The commands of the replicated state machine and their replies.

Owns their shapes only; `codec` gives them bytes, `machine` their meaning. Time and ids arrive inside the
command, read where it was proposed. Nothing here may do I/O or read a clock.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import (
    NO_REQUEST,
    DiskId,
    Epoch,
    Generation,
    Incarnation,
    NodeId,
    Offset,
    PartitionId,
    ProducerEpoch,
    ProducerId,
    RequestId,
    TopicId,
    TsNs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitCluster:
    """The first command of a cluster's life. Rejected with ALREADY_INITIALIZED ever after."""

    cluster_id: str
    topics_max: int
    partitions_max: int
    groups_max: int
    replies_max: int  # size of the request-id reply cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode:
    """A process of a node has started; a higher incarnation replaces and unfences the node."""

    node: NodeId
    incarnation: Incarnation
    disk: DiskId  # of the data directory it runs on; only this one's votes count from here on (rule 18)
    grpc_address: str
    http_address: str
    kafka_address: str  # "" where there is no listener
    rack: str = ""  # where the node stands; "" where nobody has said


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceNode:
    """The Raft leader has not heard of this incarnation for the session timeout."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfenceNode:
    """The Raft leader hears this incarnation again."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNodeDrained:
    """An operator's wish, which outlives the node's process: lead nothing here, and place nothing new."""

    request_id: RequestId = NO_REQUEST
    node: NodeId
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopic:
    """Creates a topic; replicas are placed by the machine, evenly, on nodes that are neither fenced nor drained first.

    With storage=external its replication factor is 0: Raft holds all that there is of it, on every node."""

    request_id: RequestId = NO_REQUEST
    name: str
    topic_id: TopicId
    partition_count: int
    replication_factor: int
    config: tuple[tuple[str, str], ...] = ()  # sorted by key
    start_offset: Offset = Offset(0)  # log start of every partition (migration; tests of large offsets)
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopic:
    request_id: RequestId = NO_REQUEST
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitions:
    request_id: RequestId = NO_REQUEST
    name: str
    partition_count: int  # the new total


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterTopicConfig:
    """Sets the keys of `set_`, removes those of `unset` (back to the default)."""

    request_id: RequestId = NO_REQUEST
    name: str
    set_: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectLeader:
    """Rule 11. Rejected unless `expected_epoch` is current, the candidate is this incarnation, unfenced and a
    replica, and its durable verified end reaches the hwm at apply. Epoch + 1 starts at the hwm."""

    partition: PartitionId
    expected_epoch: Epoch
    candidate: NodeId
    incarnation: Incarnation
    verified_end: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class HwmAdvance:
    partition: PartitionId
    epoch: Epoch
    hwm: Offset
    next_offset: Offset
    ts_ns: TsNs  # of the last batch below hwm


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceHwms:
    """Rule 9, for all partitions due on one node. An item of another epoch changes nothing."""

    items: tuple[HwmAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceLogStart:
    """Rule 14: DeleteRecords and retention. `offset` <= hwm, else OFFSET_OUT_OF_RANGE; never goes back."""

    request_id: RequestId = NO_REQUEST
    partition: PartitionId
    offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateProducerId:
    """A fresh producer id, epoch 0; or, with `producer_id` >= 0, its next epoch (PRODUCER_FENCED if
    `producer_epoch` is not its current one)."""

    request_id: RequestId = NO_REQUEST
    producer_id: ProducerId = ProducerId(-1)
    producer_epoch: ProducerEpoch = ProducerEpoch(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommit:
    partition: PartitionId
    offset: Offset  # the next offset to read
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets:
    """All items or none. In the name of nobody: refused while the group has members."""

    request_id: RequestId = NO_REQUEST
    group: str
    items: tuple[OffsetCommit, ...]
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`count` offsets of one partition of external storage, for one caller. `not_before` is a next_offset of the
    partition that was true before the request was first made: what an earlier attempt got lies at or above it."""

    request_id: RequestId
    partition: PartitionId
    count: int
    not_before: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignOffsets:
    """Of all callers that one node had waiting. Each item is answered for itself, and a repeated one as at first."""

    items: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAdvance:
    partition: PartitionId
    offset: Offset  # everything below it can be read, wherever it is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceExternalHwms:
    """The high water marks of external storage, of all callers that one node had waiting. Never back."""

    items: tuple[ExternalAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitMemberOffsets:
    """As CommitCoordinatedOffsets, without the coordinator's epoch. Logs hold it; nobody proposes it any more, since a
    former coordinator could bring an old commit behind a newer one."""

    request_id: RequestId = NO_REQUEST
    group: str
    generation: Generation
    member_id: str
    instance_id: str = ""  # "" where the member is not static
    items: tuple[OffsetCommit, ...]
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCoordinatedOffsets:
    """A commit in the name of a member: fenced by the coordinator that was asked, the group's generation, the member's
    id and, for a static member, its instance id. All items or none."""

    request_id: RequestId = NO_REQUEST
    group: str
    coordinator_epoch: Epoch
    generation: Generation
    member_id: str
    instance_id: str = ""  # "" where the member is not static
    items: tuple[OffsetCommit, ...]
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """What a member said when it joined. The protocols are in the order of its preference, each with its metadata."""

    member_id: str
    instance_id: str = ""  # "" where the member is not static
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGeneration:
    """The coordinator's collection of members is over: they are the next generation, which waits for its leader's
    assignment. Makes the group where there is none (expected generation 0)."""

    request_id: RequestId = NO_REQUEST
    group: str
    coordinator_epoch: Epoch
    expected_generation: Generation
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignMembers:
    """The leader's assignment of one generation, once. Members that are not named get an empty one."""

    request_id: RequestId = NO_REQUEST
    group: str
    coordinator_epoch: Epoch
    generation: Generation
    assignments: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveMembers:
    """These members have left, or were not heard of. Those that stay must rebalance; the last one gone empties the
    group, in a generation of its own."""

    request_id: RequestId = NO_REQUEST
    group: str
    coordinator_epoch: Epoch
    generation: Generation
    member_ids: tuple[str, ...]
    removed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceMember:
    """A static member is back under a new member id: it takes the old one's place and assignment; the old id is
    fenced."""

    request_id: RequestId = NO_REQUEST
    group: str
    coordinator_epoch: Epoch
    old_member_id: str
    member: GroupMember


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroup:
    """The group and its offsets; refused while it has members."""

    request_id: RequestId = NO_REQUEST
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOffsets:
    """What a group has committed for these partitions. Whoever proposes it has looked at what the members of this
    generation subscribe to."""

    request_id: RequestId = NO_REQUEST
    group: str
    generation: Generation
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireOffsets:
    """Forgets what groups committed that have had no members for the retention, as of this time."""

    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOffsetsRetention:
    """For the whole cluster. 0 keeps committed offsets for ever."""

    request_id: RequestId = NO_REQUEST
    retention_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """Changes nothing: whoever sees it applied has seen everything committed before it was proposed."""


Command: TypeAlias = (
    InitCluster
    | RegisterNode
    | FenceNode
    | UnfenceNode
    | CreateTopic
    | DeleteTopic
    | AddPartitions
    | AlterTopicConfig
    | ElectLeader
    | AdvanceHwms
    | AdvanceLogStart
    | AllocateProducerId
    | CommitOffsets
    | CommitMemberOffsets
    | CommitCoordinatedOffsets
    | FormGeneration
    | AssignMembers
    | RemoveMembers
    | ReplaceMember
    | DeleteGroup
    | DeleteOffsets
    | ExpireOffsets
    | SetOffsetsRetention
    | Barrier
    | SetNodeDrained
    | AssignOffsets
    | AdvanceExternalHwms
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The command took effect and has nothing to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The command changed nothing. `lo`/`hi` are -1 where they do not apply."""

    code: ErrorCode
    message: str
    lo: Offset = Offset(-1)
    hi: Offset = Offset(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCreated:
    topic_id: TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElected:
    epoch: Epoch
    start: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class HwmsAdvanced:
    accepted: tuple[bool, ...]  # one an item; False where the epoch has moved on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdAllocated:
    producer_id: ProducerId
    producer_epoch: ProducerEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsAssigned:
    """[base, last] are the caller's alone, and nobody else's ever."""

    base: Offset
    last: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalHwm:
    hwm: Offset  # the one in force, which may be above what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One reply an item of a command that carries the wishes of several callers."""

    items: tuple[OffsetsAssigned | ExternalHwm | Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed:
    generation: Generation


Reply: TypeAlias = (
    Done
    | Rejected
    | TopicCreated
    | LeaderElected
    | HwmsAdvanced
    | ProducerIdAllocated
    | OffsetsAssigned
    | ExternalHwm
    | Results
    | GenerationFormed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one apply did: the reply, and which partitions' state may have changed (created and deleted too)."""

    reply: Reply
    touched: tuple[PartitionId, ...] = field(default=())
