"""SmqError on the gRPC wire: as an ErrorDetail message, as trailing metadata, and back. Also the error for a request
that is never sent, because its message cannot hold a value.

Owns the one translation between the error table of `smq.raft_state.errors` and gRPC. It must never do I/O or decide
about retries (`retry` does). The clients and the server's gRPC services may import it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar, cast

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from smq.clients.arguments import shown
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, RecordError, SmqError
from smq.raft_state.ids import NodeId, Offset

M = TypeVar("M", bound=Message)
P = ParamSpec("P")

ERROR_METADATA_KEY: Final = "smq-error-bin"  # trailing metadata of a failed call; the value is an ErrorDetail

# gRPC's words for a call that waited for a connection, and got none.
_NOT_CONNECTED: Final = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "DNS resolution failed",
    "Domain name not found",
)
_CONNECT_FAILURES: Final = (
    ("WRONG_VERSION_NUMBER", "this client uses TLS, and that port does not"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by this client's CA"),
    ("Hostname Verification Check failed", "its certificate is for another host name"),
    ("Peer name", "its certificate is for another host name"),
    ("CERTIFICATE_REQUIRED", "it asks for a client's certificate"),
    ("Connection refused", "connection refused"),
    ("Domain name not found", "there is no such host"),
    ("DNS resolution failed", "there is no such host"),
    ("Network is unreachable", "the network is unreachable"),
    ("No route to host", "no route to the host"),
    # A node that asks for TLS, or for a client's certificate, closes a connection without it.
    ("Socket closed", "it closed the connection; does it ask for TLS, or for a client's certificate?"),
    ("Ssl handshake failed", "the TLS handshake failed"),
)

_STATUS: Final[dict[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN_TOPIC: grpc.StatusCode.NOT_FOUND,
    ErrorCode.UNKNOWN_PARTITION: grpc.StatusCode.NOT_FOUND,
    ErrorCode.UNKNOWN_GROUP: grpc.StatusCode.NOT_FOUND,
    ErrorCode.UNKNOWN_USER: grpc.StatusCode.NOT_FOUND,
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
    ErrorCode.USER_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.SESSION_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.ALREADY_INITIALIZED: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.INVALID_TOPIC_NAME: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_PARTITION_COUNT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REPLICATION_FACTOR: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_CONFIG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REPLICA_ASSIGNMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.INVALID_CREDENTIAL: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.LOGIN_NEEDED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.AUTHENTICATION_FAILED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.NOT_AUTHORIZED: grpc.StatusCode.PERMISSION_DENIED,
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
    ErrorCode.WRONG_WRITER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.OFFSET_TAKEN: grpc.StatusCode.FAILED_PRECONDITION,
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

_INTEGERS: Final = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}  # there are no others
_KINDS: Final[dict[int, tuple[type, str]]] = {
    FieldDescriptor.CPPTYPE_STRING: (str, "a str"),
    FieldDescriptor.CPPTYPE_BOOL: (bool, "True or False"),
}


def build(kind: Callable[P, M], /, *args: P.args, **fields: P.kwargs) -> M:
    """Builds a message of this kind. INVALID_REQUEST, with the field's name, if a caller's value does not fit it.

    Every request with a value from the caller is built here: protobuf's own errors name no field, and it takes True
    for 1, and 1.0 for an offset."""
    descriptor = cast("type[Message]", kind).DESCRIPTOR
    for name, value in fields.items():
        field = descriptor.fields_by_name[name]
        if value is not None or not field.has_presence:
            _check(field, value)
    try:
        return kind(*args, **fields)
    except (UnicodeError, TypeError, ValueError) as e:
        given = ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
        raise SmqError(ErrorCode.INVALID_REQUEST, f"{descriptor.name} cannot hold {given}: {e}") from e


def _check(field: Any, value: object) -> None:  # a FieldDescriptor, of either implementation
    bits, name = _INTEGERS.get(field.cpp_type), field.name
    if field.is_repeated:
        if isinstance(value, str | bytes):
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} must be a list, not {shown(value)}")
    elif bits is not None:
        lo, hi = -(1 << bits - 1), (1 << bits - 1) - 1
        if isinstance(value, bool) or not isinstance(value, int):
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} must be a whole number, not {shown(value)}")
        if not lo <= value <= hi:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} {value} is out of range: {lo} to {hi}")
    elif field.type == FieldDescriptor.TYPE_BYTES:
        if not isinstance(value, bytes):
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} must be bytes, not {shown(value)}")
    elif field.cpp_type in _KINDS:
        expected, text = _KINDS[field.cpp_type]
        if not isinstance(value, expected):
            raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} must be {text}, not {shown(value)}")
        if isinstance(value, str):
            _check_text(name, value)


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeError as e:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"{name} {value!r} is no text in UTF-8") from e


def status_of(code: ErrorCode) -> grpc.StatusCode:
    """The gRPC status that a call fails with. Every code has one, as a test proves."""
    return _STATUS[code]


def detail_from_error(error: SmqError) -> pb.ErrorDetail:
    """The wire form. Details that are None are absent."""
    d = error.details
    return pb.ErrorDetail(
        code=error.code.number,
        name=error.code.name,
        message=error.message,
        advice=error.code.advice,
        definite=error.code.is_definite,
        retriable=error.code.is_retriable,
        leader=d.leader,
        leader_address=d.leader_address,
        lo=d.lo,
        hi=d.hi,
        retry_after_ms=d.retry_after_ms,
        records=[pb.RecordError(place=bad.place, message=bad.message) for bad in d.records],
    )


def error_from_detail(detail: pb.ErrorDetail) -> SmqError:
    """Inverse of `detail_from_error`. A code of a newer version becomes INTERNAL and keeps its name in the text."""
    code = ErrorCode.from_number(detail.code)
    message = detail.message
    if code is ErrorCode.INTERNAL and detail.name not in ("", "INTERNAL"):
        message = f"{detail.name}: {message}; {detail.advice}"
    details = ErrorDetails(
        leader=NodeId(detail.leader) if detail.HasField("leader") else None,
        leader_address=detail.leader_address if detail.HasField("leader_address") else None,
        lo=Offset(detail.lo) if detail.HasField("lo") else None,
        hi=Offset(detail.hi) if detail.HasField("hi") else None,
        retry_after_ms=detail.retry_after_ms if detail.HasField("retry_after_ms") else None,
        records=tuple(RecordError(bad.place, bad.message) for bad in detail.records),
    )
    return SmqError(code, message, details)


def trailing_metadata_of(error: SmqError) -> tuple[tuple[str, bytes], ...]:
    """The trailers of a call that fails with `error`."""
    return ((ERROR_METADATA_KEY, detail_from_error(error).SerializeToString()),)


def error_from_rpc(failure: grpc.RpcError, address: str) -> SmqError:
    """The SmqError of a failed call: the server's own, or one made from gRPC's status and `address`.

    A broken connection is indefinite (TIMED_OUT): the request may have arrived before it broke. A connection that was
    never made is definite (UNREACHABLE): nothing was sent.
    """
    found = _detail_in(getattr(failure, "trailing_metadata", lambda: None)())
    if found is not None:
        return error_from_detail(found)
    status = getattr(failure, "code", lambda: None)()
    text = getattr(failure, "details", lambda: None)() or ""
    if status is grpc.StatusCode.UNAVAILABLE and any(sign in text for sign in _NOT_CONNECTED):
        return SmqError(ErrorCode.UNREACHABLE, f"no node answers at {address}: {_connect_failure(text)}")
    if status is grpc.StatusCode.UNAVAILABLE:
        return SmqError(ErrorCode.TIMED_OUT, f"no node answers at {address} ({_first_line(text)})")
    if status in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
        return SmqError(ErrorCode.TIMED_OUT, f"the node at {address} gave no answer in time ({_first_line(text)})")
    if status is grpc.StatusCode.INTERNAL:
        # Our own INTERNAL carries a detail. Without one it is gRPC's: a node was killed while a message was being
        # written ("Internal error from Core").
        return SmqError(ErrorCode.TIMED_OUT, f"the connection to {address} broke ({_first_line(text)})")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return SmqError(ErrorCode.LIMIT_EXCEEDED, f"a message is larger than gRPC lets through: {_first_line(text)}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return SmqError(ErrorCode.INVALID_REQUEST, f"the server at {address} is not an smq node of this version")
    name = status.name if isinstance(status, grpc.StatusCode) else "unknown"
    return SmqError(ErrorCode.INTERNAL, f"{address} answered with gRPC status {name}: {_first_line(text)}")


def _detail_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> pb.ErrorDetail | None:
    for key, value in metadata or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _connect_failure(text: str) -> str:
    """What gRPC says of a connection that was not made, in a few words. Its own text names functions of OpenSSL."""
    for sign, meaning in _CONNECT_FAILURES:
        if sign in text:
            return meaning
    return _first_line(text.rpartition("last error: ")[2])


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300] or "no reason given"
