"""Listening sockets.

Owns how one is bound, and how the address of a client is written. It must import nothing but the standard library:
commands that need no server check ports, too.
"""

import socket
from typing import Final

_BACKLOG: Final = 128  # connections the kernel holds for us: a few per peer would do


def plain_host(host: str) -> str:
    """An IPv4 address as such: a socket that listens for both kinds shows it as ::ffff:10.0.0.1."""
    return host.removeprefix("::ffff:")


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0 takes a free one. OSError if the address is not available.
    A host name is resolved here, once."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A name may have addresses of both kinds. We listen on one, and all clients speak IPv4.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" takes IPv4, too, whatever the machine's default is: it is the one address for all.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:  # in every case the caller never gets the socket to close
        sock.close()
        raise
    return sock
