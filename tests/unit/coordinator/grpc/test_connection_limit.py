"""Connections to a gRPC port by address: the newest beyond the limit are closed, and no others."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from smq.coordinator.grpc.connection_limit import ConnectionLimit
from smq.testing.served import PATIENCE_S

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # HTTP/2's, with empty settings


class World:
    """A gRPC server without methods, its connection limit, and clients."""

    def __init__(self, port: int, limit: ConnectionLimit) -> None:
        self.port = port
        self.limit = limit
        self.sockets: list[socket.socket] = []

    def connect(self, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
        made = []
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", self.port), source_address=(address, 0))
            sock.setblocking(False)
            sock.sendall(GREETING)
            made.append(sock)
        self.sockets += made
        return made

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 - other parties' sockets: no event says that they change
            await asyncio.sleep(0.005)


def is_open(sock: socket.socket) -> bool:
    """Reads gRPC's own settings away on the way."""
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@asynccontextmanager
async def with_limit(per_address_max: int) -> AsyncIterator[World]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limit = ConnectionLimit(frozenset({port}), per_address_max=per_address_max, scan_interval_s=0.005)
    limit.start()
    world = World(port, limit)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield world
    finally:
        limit.stop()
        for sock in world.sockets:
            sock.close()
        await server.stop(None)


async def test_an_address_has_connections_up_to_its_limit_and_no_more() -> None:
    async with with_limit(3) as world:
        first = world.connect(3)
        await world.until(lambda: world.limit.open == 3)
        assert all(is_open(s) for s in first), "at the limit, not above"
        more = world.connect(5)
        await world.until(lambda: not any(is_open(s) for s in more))
        assert all(is_open(s) for s in first), "the first ones stay"
        await world.until(lambda: world.limit.counts.refused == 5)


async def test_another_address_has_a_limit_of_its_own() -> None:
    async with with_limit(2) as world:
        flood = world.connect(9)
        others = world.connect(2, "127.0.0.9")
        await world.until(lambda: sum(is_open(s) for s in flood) == 2)
        assert all(is_open(s) for s in others)


async def test_a_connection_that_ends_makes_room_for_another() -> None:
    async with with_limit(1) as world:
        (first,) = world.connect(1)
        await world.until(lambda: world.limit.open == 1)
        first.close()
        await world.until(lambda: world.limit.open == 0)
        (second,) = world.connect(1)
        await world.until(lambda: world.limit.open == 1)
        assert is_open(second)


async def test_a_scan_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan needs a descriptor itself, and those may run out."""
    failed = []

    def none_left(_path: str) -> list[str]:
        failed.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    async with with_limit(1) as world:
        with monkeypatch.context() as patched:
            patched.setattr("smq.coordinator.grpc.connection_limit.os.listdir", none_left)
            await world.until(lambda: bool(failed))
        flood = world.connect(3)
        await world.until(lambda: sum(is_open(s) for s in flood) == 1)


async def test_sockets_of_other_ports_are_left_alone() -> None:
    async with with_limit(1) as world:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            pairs = []
            for _ in range(4):
                client = stack.enter_context(socket.create_connection(listener.getsockname()))
                served = stack.enter_context(listener.accept()[0])
                pairs.append((client, served))
            world.connect(4)
            await world.until(lambda: world.limit.counts.refused == 3)
            for client, served in pairs:
                client.sendall(b"x")
                assert served.recv(1) == b"x"
