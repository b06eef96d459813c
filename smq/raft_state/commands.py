"""The commands of the replicated state machine.

Owns their shapes only; `command_table` lists their bytes and their handlers. Time and ids are inside the command; the
proposing node reads them. It must never do I/O or read a clock. Any module on the node may import it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from smq.raft_state.ids import (
    NO_REQUEST,
    BirthId,
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

UNKNOWN_AGE: Final = -1  # never refused for its age; the node's proposer always sets one
UNSEEN: Final = -1  # refused; the coordinator sets the number when it proposes the command
NO_LEADER_EPOCH: Final = -1  # the reader has not named one
NO_GENERATION: Final = Generation(-1)  # of a commit that no member makes

# Of several topics: the topics' ids ascend, and so do the indexes of each, of which there is at least one.
Partitions: TypeAlias = tuple[tuple[TopicId, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One change of the replicated state, as it stands in the Raft log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Command):
    """A command of one caller. A repetition under the same id gets the first reply again (see `machine`).

    `is_from_node` if the caller named no id, so that the proposing node chose one. `replies_before` bounds its age: no
    more than its cache had counted when a node first accepted the request (see `state.Cache`)."""

    request_id: RequestId = NO_REQUEST
    is_from_node: bool = False
    replies_before: int = UNKNOWN_AGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinated(Request, ABC):
    """A change of a group or of a transactional id by its coordinator. It is refused unless the coordinator's epoch is
    current and its subject has changed as often as the coordinator had seen when it proposed the command (see
    `fencing`)."""

    coordinator_epoch: Epoch
    changes_seen: int = UNSEEN

    @property
    @abstractmethod
    def subject(self) -> str:
        """The name that decides the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange(Coordinated):
    group: str

    @property
    def subject(self) -> str:
        return self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionChange(Coordinated):
    transactional_id: str

    @property
    def subject(self) -> str:
        return self.transactional_id


@dataclass(frozen=True, slots=True, kw_only=True)
class InitCluster(Command):
    """The first command of a cluster's life. A later one is rejected with ALREADY_INITIALIZED."""

    cluster_id: str
    birth: BirthId
    topics_max: int
    partitions_max: int
    groups_max: int
    replies_max: int  # size of each cache of replies by request id


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A further way in to a node: clients that come through it get the addresses of the listener of this name."""

    name: str
    grpc_address: str  # "" if it has none, as the next
    kafka_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterNode(Command):
    """A process of a node has started; a higher incarnation replaces and unfences the node."""

    node: NodeId
    incarnation: Incarnation
    disk: DiskId  # of its data directory; from here on, only this disk's votes count (rule 18)
    grpc_address: str
    http_address: str
    kafka_address: str  # "" if there is no listener
    rack: str = ""  # the node's failure zone, by the name that Kafka clients use; "" if none is configured
    feature_level: int = 1  # the highest that this process knows
    listeners: tuple[Listener, ...] = ()  # by name, beside the addresses above


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseFeatureLevel(Command):
    """Every node knows this level: what it introduced may be used from here on."""

    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceNode(Command):
    """The Raft leader has not heard from this incarnation for the session timeout."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfenceNode(Command):
    """The Raft leader hears from this incarnation again."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SetNodeDrained(Request):
    """An operator's request, which outlives the node's process: lead nothing here, and place nothing new here."""

    node: NodeId
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterClusterConfig(Request):
    """Sets the keys of `set_` for the whole cluster, and resets those of `unset` to their defaults."""

    set_: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScramCredential:
    """What a user's password is checked by (RFC 5802). It is not the password, which no node ever learns; but it lets
    its holder guess, so no text shows it."""

    mechanism: int  # Kafka's number: see `users`
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterUser(Request):
    """Sets credentials of a user and removes others, all or none. A user without any is gone."""

    name: str
    set_: tuple[ScramCredential, ...] = ()
    unset: tuple[int, ...] = ()  # mechanisms
    may_create: bool = True
    may_replace: bool = True  # anything of a user that is there
    decoy_secret: bytes = field(default=b"", repr=False)  # random; the cluster keeps the first that it gets
    administrators: tuple[str, ...] = ()  # as of DeleteUser


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteUser(Request):
    """Refused for the last of the `administrators` that is a user: the super users of the node that proposes it."""

    name: str
    administrators: tuple[str, ...] = ()


class Acl(NamedTuple):
    """A rule about who may do what to which resources, under Kafka's numbers: see `handlers.acls`. "*" stands for every
    user and every host, and for every name of a literal pattern."""

    resource: int
    pattern: int  # literal or prefixed
    name: str
    principal: str  # User:NAME
    host: str
    operation: int
    permission: int  # deny or allow


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterAcls(Request):
    """Adds rules and removes others, all or none. What is there already, or gone already, is no error."""

    add: tuple[Acl, ...] = ()
    remove: tuple[Acl, ...] = ()


class Quota(NamedTuple):
    """What clients may use of a node, in Kafka's words: see `handlers.quotas`."""

    entity: tuple[tuple[str, str], ...]  # by kind, ascending: the name, or "" for each that has no quota of its own
    key: str
    thousandths: int  # of the unit of the key


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterQuotas(Request):
    """Sets quotas, all or none. One of 0 is removed; what is gone already is no error."""

    quotas: tuple[Quota, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopic(Request):
    """Creates a topic. Without `assignments` the machine places its replicas evenly, on nodes that are neither fenced
    nor drained if it can. An assignment names the nodes of one partition; the first is the preferred leader.

    With storage=external its replication factor is 0: Raft holds all of its state, on every node."""

    name: str
    topic_id: TopicId
    partition_count: int
    replication_factor: int
    config: tuple[tuple[str, str], ...] = ()  # sorted by key
    assignments: tuple[tuple[NodeId, ...], ...] = ()
    start_offset: Offset = Offset(0)  # log start of every partition (migration; tests of large offsets)
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopic(Request):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPartitions(Request):
    name: str
    partition_count: int  # the new total
    assignments: tuple[tuple[NodeId, ...], ...] = ()  # of the new partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterTopicConfig(Request):
    """Sets the keys of `set_`, and resets those of `unset` to their defaults."""

    name: str
    set_: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a replica reported when it had stopped to take part in an epoch: where its durable, verified log ended."""

    node: NodeId
    incarnation: Incarnation
    end: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectLeader(Command):
    """Rule 11. Rejected unless `expected_epoch` is current, the candidate is this incarnation, unfenced and a replica,
    and the log that it offers, up to `end`, holds everything that may be committed. The `seals` prove that, or the
    epoch's own leader says so (`by_leader`)."""

    partition: PartitionId
    expected_epoch: Epoch
    candidate: NodeId
    incarnation: Incarnation
    end: Offset
    seals: tuple[Seal, ...] = ()
    by_leader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteReplica:
    """The leader of this epoch knows that the replica's log has caught up, in the process of this incarnation."""

    partition: PartitionId
    epoch: Epoch
    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteReplicas(Command):
    """Rule 22, for the partitions of one leader. An item that is no longer current changes nothing."""

    items: tuple[CompleteReplica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkIncomplete(Command):
    """Rule 23: this process found that its logs of these partitions may have held more than they do."""

    node: NodeId
    incarnation: Incarnation
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HwmAdvance:
    partition: PartitionId
    epoch: Epoch
    hwm: Offset
    next_offset: Offset
    ts_ns: TsNs  # of the last record below hwm


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceHwms(Command):
    """Rule 9, for all partitions of one node that are due. An item of another epoch changes nothing."""

    items: tuple[HwmAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceLogStart(Request):
    """Rule 14: DeleteRecords. OFFSET_OUT_OF_RANGE if `offset` > hwm; the log start never goes back."""

    partition: PartitionId
    offset: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedStart:
    """Where a partition's log starts without what its topic does not retain, as the leader of this epoch has found.
    `limits` are those that it has judged by: milliseconds, bytes and records, -1 for each that there is not."""

    partition: PartitionId
    epoch: Epoch
    offset: Offset
    limits: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRetention(Command):
    """Rule 14, for all partitions of one leader from which something goes. An item of another epoch, or of a topic that
    has other limits by now, changes nothing."""

    items: tuple[RetainedStart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSegment(Command):
    """The leader has rewritten [start, end): the replicas end with the bytes of this digest there. Refused unless the
    epoch is current, and the partition has been compacted as often as the leader had seen. A first segment is made with
    the present log start in view: otherwise logs may have been trimmed to another border. `is_reset`: the bytes of the
    digest before are nowhere, so what had been compacted from here on counts as dirty again."""

    partition: PartitionId
    epoch: Epoch
    compactions_seen: int
    log_start_seen: Offset
    start: Offset
    end: Offset
    digest: bytes
    tombstones_ms: int
    is_reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateProducerId(Request):
    """A fresh producer id, epoch 0; or, with `producer_id` >= 0, its next epoch (PRODUCER_FENCED if
    `producer_epoch` is not its current one)."""

    producer_id: ProducerId = ProducerId(-1)
    producer_epoch: ProducerEpoch = ProducerEpoch(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommit:
    partition: PartitionId
    offset: Offset  # the next offset to read; a negative one is kept as it is, and is no position
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH  # of the last record before `offset`, as the reader knows it


class Assignment(NamedTuple):
    """`count` offsets of one partition of external storage, for one caller. `not_before` is a next_offset that the
    partition had before the first attempt: offsets that an earlier attempt got are at or above it.

    A tuple, as `Assigned` is: every node makes both for every caller, and a frozen dataclass takes three times as
    long."""

    request_id: RequestId
    partition: PartitionId
    count: int  # type: ignore[assignment] # of offsets; the tuple's own is not used
    not_before: Offset


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignOffsets(Command):
    """For all callers that waited at one node. Each item has its own answer, and a repeated item its first answer."""

    items: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAdvance:
    partition: PartitionId
    offset: Offset  # everything below it is readable, wherever it is stored


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceExternalHwms(Command):
    """High water marks of external storage, for all callers that waited at one node. They never go back."""

    items: tuple[ExternalAdvance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets(GroupChange):
    """All items or none. Of a member: the group's generation, the member's id and, for a static member, its instance id
    must be current. Of no member: refused while the group has members."""

    generation: Generation = NO_GENERATION
    member_id: str = ""
    instance_id: str = ""  # "" if the member is not static
    items: tuple[OffsetCommit, ...]
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """What a member sent when it joined. The protocols are in its order of preference, each with its metadata."""

    member_id: str
    instance_id: str = ""  # "" if the member is not static
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """What a member of a consumer group (KIP-848) wants to read. Both lists ascend."""

    topics: tuple[str, ...] = ()  # by their names
    pattern: str = ""  # a regular expression; "" for none
    matched: tuple[str, ...] = ()  # the topics that it matched when the coordinator last looked
    assignor: str = ""  # that the member asks for; "" for any
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerUpdate:
    """A member that joins a consumer group, or has changed what it said. `replaces` is the id of the static member
    whose place it takes. Its `protocols` are empty: the group's settings say how long its session lasts."""

    member: GroupMember
    subscription: Subscription
    replaces: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What a member has said in a heartbeat: its epoch, and which partitions it still has, unless it does not say.
    `is_away`: it is static, has given up everything, and will be back."""

    member_id: str
    epoch: int
    owned: Partitions = ()
    says_owned: bool = False
    is_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConsumers(GroupChange):
    """The group's next epoch, unless these members only take the place of former ones. Creates the group if there is
    none. Refused while it has members of the classic protocol."""

    updates: tuple[ConsumerUpdate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignConsumers(GroupChange):
    """The target assignment of the group's epoch, of which the members that it does not name keep theirs. If the epoch
    has one already, the topics have changed: then it is the next epoch's."""

    generation: Generation
    assignor: str
    targets: tuple[tuple[str, Partitions], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileConsumers(GroupChange):
    """Moves each of these members as far towards its target as what it has said allows."""

    items: tuple[Acknowledgement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGeneration(GroupChange):
    """The coordinator has collected the members of the next generation, which waits for its leader's assignment.
    Creates the group if there is none (expected generation 0)."""

    expected_generation: Generation
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignMembers(GroupChange):
    """The leader's assignment of one generation, once. Members that it does not name get an empty assignment."""

    generation: Generation
    assignments: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveMembers(GroupChange):
    """These members have left or timed out. The remaining members must rebalance. If none remains, the group is empty,
    in a new generation."""

    generation: Generation
    member_ids: tuple[str, ...]
    removed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceMember(GroupChange):
    """A static member has returned under a new member id. It takes the place and the assignment of the old id, which is
    fenced."""

    old_member_id: str
    member: GroupMember


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroup(GroupChange):
    """Deletes the group and its offsets; refused while it has members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOffsets(GroupChange):
    """Deletes a group's committed offsets of these partitions. The proposer has checked the subscriptions of the
    members of this generation."""

    generation: Generation
    partitions: tuple[PartitionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InitTransactions(TransactionChange):
    """A producer has started under this transactional id: it gets the id's next producer epoch, and all before it are
    fenced. Refused while a transaction is open or its markers are being written.

    A producer that is known under the id may name its producer id and epoch, to go on after an error. It is fenced if
    another one has started since; a repetition gets the same epoch again."""

    timeout_ms: int  # an open transaction is aborted after this time
    producer_id: ProducerId = ProducerId(-1)
    producer_epoch: ProducerEpoch = ProducerEpoch(-1)
    is_temporary: bool = False  # the id is forgotten once its transaction has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class AddToTransaction(TransactionChange):
    """The producer is about to write to these partitions, or to stage offsets of these groups. The first one begins the
    transaction. Refused while the markers of the one before are being written."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    partitions: tuple[PartitionId, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTransaction(TransactionChange):
    """Decides a transaction over all its partitions and all offsets staged in it: this entry is the decision. A
    repetition of the same decision changes nothing. With `is_fencing`, which only an abort may have, the producer's
    epoch grows: it can do nothing more until it has asked for the next one. With `is_replacing` as well, another
    producer takes its place: it cannot even do that.

    With `is_bumping`, Kafka's second protocol, the producer's epoch grows with the decision, and the reply is what it
    goes on with: the next epoch, or a fresh id after the last one. So nothing that it sent before counts any more. An
    abort may then come without a transaction: a batch that would begin one may be on its way."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    is_commit: bool
    is_fencing: bool = False
    is_replacing: bool = False
    is_bumping: bool = False


class Joining(NamedTuple):
    """A producer has sent a batch of a transaction to this partition, and has not said before that it would."""

    partition: PartitionId
    producer_id: ProducerId
    producer_epoch: ProducerEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTransactions(Command):
    """Kafka's second protocol: the leaders of partitions add them to the transactions of their producers, before they
    append. The first partition begins a transaction. No coordinator's fence is needed: an epoch has one transaction,
    because the end of each begins the next epoch. In an epoch that has outlived a transaction every item is refused.
    The reply has one result per item."""

    items: tuple[Joining, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOffsets(GroupChange):
    """Offsets that are committed with the transaction, or not at all. Its group has been added to the transaction; or
    this does it (`is_joining`: Kafka's second protocol, under the conditions of JoinTransactions). The group's
    coordinator proposes it: a member's generation and ids must be current, as in CommitOffsets.
    `transaction_changes_seen` is how often the transactional id had changed when the request came."""

    transactional_id: str
    transaction_changes_seen: int
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    generation: Generation = NO_GENERATION
    member_id: str = ""
    instance_id: str = ""  # "" if the member is not static
    items: tuple[OffsetCommit, ...]
    committed_ms: int
    is_joining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTransaction:
    """The first transaction of this epoch of the producer, which is open."""

    transactional_id: str
    producer_id: ProducerId
    producer_epoch: ProducerEpoch


class Fingerprint(NamedTuple):
    """What a batch has written: the same for the same rows, in whatever order and by whichever tasks."""

    rows: int = -1  # -1: the batch has no fingerprint, and is compared with none
    digest: bytes = b""

    @property
    def is_known(self) -> bool:
        return self.rows >= 0


NO_FINGERPRINT: Final = Fingerprint()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch(Request):
    """Commits all of these transactions by this one entry, unless the app has committed this batch or a later one: then
    it aborts them. `app` "" is no app: its batches are not counted. A repetition changes nothing: the app's last batch
    says so, or without an app the request id. With a `fingerprint`, only a batch of the same rows is a repetition, and
    another one is refused."""

    app: str
    batch_id: int
    transactions: tuple[StagedTransaction, ...]
    fingerprint: Fingerprint = NO_FINGERPRINT


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMarker:
    """The leader of this epoch knows that the partition's log says how the transaction has ended, and that this is
    committed. `changes` of the transactional id, as decided, name the transaction."""

    partition: PartitionId
    epoch: Epoch
    producer_id: ProducerId
    changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteTransactions(Command):
    """For the partitions of one leader. An item that is no longer current changes nothing."""

    items: tuple[WrittenMarker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceClock(Command):
    """Moves the clock by which committed offsets, producers and transactions expire, and lets expire what is due.
    Groups that have been without offsets and members since the step before this one go, too.

    `seen_ms` is the clock as the proposer has applied it, `elapsed_ms` the time since it changed there, by the
    proposer's monotonic clock, and `now_ms` the proposer's wall clock, which may be wrong."""

    seen_ms: int
    elapsed_ms: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier(Command):
    """Changes nothing: a node that applies it has applied everything committed before the proposal."""
