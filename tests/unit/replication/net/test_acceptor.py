"""A node's port: what it listens at, which connections it accepts, and what a starting node learns at its own
address."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from smq.coordinator import limits
from smq.coordinator.cli.cluster_dir import free_ports
from smq.coordinator.server.process import ConnectionCaps, divide
from smq.coordinator.user_errors import StartError
from smq.raft_state.ids import NodeId
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket
from smq.replication.net.duplicates import AddressAnswer
from smq.replication.net.frames import FrameKind
from smq.replication.net.listening import bind_closed, bind_listener, open_closed, plain_host
from smq.replication.net.tcp import TcpNetwork, TcpSettings
from smq.replication.ports import Channel
from tests.unit.replication.net.test_tcp import PATIENCE_S, Recorder, frame, hello_payload, on_loop, run

# ------------------------------------------------------------------------------------------------------------ acceptor
# Which connections a port accepts: the limits of connections, addresses and descriptors, at, below and above each.
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Greeter(asyncio.Protocol):
    """Sends one byte to each accepted connection."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"!")  # type: ignore[attr-defined] # uvloop's transports do not have the base

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.close()


class ServedAcceptor:
    """An acceptor and its clients, which connect from any loopback address."""

    def __init__(self, accept: AcceptLimits, listener: Any = None) -> None:
        self.listener: Any = listener or bind_listener("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self.acceptor = Acceptor(self.listener, Greeter, loop=loop, purpose="test", limits=accept)
        self.acceptor.start()
        self._held: list[Streams] = []

    async def try_connect(self, address: str = "127.0.0.1") -> bool:
        """Whether one more connection from `address` is accepted; if so it stays open."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
            try:
                is_accepted = await reader.read(1) == b"!"
            except ConnectionError:
                is_accepted = False
            if is_accepted:
                self._held.append((reader, writer))
            else:
                writer.close()
        return is_accepted

    async def leave(self) -> None:
        """Closes the oldest connection and waits until the acceptor has noticed."""
        before = self.acceptor.open
        self._held.pop(0)[1].close()
        async with asyncio.timeout(PATIENCE_S):
            while self.acceptor.open == before:  # noqa: ASYNC110 - only the kernel knows
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.acceptor.close()
        for _, writer in self._held:
            writer.close()


def with_acceptor(
    accept: AcceptLimits | Callable[[], AcceptLimits],
    body: Callable[[ServedAcceptor], Coroutine[None, None, None]],
    listener: Any = None,
) -> None:
    async def test() -> None:
        served = ServedAcceptor(accept() if callable(accept) else accept, listener)
        try:
            await body(served)
        finally:
            served.close()

    run(test)


def test_connections_are_accepted_up_to_the_total_limit_and_again_after_one_has_closed() -> None:
    async def body(served: ServedAcceptor) -> None:
        assert [await served.try_connect(f"127.0.0.{i}") for i in range(1, 6)] == [True] * 3 + [False] * 2
        assert (served.acceptor.open, served.acceptor.counts.refused) == (3, 2)
        await served.leave()
        assert await served.try_connect()
        assert not await served.try_connect()

    with_acceptor(AcceptLimits(connections_max=3, per_address_max=3), body)


def test_one_address_has_its_own_limit_and_leaves_slots_for_others() -> None:
    async def body(served: ServedAcceptor) -> None:
        assert [await served.try_connect("127.0.0.1") for _ in range(4)] == [True, True, False, False]
        assert [await served.try_connect("127.0.0.2") for _ in range(3)] == [True, True, False]
        await served.leave()
        assert not await served.try_connect("127.0.0.2")
        assert await served.try_connect("127.0.0.1")

    with_acceptor(AcceptLimits(connections_max=100, per_address_max=2), body)


def test_a_socket_with_a_reserved_descriptor_is_refused_with_the_limit_to_raise() -> None:
    """In this test the clients hold the other descriptors: they live in the same process."""

    async def body(served: ServedAcceptor) -> None:
        with capture_logs() as logged:
            came = [await served.try_connect() for _ in range(20)]
        assert came[0]
        assert not came[-1]
        assert came == sorted(came, reverse=True)
        reasons = [entry["reason"] for entry in logged if entry["event"] == "connection_refused"]
        assert "ulimit -n" in reasons[0]

    def accept() -> AcceptLimits:
        free = [socket.socket() for _ in range(12)]  # not one after the other, if the process has closed some
        highest = max(one.fileno() for one in free)
        for one in free:
            one.close()
        return AcceptLimits(connections_max=100, per_address_max=100, descriptor_max=highest + 1)

    with_acceptor(accept, body)


def test_refusals_do_not_fill_the_log() -> None:
    async def body(served: ServedAcceptor) -> None:
        with capture_logs() as logged:
            assert [await served.try_connect() for _ in range(30)] == [False] * 30
        assert len([e for e in logged if e["event"] == "connection_refused"]) < 10  # one per second
        assert served.acceptor.counts.refused == 30

    with_acceptor(AcceptLimits(connections_max=0, per_address_max=1), body)


def test_a_system_without_descriptors_delays_connections_and_loses_none() -> None:
    class Exhausted:
        """A listener whose accept fails twice, as it does with EMFILE."""

        def __init__(self) -> None:
            self._sock = bind_listener("127.0.0.1", 0)
            self.failures = 2

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

    async def body(served: ServedAcceptor) -> None:
        assert await served.try_connect()
        assert served.listener.failures == 0

    with_acceptor(AcceptLimits(connections_max=5, per_address_max=5), body, Exhausted())


# ------------------------------------------------------------------------------------------------- descriptors
def test_no_limit_is_reduced_if_there_are_enough_descriptors() -> None:
    plenty = divide(65_536)
    assert (plenty.grpc, plenty.kafka, plenty.http) == (
        limits.GRPC_CONNECTIONS_MAX,
        limits.KAFKA_CONNECTIONS_MAX,
        limits.HTTP_CONNECTIONS_MAX,
    )


@pytest.mark.parametrize("descriptors", [limits.DESCRIPTORS_MIN, 1_024, 4_096, 15_000, 15_448, 15_449])
def test_clients_never_get_the_descriptors_of_the_disk_and_the_peers(descriptors: int) -> None:
    found = divide(descriptors)
    assert found.grpc + found.kafka + found.http <= descriptors - limits.DESCRIPTORS_RESERVED
    assert min(found.grpc, found.kafka, found.http) >= 1
    assert found.descriptor_max == descriptors - limits.DESCRIPTORS_RESERVED
    for ports in (1, 2, 9):
        limits_of_one = found.kafka_limits(ports)
        assert limits_of_one.per_address_max <= limits_of_one.connections_max <= max(1, found.kafka // ports)


def test_too_few_descriptors_are_refused_with_the_limit_to_raise() -> None:
    assert isinstance(divide(limits.DESCRIPTORS_MIN), ConnectionCaps)
    with pytest.raises(StartError, match=r"255 files.*ulimit -n, LimitNOFILE"):
        divide(limits.DESCRIPTORS_MIN - 1)


# ----------------------------------------------------------------------------------------------------------- listening
# Listening sockets: names, both kinds of addresses, and how a client's address is written.
@pytest.mark.parametrize(
    ("listen", "dial"),
    [
        ("::", "127.0.0.1"),
        ("::", "::1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_a_listener_is_reached_by_the_addresses_that_it_stands_for(listen: str, dial: str) -> None:
    with bind_listener(listen, 0) as listener:
        listener.setblocking(True)
        client = socket.create_connection((dial, listener.getsockname()[1]), timeout=5)
        accepted, address = listener.accept()
        assert plain_host(address[0]) == dial
        assert client.getsockname()[1] == address[1]
        client.close()
        accepted.close()


def test_one_address_listens_for_itself_alone() -> None:
    with bind_listener("::1", 0) as listener, pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5)


def test_a_name_that_leads_nowhere_is_an_os_error() -> None:
    with pytest.raises(OSError):
        bind_listener("name.invalid", 0)


@pytest.mark.parametrize(
    ("host", "expected"), [("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00::1")]
)
def test_an_ipv4_client_of_a_socket_for_both_kinds_is_written_as_ipv4(host: str, expected: str) -> None:
    assert plain_host(host) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_closed_port_refuses_clients_and_other_owners_until_it_is_opened(host: str) -> None:
    (port,) = free_ports(1)
    with bind_closed(host, port) as closed:
        for bind in (bind_closed, bind_listener):
            with pytest.raises(OSError, match="in use"):
                bind(host, port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        open_closed(closed)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_port_is_bound_and_opened_while_connections_of_its_last_owner_are_closing() -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        listener.accept()[0].close()  # the first to close: its end lingers in the system
        client.close()
    with bind_closed("127.0.0.1", port) as closed:
        open_closed(closed)
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


# --------------------------------------------------------------------------------------------------------- own address
# What a starting node learns at its own address: itself, another process of this node, or nothing of use.
ONE, TWO = NodeId(1), NodeId(2)


def network(node: NodeId, address: tuple[str, int] | None = None, cluster_id: str = "c") -> TcpNetwork:
    listener = bind_listener(*(address or ("127.0.0.1", 0)))
    peers = dict.fromkeys((ONE, TWO), ("127.0.0.1", 1)) | {node: listener.getsockname()[:2]}
    settings = TcpSettings(connect_timeout_ms=300, redial_min_ms=1, redial_max_ms=10)
    return TcpNetwork(
        loop=asyncio.get_running_loop(),
        node_id=node,
        cluster_id=cluster_id,
        peers=peers,
        listener=listener,
        settings=settings,
    )


def address_of(one: TcpNetwork) -> tuple[str, int]:
    return "127.0.0.1", one.port


@on_loop
async def test_a_node_finds_itself_at_its_own_address() -> None:
    me = network(TWO)
    found = await me.ask_own_address(address_of(me))
    assert me.is_me(found.process)
    me.close()


@on_loop
async def test_another_process_of_the_node_is_found_whether_it_serves_or_is_about_to() -> None:
    first, second = network(TWO), network(TWO)
    await first.ask_own_address(address_of(first))  # a process that is still opening its disk
    asked = asyncio.create_task(second.ask_own_address(address_of(first)))
    await asyncio.sleep(0)
    first.start(Recorder())
    for found in (await asked, await second.ask_own_address(address_of(first))):
        assert found.process
        assert not second.is_me(found.process)
    first.close()
    second.close()


@pytest.mark.parametrize(("node", "cluster_id"), [(ONE, "c"), (TWO, "other")])
def test_another_node_at_the_address_is_no_process_of_this_one(node: NodeId, cluster_id: str) -> None:
    async def test() -> None:
        me, other = network(TWO), network(node, cluster_id=cluster_id)
        other.start(Recorder())
        found = await me.ask_own_address(address_of(other))
        assert not found.process
        assert "another node, or another program" in found.reason
        me.close()
        other.close()

    run(test)


@on_loop
async def test_a_dead_address_is_a_reason() -> None:
    me = network(TWO)
    (port,) = free_ports(1)
    found = await me.ask_own_address(("127.0.0.1", port))
    assert found == AddressAnswer(reason=found.reason)
    assert "refused" in found.reason.lower() or "connect" in found.reason.lower()
    me.close()


@on_loop
async def test_a_program_that_says_nothing_is_given_up() -> None:
    silent = bind_listener("127.0.0.1", 0)
    me = network(TWO)
    assert (await me.ask_own_address(silent.getsockname())).reason == "timed out"
    me.close()
    silent.close()


@on_loop
async def test_a_peer_that_dials_before_the_start_gets_its_session_after_it() -> None:
    me = network(TWO)
    peer = network(ONE)
    peer._peers[TWO] = address_of(me)
    handlers = Recorder(), Recorder()
    peer.start(handlers[0])
    for _ in range(3):
        await me.ask_own_address(address_of(me))
    assert handlers[0].events == []
    me.start(handlers[1])
    await handlers[0].wait_count("open", 1)
    await handlers[1].wait_count("open", 1)
    me.close()
    peer.close()


@on_loop
async def test_the_answer_to_a_second_process_is_the_end_of_its_connection() -> None:
    me = network(TWO)
    me.start(Recorder())
    reader, writer = await asyncio.open_connection(*address_of(me))
    writer.write(frame(hello_payload(sender=TWO, receiver=TWO), FrameKind.WHO))
    async with asyncio.timeout(20):
        assert await reader.read() != b""
    assert not me.is_open(TWO, Channel.CONTROL)
    writer.close()
    me.close()


def test_both_sides_of_a_session_learn_how_far_the_other_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clocks = {ONE: iter(range(1_000_000, 2_000_000)), TWO: iter(range(9_000_000, 10_000_000))}
        seen: dict[NodeId, int] = {}
        two = network(TWO)
        one = network(ONE)
        one._peers[TWO] = address_of(two)
        for node, known in ((ONE, one), (TWO, two)):
            known._on_clock = seen.__setitem__
            monkeypatch.setattr(known, "_wall_ms", clocks[node].__next__)
            known.start(Recorder())
        async with asyncio.timeout(20):
            while len(seen) < 2:  # noqa: ASYNC110 - a state of the networks, not an event
                await asyncio.sleep(0.001)
        assert 7_900_000 < seen[TWO] < 8_100_000
        assert -8_100_000 < seen[ONE] < -7_900_000
        one.close()
        two.close()

    run(test)
