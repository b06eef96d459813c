"""The commands of the replicated state machine and their replies.

Owns their shapes only; `codec` gives them bytes, `machine` their meaning. Time and ids arrive inside the
command, read where it was proposed. Nothing here may do I/O or read a clock.
"""

from dataclasses import dataclass, field
from typing import Final

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

UNKNOWN_AGE: Final = -1  # a request that is never refused for its age; the node's proposer always names one


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One change of the replicated state, as it stands in the Raft log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Command):
    """A command of one caller. A repetition under the same id gets the first reply again (see `machine`).

    `replies_before` bounds its age: no more than `replies_counted` was when a node first accepted the request."""

    request_id: RequestId = NO_REQUEST
    replies_before: int = UNKNOWN_AGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinated(Request):
    """A command of a group's coordinator, fenced by that coordinator's epoch."""

    group: str
    coordinator_epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class InitCluster(Command):
    """The first command of a cluster's life. Rejected with ALREADY_INITIALIZED ever after."""

    cluster_id: str
    topics_max: int
    partitions_max: int
    groups_max: int
    replies_max: int  # size of the request-id reply cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(Command):
    """A process of a node has started; a higher incarnation replaces and unfences the node."""

    node: NodeId
    incarnation: Incarnation
    disk: DiskId  # of the data directory it runs on; only this one's votes count from here on (rule 18)
    grpc_address: str
    http_address: str
    kafka_address: str  # "" where there is no listener
    rack: str = ""  # where the node stands; "" where nobody has said


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceNode(Command):
    """The Raft leader has not heard of this incarnation for the session timeout."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfenceNode(Command):
    """The Raft leader hears this incarnation again."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNodeDrained(Request):
    """An operator's wish, which outlives the node's process: lead nothing here, and place nothing new."""

    node: NodeId
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopic(Request):
    """Creates a topic; replicas are placed by the machine, evenly, on nodes that are neither fenced nor drained first.

    With storage=external its replication factor is 0: Raft holds all that there is of it, on every node."""

    name: str
    topic_id: TopicId
    partition_count: int
    replication_factor: int
    config: tuple[tuple[str, str], ...] = ()  # sorted by key
    start_offset: Offset = Offset(0)  # log start of every partition (migration; tests of large offsets)
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopic(Request):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitions(Request):
    name: str
    partition_count: int  # the new total


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterTopicConfig(Request):
    """Sets the keys of `set_`, removes those of `unset` (back to the default)."""

    name: str
    set_: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectLeader(Command):
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
class AdvanceHwms(Command):
    """Rule 9, for all partitions due on one node. An item of another epoch changes nothing."""

    items: tuple[HwmAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceLogStart(Request):
    """Rule 14: DeleteRecords and retention. `offset` <= hwm, else OFFSET_OUT_OF_RANGE; never goes back."""

    partition: PartitionId
    offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateProducerId(Request):
    """A fresh producer id, epoch 0; or, with `producer_id` >= 0, its next epoch (PRODUCER_FENCED if
    `producer_epoch` is not its current one)."""

    producer_id: ProducerId = ProducerId(-1)
    producer_epoch: ProducerEpoch = ProducerEpoch(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommit:
    partition: PartitionId
    offset: Offset  # the next offset to read
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets(Request):
    """All items or none. In the name of nobody: refused while the group has members."""

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
class AssignOffsets(Command):
    """Of all callers that one node had waiting. Each item is answered for itself, and a repeated one as at first."""

    items: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAdvance:
    partition: PartitionId
    offset: Offset  # everything below it can be read, wherever it is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceExternalHwms(Command):
    """The high water marks of external storage, of all callers that one node had waiting. Never back."""

    items: tuple[ExternalAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCoordinatedOffsets(Coordinated):
    """A commit in the name of a member: fenced by the coordinator that was asked, the group's generation, the member's
    id and, for a static member, its instance id. All items or none."""

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
class FormGeneration(Coordinated):
    """The coordinator's collection of members is over: they are the next generation, which waits for its leader's
    assignment. Makes the group where there is none (expected generation 0)."""

    expected_generation: Generation
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignMembers(Coordinated):
    """The leader's assignment of one generation, once. Members that are not named get an empty one."""

    generation: Generation
    assignments: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveMembers(Coordinated):
    """These members have left, or were not heard of. Those that stay must rebalance; the last one gone empties the
    group, in a generation of its own."""

    generation: Generation
    member_ids: tuple[str, ...]
    removed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceMember(Coordinated):
    """A static member is back under a new member id: it takes the old one's place and assignment; the old id is
    fenced."""

    old_member_id: str
    member: GroupMember


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroup(Request):
    """The group and its offsets; refused while it has members."""

    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOffsets(Request):
    """What a group has committed for these partitions. Whoever proposes it has looked at what the members of this
    generation subscribe to."""

    group: str
    generation: Generation
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireOffsets(Command):
    """Forgets what groups committed that have had no members for the retention, as of this time."""

    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOffsetsRetention(Request):
    """For the whole cluster. 0 keeps committed offsets for ever."""

    retention_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier(Command):
    """Changes nothing: whoever sees it applied has seen everything committed before it was proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one command came to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Reply):
    """The command took effect and has nothing to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(Reply):
    """The command changed nothing. `lo`/`hi` are -1 where they do not apply."""

    code: ErrorCode
    message: str
    lo: Offset = Offset(-1)
    hi: Offset = Offset(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicCreated(Reply):
    topic_id: TopicId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElected(Reply):
    epoch: Epoch
    start: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class HwmsAdvanced(Reply):
    accepted: tuple[bool, ...]  # one an item; False where the epoch has moved on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdAllocated(Reply):
    producer_id: ProducerId
    producer_epoch: ProducerEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsAssigned(Reply):
    """[base, last] are the caller's alone, and nobody else's ever."""

    base: Offset
    last: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalHwm(Reply):
    hwm: Offset  # the one in force, which may be above what was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Reply):
    """One reply an item of a command that carries the wishes of several callers."""

    items: tuple[OffsetsAssigned | ExternalHwm | Rejected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed(Reply):
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one apply did: the reply, and which partitions' state may have changed (created and deleted too)."""

    reply: Reply
    touched: tuple[PartitionId, ...] = field(default=())
