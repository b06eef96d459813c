"""How much of gRPC's calls of one request each may be in memory before and while they are served.

Owns the places of requests that are on their way, and the bytes of large ones that are here. gRPC takes in a whole
message before a handler sees it, whatever its method, and a connection may have a thousand calls open: without a gate
one client makes a node hold gigabytes that are nobody's request yet. So every such method is served as one of a stream
of requests (on the wire they are the same), of which the gate reads the first and only when there is a place for it.
Streams proper are not its business: they may be opened long before their first message. Only the composition root makes
one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from smq.coordinator.grpc.errors import abort
from smq.coordinator.limits import (
    GRPC_ARRIVAL_PATIENT_S,
    GRPC_ARRIVALS_MAX,
    GRPC_ARRIVALS_SLOW_MAX,
    GRPC_LARGE_REQUEST_BYTES,
    GRPC_LARGE_REQUESTS_BYTES_MAX,
    PUBLISH_RETRY_AFTER_MS,
)
from smq.coordinator.service.inflight import ByteBudget
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    Method = Callable[[Any, Context], Awaitable[Any]]
    Deserialize = Callable[[bytes], Any] | None

_PATIENT_S_MIN: Final = 0.01  # however many wait: a request that is here needs some passes of the loop to be read
_AGAIN: Final = ErrorDetails(retry_after_ms=PUBLISH_RETRY_AFTER_MS)


class ArrivalGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """In order of coming. A call whose request takes longer than `patient_s` while others wait leaves its place to
    them and is one of the slow, of whom the oldest is ended where there are too many. The more wait, the less patient:
    a thousand calls that say nothing hold up those behind them for seconds, not for a thousand times their share."""

    def __init__(
        self,
        *,
        arrivals_max: int = GRPC_ARRIVALS_MAX,
        slow_max: int = GRPC_ARRIVALS_SLOW_MAX,
        patient_s: float = GRPC_ARRIVAL_PATIENT_S,
        large_bytes_max: int = GRPC_LARGE_REQUESTS_BYTES_MAX,
    ) -> None:
        self._arrivals_max: Final = arrivals_max
        self._places: Final = ByteBudget(arrivals_max)  # a call's is 1
        self._large: Final = ByteBudget(large_bytes_max)
        self._slow_max: Final = slow_max
        self._patient_s: Final = patient_s
        self._arriving: dict[Context, float] = {}  # who has a place, and since when; oldest first
        self._slow: dict[Context, None] = {}  # oldest first
        self._handlers: dict[str, Handler] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        gated = self._handlers.get(handler_call_details.method)
        if gated is not None:
            return gated
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.response_streaming:
            return handler  # None: a method that there is not, which gRPC refuses
        method: Any = handler.unary_unary  # the stubs know those of threads alone
        serve = partial(self._serve, method, handler.request_deserializer)
        gated = grpc.stream_unary_rpc_method_handler(serve, None, handler.response_serializer)
        self._handlers[handler_call_details.method] = gated
        return gated

    async def _serve(self, method: "Method", deserialize: "Deserialize", _requests: object, context: "Context") -> Any:
        data = await self._arrival(context)
        if not isinstance(data, bytes):  # gRPC's mark of an end
            await abort(context, SmqError(ErrorCode.INVALID_REQUEST, "the call ended without a request"))
        size = len(data)
        if size < GRPC_LARGE_REQUEST_BYTES:
            return await method(await _parsed(deserialize, data, context), context)
        if not self._large.try_acquire(size):
            told = f"large requests that are being served leave no room for another of {size} bytes"
            await abort(context, SmqError(ErrorCode.OVERLOADED, told, _AGAIN))
        try:
            request = await _parsed(deserialize, data, context)
            del data  # the message has a copy of its own
            return await method(request, context)
        finally:
            self._large.release(size)

    async def _arrival(self, context: "Context") -> Any:
        """The request's bytes, once there was a place for them and they have come; or EOF."""
        if not self._places.try_acquire(1):
            self._look_later()
            await self._places.acquire(1)
        self._arriving[context] = asyncio.get_running_loop().time()
        try:
            return await context.read()
        finally:
            if self._arriving.pop(context, None) is not None:
                self._places.release(1)
            self._slow.pop(context, None)

    # --------------------------------------------------------------------------------------------- who dawdles
    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s / 4, self._look)

    @property
    def _patience_s(self) -> float:
        share = self._patient_s * self._arrivals_max / max(self._places.waiters, 1)
        return min(self._patient_s, max(share, _PATIENT_S_MIN))

    def _look(self) -> None:
        self._timer = None
        if not self._places.waiters:
            return
        now, patience_s = asyncio.get_running_loop().time(), self._patience_s
        for context, since in list(self._arriving.items()):
            if now - since < patience_s:
                break
            del self._arriving[context]
            self._slow[context] = None
            self._places.release(1)
        for context in list(self._slow)[: max(0, len(self._slow) - self._slow_max)]:
            task = asyncio.create_task(self._end(context))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._look_later()

    async def _end(self, context: "Context") -> None:
        """Its `read` then raises."""
        if context not in self._slow:
            return  # it came while this task was on its way
        told = "the request arrives too slowly, and others wait"
        with suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # what abort ends with; and a call ended meanwhile
            await abort(context, SmqError(ErrorCode.OVERLOADED, told, _AGAIN))


async def _parsed(deserialize: "Deserialize", data: bytes, context: "Context") -> Any:
    try:
        return deserialize(data) if deserialize is not None else data
    except Exception as e:  # noqa: BLE001 - whatever the parser raises, it is the client's bytes that did it
        told = f"the request cannot be parsed: {type(e).__name__}"
        await abort(context, SmqError(ErrorCode.INVALID_REQUEST, told))
