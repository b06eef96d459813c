"""Listening sockets.

Owns how one is bound, when it begins to listen, and how the address of a client is written. It must import nothing but
the standard library: commands that need no server check ports, too.
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
    sock = bind_closed(host, port)
    try:
        open_closed(sock)
    except BaseException:  # in every case the caller never gets the socket to close
        sock.close()
        raise
    return sock


def bind_closed(host: str, port: int) -> socket.socket:
    """As `bind_listener`, but the system refuses all connections until `open_closed`. The port is taken meanwhile."""
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
        # Linux lets two sockets with this option have one port while neither has listened. Listening for a moment takes
        # the port, and without the option it stays ours. (A free one of the system's choice would be given back.)
        if port:
            sock.listen(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if port:
            sock.shutdown(socket.SHUT_RDWR)
        sock.setblocking(False)
    except BaseException:  # the caller never gets the socket to close, whatever it is
        sock.close()
        raise
    return sock


def open_closed(sock: socket.socket) -> None:
    """From now on connections are accepted."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier process may still be closing
    sock.listen(_BACKLOG)
