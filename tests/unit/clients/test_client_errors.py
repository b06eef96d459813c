"""SmqError to the wire and back."""

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.clients.errors import (
    ERROR_METADATA_KEY,
    detail_from_error,
    error_from_detail,
    error_from_rpc,
    status_of,
    trailing_metadata_of,
)
from smq.clients.pb import smq_pb2 as pb
from smq.raft_state.errors import ErrorCode, ErrorDetails, RecordError, SmqError
from smq.raft_state.ids import NodeId, Offset


class Failure(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, details: str = "", trailers: Any = ()) -> None:
        self._status, self._details, self._trailers = status, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


int64s = st.none() | st.integers(0, 2**63 - 1)


@given(
    code=st.sampled_from(list(ErrorCode)),
    message=st.text(max_size=50),
    leader=st.none() | st.integers(1, 2**31 - 1),
    address=st.none() | st.text(max_size=20),
    lo=int64s,
    hi=int64s,
    retry=int64s,
    records=st.lists(st.builds(RecordError, st.integers(0, 2**31 - 1), st.text(max_size=9)), max_size=3),
)
def test_every_error_survives_the_wire(
    code: ErrorCode,
    message: str,
    leader: int | None,
    address: str | None,
    lo: int | None,
    hi: int | None,
    retry: int | None,
    records: list[RecordError],
) -> None:
    details = ErrorDetails(
        leader=None if leader is None else NodeId(leader),
        leader_address=address,
        lo=None if lo is None else Offset(lo),
        hi=None if hi is None else Offset(hi),
        retry_after_ms=retry,
        records=tuple(records),
    )
    error = SmqError(code, message, details)
    back = error_from_detail(pb.ErrorDetail.FromString(detail_from_error(error).SerializeToString()))
    assert (back.code, back.message, back.details) == (code, message, details)
    by_trailers = error_from_rpc(Failure(status_of(code), "", trailing_metadata_of(error)), "a:1")
    assert (by_trailers.code, by_trailers.message) == (code, message)


def test_code_of_a_newer_version_keeps_its_name() -> None:
    error = error_from_detail(pb.ErrorDetail(code=9999, name="FROM_THE_FUTURE", message="new", advice="upgrade"))
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "FROM_THE_FUTURE: new; upgrade"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.TIMED_OUT),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.TIMED_OUT),
        (grpc.StatusCode.CANCELLED, ErrorCode.TIMED_OUT),
        (grpc.StatusCode.UNKNOWN, ErrorCode.TIMED_OUT),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.LIMIT_EXCEEDED),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.INVALID_REQUEST),
        (grpc.StatusCode.INTERNAL, ErrorCode.TIMED_OUT),
        (grpc.StatusCode.ABORTED, ErrorCode.INTERNAL),
    ],
)
def test_grpc_failure_becomes_an_error_that_names_the_address(status: grpc.StatusCode, code: ErrorCode) -> None:
    error = error_from_rpc(Failure(status, "why\nand a long trace"), "host:1")
    assert error.code is code
    assert "long trace" not in error.message
    assert "host:1" in error.message or code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        ("Ssl handshake failed: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "uses TLS, and"),
        ("error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED", "not signed by this client's CA"),
        ("connect: Connection refused (111)", "connection refused"),
        ("Hostname Verification Check failed.", "for another host name"),
        ("Socket closed", "does it ask for TLS"),
    ],
)
def test_a_connection_that_was_not_made_is_told_in_plain_words_and_sent_nothing(sign: str, says: str) -> None:
    text = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7401: {sign}"
    error = error_from_rpc(Failure(grpc.StatusCode.UNAVAILABLE, text), "host:1")
    assert (error.code, error.code.is_definite) == (ErrorCode.UNREACHABLE, True)
    assert says in error.message
    assert "nothing was sent" in str(error)
    assert "SSL" not in error.message


def test_garbage_trailers_are_ignored() -> None:
    error = error_from_rpc(Failure(grpc.StatusCode.UNAVAILABLE, "", ((ERROR_METADATA_KEY, b"\xff\xff"),)), "h:1")
    assert error.code is ErrorCode.TIMED_OUT
    assert "no reason given" in error.message


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_maps_to_a_failure_status(code: ErrorCode) -> None:
    assert status_of(code) not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
