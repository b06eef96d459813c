"""Kafka's error codes for SmqError and for the outcomes of groups: one table each, and what differs for readers.

Owns the numbers. A definite error of ours must not become an indefinite one of Kafka's if that would lose or repeat a
producer's batch: clients take some codes as "not stored", and some as "perhaps".
"""

import enum
from typing import Final

from smq.coordinator.groups.member_requests import Outcome
from smq.raft_state.errors import ErrorCode, SmqError


class KafkaError(enum.IntEnum):
    """The codes that smq sends, under Kafka's names."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    NOT_ENOUGH_REPLICAS = 19
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    UNKNOWN_TOPIC_ID = 100
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    UNSUPPORTED_ENDPOINT_TYPE = 115
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    TRANSACTION_ABORTABLE = 120
    INVALID_REGULAR_EXPRESSION = 128


CODES: Final[dict[ErrorCode, KafkaError]] = {
    ErrorCode.UNKNOWN_TOPIC: KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_PARTITION: KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.TOPIC_EXISTS: KafkaError.TOPIC_ALREADY_EXISTS,
    ErrorCode.INVALID_TOPIC_NAME: KafkaError.INVALID_TOPIC_EXCEPTION,
    ErrorCode.INVALID_PARTITION_COUNT: KafkaError.INVALID_PARTITIONS,
    ErrorCode.INVALID_REPLICATION_FACTOR: KafkaError.INVALID_REPLICATION_FACTOR,
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: KafkaError.INVALID_REPLICA_ASSIGNMENT,
    ErrorCode.INVALID_CONFIG: KafkaError.INVALID_CONFIG,
    ErrorCode.LIMIT_EXCEEDED: KafkaError.POLICY_VIOLATION,
    ErrorCode.INVALID_REQUEST: KafkaError.INVALID_REQUEST,
    # Clients take 6 as "not stored here; look up the leader and send again", whatever the reason.
    ErrorCode.NOT_LEADER: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.NOT_REPLICA: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.LEADER_UNAVAILABLE: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.APPEND_LOST: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.SHUTTING_DOWN: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.NODE_NOT_READY: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.UPGRADE_NEEDED: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.STALE_EPOCH: KafkaError.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.OFFSET_OUT_OF_RANGE: KafkaError.OFFSET_OUT_OF_RANGE,
    ErrorCode.OFFSET_STAGED: KafkaError.UNSTABLE_OFFSET_COMMIT,
    ErrorCode.OFFSET_NOT_AVAILABLE: KafkaError.OFFSET_NOT_AVAILABLE,
    ErrorCode.BATCH_TOO_LARGE: KafkaError.MESSAGE_TOO_LARGE,
    ErrorCode.CORRUPT_BATCH: KafkaError.CORRUPT_MESSAGE,
    ErrorCode.INVALID_BATCH: KafkaError.INVALID_RECORD,
    ErrorCode.INVALID_TIMESTAMP: KafkaError.INVALID_TIMESTAMP,
    ErrorCode.OUT_OF_ORDER_SEQUENCE: KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.PRODUCER_FENCED: KafkaError.INVALID_PRODUCER_EPOCH,
    ErrorCode.UNKNOWN_TRANSACTIONAL_ID: KafkaError.INVALID_PRODUCER_ID_MAPPING,
    ErrorCode.INVALID_TRANSACTION_STATE: KafkaError.INVALID_TXN_STATE,
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: KafkaError.INVALID_TRANSACTION_TIMEOUT,
    ErrorCode.TRANSACTION_ENDING: KafkaError.CONCURRENT_TRANSACTIONS,
    # Both mean "perhaps": clients send the batch again under its sequence.
    ErrorCode.NO_QUORUM: KafkaError.REQUEST_TIMED_OUT,
    ErrorCode.TIMED_OUT: KafkaError.REQUEST_TIMED_OUT,
    ErrorCode.OVERLOADED: KafkaError.NOT_ENOUGH_REPLICAS,  # "not stored, try again", without a look-up of the leader
    ErrorCode.TOO_MANY_PRODUCERS: KafkaError.NOT_ENOUGH_REPLICAS,  # likewise: producers retry, in order
    ErrorCode.STORAGE_FULL: KafkaError.KAFKA_STORAGE_ERROR,
    ErrorCode.DATA_DAMAGED: KafkaError.KAFKA_STORAGE_ERROR,
    ErrorCode.UNKNOWN_GROUP: KafkaError.GROUP_ID_NOT_FOUND,
    ErrorCode.NO_COMMITTED_OFFSET: KafkaError.GROUP_ID_NOT_FOUND,
    ErrorCode.INVALID_OFFSET: KafkaError.OFFSET_OUT_OF_RANGE,
    # Not "unknown", which clients would retry: the topic exists, but Kafka clients cannot use it.
    ErrorCode.WRONG_STORAGE: KafkaError.INVALID_TOPIC_EXCEPTION,
    ErrorCode.WRONG_WRITER: KafkaError.POLICY_VIOLATION,
    ErrorCode.NOT_COORDINATOR: KafkaError.NOT_COORDINATOR,
    ErrorCode.ILLEGAL_GENERATION: KafkaError.ILLEGAL_GENERATION,
    ErrorCode.UNKNOWN_MEMBER: KafkaError.UNKNOWN_MEMBER_ID,
    ErrorCode.FENCED_INSTANCE: KafkaError.FENCED_INSTANCE_ID,
    ErrorCode.INCONSISTENT_PROTOCOL: KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    ErrorCode.BATCH_DIFFERS: KafkaError.INVALID_REQUEST,
    ErrorCode.REBALANCE_IN_PROGRESS: KafkaError.REBALANCE_IN_PROGRESS,
    ErrorCode.GROUP_NOT_EMPTY: KafkaError.NON_EMPTY_GROUP,
    ErrorCode.GROUP_SUBSCRIBED: KafkaError.GROUP_SUBSCRIBED_TO_TOPIC,
    ErrorCode.REQUEST_EXPIRED: KafkaError.REQUEST_TIMED_OUT,
    ErrorCode.UNKNOWN_USER: KafkaError.RESOURCE_NOT_FOUND,
    ErrorCode.USER_EXISTS: KafkaError.DUPLICATE_RESOURCE,
    ErrorCode.INVALID_CREDENTIAL: KafkaError.UNACCEPTABLE_CREDENTIAL,
    ErrorCode.LOGIN_NEEDED: KafkaError.SASL_AUTHENTICATION_FAILED,
    ErrorCode.AUTHENTICATION_FAILED: KafkaError.SASL_AUTHENTICATION_FAILED,
    ErrorCode.NOT_AUTHORIZED: KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    # No Kafka client can cause these.
    ErrorCode.OFFSET_TAKEN: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.SESSION_EXISTS: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.UNKNOWN_SESSION: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.STALE_INCARNATION: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.UNKNOWN_NODE: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.ELECTION_REJECTED: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.ALREADY_INITIALIZED: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.FEATURE_NOT_ENABLED: KafkaError.UNSUPPORTED_VERSION,
    ErrorCode.INTERNAL: KafkaError.UNKNOWN_SERVER_ERROR,
    # Of clients of smq alone: no node raises them.
    ErrorCode.UNREACHABLE: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.CLIENT_CLOSED: KafkaError.UNKNOWN_SERVER_ERROR,
    ErrorCode.FORKED: KafkaError.UNKNOWN_SERVER_ERROR,
}

# A consumer knows neither "not enough replicas" nor "timed out": Java's ends with an exception. After "wrong node" it
# looks up the leader again and comes back.
_FETCH_CODES: Final = dict.fromkeys(
    (ErrorCode.OVERLOADED, ErrorCode.TIMED_OUT, ErrorCode.NO_QUORUM), KafkaError.NOT_LEADER_OR_FOLLOWER
)
# Clients know OFFSET_NOT_AVAILABLE from these versions on (KIP-392, KIP-207). Older ones get what they retry.
_FETCH_NOT_AVAILABLE_VERSION: Final = 11
_LIST_NOT_AVAILABLE_VERSION: Final = 5
# And TRANSACTION_ABORTABLE from these on (KIP-890).
_PRODUCE_ABORTABLE_VERSION: Final = 11
_STAGING_ABORTABLE_VERSION: Final = 4
INIT_FENCED_VERSION: Final = 4  # of InitProducerId: from here on PRODUCER_FENCED has a code of its own
_ELSEWHERE: Final = frozenset(
    {ErrorCode.SHUTTING_DOWN, ErrorCode.NODE_NOT_READY, ErrorCode.LEADER_UNAVAILABLE, ErrorCode.UPGRADE_NEEDED}
)


class KafkaRefusal(Exception):
    """A refusal in this protocol's terms, before any command."""

    def __init__(self, code: KafkaError, message: str) -> None:
        super().__init__(message)
        self.code = code


def error_fields(error: SmqError | KafkaRefusal) -> dict[str, KafkaError | str]:
    """The two fields that carry an error in the answers to admin requests."""
    code = error.code if isinstance(error, KafkaRefusal) else code_of(error)
    return {"error_code": code, "error_message": str(error)}


def topic_error_fields(error: SmqError | KafkaRefusal) -> dict[str, KafkaError | str]:
    """The same in the answers to requests that Kafka's controller carries out. Clients ask another node only after
    NOT_CONTROLLER."""
    is_elsewhere = isinstance(error, SmqError) and error.code in _ELSEWHERE
    return error_fields(error) | ({"error_code": KafkaError.NOT_CONTROLLER} if is_elsewhere else {})


# Clients of a coordinator take these as: look it up again.
_GROUP_CODES: Final = {
    ErrorCode.OVERLOADED: KafkaError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NODE_NOT_READY: KafkaError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.LEADER_UNAVAILABLE: KafkaError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.SHUTTING_DOWN: KafkaError.NOT_COORDINATOR,
    ErrorCode.UPGRADE_NEEDED: KafkaError.NOT_COORDINATOR,
    # Of the codes for a time-out, not every client repeats the request by itself.
    ErrorCode.TIMED_OUT: KafkaError.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NO_QUORUM: KafkaError.COORDINATOR_NOT_AVAILABLE,
}


# Clients take NOT_COORDINATOR and COORDINATOR_NOT_AVAILABLE as: look the coordinator up again, then repeat the request.
OUTCOME_CODES: Final[dict[Outcome, KafkaError]] = {
    Outcome.OK: KafkaError.NONE,
    Outcome.ID_RESERVED: KafkaError.MEMBER_ID_REQUIRED,
    Outcome.REBALANCING: KafkaError.REBALANCE_IN_PROGRESS,
    Outcome.UNKNOWN_MEMBER: KafkaError.UNKNOWN_MEMBER_ID,
    Outcome.FENCED_INSTANCE: KafkaError.FENCED_INSTANCE_ID,
    Outcome.WRONG_GENERATION: KafkaError.ILLEGAL_GENERATION,
    Outcome.PROTOCOL_MISMATCH: KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    Outcome.GROUP_FULL: KafkaError.GROUP_MAX_SIZE_REACHED,
    Outcome.TOO_MANY_GROUPS: KafkaError.POLICY_VIOLATION,
    Outcome.LIMIT_EXCEEDED: KafkaError.POLICY_VIOLATION,
    Outcome.TOO_MANY_NEW_GROUPS: KafkaError.COORDINATOR_NOT_AVAILABLE,
    Outcome.QUEUE_FULL: KafkaError.COORDINATOR_NOT_AVAILABLE,
    Outcome.BAD_SESSION_TIMEOUT: KafkaError.INVALID_SESSION_TIMEOUT,
    Outcome.BAD_MEMBER: KafkaError.INVALID_REQUEST,
    Outcome.BAD_GROUP: KafkaError.INVALID_GROUP_ID,
    Outcome.NOT_COORDINATOR: KafkaError.NOT_COORDINATOR,
    Outcome.NOT_READY: KafkaError.COORDINATOR_NOT_AVAILABLE,
    Outcome.UNCERTAIN: KafkaError.COORDINATOR_NOT_AVAILABLE,
    Outcome.FENCED_EPOCH: KafkaError.FENCED_MEMBER_EPOCH,
    Outcome.UNRELEASED_INSTANCE: KafkaError.UNRELEASED_INSTANCE_ID,
    Outcome.UNKNOWN_ASSIGNOR: KafkaError.UNSUPPORTED_ASSIGNOR,
    Outcome.BAD_PATTERN: KafkaError.INVALID_REGULAR_EXPRESSION,
    Outcome.NO_CONSUMER_GROUP: KafkaError.GROUP_ID_NOT_FOUND,
}


def code_of(error: SmqError) -> KafkaError:
    return CODES[error.code]


def fetch_code_of(error: SmqError, version: int) -> KafkaError:
    if error.code is ErrorCode.OFFSET_NOT_AVAILABLE and version < _FETCH_NOT_AVAILABLE_VERSION:
        return KafkaError.NOT_LEADER_OR_FOLLOWER
    return _FETCH_CODES.get(error.code, CODES[error.code])


def list_offsets_code_of(error: SmqError, version: int) -> KafkaError:
    if error.code is ErrorCode.OFFSET_NOT_AVAILABLE and version < _LIST_NOT_AVAILABLE_VERSION:
        return KafkaError.LEADER_NOT_AVAILABLE
    return CODES[error.code]


def group_code_of(error: SmqError) -> KafkaError:
    return _GROUP_CODES.get(error.code, CODES[error.code])


def offset_fetch_code_of(error: SmqError) -> KafkaError:
    """For OffsetFetch. After COORDINATOR_NOT_AVAILABLE, Java's consumer ends, and librdkafka's asks no more."""
    code = group_code_of(error)
    return KafkaError.COORDINATOR_LOAD_IN_PROGRESS if code is KafkaError.COORDINATOR_NOT_AVAILABLE else code


def transaction_code_of(error: SmqError, *, is_fenced_known: bool) -> KafkaError:
    """For the requests to a transactional id's coordinator."""
    if error.code is ErrorCode.PRODUCER_FENCED and is_fenced_known:
        return KafkaError.PRODUCER_FENCED
    return group_code_of(error)


def producer_id_code_of(error: SmqError, version: int) -> KafkaError:
    """For InitProducerId without a transactional id. After any other code than this one, some clients end."""
    if error.code is ErrorCode.PRODUCER_FENCED and version >= INIT_FENCED_VERSION:
        return KafkaError.PRODUCER_FENCED
    return KafkaError.COORDINATOR_LOAD_IN_PROGRESS if error.code.is_retriable else CODES[error.code]


def produce_code_of(error: SmqError, version: int) -> KafkaError:
    """For a batch of a transaction. Without a code that says "abort, then go on", producers give themselves up."""
    if error.code is ErrorCode.INVALID_TRANSACTION_STATE and version >= _PRODUCE_ABORTABLE_VERSION:
        return KafkaError.TRANSACTION_ABORTABLE
    return CODES[error.code]


def staging_code_of(error: SmqError, version: int) -> KafkaError:
    """For TxnOffsetCommit. Its clients know neither CONCURRENT_TRANSACTIONS nor REBALANCE_IN_PROGRESS: Java's producer
    would end. They repeat the request after COORDINATOR_LOAD_IN_PROGRESS."""
    if error.code in (ErrorCode.TRANSACTION_ENDING, ErrorCode.REBALANCE_IN_PROGRESS):
        return KafkaError.COORDINATOR_LOAD_IN_PROGRESS
    if error.code is ErrorCode.INVALID_TRANSACTION_STATE and version >= _STAGING_ABORTABLE_VERSION:
        return KafkaError.TRANSACTION_ABORTABLE
    return group_code_of(error)
