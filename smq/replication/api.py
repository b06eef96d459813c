"""What a node offers to the services above it: request and result shapes, and the NodeApi protocol.

The only way of the coordinator (gRPC, Kafka, CLI) and of the simulation's clients into the replication layer. A `done`
is called exactly once, on the node's loop, with the result or an SmqError. It may be called before the method returns
only for errors found immediately. Timeouts are in milliseconds.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from smq.raft_state.commands import Command
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import (
    NO_BIRTH,
    BirthId,
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    PartitionIndex,
    ProducerEpoch,
    ProducerId,
    TopicId,
    TsNs,
)
from smq.raft_state.ids import (
    Sequence as ProducerSequence,
)
from smq.raft_state.replies import OffsetsAssigned, Reply
from smq.raft_state.state import ClusterState, CommittedOffset, PartitionState
from smq.replication.monitoring.anomalies import Anomaly
from smq.replication.monitoring.measures import StageSink, Traffic
from smq.replication.ports import Buffer, Quorum

T = TypeVar("T")
DoneFn: TypeAlias = Callable[[T | SmqError], None]


class Acks(enum.IntEnum):
    NONE = 0  # answered (base and last -1) before it is appended; its failure is not reported
    LEADER = 1  # answered after the leader's own durable append; may be lost with the leader
    ALL = -1  # answered when a majority of replicas holds it durably and Raft has committed the HWM


@dataclass(slots=True)  # read-only; not frozen, for speed, as BatchHeader
class ProduceRequest:
    """One RecordBatch v2 for a partition. The caller makes it, and every hop to the replica takes it as it is."""

    topic: str | TopicId
    partition: int
    batch: Buffer
    acks: Acks
    timeout_ms: int
    done: "DoneFn[Produced]"
    transactional_id: str | None = None  # a transactional batch must be of its producer
    is_joining: bool = False  # Kafka's second protocol of transactions: the partition joins the batch's transaction
    names_bad_records: bool = False  # a refusal says which they are
    is_mirrored: bool = False  # of another cluster's log: it goes to its own offsets, in a topic that is mirrored
    trace: StageSink | None = None  # is given the times of the stages; of disk and majority perhaps after the answer


@dataclass(slots=True)  # not frozen, for speed, as BatchHeader
class Produced:
    base_offset: Offset
    last_offset: Offset
    ts_ns: TsNs  # of the first record; each further one's is one more
    epoch: Epoch
    duplicate: bool  # the batch was already there (idempotent retry)
    is_append_time: bool = False  # the records' timestamp is the leader's, `ts_ns` in milliseconds


class StoredBatch(NamedTuple):
    """One RecordBatch v2 as it lies in the log: `data` is byte for byte what the producer sent, with base
    offset and epoch patched in its header."""

    base_offset: Offset
    last_offset: Offset
    ts_ns: TsNs  # of the record at `base_offset`; at the offset that lies n beyond, it is n more
    data: memoryview


class Aborted(NamedTuple):
    """An aborted transaction: readers leave out its producer's transactional records from `first` to `marker`."""

    marker: Offset  # of the control batch
    first: Offset  # of the transaction's first batch
    producer_id: ProducerId


@dataclass(frozen=True, slots=True)
class Fetched:
    """`batches` is empty if nothing came within max_wait. The first batch may begin below the requested offset (batches
    are not cut) and comes whole, whatever max_bytes is."""

    batches: list[StoredBatch]
    log_start: Offset
    hwm: Offset
    lso: Offset
    readable_end: Offset  # the end of what this replica can serve now
    aborted: Sequence[Aborted] = ()  # for a committed reader: what to leave out of the batches


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """The linearizable state of a partition, as its leader knows it. `next_offset` is the end of its log."""

    topic: str
    partition: PartitionIndex
    pid: PartitionId
    log_start: Offset
    lso: Offset
    hwm: Offset
    next_offset: Offset
    leader: NodeId
    epoch: Epoch
    replicas: tuple[NodeId, ...]

    def end_for(self, *, is_committed: bool) -> Offset:
        """Where the log ends for a reader of what is committed, or of everything."""
        return self.lso if is_committed else self.hwm


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """What a partition's leader knew at one moment, after a read index (rule 25)."""

    epoch: Epoch
    leader: NodeId  # that said it; any node for a partition without records here
    log_start: Offset
    lso: Offset
    hwm: Offset
    log_end: Offset


@dataclass(frozen=True, slots=True)
class TimeOffset:
    """First record at or after a time. If there is none, offset == the reader's `hi`."""

    offset: Offset
    ts_ns: TsNs  # -1 if there is none
    timestamp_ms: int  # -1 if there is none


@dataclass(frozen=True, slots=True)
class SizedRun:
    """Consecutive whole batches: their end, and the size of their stored values."""

    end: Offset
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a reader has before it: whole stored batches, from the one that contains its position."""

    size_bytes: int  # 0: the log does not hold that any more
    ts_ns: TsNs  # append time of the next record that can be read; -1 if there is none


class TimeKind(enum.Enum):
    TS_NS = "ts_ns"  # the leader's append time, nanoseconds
    TIMESTAMP_MS = "timestamp_ms"  # the producer's create time, milliseconds
    MAX_TIMESTAMP = "max_timestamp"  # the first record with the largest create time; the requested value is ignored


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """This node's own copy of a partition, for status, the demo and the checkers."""

    pid: PartitionId
    is_leader: bool
    epoch: Epoch
    log_start: Offset
    hwm: Offset  # as this node has applied it
    lso: Offset  # likewise
    appended_end: Offset
    durable_end: Offset
    verified_end: Offset
    size_bytes: int


class ActiveProducer(NamedTuple):
    """An idempotent producer as a partition's log knows it, by its last batch or marker there."""

    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    last_seq: ProducerSequence  # -1 if its epoch is new, and it has written nothing in it
    ts_ns: TsNs
    open_from: Offset = Offset(-1)  # where its open transaction begins; -1 if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatus:
    """A node's own disk. Counters are of this process, except the scrubber's passes."""

    free_bytes: int  # on its file system
    total_bytes: int  # of its file system
    reusable_bytes: int  # freed inside its file
    is_full: bool  # down to the reserve: no records are appended
    is_hung: bool  # it has written nothing for a while, without an error
    damage_found: int  # batches and index rows
    damage_repaired: int
    damage_unrepaired: int  # repairs that ended without the batch
    scrub_found: int  # damaged rows of any table
    scrub_bytes: int  # read in the current pass
    scrub_passes: int  # over all tables, since the directory was created
    scrub_ended_ms: int  # of the last whole pass, Unix time; 0 before the first


@dataclass(frozen=True, slots=True)
class NodeStatus:
    node: NodeId
    incarnation: Incarnation
    is_ready: bool  # registered, caught up with Raft, and there is a quorum
    raft_leader: NodeId | None
    raft_term: int
    applied_index: LogIndex
    commit_index: LogIndex
    storage: StorageStatus
    producers: int  # idempotent producers that this node remembers, over all its partitions
    producers_max: int  # beyond it new ones are refused
    snapshot_bytes: int = 0  # of Raft's newest snapshot on this node; 0 before the first
    snapshot_index: LogIndex = LogIndex(0)  # the last entry in it
    snapshot_age_ms: int = 0  # since this process first had it
    feature_level_known: int = 1  # the highest that this smq knows; the cluster's is in the state
    compaction_dirty_bytes: int = 0  # of led partitions, as found by the last look at each
    compaction_age_ms: int = 0  # the longest time since a whole pass over one of them; 0 without a compacted one
    waiting: str = ""  # why the node has stopped to wait for an upgrade: its process only says so
    birth: BirthId = NO_BIRTH  # of the cluster that its data directory belongs to
    unborn: str = ""  # why it belongs to none yet
    warnings: tuple[str, ...] = ()  # for an operator to act on, in plain words


class Cancel(Protocol):
    def __call__(self) -> None:
        """Withdraws a long poll or a look-up; `done` is no longer called."""


class NodeApi(Protocol):
    """Implemented by smq.replication.node.Node."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def incarnation(self) -> Incarnation:
        """Of this process; 0 until it has claimed one."""

    @property
    def is_ready(self) -> bool:
        """Registered, caught up with Raft, and as far as this node knows there is a quorum."""

    @property
    def state(self) -> ClusterState:
        """As this node has applied it: read-only, possibly stale."""

    def status(self) -> NodeStatus: ...

    def digest(self, done: DoneFn[tuple[LogIndex, str]]) -> None:
        """Of the replicated state, with its index: equal on all nodes at one index. While it is computed, this node may
        apply one more entry, and then waits with the next."""

    def replica_statuses(self) -> Iterator[ReplicaStatus]:
        """Of each replica that this node had when this was called; made one by one, as there may be thousands."""

    def replica_status(self, partition: PartitionId) -> ReplicaStatus | None:
        """Of this node's replica of a partition; None if it has none."""

    def known_hwm(self, partition: PartitionState) -> Offset:
        """As far as this node knows: what its replica takes for committed, otherwise the mark in the replicated state,
        which is a little behind. Only the partition's leader can say that there is no more (`partition_ranges`)."""

    def traffic(self, partition: PartitionId) -> Traffic:
        """What this node has counted of a partition since its start."""

    def producers(self, partition: PartitionId) -> Sequence[ActiveProducer] | None:
        """The idempotent producers that this node's replica knows, the least recent writer first; None if it has no
        replica."""

    def describe_quorum(self, timeout_ms: int, done: DoneFn[Quorum]) -> None:
        """Raft as its leader knows it, from any node: asks the leader, whichever node it is."""

    def request_preferred_leader(self, partition: PartitionId) -> bool:
        """Asks the partition's leader, on whichever node, to hand over to the first replica. False, and nothing is
        requested, if that node is not fit to lead. Best effort: the state shows whether it happened, and a second
        request does no harm."""

    def anomalies(self) -> Sequence[Anomaly]:
        """The latest ones that this process has noted, the oldest first."""

    def queued_bytes(self) -> int:
        """Bytes submitted to this node's disk and not yet durable, without the appends of partitions that it follows.
        Beyond half of append_inflight_bytes_max, produce answers OVERLOADED; a caller that can wait holds back long
        before."""

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        """Runs a command through Raft, from any node: forwards it to the Raft leader, and retries it until the deadline
        (every command has a request id or is naturally idempotent). A Rejected reply arrives as SmqError. When `done`
        is called, this node has applied the command too."""

    def barrier(self, timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        """Linearizable read point: afterwards this node's state holds everything committed before the call."""

    def find(self, look_up: Callable[[ClusterState], T | None], timeout_ms: int, done: DoneFn[T | None]) -> None:
        """Calls `done` with what `look_up` finds in this node's state: within this call if it finds anything, otherwise
        after a barrier. Nothing else may say that something is unknown: None here, and an SmqError if there was no
        barrier in time. `look_up` must not raise."""

    def produce(self, request: ProduceRequest) -> None:
        """Appends the batch if this node leads the partition (otherwise NOT_LEADER with the leader). Batches of one
        partition are appended in the order of these calls, also if the first ones wait for a look-up. After a batch of
        an idempotent producer has been refused so that it comes again, the later ones of that producer get OVERLOADED
        until it has come. If the partition has to join the batch's transaction first, later batches of that producer
        wait meanwhile.

        A mirrored batch goes to the offset that its header names: OFFSET_OUT_OF_RANGE (lo, hi) if the log ends before
        that, OFFSET_TAKEN if other bytes are there, and the first attempt's answer if the same are. WRONG_WRITER unless
        its topic is mirrored, and for any other batch if it is."""

    def expect_again(self, topic: str | TopicId, partition: int, batch: Buffer) -> None:
        """A service holds this batch back or refuses it, before `produce`: the later ones of its producer must not
        overtake it. For requests that want an answer."""

    def fetch(
        self,
        topic: str | TopicId,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: DoneFn[Fetched],
        is_committed: bool = False,
    ) -> Cancel:
        """Reads committed batches from this node's replica, from the batch that contains `offset`, of the topic with
        this name or this id; long-polls up to max_wait_ms while there is nothing. With `is_committed` nothing from the
        last stable offset on, and the aborted transactions of what it returns. With `max_bytes` 0 it waits in the same
        way, and returns no batches. OFFSET_OUT_OF_RANGE (lo, hi) below log_start or past the log end, only once the
        leader has said where the log ends (rule 25); OFFSET_NOT_AVAILABLE if it has not in time."""

    def partition_ranges(
        self,
        partitions: Sequence[tuple[str, int]],
        timeout_ms: int,
        done: DoneFn[list[PartitionRange | SmqError]],
        *,
        at_leader: bool = False,
    ) -> None:
        """The exact range of each partition, from its leader on whichever node (rule 25): one question per leader.
        OFFSET_NOT_AVAILABLE for those whose leader has not answered in time. With `at_leader`, NOT_LEADER or
        LEADER_UNAVAILABLE for those that another node leads: no other node is asked."""

    def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int, done: DoneFn[TimeOffset]
    ) -> Cancel:
        """After a barrier, from this node's replica (NOT_REPLICA elsewhere). Exact to the batch for TS_NS, to the
        record for TIMESTAMP_MS. That there is none is said only for the end that the leader has reported (rule 25)."""

    def sized_run(
        self, topic: str, partition: int, offset: int, bytes_max: int, timeout_ms: int, done: DoneFn[SizedRun]
    ) -> Cancel:
        """The batches that fit into `bytes_max`, from the one that contains `offset`, at least one; `end` == offset if
        this node's replica has none. Answers from this node's state as of the call: call it after a look-up of the
        partition. NOT_REPLICA elsewhere, OFFSET_OUT_OF_RANGE below log_start as of this node."""

    def backlog(
        self, topic: str, partition: int, offset: int, end: int, timeout_ms: int, done: DoneFn[Backlog]
    ) -> Cancel:
        """What a reader at `offset` has before it, up to the exact `end` that `partition_ranges` has given, from this
        node's replica. NOT_REPLICA, or NOT_LEADER if it does not reach that end: ask the leader's node."""

    def follower_ends(self, partition: PartitionId) -> Mapping[NodeId, Offset]:
        """Of a partition that this process leads: how far the followers' logs reach, by their last reports. Contains
        only followers that are heard and that may be given the leadership. Empty if another node leads."""

    def assign_offsets(
        self,
        topic: str,
        partition: int,
        count: int,
        *,
        request_id: bytes,
        not_before: int | None,
        timeout_ms: int,
        done: DoneFn[OffsetsAssigned],
    ) -> None:
        """`count` offsets of a topic with storage=external, at any node. A repetition under the same request id gets
        the first answer; `not_before` is a next_offset from before the first attempt (None: this is the first)."""

    def advance_external_hwm(
        self, topic: str, partition: int, offset: int, timeout_ms: int, done: DoneFn[Offset]
    ) -> None:
        """Moves the high water mark of a topic with storage=external up to `offset`; answers with the one in force."""

    def fetch_offsets(
        self,
        group: str,
        pids: Sequence[PartitionId] | None,
        timeout_ms: int,
        done: DoneFn[dict[PartitionId, CommittedOffset]],
    ) -> None:
        """After a barrier. Partitions without a commit are absent; pids None = all."""

    def topic_id(self, topic: str) -> TopicId | None: ...

    def drain(self, timeout_ms: int, done: Callable[[], None]) -> None:
        """SIGTERM: hands over every leadership (best effort), then calls done."""

    def stop(self) -> None: ...
