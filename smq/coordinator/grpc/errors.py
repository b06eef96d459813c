"""SmqError on the gRPC wire: status codes, ErrorDetail, and the way back.

Owns the table from ErrorCode to gRPC status. Services raise SmqError, and `guarded` turns it into a status with an
ErrorDetail in the trailing metadata. Clients read the same detail with code of their own.
"""

from typing import Any, Final, NoReturn

import grpc

from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset

ERROR_METADATA_KEY: Final = "smq-error-bin"

_STATUS: Final[dict[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN_TOPIC: grpc.StatusCode.NOT_FOUND,
    ErrorCode.UNKNOWN_PARTITION: grpc.StatusCode.NOT_FOUND,
    ErrorCode.UNKNOWN_GROUP: grpc.StatusCode.NOT_FOUND,
    ErrorCode.NO_COMMITTED_OFFSET: grpc.StatusCode.NOT_FOUND,
    ErrorCode.NOT_COORDINATOR: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.ILLEGAL_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNKNOWN_MEMBER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.FENCED_INSTANCE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.INCONSISTENT_PROTOCOL: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.REBALANCE_IN_PROGRESS: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.GROUP_NOT_EMPTY: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.GROUP_SUBSCRIBED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNKNOWN_SESSION: grpc.StatusCode.NOT_FOUND,
    ErrorCode.TOPIC_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.SESSION_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.ALREADY_INITIALIZED: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.INVALID_TOPIC_NAME: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_PARTITION_COUNT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REPLICATION_FACTOR: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_BATCH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_TIMESTAMP: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_OFFSET: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.BATCH_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.CORRUPT_BATCH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.OFFSET_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    ErrorCode.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.TOO_MANY_PRODUCERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.NOT_LEADER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.NOT_REPLICA: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.OUT_OF_ORDER_SEQUENCE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.PRODUCER_FENCED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNKNOWN_TRANSACTIONAL_ID: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.BATCH_DIFFERS: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.INVALID_TRANSACTION_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.TRANSACTION_ENDING: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.WRONG_STORAGE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.STALE_EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.UNKNOWN_NODE: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.ELECTION_REJECTED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.FEATURE_NOT_ENABLED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.REQUEST_EXPIRED: grpc.StatusCode.ABORTED,
    ErrorCode.APPEND_LOST: grpc.StatusCode.ABORTED,
    ErrorCode.TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.LEADER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.OFFSET_STAGED: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.OFFSET_NOT_AVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.NO_QUORUM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.NODE_NOT_READY: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UPGRADE_NEEDED: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DATA_DAMAGED: grpc.StatusCode.DATA_LOSS,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    # Of clients alone: no node raises them.
    ErrorCode.UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CLIENT_CLOSED: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.FORKED: grpc.StatusCode.INVALID_ARGUMENT,
}


def status_of(code: ErrorCode) -> grpc.StatusCode:
    """The gRPC status of an error. Every code has one, as a test proves."""
    return _STATUS[code]


def to_detail(error: SmqError) -> pb.ErrorDetail:
    """The error as it travels."""
    d = error.details
    detail = pb.ErrorDetail(
        code=error.code.number,
        name=error.code.name,
        message=error.message,
        advice=error.code.advice,
        definite=error.code.is_definite,
        retriable=error.code.is_retriable,
    )
    if d.leader is not None:
        detail.leader = d.leader
    if d.leader_address is not None:
        detail.leader_address = d.leader_address
    if d.lo is not None:
        detail.lo = d.lo
    if d.hi is not None:
        detail.hi = d.hi
    if d.retry_after_ms is not None:
        detail.retry_after_ms = d.retry_after_ms
    return detail


def from_detail(detail: pb.ErrorDetail) -> SmqError:
    """Inverse of `to_detail`."""
    details = ErrorDetails(
        leader=NodeId(detail.leader) if detail.HasField("leader") else None,
        leader_address=detail.leader_address if detail.HasField("leader_address") else None,
        lo=Offset(detail.lo) if detail.HasField("lo") else None,
        hi=Offset(detail.hi) if detail.HasField("hi") else None,
        retry_after_ms=detail.retry_after_ms if detail.HasField("retry_after_ms") else None,
    )
    return SmqError(ErrorCode.from_number(detail.code), detail.message, details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SmqError) -> NoReturn:
    """Ends the call with the error's status and detail."""
    await context.abort(
        status_of(error.code), str(error), ((ERROR_METADATA_KEY, to_detail(error).SerializeToString()),)
    )
    raise AssertionError("abort does not return")
