"""A node's home is its address under [peers]: which process of the node answers there?

Owns one connection to a home, and the question that it carries. It opens no session. If nothing answers, that proves
little: not every network lets a machine reach itself, or each other, by that address. `tcp` imports it.
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
    decode_reason,
    encode_hello,
    frame_header,
)
from smq.replication.net.tls import uris_of

_READ_BYTES: Final = 4096  # an answer is far smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """`process`: of the node that answered; empty with the reason if none did. `refusal`: the node that answered holds
    another process for the one that asks, and why."""

    process: bytes = b""
    reason: str = ""
    refusal: str = ""


async def ask_home(
    address: tuple[str, int], question: Hello, *, tls: ssl.SSLContext | None, name: str, timeout_ms: int
) -> Home:
    """`name` is the asked node's in a certificate: an answer under another one says nothing."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(*address, ssl=tls)
            try:
                secure = writer.get_extra_info("ssl_object")
                if secure is not None and name not in uris_of(secure.getpeercert()):
                    return Home(reason="another node's certificate is shown there")
                payload = encode_hello(question)
                writer.write(frame_header(FrameKind.WHO, (payload,)) + payload)
                return await _answer(reader, question)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, FrameError) as e:
        return Home(reason=str(e) or "timed out")


async def _answer(reader: asyncio.StreamReader, question: Hello) -> Home:
    frames = FrameReader()
    while data := await reader.read(_READ_BYTES):
        for kind, payload in frames.feed(data):
            if kind is FrameKind.REFUSED:
                return Home(refusal=decode_reason(payload))
            if kind is FrameKind.HELLO:
                found = decode_hello(payload)
                if found.sender != question.receiver:
                    raise FrameError(f"node {found.sender} answers there")
                return Home(process=found.process)
    raise FrameError("the connection was closed: another node, or another program, listens there")
