"""The TCP network and the contract of the Network port: sessions, order, replacement, strangers, big frames."""

import asyncio
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from inspect import Signature, signature
from types import SimpleNamespace
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import pytest
import uvloop

from smq.raft_state.ids import NodeId
from smq.replication.net import peer_connection as tcp_connection
from smq.replication.net.frames import (
    HEADER_BYTES,
    HELLO_BYTES_MAX,
    FrameKind,
    Hello,
    encode_hello,
    frame_header,
)
from smq.replication.net.listening import bind_listener
from smq.replication.net.tcp import TcpNetwork, TcpSettings
from smq.replication.ports import Buffer, Channel

ONE, TWO = NodeId(1), NodeId(2)
CONTROL, DATA = Channel.CONTROL, Channel.DATA
PATIENCE_S = 20  # a hang is a failure; nothing is measured by it


def frame(payload: bytes = b"", kind: int = FrameKind.MESSAGE) -> bytes:
    return frame_header(cast(FrameKind, kind), (payload,)) + payload


@dataclass
class Recorder:
    """A handler that records its calls and lets a test wait for them."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    _noted: asyncio.Event = field(default_factory=asyncio.Event)

    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        self._note(("open", peer, channel))

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        self._note(("close", peer, channel))

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        self._note(("message", peer, channel, payload))

    def _note(self, event: tuple[object, ...]) -> None:
        self.events.append(event)
        self._noted.set()

    async def wait(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not happened():
                self._noted.clear()
                await self._noted.wait()

    async def wait_count(self, kind: str, count: int, channel: Channel = CONTROL) -> None:
        await self.wait(lambda: sum(1 for e in self.events if e[0] == kind and e[2] == channel) >= count)

    def messages(self, channel: Channel = CONTROL) -> list[bytes]:
        return [bytes(e[3]) for e in self.events if e[0] == "message" and e[2] == channel]  # type: ignore[call-overload] # a memoryview


class Pair:
    """Two nodes on free ports; `networks` and `handlers` by node id."""

    def __init__(self, settings: TcpSettings | None = None, cluster_ids: tuple[str, str] = ("c", "c")) -> None:
        self.settings = settings or TcpSettings(redial_min_ms=1, redial_max_ms=10)
        self.cluster_ids = dict(zip((ONE, TWO), cluster_ids, strict=True))
        self.listeners = {n: bind_listener("127.0.0.1", 0) for n in (ONE, TWO)}
        self.peers = {n: ("127.0.0.1", s.getsockname()[1]) for n, s in self.listeners.items()}
        self.networks: dict[NodeId, TcpNetwork] = {}
        self.handlers: dict[NodeId, Recorder] = {}
        self.held: list[object] = []  # connections of strangers: dropped, they would close

    def start(self, node: NodeId) -> tuple[TcpNetwork, Recorder]:
        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=node,
            cluster_id=self.cluster_ids[node],
            peers=self.peers,
            listener=self.listeners.pop(node, None),
            settings=self.settings,
        )
        self.networks[node], self.handlers[node] = network, Recorder()
        network.start(self.handlers[node])
        return network, self.handlers[node]

    def close(self) -> None:
        for network in self.networks.values():
            network.close()

    async def both_open(self) -> None:
        for handler in self.handlers.values():
            await handler.wait_count("open", 1, CONTROL)
            await handler.wait_count("open", 1, DATA)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


class Closable(Protocol):
    def close(self) -> None: ...


P = ParamSpec("P")
Lent = TypeVar("Lent", bound=Closable)


def on_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """A test on a loop of its own."""

    @wraps(test)
    def run_it(*args: P.args, **kwargs: P.kwargs) -> None:
        run(lambda: test(*args, **kwargs))

    return run_it


def lent(
    make: Callable[[], Lent],
) -> Callable[[Callable[Concatenate[Lent, P], Coroutine[None, None, None]]], Callable[P, None]]:
    """The test's first argument is made on its loop, and closed after it."""

    def decorate(test: Callable[Concatenate[Lent, P], Coroutine[None, None, None]]) -> Callable[P, None]:
        @wraps(test)
        async def with_it(*args: P.args, **kwargs: P.kwargs) -> None:
            made = make()
            try:
                await test(made, *args, **kwargs)
            finally:
                made.close()

        _, *others = signature(test).parameters.values()
        with_it.__signature__ = Signature(others)  # type: ignore[attr-defined]  # pytest looks for fixtures there
        return on_loop(with_it)

    return decorate


def paired(
    settings: TcpSettings | None = None, cluster_ids: tuple[str, str] = ("c", "c")
) -> Callable[[Callable[Concatenate[Pair, P], Coroutine[None, None, None]]], Callable[P, None]]:
    """The test gets two nodes that have started."""

    def make() -> Pair:
        pair = Pair(settings, cluster_ids)
        pair.start(ONE)
        pair.start(TWO)
        return pair

    return lent(make)


# ----------------------------------------------------------------------------------------------------- sessions
@paired()
async def test_one_session_per_channel_opens_on_both_sides(pair: Pair) -> None:
    await pair.both_open()
    for node, peer in ((ONE, TWO), (TWO, ONE)):
        assert all(pair.networks[node].is_open(peer, c) for c in Channel)
        assert sorted(e for e in pair.handlers[node].events) == [("open", peer, CONTROL), ("open", peer, DATA)]


@paired()
async def test_messages_arrive_once_in_order_and_whole_on_their_channel(pair: Pair) -> None:
    await pair.both_open()
    sent = [b"%d" % i * (i % 50) for i in range(3000)]
    for payload in sent:
        assert pair.networks[ONE].send(TWO, CONTROL, [payload[:1], b"", payload[1:]])
        assert pair.networks[TWO].send(ONE, DATA, [payload])
    await pair.handlers[TWO].wait_count("message", len(sent), CONTROL)
    await pair.handlers[ONE].wait_count("message", len(sent), DATA)
    assert pair.handlers[TWO].messages(CONTROL) == sent
    assert pair.handlers[ONE].messages(DATA) == sent


@paired()
async def test_big_messages_pass_between_small_ones_and_stay_intact(pair: Pair) -> None:
    await pair.both_open()
    big = bytes(range(256)) * (20 << 12)  # 20 MiB: many chunks of the socket
    messages: list[list[Buffer]] = [[b"a"], [memoryview(big), b"tail"], [b"b"]]
    for parts in messages:
        assert pair.networks[ONE].send(TWO, DATA, parts)
    await pair.handlers[TWO].wait_count("message", 3, DATA)
    assert pair.handlers[TWO].messages(DATA) == [b"a", big + b"tail", b"b"]


@paired()
async def test_the_receiver_may_keep_received_memory(pair: Pair) -> None:
    await pair.both_open()
    sent = [bytes([i]) * 70_000 for i in range(20)]
    for payload in sent:
        pair.networks[ONE].send(TWO, DATA, [payload])
    await pair.handlers[TWO].wait_count("message", len(sent), DATA)
    assert pair.handlers[TWO].messages(DATA) == sent  # read only now, long after they arrived
    assert all(e[3].readonly for e in pair.handlers[TWO].events if e[0] == "message")  # type: ignore[attr-defined] # a memoryview


@lent(Pair)
async def test_without_a_session_nothing_is_sent(pair: Pair) -> None:
    network, _ = pair.start(ONE)
    assert not network.send(TWO, CONTROL, [b"x"])
    assert not network.is_open(TWO, CONTROL)
    assert network.backlog_bytes(TWO, CONTROL) == 0
    assert not network.send(NodeId(9), CONTROL, [b"x"])


@paired()
async def test_a_restarted_peer_gets_a_fresh_session_after_the_old_one_is_closed(pair: Pair) -> None:
    await pair.both_open()
    pair.networks[TWO].close()
    await pair.handlers[ONE].wait_count("close", 1, CONTROL)
    assert not pair.networks[ONE].is_open(TWO, CONTROL)
    assert not pair.networks[ONE].send(TWO, CONTROL, [b"lost"])
    pair.listeners[TWO] = bind_listener(*pair.peers[TWO])
    _, second = pair.start(TWO)
    await pair.handlers[ONE].wait_count("open", 2, CONTROL)
    assert pair.networks[ONE].send(TWO, CONTROL, [b"fresh"])
    await second.wait_count("message", 1)
    assert second.messages() == [b"fresh"]
    kinds = [e[0] for e in pair.handlers[ONE].events if e[2] == CONTROL]
    assert kinds == ["open", "close", "open"]


@lent(Pair)
async def test_a_peer_that_starts_later_is_found(pair: Pair) -> None:
    pair.listeners.pop(TWO).close()
    pair.start(ONE)
    pair.listeners[TWO] = bind_listener(*pair.peers[TWO])
    pair.start(TWO)
    await pair.both_open()


@paired()
async def test_after_close_the_handler_is_not_called(pair: Pair) -> None:
    await pair.both_open()
    before = list(pair.handlers[ONE].events)
    pair.networks[ONE].close()
    await pair.handlers[TWO].wait_count("close", 1, CONTROL)
    await pair.handlers[TWO].wait_count("close", 1, DATA)
    assert pair.handlers[ONE].events == before


# --------------------------------------------------------------------------------------------------- replacement
@lent(Pair)
async def test_a_newer_session_of_a_peer_replaces_the_older_one_and_the_close_comes_first(pair: Pair) -> None:
    _, handler = pair.start(TWO)
    first = await _dial(pair, serial=1)
    await handler.wait_count("open", 1)
    second = await _dial(pair, serial=2)
    await handler.wait_count("open", 2)
    assert [e[0] for e in handler.events] == ["open", "close", "open"]
    async with asyncio.timeout(PATIENCE_S):
        await first[0].read()  # until EOF: the node closes the older connection
    second[1].write(frame(b"new"))
    await handler.wait_count("message", 1)
    assert handler.messages() == [b"new"]


@lent(Pair)
async def test_an_older_session_of_the_same_process_does_not_replace_a_newer_one(pair: Pair) -> None:
    network, handler = pair.start(TWO)
    await _dial(pair, serial=5)
    await handler.wait_count("open", 1)
    late = await _dial(pair, serial=4)
    assert await late[0].read() == b""
    assert [e[0] for e in handler.events] == ["open"]
    assert network.is_open(ONE, CONTROL)


@lent(Pair)
async def test_a_new_process_of_a_peer_replaces_the_session_of_the_old_one(pair: Pair) -> None:
    _, handler = pair.start(TWO)
    await _dial(pair, serial=5)
    await handler.wait_count("open", 1)
    await _dial(pair, serial=1, process=b"q" * 16)
    await handler.wait_count("open", 2)
    assert [e[0] for e in handler.events] == ["open", "close", "open"]


# ----------------------------------------------------------------------------------------------------- strangers
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def hello_payload(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "sender": ONE,
        "receiver": TWO,
        "channel": CONTROL,
        "process": b"p" * 16,
        "serial": 1,
        "wall_ms": 0,
        "cluster_id": "c",
    }
    return encode_hello(Hello(**{**fields, **changes}))  # type: ignore[arg-type] # the cases name the fields


def hello_frame(**changes: object) -> bytes:
    return frame(hello_payload(**changes), FrameKind.HELLO)


async def _connect(pair: Pair) -> Connection:
    connection = await asyncio.open_connection(*pair.peers[TWO])
    pair.held.append(connection)
    return connection


async def _dial(pair: Pair, *, serial: int, process: bytes = b"p" * 16) -> Connection:
    reader, writer = await _connect(pair)
    writer.write(hello_frame(serial=serial, process=process))
    return reader, writer


STRANGERS = {
    "another cluster": hello_frame(cluster_id="other"),
    "another receiver": hello_frame(receiver=NodeId(3)),
    "an unknown sender": hello_frame(sender=NodeId(3)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a message before hello": frame(b"x"),
    "a ping before hello": frame(b"", FrameKind.PING),
    "an unknown kind": frame(b"x", 9),
    "a huge hello": frame(b"x" * (HELLO_BYTES_MAX + 1), FrameKind.HELLO)[:HEADER_BYTES],
    "a short hello": frame(b"abc", FrameKind.HELLO),
    "a wrong magic": frame(hello_payload().replace(b"SMQP", b"SMTP"), FrameKind.HELLO),
    "another version": frame(hello_payload().replace(b"SMQP\x00\x01", b"SMQP\x00\x09"), FrameKind.HELLO),
    "an unknown channel": frame(hello_payload()[:14] + b"\x07" + hello_payload()[15:], FrameKind.HELLO),
    "a broken cluster id": frame(hello_payload()[:-1] + b"\xff", FrameKind.HELLO),
    "a damaged hello": hello_frame()[:-1] + b"d",
}


@pytest.mark.parametrize("name", STRANGERS)
@paired()
async def test_a_stranger_is_closed_and_no_other_session_notices(pair: Pair, name: str) -> None:
    await pair.both_open()
    before = list(pair.handlers[TWO].events)
    reader, writer = await _connect(pair)
    writer.write(STRANGERS[name])
    async with asyncio.timeout(PATIENCE_S):
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass  # closed with our bytes unread: equally good
    assert pair.handlers[TWO].events == before
    assert pair.networks[ONE].send(TWO, CONTROL, [b"still here"])
    await pair.handlers[TWO].wait_count("message", 1)


@lent(Pair)
async def test_garbage_on_an_open_session_closes_only_that_session(pair: Pair) -> None:
    network, handler = pair.start(TWO)
    sessions = [await _connect(pair) for _ in Channel]
    for (_, writer), channel in zip(sessions, Channel, strict=True):
        writer.write(hello_frame(channel=channel))
        await handler.wait_count("open", 1, channel)
    sessions[0][1].write(b"\xff" * HEADER_BYTES)
    await handler.wait_count("close", 1, CONTROL)
    async with asyncio.timeout(PATIENCE_S):
        await sessions[0][0].read()
    assert network.is_open(ONE, DATA)


@paired(cluster_ids=("c", "d"))
async def test_nodes_of_different_clusters_never_open_a_session(pair: Pair) -> None:
    reader, writer = await _connect(pair)
    writer.write(hello_frame())
    async with asyncio.timeout(PATIENCE_S):
        await reader.read()
    assert pair.handlers[ONE].events == []
    assert pair.handlers[TWO].events == []


@paired(settings=TcpSettings(hello_timeout_ms=20, idle_ping_ms=10, redial_min_ms=1))
async def test_a_connection_that_sends_nothing_is_closed(pair: Pair) -> None:
    await pair.both_open()
    reader, _ = await _connect(pair)
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""


@paired(settings=TcpSettings(pending_connections_max=2, redial_min_ms=1, hello_timeout_ms=60_000))
async def test_one_connection_too_many_without_a_hello_evicts_the_oldest(pair: Pair) -> None:
    await pair.both_open()
    first, _second, _third = [await _connect(pair) for _ in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        try:
            assert await first[0].read() == b""
        except ConnectionResetError:
            pass  # dropped before it was read: equally good
    reader, writer = await _connect(pair)
    writer.write(hello_frame(process=b"z" * 16))
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read(1), "a peer that says hello is answered, however many other connections are silent"


# ------------------------------------------------------------------------------------------- keepalive, backlog
@lent(lambda: Pair(TcpSettings(idle_ping_ms=20, silence_ms_max=100, redial_min_ms=1)))
async def test_a_silent_peer_is_dropped(pair: Pair) -> None:
    network, handler = pair.start(TWO)
    await _dial(pair, serial=1)  # sends a hello, and nothing after it
    await handler.wait_count("close", 1)
    assert not network.is_open(ONE, CONTROL)


@lent(lambda: Pair(TcpSettings(idle_ping_ms=20, silence_ms_max=5_000, redial_min_ms=1)))
async def test_idle_sessions_are_kept_open_by_pings(pair: Pair) -> None:
    _, handler = pair.start(TWO)
    reader, _ = await _dial(pair, serial=1)
    await handler.wait_count("open", 1)
    async with asyncio.timeout(PATIENCE_S):
        hello = len(hello_frame())
        data = await reader.readexactly(hello + 3 * HEADER_BYTES)
    assert data[hello:] == frame(b"", FrameKind.PING) * 3


@lent(lambda: Pair(TcpSettings(session_buffer_bytes_max=8 << 20, redial_min_ms=1)))
async def test_a_peer_that_does_not_read_is_dropped_at_the_cap(pair: Pair) -> None:
    network, handler = pair.start(TWO)
    await _dial(pair, serial=1)  # reads nothing
    await handler.wait_count("open", 1)
    block = b"x" * (1 << 20)
    for _ in range(100):
        if not network.send(ONE, CONTROL, [block]):
            break
        assert network.backlog_bytes(ONE, CONTROL) <= (9 << 20) + 64
    assert not network.is_open(ONE, CONTROL)
    assert handler.events == [("open", ONE, CONTROL)]  # never from inside the call
    await handler.wait_count("close", 1)


def test_a_peer_that_never_stops_sending_makes_the_node_hold_at_most_two_messages() -> None:
    """512 MiB in messages of 64 MiB: the node reads no faster than it handles them, and retains none."""

    class Sink(Recorder):
        seen = 0

        def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
            self.seen += len(payload)
            self._note(("message", peer, channel))

    async def test() -> None:
        pair = Pair()
        sink = Sink()
        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=TWO,
            cluster_id="c",
            peers=pair.peers,
            listener=pair.listeners.pop(TWO),
        )
        network.start(sink)
        tracemalloc.start()  # the process's own peak may come from an earlier test
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENDLESS, str(pair.peers[TWO][1]), hello_frame().hex(), stdin=asyncio.subprocess.PIPE
        )
        try:
            await sink.wait(lambda: sink.seen >= 512 << 20)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            sender.kill()
            await sender.wait()
            network.close()
        assert 64 << 20 < most_bytes < 3 * 64 << 20

    run(test)


ENDLESS = """
import socket, sys
from smq.replication.net.frames import FrameKind, frame_header
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(bytes.fromhex(sys.argv[2]))
message = frame_header(FrameKind.MESSAGE, (bytes(64 << 20),)) + bytes(64 << 20)
while True:
    peer.sendall(message)
"""


@paired(settings=TcpSettings(frame_bytes_max=2000, redial_min_ms=1))
async def test_a_message_beyond_the_frame_limit_is_the_callers_error(pair: Pair) -> None:
    await pair.both_open()
    with pytest.raises(ValueError, match="frame limit"):
        pair.networks[ONE].send(TWO, CONTROL, [b"x" * 2001])
    assert pair.networks[ONE].send(TWO, CONTROL, [b"x" * 2000])
    await pair.handlers[TWO].wait_count("message", 1)


@pytest.mark.parametrize("at", [0, 4, 8, 12, 13, -1], ids=["length", "kind", "crc", "header's crc", "first", "last"])
@lent(Pair)
async def test_a_damaged_frame_closes_its_session_and_is_counted(pair: Pair, at: int) -> None:
    """What the peer sends after it is lost with the session; the next session works."""
    network, handler = pair.start(TWO)
    _, writer = await _dial(pair, serial=1)
    damaged = bytearray(frame(b"damaged"))
    damaged[at] ^= 0x40
    writer.write(frame(b"intact") + damaged + frame(b"after"))
    await handler.wait_count("close", 1)
    assert handler.messages() == [b"intact"]
    assert network.damaged_frames == {ONE: 1}
    _, writer = await _dial(pair, serial=2)
    writer.write(frame(b"again"))
    await handler.wait_count("message", 2)
    assert handler.messages() == [b"intact", b"again"]


def test_an_exception_of_the_handler_reaches_on_error() -> None:
    class Broken(Recorder):
        def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
            raise RuntimeError("an invariant")

    async def test() -> None:
        pair = Pair()
        raised: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        network = TcpNetwork(
            loop=asyncio.get_running_loop(),
            node_id=TWO,
            cluster_id="c",
            peers=pair.peers,
            listener=pair.listeners.pop(TWO),
            on_error=raised.set_result,
        )
        network.start(Broken())
        _, writer = await _dial(pair, serial=1)
        writer.write(frame(b"x"))
        async with asyncio.timeout(PATIENCE_S):
            assert str(await raised) == "an invariant"
        network.close()

    run(test)


def test_a_port_in_use_is_an_immediate_error() -> None:
    with bind_listener("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        bind_listener(*taken.getsockname())


# ----------------------------------------------------------------------------------------------------------- tcp turns
# How many frames from other nodes one turn of the event loop handles.
def test_thousands_of_frames_that_arrive_together_are_handled_in_order_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that each message advances by a millisecond."""
    handled_ns, turn = 0, 0
    turns = Counter[int]()
    monkeypatch.setattr(tcp_connection, "time", SimpleNamespace(monotonic_ns=lambda: handled_ns))

    class Slow(Recorder):
        def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
            nonlocal handled_ns
            handled_ns += 1_000_000
            turns[turn] += 1
            super().on_message(peer, channel, payload)

    async def body(pair: Pair) -> None:
        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        await pair.both_open()
        slow = pair.networks[TWO]._handler = Slow()
        next_turn()
        sent = [number.to_bytes(4, "big") for number in range(1_000)]
        for message in sent:
            assert pair.networks[ONE].send(TWO, CONTROL, [message])
        await slow.wait_count("message", len(sent))
        assert slow.messages() == sent
        stretch = tcp_connection.HANDLING_NS_MAX // 1_000_000
        assert max(turns.values()) <= 2 * stretch  # one when it is read, and one more in the same turn

    paired()(body)()


def test_connections_share_a_turn_and_none_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, soon = 1, list[Callable[[], None]]()
    monkeypatch.setattr(tcp_connection, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    turn = tcp_connection.Turn(SimpleNamespace(call_soon=soon.append))  # type: ignore[arg-type] # all of a loop it needs
    first = turn.ends_ns()
    assert first == now_ns + tcp_connection.HANDLING_NS_MAX
    now_ns = first
    assert [turn.ends_ns(), turn.ends_ns()] == [first + tcp_connection.HANDLING_NS_MIN] * 2
    assert len(soon) == 1
    soon.pop()()
    assert turn.ends_ns() == now_ns + tcp_connection.HANDLING_NS_MAX
