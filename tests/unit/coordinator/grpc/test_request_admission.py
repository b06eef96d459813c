"""Admission of gRPC requests: slow calls block no others, large requests have a budget, every place comes back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator import limits
from smq.coordinator.grpc.request_admission import RequestAdmission
from smq.raft_state.errors import ErrorCode
from smq.testing.served import PATIENCE_S, Served, fails, served_node

PLACES = 4
SLOW = 6
LARGE = limits.GRPC_LARGE_REQUEST_BYTES


async def silence() -> AsyncIterator[bytes]:
    """The message of a call that never comes."""
    await asyncio.Event().wait()
    yield b""


def text(data: bytes) -> str:
    return data.decode()


class Echo:
    """Echoes each request; parks one that begins with "park" until it is released. Anything but UTF-8 is garbled."""

    def __init__(self) -> None:
        self.parked = asyncio.Semaphore(0)
        self.may_go = asyncio.Event()

    async def call(self, request: str, _context: Any) -> bytes:
        if request.startswith("park"):
            self.parked.release()
            await self.may_go.wait()
        return request.encode()


@asynccontextmanager
async def admitting(**settings: Any) -> AsyncIterator[tuple[Any, Echo]]:
    """A channel to a server of one method with admission, and that method."""
    echo = Echo()
    server = grpc.aio.server(interceptors=[RequestAdmission(**{"arrivals_max": PLACES, "slow_max": SLOW, **settings})])
    method: Any = echo.call  # the stubs know only those of threads
    handler = grpc.unary_unary_rpc_method_handler(method, text)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, echo
    finally:
        await server.stop(None)


@asynccontextmanager
async def silent_calls(channel: Any, count: int = PLACES) -> AsyncIterator[list[Any]]:
    """Calls that have begun, and send nothing."""
    calls = [channel.stream_unary("/t/Echo")(silence()) for _ in range(count)]
    for call in calls:
        await call.wait_for_connection()
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()


async def test_calls_whose_request_never_comes_block_no_others_and_the_oldest_are_ended() -> None:
    async with admitting(arrival_s_max=0.05) as (channel, _echo), silent_calls(channel, 2 * PLACES + SLOW) as calls:
        while sum(call.done() for call in calls) <= PLACES:  # all but those for which there is room
            assert await channel.unary_unary("/t/Echo")(b"x") == b"x"
        for call in calls:
            if call.done():
                ended = await fails(call)
                assert ended.code == ErrorCode.OVERLOADED.number
                assert ended.retriable
        assert sum(not call.done() for call in calls) >= SLOW


async def test_the_more_calls_send_nothing_the_less_time_each_gets() -> None:
    """With the same time for each, the last in the queue would wait twice as long as this test does."""

    async with admitting(arrival_s_max=PATIENCE_S / 100) as (channel, _echo), silent_calls(channel, 200 * PLACES):
        assert await channel.unary_unary("/t/Echo")(b"x") == b"x"


async def test_calls_whose_request_never_comes_are_left_alone_while_there_are_places() -> None:
    async with (
        admitting(arrival_s_max=0.0, slow_max=0) as (channel, _echo),
        silent_calls(channel, PLACES - 1) as calls,
    ):
        for _ in range(50):
            assert await channel.unary_unary("/t/Echo")(b"x") == b"x"
        assert not any(call.done() for call in calls)


async def test_a_slow_request_is_served_when_it_comes() -> None:
    async with admitting(arrival_s_max=0.05) as (channel, _echo):
        slow = channel.stream_unary("/t/Echo")()
        async with silent_calls(channel, PLACES):
            assert await channel.unary_unary("/t/Echo")(b"x") == b"x"  # so the slow ones have left their places
            await slow.write(b"at last")
            await slow.done_writing()
            assert await slow == b"at last"


async def test_a_request_that_came_is_served_however_long_it_takes() -> None:
    """The time is that of its arrival, and small requests that are served hold no place."""

    async with admitting(arrival_s_max=0.05) as (channel, echo):
        parked = [channel.unary_unary("/t/Echo")(b"park") for _ in range(3 * PLACES)]
        for _ in parked:
            await echo.parked.acquire()
        async with silent_calls(channel):
            assert await channel.unary_unary("/t/Echo")(b"one") == b"one"
            assert not any(call.done() for call in parked)
            echo.may_go.set()
            assert [await call for call in parked] == [b"park"] * len(parked)


async def test_large_requests_have_a_budget_until_they_are_served() -> None:
    async with admitting(large_bytes_max=2 * LARGE) as (channel, echo):
        ask = channel.unary_unary("/t/Echo")
        parked = [ask(b"park".ljust(LARGE)) for _ in range(2)]
        for _ in parked:
            await echo.parked.acquire()
        refused = await fails(ask(b"x" * LARGE))
        assert refused.code == ErrorCode.OVERLOADED.number
        assert await ask(b"x" * (LARGE - 1)) == b"x" * (LARGE - 1)  # small ones do not count
        echo.may_go.set()
        for call in parked:
            await call
        assert await ask(b"x" * 2 * LARGE) == b"x" * 2 * LARGE


async def test_calls_that_fail_or_are_withdrawn_give_their_places_back() -> None:
    async with admitting(large_bytes_max=LARGE, arrival_s_max=PATIENCE_S) as (channel, _echo):
        for _ in range(2 * PLACES):
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/t/NoSuchMethod")(b"")
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            for garbled in (b"\xff", b"\xff" * LARGE):
                assert (await fails(channel.unary_unary("/t/Echo")(garbled))).code == ErrorCode.INVALID_REQUEST.number
            assert (await fails(channel.stream_unary("/t/Echo")(iter(())))).code == ErrorCode.INVALID_REQUEST.number
            async with silent_calls(channel, 1):
                pass
        async with silent_calls(channel, PLACES - 1):
            assert await channel.unary_unary("/t/Echo")(b"x" * LARGE) == b"x" * LARGE


async def count(requests: Any, context: Any) -> None:
    """Answers each message with the number of messages so far."""
    number = 0
    async for _ in requests:
        number += 1
        await context.write(b"%d" % number)


def at_two_addresses(directory: Path, silent_max: int, body: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Runs `body` with channels to a server of a unary method and a stream, from loopback's address and another."""

    async def test() -> None:
        server = grpc.aio.server(interceptors=[RequestAdmission(silent_max=silent_max)])
        unary: Any = Echo().call  # the stubs know only those of threads
        stream: Any = count
        methods: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(unary, text),
            "Count": grpc.stream_stream_rpc_method_handler(stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
        one = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        other = f"unix:{directory}/s"
        server.add_insecure_port(other)
        await server.start()
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                grpc.aio.insecure_channel(one) as first,
                grpc.aio.insecure_channel(other) as second,
            ):
                await body(first, second)
        finally:
            await server.stop(None)

    asyncio.run(test())


async def refusal(call: Any) -> pb.ErrorDetail:
    """Of a stream that has sent nothing: it ends by itself."""
    return await fails(call.read())


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
def test_silent_calls_of_an_address_are_bounded_and_leave_other_addresses_alone(tmp_path: Path, kind: str) -> None:
    """A unary method is, on the wire, one with a stream of requests."""
    method = {"stream_unary": "/t/Echo", "stream_stream": "/t/Count"}[kind]

    async def body(one: Any, other: Any) -> None:
        calls = [getattr(one, kind)(method)() for _ in range(3)]
        for call in calls:
            await call.wait_for_connection()
        for refused in (one.stream_unary("/t/Echo")(silence()), one.unary_unary("/t/Echo")(b"x")):
            detail = await fails(refused)
            assert (detail.code, detail.retriable) == (ErrorCode.OVERLOADED.number, True)
            assert "send the request with each call" in detail.message
        assert (await refusal(one.stream_stream("/t/Count")())).code == ErrorCode.OVERLOADED.number
        assert await other.unary_unary("/t/Echo")(b"x") == b"x"
        calls[0].cancel()
        await calls[1].write(b"x")  # one has gone, and one is no longer silent
        if kind == "stream_stream":
            assert await calls[1].read() == b"1"
        assert await one.unary_unary("/t/Echo")(b"x") == b"x"
        for call in calls:
            call.cancel()

    at_two_addresses(tmp_path, 3, body)


def test_a_stream_that_has_spoken_once_may_be_silent_for_ever(tmp_path: Path) -> None:
    async def body(one: Any, _other: Any) -> None:
        streams = []
        for _ in range(6):
            streams.append(stream := one.stream_stream("/t/Count")())
            await stream.write(b"x")
            assert await stream.read() == b"1"
        for stream in streams:
            await stream.write(b"x")
            assert await stream.read() == b"2"
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK

    at_two_addresses(tmp_path, 1, body)


async def test_a_nodes_silent_streams_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: Any = RequestAdmission.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "silent_max", 2)

    async with served_node(tmp_path) as served:
        streams = [served.agent.SubscribeRecord(), served.agent.PublishRecord()]
        for stream in streams:
            await stream.wait_for_connection()
        assert (await refusal(served.agent.SubscribeRecord())).code == ErrorCode.OVERLOADED.number
        for stream in streams:
            stream.cancel()


async def test_a_nodes_methods_are_under_admission(served: Served) -> None:
    garbled: Any = served.channel.unary_unary("/smq.v1.Admin/NodeStatus", None, None)
    assert (await fails(garbled(b"\xff\xff"))).code == ErrorCode.INVALID_REQUEST.number
    await fails(served.admin.CreateTopic(pb.CreateTopicRequest(name="t", partition_count=0)))
    await served.create()
