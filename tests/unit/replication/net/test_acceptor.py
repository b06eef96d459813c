"""Who is let in at a listening port: the limits of connections, addresses and descriptors, at, below and above each."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from smq.coordinator import limits
from smq.coordinator.descriptors import ConnectionCaps, divide
from smq.coordinator.user_errors import StartError
from smq.replication.net.acceptor import AcceptLimits, Acceptor, Ticket
from smq.replication.net.tcp import bind_listener
from tests.unit.replication.net.test_tcp import PATIENCE_S, run

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Greeter(asyncio.Protocol):
    """Says one byte to whoever is let in."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"!")  # type: ignore[attr-defined] # uvloop's transports do not have the base

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.close()


class Door:
    """An acceptor and clients of it, which come from any loopback address."""

    def __init__(self, accept: AcceptLimits, listener: Any = None) -> None:
        self.listener: Any = listener or bind_listener("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self.acceptor = Acceptor(self.listener, Greeter, loop=loop, purpose="test", limits=accept)
        self.acceptor.start()
        self._held: list[Streams] = []

    async def knock(self, address: str = "127.0.0.1") -> bool:
        """Whether one more connection from there is let in; it stays open then."""
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
            try:
                is_in = await reader.read(1) == b"!"
            except ConnectionError:
                is_in = False
            if is_in:
                self._held.append((reader, writer))
            else:
                writer.close()
        return is_in

    async def leave(self) -> None:
        """The one that came first goes, and the acceptor has noticed."""
        before = self.acceptor.open
        self._held.pop(0)[1].close()
        async with asyncio.timeout(PATIENCE_S):
            while self.acceptor.open == before:  # noqa: ASYNC110 - told by the kernel, to nobody here
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.acceptor.close()
        for _, writer in self._held:
            writer.close()


def with_door(
    accept: AcceptLimits | Callable[[], AcceptLimits],
    body: Callable[[Door], Coroutine[None, None, None]],
    listener: Any = None,
) -> None:
    async def test() -> None:
        door = Door(accept() if callable(accept) else accept, listener)
        try:
            await body(door)
        finally:
            door.close()

    run(test)


def test_connections_in_total_are_let_in_up_to_the_limit_and_again_when_one_has_gone() -> None:
    async def body(door: Door) -> None:
        assert [await door.knock(f"127.0.0.{i}") for i in range(1, 6)] == [True] * 3 + [False] * 2
        assert (door.acceptor.open, door.acceptor.counts.refused) == (3, 2)
        await door.leave()
        assert await door.knock()
        assert not await door.knock()

    with_door(AcceptLimits(connections_max=3, per_address_max=3), body)


def test_one_address_has_its_own_limit_and_leaves_room_for_others() -> None:
    async def body(door: Door) -> None:
        assert [await door.knock("127.0.0.1") for _ in range(4)] == [True, True, False, False]
        assert [await door.knock("127.0.0.2") for _ in range(3)] == [True, True, False]
        await door.leave()
        assert not await door.knock("127.0.0.2")
        assert await door.knock("127.0.0.1")

    with_door(AcceptLimits(connections_max=100, per_address_max=2), body)


def test_a_socket_of_a_number_that_is_kept_for_the_node_is_refused_with_what_to_raise() -> None:
    """Whoever took the others: here it is the clients, which live in this process, too."""

    async def body(door: Door) -> None:
        with capture_logs() as told:
            came = [await door.knock() for _ in range(20)]
        assert came[0]
        assert not came[-1]
        assert came == sorted(came, reverse=True)
        reasons = [entry["reason"] for entry in told if entry["event"] == "connection_refused"]
        assert "ulimit -n" in reasons[0]

    def accept() -> AcceptLimits:
        with socket.socket() as free:
            return AcceptLimits(connections_max=100, per_address_max=100, descriptor_max=free.fileno() + 12)

    with_door(accept, body)


def test_refusals_do_not_fill_the_log() -> None:
    async def body(door: Door) -> None:
        with capture_logs() as told:
            assert [await door.knock() for _ in range(30)] == [False] * 30
        assert len([e for e in told if e["event"] == "connection_refused"]) < 10  # one a second
        assert door.acceptor.counts.refused == 30

    with_door(AcceptLimits(connections_max=0, per_address_max=1), body)


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

    async def body(door: Door) -> None:
        assert await door.knock()
        assert door.listener.failures == 0

    with_door(AcceptLimits(connections_max=5, per_address_max=5), body, Exhausted())


# ------------------------------------------------------------------------------------------------- descriptors
def test_all_limits_are_whole_where_there_are_descriptors_for_all() -> None:
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
    assert found.kafka_limits.per_address_max <= found.kafka


def test_too_few_descriptors_are_refused_with_what_to_raise() -> None:
    assert isinstance(divide(limits.DESCRIPTORS_MIN), ConnectionCaps)
    with pytest.raises(StartError, match=r"255 files.*ulimit -n, LimitNOFILE"):
        divide(limits.DESCRIPTORS_MIN - 1)
