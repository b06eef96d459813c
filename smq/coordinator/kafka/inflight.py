"""What all Kafka connections of a node hold together, and who waits for it to become less.

Owns one counter. Requests that have begun to come, answers that are being read from the log, and answers that their
clients have not taken yet all count; a fetch that waits for records holds nothing and costs nothing. Past the bound no
connection is read any more, but those in the middle of a request, and no answer is read from the log: who asks is told
"nothing yet" after a while, which ends his wait and whatever waits behind it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from smq.coordinator.limits import KAFKA_INFLIGHT_BYTES_PER_NODE_MAX, KAFKA_ROOM_S_MAX
from smq.raft_state.errors import ErrorCode, SmqError


class Waiter(Protocol):
    """A connection that is not read because the node is full."""

    def look_again(self) -> None: ...


class InflightBytes:
    """Whatever comes last may pass the bound, by one request or one answer: nothing that large could ever go else."""

    def __init__(self, bytes_max: int = KAFKA_INFLIGHT_BYTES_PER_NODE_MAX) -> None:
        self._max = bytes_max
        self._used = 0
        self._is_granting = False
        self._unread: dict[Waiter, None] = {}
        self._reading: deque[tuple[int, asyncio.Future[None]]] = (
            deque()
        )  # one a fetch under way, each has its own bound

    @property
    def used(self) -> int:
        return self._used

    @property
    def is_full(self) -> bool:
        return self._used >= self._max

    def add(self, size: int) -> None:
        """Negative to give back; who waited for room is then looked at again, answers before new requests."""
        self._used += size
        if size < 0 and (self._reading or self._unread) and not self._is_granting:
            # Not at once: what was reserved for an answer is given back just before the answer itself is counted.
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._is_granting = False
        while self._reading and not self.is_full:
            wanted, place = self._reading.popleft()
            if not place.done():
                self._used += wanted
                place.set_result(None)
        if self._unread and not self.is_full:
            unread, self._unread = self._unread, {}
            for waiter in unread:
                waiter.look_again()

    def wait(self, waiter: Waiter) -> None:
        self._unread[waiter] = None

    def forget(self, waiter: Waiter) -> None:
        self._unread.pop(waiter, None)

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Room for that much, as soon as the node has any, until the end of the block. OVERLOADED where that is not
        soon: what holds the room may lie behind the very answer that waits for some, on its own connection."""
        if self.is_full or self._reading:
            await self._turn(size)
        else:
            self._used += size
        try:
            yield
        finally:
            self.add(-size)

    async def _turn(self, size: int) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading.append((size, place))
        try:
            async with asyncio.timeout(KAFKA_ROOM_S_MAX):  # a timer, but on a full node only
                await place
        except (asyncio.CancelledError, TimeoutError) as e:
            if place.done() and not place.cancelled():
                self.add(-size)  # it was granted in the very moment of the cancellation
            if isinstance(e, TimeoutError):
                raise SmqError(ErrorCode.OVERLOADED, f"no room for an answer within {KAFKA_ROOM_S_MAX} s") from None
            raise
