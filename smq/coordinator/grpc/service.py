"""What all gRPC handlers share: errors as statuses, deadlines, request ids, offsets to commit.

Owns the one try/except around a handler, what is counted of its calls, and which clients a service speaks to. Services
import it.
"""

import asyncio
import copy
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NoReturn, Self, TypeVar

import grpc
from google.protobuf.message import Message

from smq.clients.errors import status_of, trailing_metadata_of
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.acts import ACTS, note
from smq.coordinator.grpc.authorization import check
from smq.coordinator.grpc.gate import LOGIN_METHOD, OPEN, Caller, Gate
from smq.coordinator.grpc.gate import Context as Context
from smq.coordinator.grpc.required import check_required
from smq.coordinator.limits import DEADLINE_SLACK_MS
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls, internal
from smq.coordinator.service.name_lookup import find_partition
from smq.coordinator.service.request_checks import timeout_of
from smq.raft_state.commands import OffsetCommit
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, RequestId
from smq.replication.monitoring.measures import ProcessMeasures

S = TypeVar("S", bound="Service")
Q = TypeVar("Q")
R = TypeVar("R")

_REQUEST_ID_BYTES: Final = 16
_WAITING: Final = frozenset({"Fetch", "SearchRecords", "JoinGroup", "SyncGroup"})  # and change nothing that stays


class Service:
    """What the services have in common: the clients that they speak to. A service begins with the node's own."""

    audience: Audience
    gate: Gate = OPEN
    measures = ProcessMeasures()  # until it is served: `speaking_to` gives it the process's own

    def speaking_to(self, audience: Audience, measures: ProcessMeasures, gate: Gate) -> Self:
        """The same service, with the same sessions and budgets, for the clients of a listener."""
        other = copy.copy(self)
        other.audience = audience
        other.measures = measures
        other.gate = gate
        return other


def guarded(
    handler: Callable[[S, Q, Context], Awaitable[R]],
) -> Callable[[S, Q, Context], Awaitable[R]]:
    """A handler whose SmqErrors become statuses with details, and whose faults become INTERNAL. It is timed, and its
    results are counted, unless it is a stream, which answers many requests."""
    method = handler.__name__

    @functools.wraps(handler)
    async def wrapper(self: S, request: Q, context: Context) -> R:
        began_ns = time.perf_counter_ns()
        caller: Caller | None = None
        try:
            if method == LOGIN_METHOD:
                return await handler(self, request, context)
            caller = self.gate.caller(context)
            if not isinstance(request, Message):
                with self.gate.watched(caller, is_sure=False):
                    return await handler(self, request, context)
            check_required(request)
            answer = await _authorized(self, handler, request, context, caller)
        except SmqError as e:
            note(self.gate.audit, self.audience.listener, method, request, context, caller, e)
            self.measures.grpc_requests.add(1, method, e.code.name)
            await abort(context, self.audience.told(e))
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except asyncio.CancelledError as e:  # the client went away, and what it asked for may yet be done
            note(self.gate.audit, self.audience.listener, method, request, context, caller, e)
            raise
        except Exception as e:  # noqa: BLE001 - a bug in one handler must not be a bare UNKNOWN for its client
            error = internal(method, e)
            note(self.gate.audit, self.audience.listener, method, request, context, caller, error)
            self.measures.grpc_requests.add(1, method, error.code.name)
            await abort(context, error)
        if method in ACTS:
            note(self.gate.audit, self.audience.listener, method, request, context, caller, None)
        self.measures.grpc_requests.add(1, method, "ok")
        self.measures.grpc_request.observe(time.perf_counter_ns() - began_ns, method)
        return answer

    return wrapper


async def _authorized(
    service: S, handler: Callable[[S, Any, Context], Awaitable[R]], request: Any, context: Context, caller: Caller
) -> R:
    """One request, if its caller may do it; a call that waits ends when the right to it does."""
    method = handler.__name__
    complete = check(caller, method, request)
    if method not in _WAITING or caller.session is None:
        answer = await handler(service, request, context)
    else:

        def again() -> None:
            check(caller, method, request)

        rules = caller.rules
        with service.gate.watched(caller, again, is_sure=True):
            answer = await handler(service, request, context)
        if caller.rules is not rules:
            again()
    if complete is not None:
        complete(answer)
    return answer


async def abort(context: Context, error: SmqError) -> NoReturn:
    """Ends the call with the error's status and detail."""
    await context.abort(status_of(error.code), str(error), trailing_metadata_of(error))
    raise AssertionError("abort does not return")


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


async def offset_commits(
    calls: NodeCalls, offsets: Iterable[pb.PartitionOffset], timeout_ms: int
) -> tuple[OffsetCommit, ...]:
    """What a request commits or stages for a group. INVALID_OFFSET for a negative offset, and the errors of partitions
    that do not exist."""
    items = []
    for o in offsets:
        if o.offset < 0:
            raise SmqError(ErrorCode.INVALID_OFFSET, f"offset {o.offset} of {o.topic}/{o.partition} is negative")
        partition = await find_partition(calls, o.topic, o.partition, timeout_ms)
        items.append(OffsetCommit(partition=partition.pid, offset=Offset(o.offset), metadata=o.metadata))
    return tuple(items)
