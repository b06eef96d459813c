"""How many gRPC calls of one request each may have that request on the way at a time.

Owns that number alone. gRPC takes in a whole message before a handler sees it, whatever its method, and a connection
may have a thousand calls open: without a gate one client makes a node hold gigabytes that are nobody's request yet.
Streams of requests are not its business: they may be opened long before their first. Only the composition root makes
one.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from smq.coordinator.limits import GRPC_ARRIVAL_PATIENT_S, GRPC_ARRIVALS_MAX

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class ArrivalGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in the stubs alone
    """In order. Who takes longer than `patient_s` is not counted any more where others wait: gRPC does not let a call
    be ended from here, and one that dawdles must not keep everybody out."""

    def __init__(self, arrivals_max: int = GRPC_ARRIVALS_MAX, patient_s: float = GRPC_ARRIVAL_PATIENT_S) -> None:
        self._max: Final = arrivals_max
        self._patient_s: Final = patient_s
        self._arriving: dict[asyncio.Task[Any], float] = {}  # and since when; oldest first
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler  # None: a method that there is not, which gRPC refuses
        task = asyncio.current_task()
        assert task is not None  # gRPC runs every call in one
        if len(self._arriving) >= self._max or self._waiting:
            await self._turn()
        self._arriving[task] = asyncio.get_running_loop().time()
        task.add_done_callback(self._arrived)
        read = partial(self._read, task, handler.request_deserializer)
        replaced: Handler = handler._replace(request_deserializer=read)  # type: ignore[attr-defined] # a named tuple
        return replaced

    def _read(self, task: asyncio.Task[Any], deserialize: Callable[[bytes], Any], data: bytes) -> Any:
        self._arrived(task)
        return deserialize(data)

    def _arrived(self, task: asyncio.Task[Any]) -> None:
        """The first message is there, or the call has ended."""
        if self._arriving.pop(task, None) is not None:
            self._grant()

    async def _turn(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._look_later()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._grant()  # it was granted in the very moment of the cancellation
            raise

    def _grant(self) -> None:
        free = self._max - len(self._arriving)
        while self._waiting and free > 0:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                free -= 1

    # --------------------------------------------------------------------------------------------- who dawdles
    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patient_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        for task, since in list(self._arriving.items()):
            if now - since >= self._patient_s:
                self._arrived(task)
        self._look_later()
