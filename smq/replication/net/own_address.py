"""Before a node joins: does its own address lead to itself?

Owns one connection of a starting node to the address that its peers have of it. If another process answers there as
this very node, two would take turns in the cluster, so the caller must not start. If nothing answers, that proves
little: not every network lets a machine reach itself by its outer address. It opens no session. `tcp` imports it.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final

from smq.replication.net.frames import (
    FrameError,
    FrameKind,
    FrameReader,
    Hello,
    decode_hello,
    encode_hello,
    frame_header,
)
from smq.replication.net.tls import uris_of

_READ_BYTES: Final = 4096  # a hello is far smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddress:
    """`process`: of the node that answered; empty with the reason if none did."""

    process: bytes = b""
    reason: str = ""


async def ask_own_address(
    address: tuple[str, int], hello: Hello, *, tls: ssl.SSLContext | None, name: str, timeout_ms: int
) -> OwnAddress:
    """`name` is this node's in a certificate: an answer under another one says nothing."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(*address, ssl=tls)
            try:
                secure = writer.get_extra_info("ssl_object")
                if secure is not None and name not in uris_of(secure.getpeercert()):
                    return OwnAddress(reason="another node's certificate is shown there")
                payload = encode_hello(hello)
                writer.write(frame_header(FrameKind.HELLO, (payload,)) + payload)
                return OwnAddress(process=(await _answer(reader)).process)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, FrameError) as e:
        return OwnAddress(reason=str(e) or "timed out")


async def _answer(reader: asyncio.StreamReader) -> Hello:
    frames = FrameReader()
    while data := await reader.read(_READ_BYTES):
        for kind, payload in frames.feed(data):
            if kind is FrameKind.HELLO:
                return decode_hello(payload)
    raise FrameError("the connection was closed: another node, or another program, listens there")
