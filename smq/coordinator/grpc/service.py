"""What all gRPC handlers share: errors as statuses, deadlines, request ids.

Owns the one try/except around a handler, and which clients a service speaks to. Services import it.
"""

import copy
import functools
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from smq.coordinator.grpc.errors import abort
from smq.coordinator.grpc.required import check_required
from smq.coordinator.limits import DEADLINE_SLACK_MS
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.internal_errors import internal
from smq.coordinator.service.requests import timeout_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import RequestId

S = TypeVar("S", bound="Service")
Q = TypeVar("Q")
R = TypeVar("R")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_REQUEST_ID_BYTES: Final = 16


class Service:
    """What the services have in common: the clients that they speak to. A service begins with the node's own."""

    audience: Audience

    def speaking_to(self, audience: Audience) -> Self:
        """The same service, with the same sessions and budgets, for the clients of a listener."""
        other = copy.copy(self)
        other.audience = audience
        return other


def guarded(
    handler: Callable[[S, Q, Context], Awaitable[R]],
) -> Callable[[S, Q, Context], Awaitable[R]]:
    """A handler whose SmqErrors become statuses with details, and whose faults become INTERNAL."""

    @functools.wraps(handler)
    async def wrapper(self: S, request: Q, context: Context) -> R:
        try:
            if isinstance(request, Message):
                check_required(request)
            return await handler(self, request, context)
        except SmqError as e:
            await abort(context, self.audience.told(e))
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as e:  # noqa: BLE001 - a bug in one handler must not be a bare UNKNOWN for its client
            await abort(context, internal(handler.__name__, e))

    return wrapper


def deadline_ms(requested_ms: int, context: Context) -> int:
    """The timeout of a call, short enough that our typed error arrives before the client gives up."""
    return timeout_of(requested_ms, remaining_ms(context))


def remaining_ms(context: Context) -> float | None:
    """Until shortly before the client gives up the call; None if it never does."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else remaining_s * 1000 - DEADLINE_SLACK_MS


def request_id_of(request_id: bytes) -> RequestId:
    """The caller's id, or a fresh one that lets the node itself retry safely within this call."""
    if not request_id:
        return RequestId(secrets.token_bytes(_REQUEST_ID_BYTES))
    if len(request_id) != _REQUEST_ID_BYTES:
        raise SmqError(ErrorCode.INVALID_REQUEST, f"request_id has {len(request_id)} bytes: it must have 16, or none")
    return RequestId(request_id)
