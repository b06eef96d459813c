"""Forwards TCP ports, as the port mapping of a router or of a container does: python -m ... LISTEN=TARGET ...

Owns nothing but the copying of bytes. Each address is host:port. A target's name is resolved for each connection. The
bytes are not touched, so TLS ends where it began.
"""

import asyncio
import sys
from functools import partial

_CHUNK = 64 << 10


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.transport.abort()


async def _forward(target: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        onward, out = await asyncio.open_connection(*target)
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(_copy(reader, out), _copy(onward, writer))
    out.close()
    writer.close()


async def _main(pairs: list[str]) -> None:
    servers = []
    for pair in pairs:
        listen, _, target = pair.partition("=")
        servers.append(await asyncio.start_server(partial(_forward, _address(target)), *_address(listen)))
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
