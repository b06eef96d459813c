"""What gRPC clients have open on this node: publishing sessions, subscriptions, streams, and answers not yet sent.

Owns bounded registries, in memory only: a restart empties them, and clients then get UNKNOWN_SESSION. Owns how many
bytes the answers to fetches may hold, per connection and in total, and when they are given back: once gRPC has taken
the whole answer from us. A client that asks and does not read waits behind its own answers, until the keepalive ends
its connection. It must never use the node. The gRPC services import it.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from smq.coordinator.limits import (
    FETCH_INFLIGHT_BYTES_PER_CONNECTION_MAX,
    FETCH_INFLIGHT_BYTES_PER_NODE_MAX,
    PUBLISH_SESSIONS_MAX,
    SUBSCRIPTIONS_MAX,
)
from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, overloaded, release_all, try_acquire_all
from smq.coordinator.service.request_checks import check_id
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSession:
    """`request_id` is that of the call that opened it, so that a retry of this call finds its own session. `user` has
    opened it, and no other may use it; "" where no user is asked for."""

    session_id: str
    user: str = ""
    topic: str
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    request_id: bytes


class PublishSessions:
    """By id, least recently used first. An id is reserved while its session is being opened."""

    def __init__(self, sessions_max: int = PUBLISH_SESSIONS_MAX) -> None:
        self._sessions: OrderedDict[str, PublishSession | None] = OrderedDict()
        self._max: Final = sessions_max

    def __len__(self) -> int:
        return len(self._sessions)

    def reserve(self, session_id: str, request_id: bytes, user: str = "") -> PublishSession | None:
        """Reserves the id. Returns the session if this very request has opened it already."""
        check_id("session_id", session_id)
        if session_id in self._sessions:
            session = self._sessions[session_id]
            if session is not None and request_id and (session.request_id, session.user) == (request_id, user):
                return session
            raise SmqError(ErrorCode.SESSION_EXISTS, f"a publishing session {session_id!r} is open on this node")
        if len(self._sessions) >= self._max:
            self._evict()
        self._sessions[session_id] = None
        return None

    def open(self, session: PublishSession) -> None:
        """Replaces the reservation."""
        self._sessions[session.session_id] = session

    def release(self, session_id: str) -> None:
        """Gives a reserved id back: the session could not be opened."""
        self._sessions.pop(session_id, None)

    def get(self, session_id: str, user: str = "") -> PublishSession:
        session = self._sessions.get(session_id)
        if session is None or session.user != user:
            raise SmqError(ErrorCode.UNKNOWN_SESSION, f"there is no publishing session {session_id!r} on this node")
        self._sessions.move_to_end(session_id)
        return session

    def close(self, session_id: str, user: str = "") -> None:
        """Later requests under this id fail with UNKNOWN_SESSION."""
        self.get(session_id, user)
        del self._sessions[session_id]

    def _evict(self) -> None:
        for session_id, session in self._sessions.items():
            if session is not None:
                del self._sessions[session_id]
                return
        raise SmqError(ErrorCode.LIMIT_EXCEEDED, f"{self._max} publishing sessions are being opened on this node")


class StreamCounts:
    """Open streams of one kind per connection. gRPC's `peer` names a connection by address and port."""

    def __init__(self, kind: str, per_connection_max: int) -> None:
        self._open: Counter[str] = Counter()
        self._kind = kind
        self._max: Final = per_connection_max

    @contextmanager
    def one_more(self, peer: str) -> Iterator[None]:
        """Counts a stream for the length of a block; LIMIT_EXCEEDED if there are too many."""
        if self._open[peer] >= self._max:
            raise SmqError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{self._max} {self._kind} streams are open on this connection, its limit: one stream carries any "
                "number of requests",
            )
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


class Subscriptions:
    """The ids of the open subscription streams."""

    def __init__(self, subscriptions_max: int = SUBSCRIPTIONS_MAX) -> None:
        self._ids: set[str] = set()
        self._max: Final = subscriptions_max

    def __len__(self) -> int:
        return len(self._ids)

    def open(self, subscription_id: str) -> None:
        check_id("subscription_id", subscription_id)
        if subscription_id in self._ids:
            raise SmqError(ErrorCode.SESSION_EXISTS, f"a subscription {subscription_id!r} is open on this node")
        if len(self._ids) >= self._max:
            raise SmqError(ErrorCode.LIMIT_EXCEEDED, f"{self._max} subscriptions are open on this node, its limit")
        self._ids.add(subscription_id)

    def close(self, subscription_id: str) -> None:
        self._ids.discard(subscription_id)


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
