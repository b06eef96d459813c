"""The publishing sessions and subscriptions that are open on this node.

Owns two bounded registries, in memory alone: both are gone after a restart, and clients are told so
(UNKNOWN_SESSION). It must never call a node. The gRPC agent alone imports it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from smq.coordinator.limits import PUBLISH_SESSIONS_MAX, SESSION_ID_CHARS_MAX, SUBSCRIPTIONS_MAX
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSession:
    """`request_id` is that of the call that opened it, so that a retry of it finds its own session."""

    session_id: str
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

    def reserve(self, session_id: str, request_id: bytes) -> PublishSession | None:
        """Takes the id; returns the session where this very request had opened it already."""
        check_id("session_id", session_id)
        if session_id in self._sessions:
            session = self._sessions[session_id]
            if session is not None and request_id and session.request_id == request_id:
                return session
            raise SmqError(ErrorCode.SESSION_EXISTS, f"a publishing session {session_id!r} is open on this node")
        if len(self._sessions) >= self._max:
            self._evict()
        self._sessions[session_id] = None
        return None

    def open(self, session: PublishSession) -> None:
        """Fills the reserved place."""
        self._sessions[session.session_id] = session

    def release(self, session_id: str) -> None:
        """The session could not be opened after all."""
        self._sessions.pop(session_id, None)

    def get(self, session_id: str) -> PublishSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise SmqError(ErrorCode.UNKNOWN_SESSION, f"there is no publishing session {session_id!r} on this node")
        self._sessions.move_to_end(session_id)
        return session

    def close(self, session_id: str) -> None:
        """Later requests under this id fail with UNKNOWN_SESSION."""
        self.get(session_id)
        del self._sessions[session_id]

    def _evict(self) -> None:
        for session_id, session in self._sessions.items():
            if session is not None:
                del self._sessions[session_id]
                return
        raise SmqError(ErrorCode.LIMIT_EXCEEDED, f"{self._max} publishing sessions are being opened on this node")


class StreamCounts:
    """Streams that are open, by connection; gRPC's peer names one by address and port."""

    def __init__(self, per_connection_max: int) -> None:
        self._open: Counter[str] = Counter()
        self._max: Final = per_connection_max

    @contextmanager
    def one_more(self, peer: str) -> Iterator[None]:
        """For as long as it is open; LIMIT_EXCEEDED where there are too many."""
        if self._open[peer] >= self._max:
            told = f"{self._max} publishing streams are open on this connection, its limit: one carries any number"
            raise SmqError(ErrorCode.LIMIT_EXCEEDED, f"{told} of requests")
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


def check_id(field: str, value: str) -> None:
    """INVALID_REQUEST for an id that is empty or endless."""
    if not value or len(value) > SESSION_ID_CHARS_MAX:
        raise SmqError(
            ErrorCode.INVALID_REQUEST, f"{field} must have 1 to {SESSION_ID_CHARS_MAX} characters, it has {len(value)}"
        )
