"""Errors on the wire: every code has a status, and a detail carries all that a machine needs."""

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.errors import from_detail, status_of, to_detail
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import NodeId, Offset

DETAILS = [
    ErrorDetails(),
    ErrorDetails(leader=NodeId(2), leader_address="127.0.0.1:7411"),
    ErrorDetails(lo=Offset(0), hi=Offset(0)),
    ErrorDetails(lo=Offset(2**40), hi=Offset(2**63 - 1), retry_after_ms=0),
]


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_has_a_grpc_status_that_is_not_ok(code: ErrorCode) -> None:
    assert status_of(code) not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize("details", DETAILS)
def test_an_error_survives_the_wire(code: ErrorCode, details: ErrorDetails) -> None:
    detail = pb.ErrorDetail.FromString(to_detail(SmqError(code, "what", details)).SerializeToString())
    back = from_detail(detail)
    assert (back.code, back.message, back.details) == (code, "what", details)
    assert (detail.name, detail.advice) == (code.name, code.advice)
    assert (detail.definite, detail.retriable) == (code.is_definite, code.is_retriable)


def test_an_error_of_a_newer_version_becomes_internal() -> None:
    assert from_detail(pb.ErrorDetail(code=9999, name="FUTURE", message="m")).code is ErrorCode.INTERNAL
