"""How many unary gRPC requests may be in memory, before and while they are served, and how many calls may be silent.

Owns the places of requests that are arriving, the byte budget of large ones that have arrived, and the count of calls
per address that have sent nothing. gRPC reads a whole message before a handler sees it, whatever its method, and one
connection may have a thousand calls open. Without admission, one client could make a node hold gigabytes of requests
that nothing serves yet. So every unary method is served as a method with a stream of requests (on the wire they are the
same), and the first request of that stream is read only when there is a place for it. Real streams need no place: they
may be open long before their first message, and are only counted until then. Only the composition root makes one.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from smq.coordinator.grpc.gate import LOGIN_METHOD, OPEN, Gate
from smq.coordinator.grpc.service import abort
from smq.coordinator.limits import (
    GRPC_ARRIVAL_S_MAX,
    GRPC_ARRIVALS_MAX,
    GRPC_ARRIVALS_SLOW_MAX,
    GRPC_LARGE_REQUEST_BYTES,
    GRPC_LARGE_REQUESTS_BYTES_MAX,
    GRPC_SILENT_CALLS_PER_ADDRESS_MAX,
)
from smq.coordinator.service.byte_budget import ByteBudget, overloaded
from smq.raft_state.errors import ErrorCode, SmqError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    Method = Callable[[Any, Context], Awaitable[Any]]
    Deserialize = Callable[[bytes], Any] | None

_ARRIVAL_S_MIN: Final = 0.01  # however many wait: reading a request that is here takes a few passes of the loop


class RequestAdmission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """Admits requests in order of arrival. If a request takes longer than `arrival_s_max` while others wait, its call
    gives up its place and becomes one of the slow ones. If there are too many slow ones, the oldest is ended. The more
    calls wait, the less time each gets: a thousand calls that send nothing delay the others by seconds, not by a
    thousand times that limit. An address with `silent_max` silent calls, unary or streams, gets no further one: the
    calls of other addresses wait behind a bounded number of its own."""

    def __init__(
        self,
        *,
        arrivals_max: int = GRPC_ARRIVALS_MAX,
        slow_max: int = GRPC_ARRIVALS_SLOW_MAX,
        arrival_s_max: float = GRPC_ARRIVAL_S_MAX,
        large_bytes_max: int = GRPC_LARGE_REQUESTS_BYTES_MAX,
        silent_max: int = GRPC_SILENT_CALLS_PER_ADDRESS_MAX,
    ) -> None:
        self._silence: Final = _Silence(silent_max)
        self._arrivals_max: Final = arrivals_max
        self._places: Final = ByteBudget(arrivals_max)  # one per call
        self._large: Final = ByteBudget(large_bytes_max)
        self._slow_max: Final = slow_max
        self._arrival_s_max: Final = arrival_s_max
        self._arriving: dict[Context, float] = {}  # calls with a place, and since when; oldest first
        self._slow: dict[Context, None] = {}  # oldest first
        self._handlers: dict[str, Handler] = {}
        self._gate = OPEN
        self._timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def for_one_server(self, gate: Gate) -> "RequestAdmission":
        """For a further server of the same node: places, budgets and counts are the node's, and the handlers are that
        server's. A call that `gate` does not admit ends before anything of it is read."""
        other = copy.copy(self)
        other._handlers = {}
        other._gate = gate
        return other

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        admitting = self._handlers.get(handler_call_details.method)
        if admitting is not None:
            return admitting
        found: Any = await continuation(handler_call_details)  # the stubs know only threads' methods, and no None
        if found is None:
            return found  # type: ignore[return-value] # an unknown method, which gRPC refuses
        if found.request_streaming and handler_call_details.method.endswith(f"/{LOGIN_METHOD}"):
            admitting = grpc.stream_stream_rpc_method_handler(
                partial(self._serve_login, found.stream_stream), found.request_deserializer, found.response_serializer
            )
        elif found.request_streaming:  # and so is its answer: there is no other kind here
            counted = partial(self._serve_stream, found.stream_stream)
            admitting = grpc.stream_stream_rpc_method_handler(
                counted, found.request_deserializer, found.response_serializer
            )
        else:
            serve = partial(self._serve, found.unary_unary, found.request_deserializer)
            admitting = grpc.stream_unary_rpc_method_handler(serve, None, found.response_serializer)
        self._handlers[handler_call_details.method] = admitting
        return admitting

    async def _serve_login(self, method: "Method", requests: AsyncIterable[Any], context: "Context") -> None:
        """A stranger's: it counts as silent until it ends."""
        async with self._silence.begin(context):
            await method(requests, context)

    async def _serve_stream(self, method: "Method", requests: AsyncIterable[Any], context: "Context") -> None:
        await self._refuse_strangers(context)
        async with self._silence.begin(context) as on_message:
            await method(_Noticed(requests, on_message), context)

    async def _refuse_strangers(self, context: "Context") -> None:
        try:
            self._gate.admit(context)
        except SmqError as e:
            await abort(context, e)

    async def _serve(self, method: "Method", deserialize: "Deserialize", _requests: object, context: "Context") -> Any:
        await self._refuse_strangers(context)
        async with self._silence.begin(context):
            data = await self._arrival(context)
        if not isinstance(data, bytes):  # gRPC's mark of an end
            await abort(context, SmqError(ErrorCode.INVALID_REQUEST, "the call ended without a request"))
        size = len(data)
        if size < GRPC_LARGE_REQUEST_BYTES:
            return await method(await _parsed(deserialize, data, context), context)
        if not self._large.try_acquire(size):
            reason = f"large requests that are being served leave no room for another of {size} bytes"
            await abort(context, overloaded(reason))
        try:
            request = await _parsed(deserialize, data, context)
            del data  # the message has a copy of its own
            return await method(request, context)
        finally:
            self._large.release(size)

    async def _arrival(self, context: "Context") -> Any:
        """The request's bytes, after there was a place for them and they have arrived; or EOF."""
        if not self._places.try_acquire(1):
            self._check_later()
            await self._places.acquire(1)
        self._arriving[context] = asyncio.get_running_loop().time()
        try:
            return await context.read()
        finally:
            if self._arriving.pop(context, None) is not None:
                self._places.release(1)
            self._slow.pop(context, None)

    # --------------------------------------------------------------------------------------- slow requests
    def _check_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._allowed_s / 4, self._check_arrivals)

    @property
    def _allowed_s(self) -> float:
        share = self._arrival_s_max * self._arrivals_max / max(self._places.waiters, 1)
        return min(self._arrival_s_max, max(share, _ARRIVAL_S_MIN))

    def _check_arrivals(self) -> None:
        self._timer = None
        if not self._places.waiters:
            return
        now, allowed_s = asyncio.get_running_loop().time(), self._allowed_s
        for context, since in list(self._arriving.items()):
            if now - since < allowed_s:
                break
            del self._arriving[context]
            self._slow[context] = None
            self._places.release(1)
        for context in list(self._slow)[: max(0, len(self._slow) - self._slow_max)]:
            task = asyncio.create_task(self._end(context))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._check_later()

    async def _end(self, context: "Context") -> None:
        """Aborts a slow call, so that its `read` raises."""
        if context not in self._slow:
            return  # its request arrived before this task ran
        with suppress(grpc.aio.AbortError, grpc.aio.UsageError):  # what abort ends with; or the call has ended by now
            await abort(context, overloaded("the request arrives too slowly, and others wait"))


class _Silence:
    """The calls whose first message has not been read yet, by the address of their client."""

    def __init__(self, calls_max: int) -> None:
        self._max = calls_max
        self._silent: Counter[str] = Counter()  # no entry for an address without any

    @asynccontextmanager
    async def begin(self, context: "Context") -> AsyncIterator[Callable[[], None]]:
        """The call is silent until it calls what it gets here, or ends. Ends it if its address has too many."""
        address, _, _port = context.peer().rpartition(":")
        if self._silent[address] >= self._max:
            reason = f"{self._max} calls of this address have not sent anything"
            await abort(context, overloaded(f"{reason}: send the request with each call, or end the idle ones"))
        self._silent[address] += 1
        is_silent = True

        def over() -> None:
            nonlocal is_silent
            if is_silent:
                is_silent = False
                self._silent[address] -= 1
                if not self._silent[address]:
                    del self._silent[address]

        try:
            yield over
        finally:
            over()


class _Noticed:
    """A stream of messages that reports its first one. From then on it adds nothing to an iteration."""

    def __init__(self, messages: AsyncIterable[Any], on_first: Callable[[], None]) -> None:
        self._messages: Any = messages  # begun with the first: grpc warns of one that nothing awaits
        self._on_first: Callable[[], None] | None = on_first

    def __aiter__(self) -> "_Noticed":
        return self

    def __anext__(self) -> Awaitable[Any]:
        return self._messages.__anext__() if self._on_first is None else self._first(self._on_first)

    async def _first(self, on_first: Callable[[], None]) -> Any:
        self._messages = aiter(self._messages)
        message = await anext(self._messages)
        self._on_first = None
        on_first()
        return message


async def _parsed(deserialize: "Deserialize", data: bytes, context: "Context") -> Any:
    try:
        return deserialize(data) if deserialize is not None else data
    except Exception as e:  # noqa: BLE001 - whatever the parser raises, the client's bytes caused it
        reason = f"the request cannot be parsed: {type(e).__name__}"
        await abort(context, SmqError(ErrorCode.INVALID_REQUEST, reason))
