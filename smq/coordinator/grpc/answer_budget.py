"""How many bytes the answers to gRPC fetches may hold, per connection and in total.

Owns which budgets an answer counts against, and when it is given back: once gRPC has taken the whole answer from us.
A client that asks and does not read waits behind its own answers, until the keepalive ends its connection.
`grpc.broker` and `grpc.search` import it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from smq.coordinator.limits import FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX, FETCH_INFLIGHT_BYTES_PER_NODE_MAX
from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, overloaded, release_all, try_acquire_all


class AnswerBudget:
    """Of all connections. gRPC's `peer` names a connection by address and port."""

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
        """Reserves `size` bytes for the length of a block, for an answer that is about to be read. OVERLOADED if they
        do not become free in time."""
        own = self._own(peer)
        if not try_acquire_all((own, self._node), size):
            await self._wait(peer, own, size, timeout_ms)
        try:
            yield
        finally:
            self._release(peer, own, size)

    async def _wait(self, peer: str, own: ByteBudget, size: int, timeout_ms: int) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await acquire_all((own, self._node), size)
        except TimeoutError:
            raise overloaded(
                f"answers that clients have not taken leave no room for another within {timeout_ms} ms"
            ) from None
        finally:
            self._forget(peer, own)

    def hold(self, peer: str, size: int) -> None:
        """Counts an answer until the call's own task has sent it, or until the connection has ended. A client that
        reads nothing at all answers no ping either, which ends its connection (GRPC_KEEPALIVE_TIMEOUT_MS)."""
        if size == 0:
            return
        task = asyncio.current_task()
        assert task is not None  # gRPC runs every call in one
        own = self._own(peer)
        own.take(size)
        self._node.take(size)
        task.add_done_callback(lambda _: self._release(peer, own, size))

    def _own(self, peer: str) -> ByteBudget:
        return self._connections.setdefault(peer, ByteBudget(self._connection_max))

    def _release(self, peer: str, own: ByteBudget, size: int) -> None:
        release_all((own, self._node), size)
        self._forget(peer, own)

    def _forget(self, peer: str, own: ByteBudget) -> None:
        if own.is_idle and self._connections.get(peer) is own:
            del self._connections[peer]
