"""Which rpcs are administrative acts, and what each is about, for the audit log.

Owns the fields that a request is known by there. It must never name one that may be secret: of a user only the name.
`service` imports it.
"""

from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import Message

from smq.coordinator.grpc.gate import Caller, Context, host_of
from smq.coordinator.service.audit import Audit, Sender, setting
from smq.raft_state.errors import ErrorCode, SmqError

ACTS: Final[Mapping[str, tuple[str, ...]]] = {
    "CreateTopic": ("name", "partition_count", "replication_factor", "config"),
    "DeleteTopic": ("name",),
    "AddPartitions": ("name", "partition_count"),
    "AlterTopic": ("name", "set", "unset"),
    "DeleteRecords": ("topic", "partition", "before_offset"),
    "DeleteGroup": ("group",),
    "AbortTransaction": ("transactional_id",),
    "DeleteOffsets": ("group", "partitions"),
    "AlterClusterConfig": ("set", "unset"),
    "AlterUser": ("name",),
    "DeleteUser": ("name",),
    "AlterAcls": ("add", "remove"),
    "AlterQuotas": ("quotas",),
    "SetNodeDrained": ("node", "drained"),
}
_REFUSED: Final = frozenset({ErrorCode.NOT_AUTHORIZED, ErrorCode.LOGIN_NEEDED, ErrorCode.AUTHENTICATION_FAILED})


def note(
    audit: Audit,
    listener: str,
    method: str,
    request: Any,
    context: Context,
    caller: Caller | None,
    error: SmqError | CancelledError | None,
) -> None:
    """What became of a call. Of those that are no acts only refusals are noted."""
    code = error.code if isinstance(error, SmqError) else None
    is_refused = code in _REFUSED
    if not audit.is_on or (method not in ACTS and not is_refused):
        return
    user = caller.user if caller is not None else ""
    names = context.auth_context().get("x509_common_name", ()) if not user else ()
    user = user or b",".join(names).decode(errors="replace")
    sender = Sender(user=user, address=host_of(context.peer()), port="grpc", listener=listener)
    if method in ACTS:
        errors = None if isinstance(error, CancelledError) else {"": code.name} if code is not None else {}
        audit.acted(sender, method, _about(method, request), errors, refused=is_refused)
    elif code is not None:
        audit.refused(sender, method, code.name)


def _about(method: str, request: Message) -> list[str]:
    return [f"{field.name} {_shown(value)}" for field, value in request.ListFields() if field.name in ACTS[method]]


def _shown(value: Any) -> str:
    if isinstance(value, Message):
        return " ".join(f"{field.name}={part}" for field, part in value.ListFields())
    if isinstance(value, Mapping):
        return ", ".join(setting(key, value[key]) for key in sorted(value))
    if isinstance(value, str | bytes | int | float):
        return str(value)
    return ", ".join(map(_shown, value))
