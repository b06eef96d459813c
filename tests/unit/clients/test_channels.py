"""Channels over real sockets: a name that leads elsewhere is followed."""

import asyncio
import socket
import struct
from typing import cast

import grpc
from grpc import aio

from smq.clients.channels import CHANNEL_OPTIONS, Channels

GRPC_DEFAULT_S = 30  # between two questions to the name server
FOLLOWED_WITHIN_S = 20  # so not by that default
NAME = b"\x06broker\x04test\x00"


class NameServer(asyncio.DatagramProtocol):
    """Knows the IPv4 address of one name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question = data[12 : data.index(b"\x00", 12) + 5]
        is_known = question == NAME + struct.pack(">HH", 1, 1)
        self.asked += is_known
        answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(self.address) if is_known else b""
        head = data[:2] + struct.pack(">HHHHH", 0x8180, 1, is_known, 0, 0)
        self._transport.sendto(head + question + answer, addr)


async def serving(host: str, port: int, answer: bytes) -> tuple[aio.Server, int]:
    async def handle(_request: bytes, _context: object) -> bytes:
        return answer

    server = aio.server()
    method = grpc.unary_unary_rpc_method_handler(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Where": method}),))
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, bound


def test_a_client_follows_the_name_of_a_node_that_comes_back_under_another_address() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        transport, names = await loop.create_datagram_endpoint(
            lambda: NameServer("127.0.0.1"), local_addr=("127.0.0.1", 0)
        )
        before, port = await serving("127.0.0.1", 0, b"before")
        after, _ = await serving("127.0.0.2", port, b"after")
        channels = Channels()
        name_server = transport.get_extra_info("sockname")[1]
        node = channels.node(f"dns://127.0.0.1:{name_server}/broker.test:{port}")
        where = node.channel.unary_unary("/test.Test/Where", None, None)
        try:
            answers = [await where(b"", timeout=FOLLOWED_WITHIN_S)]
            names.address = "127.0.0.2"
            await before.stop(None)
            answers.append(await where(b"", timeout=FOLLOWED_WITHIN_S, wait_for_ready=True))
        finally:
            await channels.close()
            await before.stop(None)
            await after.stop(None)
            transport.close()
        assert answers == [b"before", b"after"]
        assert names.asked < FOLLOWED_WITHIN_S

    assert FOLLOWED_WITHIN_S < GRPC_DEFAULT_S
    asyncio.run(run())


def test_a_name_is_asked_for_about_once_per_second_at_most() -> None:
    """Each attempt to connect, up to ten per second, would be a question otherwise."""
    assert dict(CHANNEL_OPTIONS)["grpc.dns_min_time_between_resolutions_ms"] == 1_000
