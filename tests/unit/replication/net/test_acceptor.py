"""Which connections a port accepts: the limits of connections, addresses and descriptors, at, below and above each."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from smq.coordinator import limits
from smq.coordinator.server.process import ConnectionCaps, divide
from smq.coordinator.user_errors import StartError
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket
from smq.replication.net.listening import bind_listener
from tests.unit.replication.net.test_tcp import PATIENCE_S, run

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
