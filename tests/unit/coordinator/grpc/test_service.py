"""What a failed call ends with."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.service import Service, guarded
from smq.coordinator.service.audience import Audience
from smq.raft_state.errors import ErrorCode, SmqError
from smq.replication.api import NodeApi
from smq.testing.fake.cluster import FakeCluster, FakeNode, answering


class Call:
    """A call's context, which keeps what the call is ended with."""

    ends_with: tuple[Any, ...] = ()

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        self.ends_with = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError


class Failing(Service):
    """A servicer that always raises `error`, as a node's services and the fake cluster's do."""

    def __init__(self, error: SmqError) -> None:
        self.audience = Audience(node=cast("NodeApi", None))
        self.node = FakeNode(FakeCluster(), 1, lambda node, server: None)
        self._error = error

    async def _fail(self, request: pb.FetchRequest) -> pb.FetchResponse:
        raise self._error

    async def _fail_node(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        raise self._error

    of_the_fake = answering(_fail)
    of_a_node = guarded(_fail_node)


@pytest.mark.parametrize("code", ErrorCode)
def test_the_fake_cluster_fails_a_call_as_a_node_does(code: ErrorCode) -> None:
    async def outcome(name: str) -> tuple[Any, ...]:
        context = Call()
        with pytest.raises(grpc.aio.AbortError):
            await getattr(Failing(SmqError(code, "what")), name)(pb.FetchRequest(), context)
        return context.ends_with

    assert asyncio.run(outcome("of_the_fake")) == asyncio.run(outcome("of_a_node"))
