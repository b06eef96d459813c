"""Every error that a caller can meet: its name, whether it is definite, whether a retry can help, and what to do.

Owns the table of error codes, shared by the state machine's rejections, the node and all wire protocols. It must never
import another layer. "Definite" means that the operation did not and will not happen; in doubt, an error is indefinite.
"""

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from smq.raft_state.ids import NodeId, Offset


class _Traits(NamedTuple):
    number: int  # on the wire; never reused
    definite: bool
    retriable: bool  # the same request may succeed later, perhaps at another node
    advice: str  # what the user should do next; empty if that depends on the message, which then says it


class ErrorCode(enum.Enum):
    """value = (wire number, definite, retriable, advice)."""

    UNKNOWN_TOPIC = _Traits(
        1, True, False, "create it with `smq topic create`, or check its name with `smq topic list`"
    )
    UNKNOWN_PARTITION = _Traits(
        2, True, False, "choose a partition below the topic's partition count (`smq topic describe`)"
    )
    TOPIC_EXISTS = _Traits(3, True, False, "choose another name, or use the existing topic")
    INVALID_TOPIC_NAME = _Traits(4, True, False, "use 1-249 of the characters a-z A-Z 0-9 . _ - (and not '.' or '..')")
    INVALID_PARTITION_COUNT = _Traits(5, True, False, "request a count within the limit, and not below the present one")
    INVALID_REPLICATION_FACTOR = _Traits(6, True, False, "request at least 1 replica and at most one per node")
    INVALID_CONFIG = _Traits(7, True, False, "use a key and a value that the message names")
    LIMIT_EXCEEDED = _Traits(8, True, False, "send less, or free some of what the message names: the limit is fixed")
    INVALID_REQUEST = _Traits(9, True, False, "")  # the message says what to correct
    NOT_LEADER = _Traits(10, True, True, "retry at the leader named in the details")
    NOT_REPLICA = _Traits(11, True, True, "read from one of the replicas named in the details")
    LEADER_UNAVAILABLE = _Traits(
        12, True, True, "retry: a leader is being elected; if it lasts, `smq status` shows why"
    )
    OFFSET_OUT_OF_RANGE = _Traits(13, True, False, "use an offset within the range that the message names")
    BATCH_TOO_LARGE = _Traits(14, True, False, "send smaller batches, or raise the topic's max.message.bytes")
    CORRUPT_BATCH = _Traits(15, True, False, "send it again: its checksum does not match its bytes")
    INVALID_BATCH = _Traits(16, True, False, "")  # the message says what to correct
    OUT_OF_ORDER_SEQUENCE = _Traits(17, True, False, "a batch before this one is missing; start a new producer session")
    PRODUCER_FENCED = _Traits(18, True, False, "a newer producer took over this producer id; start a new session")
    NO_QUORUM = _Traits(
        19, False, True, "retry: a majority of nodes could not be reached in time; a request id makes a change safe"
    )
    TIMED_OUT = _Traits(20, False, True, "retry: the outcome is unknown; a request id or sequence makes a change safe")
    APPEND_LOST = _Traits(21, True, True, "send it again: leadership moved before it was committed, and it was dropped")
    OVERLOADED = _Traits(22, True, True, "slow down and retry after the time in the details")
    SHUTTING_DOWN = _Traits(23, True, True, "retry at another node")
    STORAGE_FULL = _Traits(24, True, True, "free disk space on the node; readers are not affected")
    DATA_DAMAGED = _Traits(25, True, True, "read from another replica; this one's bytes fail their checksum")
    UNKNOWN_GROUP = _Traits(
        26, True, False, "commit an offset for the group first, or check its name with `smq group list`"
    )
    NO_COMMITTED_OFFSET = _Traits(27, True, False, "commit one first, or choose where to start")
    SESSION_EXISTS = _Traits(28, True, False, "close the session with this id first, or use another id")
    UNKNOWN_SESSION = _Traits(29, True, False, "start a session first; a restart of the node ends it")
    STALE_EPOCH = _Traits(30, True, False, "internal: the leadership that the request names is over")
    STALE_INCARNATION = _Traits(31, True, False, "internal: a newer process of this node has registered")
    UNKNOWN_NODE = _Traits(32, True, False, "start the node first, or check its id with `smq node list`")
    ELECTION_REJECTED = _Traits(33, True, True, "internal: the candidate's log does not reach the high water mark")
    NODE_NOT_READY = _Traits(34, True, True, "retry, here or at another node: this one is starting or has no quorum")
    INTERNAL = _Traits(35, False, False, "report it with the node's log")
    INVALID_OFFSET = _Traits(36, True, False, "correct the offset: it must be >= 0 and within what the message names")
    TOO_MANY_PRODUCERS = _Traits(
        38,
        True,
        True,
        "raise producers_max in the node's node.toml, lower producer.id.expiration.ms, or use fewer producers;"
        " known producers are not affected",
    )
    OFFSET_NOT_AVAILABLE = _Traits(
        39, True, True, "retry: the partition's leader alone knows its end, and could not say it in time"
    )
    ALREADY_INITIALIZED = _Traits(37, True, False, "internal: the cluster has been initialized")
    NOT_COORDINATOR = _Traits(50, True, True, "look up the group's coordinator again, and retry there")
    ILLEGAL_GENERATION = _Traits(51, True, False, "join the group again: it has rebalanced without this member")
    UNKNOWN_MEMBER = _Traits(52, True, False, "join the group again under a new member id")
    FENCED_INSTANCE = _Traits(53, True, False, "stop this process: another one has joined with the same instance id")
    REBALANCE_IN_PROGRESS = _Traits(54, True, True, "join the group again, then retry")
    GROUP_NOT_EMPTY = _Traits(55, True, False, "stop the group's members first (`smq group describe` lists them)")
    GROUP_SUBSCRIBED = _Traits(56, True, False, "stop the members that consume this topic first")
    REQUEST_EXPIRED = _Traits(
        58,
        False,
        False,
        "too many requests came after it to know whether it took effect; check, then send it under a new id",
    )
    WRONG_STORAGE = _Traits(
        59, True, False, "publish to and read from topics of storage=log; assign offsets in those of storage=external"
    )
    UNKNOWN_TRANSACTIONAL_ID = _Traits(
        60, True, False, "check the id (`smq txn list`), or start its producer again, which makes it known"
    )
    INVALID_TRANSACTION_STATE = _Traits(
        61, True, False, "begin a transaction first, and add to it what the producer writes to; abort it after an error"
    )
    TRANSACTION_ENDING = _Traits(
        62, True, True, "retry: the markers of the producer's last transaction are still being written"
    )
    INVALID_TRANSACTION_TIMEOUT = _Traits(
        63, True, False, "choose a transaction timeout within what the message names (transaction.max.timeout.ms)"
    )
    INVALID_TIMESTAMP = _Traits(
        64,
        True,
        False,
        "correct the clock or the timestamps of the producer, or raise message.timestamp.before.max.ms or"
        " message.timestamp.after.max.ms of the topic",
    )

    OFFSET_STAGED = _Traits(
        66, True, True, "retry: an open transaction is about to move it, and ends, at the latest by its time-out"
    )
    INCONSISTENT_PROTOCOL = _Traits(
        65, True, False, "choose an assignor that every member of the group knows (`smq group describe` shows theirs)"
    )
    BATCH_DIFFERS = _Traits(
        67,
        True,
        False,
        "compare it with what was committed under this number, which is kept; write other rows under a newer number",
    )
    INVALID_REPLICA_ASSIGNMENT = _Traits(
        70,
        True,
        False,
        "name registered nodes, each once, for every new partition; or none, and the cluster chooses",
    )
    FEATURE_NOT_ENABLED = _Traits(
        71, True, False, "run the new smq on every node first; `smq status` shows the level that each node knows"
    )
    UPGRADE_NEEDED = _Traits(72, True, True, "run a newer smq on this node; until then, use the other nodes")
    UNKNOWN_USER = _Traits(73, True, False, "create it with `smq user create`, or check its name with `smq user list`")
    USER_EXISTS = _Traits(74, True, False, "choose another name, or change its password with `smq user passwd`")
    INVALID_CREDENTIAL = _Traits(75, True, False, "")  # the message says what to correct
    WRONG_WRITER = _Traits(
        76, True, False, "a mirrored topic takes records from its mirror alone, until `smq mirror cutover`"
    )
    OFFSET_TAKEN = _Traits(
        77, True, False, "what is here is kept: compare both sides with `smq mirror verify`, or mirror to a new topic"
    )
    LOGIN_NEEDED = _Traits(78, True, True, "log in, and send it again: clients that are given a user do so themselves")
    AUTHENTICATION_FAILED = _Traits(
        79, True, False, "check the user's name and its password; `smq user passwd` sets another"
    )
    NOT_AUTHORIZED = _Traits(
        80, True, False, "ask an administrator for the right (`smq acl grant`); `smq acl test` says which rule decides"
    )
    # Clients alone raise these; no node sends them.
    UNREACHABLE = _Traits(
        90, True, True, "nothing was sent: start a node (`smq dev`), or correct the address, port or TLS settings"
    )
    CLIENT_CLOSED = _Traits(91, True, False, "make a new client")
    FORKED = _Traits(
        92, True, False, "start child processes by multiprocessing's spawn method, and make clients in the child"
    )

    @property
    def number(self) -> int:
        return self.value.number

    @property
    def is_definite(self) -> bool:
        return self.value.definite

    @property
    def is_retriable(self) -> bool:
        return self.value.retriable

    @property
    def advice(self) -> str:
        return self.value.advice

    @classmethod
    def from_number(cls, number: int) -> "ErrorCode":
        """INTERNAL for a number that this version does not know."""
        return _BY_NUMBER.get(number, cls.INTERNAL)


_BY_NUMBER = {code.number: code for code in ErrorCode}


class RecordError(NamedTuple):
    place: int  # in its batch, from 0
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What a program needs to act on an error. Fields that do not apply are None."""

    leader: NodeId | None = None  # the current leader, if known
    leader_address: str | None = None  # its gRPC address, host:port
    lo: Offset | None = None  # first valid offset
    hi: Offset | None = None  # high water mark: the first offset that is not readable yet
    retry_after_ms: int | None = None
    records: tuple[RecordError, ...] = ()  # why a batch was refused, if its caller asked which of its records are bad


class SmqError(Exception):
    """The one exception of smq's interfaces. Made with a code, it is an instance of that code's subclass below, so
    that `except UnknownTopic` and a look at `code` mean the same."""

    def __new__(cls, code: ErrorCode, message: str, details: ErrorDetails | None = None) -> "SmqError":
        kind = _BY_CODE.get(code, SmqError) if cls is SmqError else cls
        return super().__new__(kind, code, message, details)

    def __init__(self, code: ErrorCode, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details or ErrorDetails()

    def __str__(self) -> str:
        advice = self.code.advice
        return f"{self.code.name}: {self.message}; {advice}" if advice else f"{self.code.name}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return (SmqError, (self.code, self.message, self.details))


class UnknownTopic(SmqError): ...


class UnknownPartition(SmqError): ...


class TopicExists(SmqError): ...


class InvalidTopicName(SmqError): ...


class InvalidPartitionCount(SmqError): ...


class InvalidReplicationFactor(SmqError): ...


class InvalidConfig(SmqError): ...


class LimitExceeded(SmqError): ...


class InvalidRequest(SmqError): ...


class NotLeader(SmqError): ...


class NotReplica(SmqError): ...


class LeaderUnavailable(SmqError): ...


class OffsetOutOfRange(SmqError): ...


class BatchTooLarge(SmqError): ...


class CorruptBatch(SmqError): ...


class InvalidBatch(SmqError): ...


class OutOfOrderSequence(SmqError): ...


class ProducerFenced(SmqError): ...


class NoQuorum(SmqError): ...


class Timeout(SmqError): ...


class AppendLost(SmqError): ...


class Overloaded(SmqError): ...


class ShuttingDown(SmqError): ...


class StorageFull(SmqError): ...


class DataDamaged(SmqError): ...


class UnknownGroup(SmqError): ...


class NoCommittedOffset(SmqError): ...


class SessionExists(SmqError): ...


class UnknownSession(SmqError): ...


class UnknownNode(SmqError): ...


class NodeNotReady(SmqError): ...


class InternalError(SmqError): ...


class InvalidOffset(SmqError): ...


class TooManyProducers(SmqError): ...


class OffsetNotAvailable(SmqError): ...


class NotCoordinator(SmqError): ...


class IllegalGeneration(SmqError): ...


class UnknownMember(SmqError): ...


class FencedInstance(SmqError): ...


class RebalanceInProgress(SmqError): ...


class GroupNotEmpty(SmqError): ...


class GroupSubscribed(SmqError): ...


class RequestExpired(SmqError): ...


class WrongStorage(SmqError): ...


class UnknownTransactionalId(SmqError): ...


class InvalidTransactionState(SmqError): ...


class TransactionEnding(SmqError): ...


class InvalidTransactionTimeout(SmqError): ...


class InvalidTimestamp(SmqError): ...


class OffsetStaged(SmqError): ...


class InconsistentProtocol(SmqError): ...


class BatchDiffers(SmqError): ...


class InvalidReplicaAssignment(SmqError): ...


class FeatureNotEnabled(SmqError): ...


class UpgradeNeeded(SmqError): ...


class UnknownUser(SmqError): ...


class UserExists(SmqError): ...


class InvalidCredential(SmqError): ...


class WrongWriter(SmqError): ...


class OffsetTaken(SmqError): ...


class LoginNeeded(SmqError): ...


class AuthenticationFailed(SmqError): ...


class NotAuthorized(SmqError): ...


class Unreachable(SmqError): ...


class ClientClosed(SmqError): ...


class Forked(SmqError): ...


_BY_CODE: Final[dict[ErrorCode, type[SmqError]]] = {
    ErrorCode.UNKNOWN_TOPIC: UnknownTopic,
    ErrorCode.UNKNOWN_PARTITION: UnknownPartition,
    ErrorCode.TOPIC_EXISTS: TopicExists,
    ErrorCode.INVALID_TOPIC_NAME: InvalidTopicName,
    ErrorCode.INVALID_PARTITION_COUNT: InvalidPartitionCount,
    ErrorCode.INVALID_REPLICATION_FACTOR: InvalidReplicationFactor,
    ErrorCode.INVALID_CONFIG: InvalidConfig,
    ErrorCode.LIMIT_EXCEEDED: LimitExceeded,
    ErrorCode.INVALID_REQUEST: InvalidRequest,
    ErrorCode.NOT_LEADER: NotLeader,
    ErrorCode.NOT_REPLICA: NotReplica,
    ErrorCode.LEADER_UNAVAILABLE: LeaderUnavailable,
    ErrorCode.OFFSET_OUT_OF_RANGE: OffsetOutOfRange,
    ErrorCode.BATCH_TOO_LARGE: BatchTooLarge,
    ErrorCode.CORRUPT_BATCH: CorruptBatch,
    ErrorCode.INVALID_BATCH: InvalidBatch,
    ErrorCode.OUT_OF_ORDER_SEQUENCE: OutOfOrderSequence,
    ErrorCode.PRODUCER_FENCED: ProducerFenced,
    ErrorCode.NO_QUORUM: NoQuorum,
    ErrorCode.TIMED_OUT: Timeout,
    ErrorCode.APPEND_LOST: AppendLost,
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.SHUTTING_DOWN: ShuttingDown,
    ErrorCode.STORAGE_FULL: StorageFull,
    ErrorCode.DATA_DAMAGED: DataDamaged,
    ErrorCode.UNKNOWN_GROUP: UnknownGroup,
    ErrorCode.NO_COMMITTED_OFFSET: NoCommittedOffset,
    ErrorCode.SESSION_EXISTS: SessionExists,
    ErrorCode.UNKNOWN_SESSION: UnknownSession,
    ErrorCode.UNKNOWN_NODE: UnknownNode,
    ErrorCode.NODE_NOT_READY: NodeNotReady,
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.INVALID_OFFSET: InvalidOffset,
    ErrorCode.TOO_MANY_PRODUCERS: TooManyProducers,
    ErrorCode.OFFSET_NOT_AVAILABLE: OffsetNotAvailable,
    ErrorCode.NOT_COORDINATOR: NotCoordinator,
    ErrorCode.ILLEGAL_GENERATION: IllegalGeneration,
    ErrorCode.UNKNOWN_MEMBER: UnknownMember,
    ErrorCode.FENCED_INSTANCE: FencedInstance,
    ErrorCode.REBALANCE_IN_PROGRESS: RebalanceInProgress,
    ErrorCode.GROUP_NOT_EMPTY: GroupNotEmpty,
    ErrorCode.GROUP_SUBSCRIBED: GroupSubscribed,
    ErrorCode.REQUEST_EXPIRED: RequestExpired,
    ErrorCode.WRONG_STORAGE: WrongStorage,
    ErrorCode.UNKNOWN_TRANSACTIONAL_ID: UnknownTransactionalId,
    ErrorCode.INVALID_TRANSACTION_STATE: InvalidTransactionState,
    ErrorCode.TRANSACTION_ENDING: TransactionEnding,
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: InvalidTransactionTimeout,
    ErrorCode.INVALID_TIMESTAMP: InvalidTimestamp,
    ErrorCode.OFFSET_STAGED: OffsetStaged,
    ErrorCode.INCONSISTENT_PROTOCOL: InconsistentProtocol,
    ErrorCode.BATCH_DIFFERS: BatchDiffers,
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: InvalidReplicaAssignment,
    ErrorCode.FEATURE_NOT_ENABLED: FeatureNotEnabled,
    ErrorCode.UPGRADE_NEEDED: UpgradeNeeded,
    ErrorCode.UNKNOWN_USER: UnknownUser,
    ErrorCode.USER_EXISTS: UserExists,
    ErrorCode.INVALID_CREDENTIAL: InvalidCredential,
    ErrorCode.WRONG_WRITER: WrongWriter,
    ErrorCode.OFFSET_TAKEN: OffsetTaken,
    ErrorCode.LOGIN_NEEDED: LoginNeeded,
    ErrorCode.AUTHENTICATION_FAILED: AuthenticationFailed,
    ErrorCode.NOT_AUTHORIZED: NotAuthorized,
    ErrorCode.UNREACHABLE: Unreachable,
    ErrorCode.CLIENT_CLOSED: ClientClosed,
    ErrorCode.FORKED: Forked,
}
