"""How much the answers to gRPC fetches may hold, by connection and in all.

Owns the budgets, and when they are given back: once gRPC has taken the whole answer off our hands. A client that asks
and does not read waits for its own answers, until the keepalive ends its connection. `grpc.broker` alone imports it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from smq.coordinator.limits import (
    FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX,
    FETCH_INFLIGHT_BYTES_PER_NODE_MAX,
    PUBLISH_RETRY_AFTER_MS,
)
from smq.coordinator.service.inflight import ByteBudget
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError


class AnswerRoom:
    """Of all connections; gRPC's `peer` names one by address and port."""

    def __init__(
        self,
        *,
        connection_bytes_max: int = FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX,
        node_bytes_max: int = FETCH_INFLIGHT_BYTES_PER_NODE_MAX,
    ) -> None:
        self._connection_max: Final = connection_bytes_max
        self._node = ByteBudget(node_bytes_max)
        self._connections: dict[str, ByteBudget] = {}  # those that hold something

    @property
    def used_bytes(self) -> int:
        return self._node.used_bytes

    @asynccontextmanager
    async def reserved(self, peer: str, size: int, timeout_ms: int) -> AsyncIterator[None]:
        """Room for an answer that is about to be read, for the length of a block. OVERLOADED where none comes in
        time."""
        own = self._connections.setdefault(peer, ByteBudget(self._connection_max))
        if own.try_acquire(size):
            if not self._node.try_acquire(size):
                own.release(size)
                await self._wait(peer, own, size, timeout_ms)
        else:
            await self._wait(peer, own, size, timeout_ms)
        try:
            yield
        finally:
            self._release(peer, own, size)

    async def _wait(self, peer: str, own: ByteBudget, size: int, timeout_ms: int) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await own.acquire(size)
                try:
                    await self._node.acquire(size)
                except asyncio.CancelledError:
                    own.release(size)
                    raise
        except TimeoutError:
            details = ErrorDetails(retry_after_ms=PUBLISH_RETRY_AFTER_MS)
            told = f"answers that clients have not taken leave no room for another within {timeout_ms} ms"
            raise SmqError(ErrorCode.OVERLOADED, told, details) from None
        finally:
            self._forget(peer, own)

    def hold(self, peer: str, size: int) -> None:
        """Counts an answer that is there until the call's own task has sent it, or the connection has ended: a client
        that reads nothing at all answers no ping either (GRPC_KEEPALIVE_TIMEOUT_MS)."""
        if size == 0:
            return
        task = asyncio.current_task()
        assert task is not None  # gRPC runs every call in one
        own = self._connections.setdefault(peer, ByteBudget(self._connection_max))
        own.take(size)
        self._node.take(size)
        task.add_done_callback(lambda _: self._release(peer, own, size))

    def _release(self, peer: str, own: ByteBudget, size: int) -> None:
        self._node.release(size)
        own.release(size)
        self._forget(peer, own)

    def _forget(self, peer: str, own: ByteBudget) -> None:
        if own.is_idle and self._connections.get(peer) is own:
            del self._connections[peer]
