"""The registries of sessions: duplicates, closing, bounds."""

import pytest

from smq.coordinator.grpc.open_streams import PublishSession, PublishSessions, Subscriptions
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import ProducerEpoch, ProducerId


def session(session_id: str, request_id: bytes = b"") -> PublishSession:
    return PublishSession(
        session_id=session_id,
        topic="t",
        producer_id=ProducerId(1),
        producer_epoch=ProducerEpoch(0),
        request_id=request_id,
    )


def opened(sessions: PublishSessions, session_id: str, request_id: bytes = b"") -> PublishSession:
    assert sessions.reserve(session_id, request_id) is None
    made = session(session_id, request_id)
    sessions.open(made)
    return made


def fails(code: ErrorCode) -> "pytest.RaisesExc[SmqError]":
    return pytest.raises(SmqError, check=lambda e: e.code is code)


def test_an_id_is_taken_while_its_session_is_being_opened() -> None:
    sessions = PublishSessions()
    sessions.reserve("a", b"")
    with fails(ErrorCode.SESSION_EXISTS):
        sessions.reserve("a", b"")
    with fails(ErrorCode.UNKNOWN_SESSION):
        sessions.get("a")
    sessions.release("a")
    opened(sessions, "a")


def test_the_idlest_session_goes_when_there_is_one_too_many() -> None:
    sessions = PublishSessions(sessions_max=2)
    opened(sessions, "a")
    opened(sessions, "b")
    sessions.get("a")
    opened(sessions, "c")
    assert len(sessions) == 2
    sessions.get("a")
    with fails(ErrorCode.UNKNOWN_SESSION):
        sessions.get("b")


def test_sessions_being_opened_are_not_evicted() -> None:
    sessions = PublishSessions(sessions_max=1)
    sessions.reserve("a", b"")
    with fails(ErrorCode.LIMIT_EXCEEDED):
        sessions.reserve("b", b"")


@pytest.mark.parametrize("session_id", ["", "x" * 257])
def test_ids_must_be_names(session_id: str) -> None:
    with fails(ErrorCode.INVALID_REQUEST):
        PublishSessions().reserve(session_id, b"")
    with fails(ErrorCode.INVALID_REQUEST):
        Subscriptions().open(session_id)


def test_subscriptions_are_bounded() -> None:
    subscriptions = Subscriptions(subscriptions_max=1)
    subscriptions.open("s")
    with fails(ErrorCode.LIMIT_EXCEEDED):
        subscriptions.open("t")
