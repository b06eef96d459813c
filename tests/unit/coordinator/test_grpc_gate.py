"""The gate of arriving gRPC calls, on a real node: who dawdles keeps nobody out, and every place comes back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator import limits
from tests.unit.coordinator.served import PATIENCE_S, Served, fails, serving


async def silence() -> AsyncIterator[bytes]:
    """The message of a call that never comes."""
    await asyncio.Event().wait()
    yield b""


def test_calls_whose_request_never_comes_keep_nobody_out(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        dawdle: Any = served.channel.stream_unary("/smq.v1.Admin/NodeStatus", None, None)
        calls = [dawdle(silence()) for _ in range(limits.GRPC_ARRIVALS_MAX)]
        for call in calls:
            await call.wait_for_connection()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3 * limits.GRPC_ARRIVALS_MAX):
                await served.admin.NodeStatus(pb.NodeStatusRequest())
        for call in calls:
            call.cancel()
        await served.create()

    serving(tmp_path, body)


def test_calls_that_fail_or_are_withdrawn_give_their_places_back(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        unknown: Any = served.channel.unary_unary("/smq.v1.Admin/NoSuchMethod", None, None)
        garbled: Any = served.channel.unary_unary("/smq.v1.Admin/NodeStatus", None, None)
        dawdle: Any = served.channel.stream_unary("/smq.v1.Admin/NodeStatus", None, None)
        for _ in range(2 * limits.GRPC_ARRIVALS_MAX):
            for call, data in ((unknown, b""), (garbled, b"\xff\xff")):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(data)
            withdrawn = dawdle(silence())
            await withdrawn.wait_for_connection()
            withdrawn.cancel()
            await fails(served.admin.CreateTopic(pb.CreateTopicRequest(name="t", partition_count=0)))
        async with asyncio.timeout(PATIENCE_S):
            await served.admin.NodeStatus(pb.NodeStatusRequest())

    serving(tmp_path, body)
