"""Listening sockets.

Owns how one is bound. It must import nothing but the standard library: commands that need no server check ports, too.
"""

import socket
from typing import Final

_BACKLOG: Final = 128  # connections the kernel holds for us: a few per peer would do


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0 takes a free one. OSError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:  # in every case the caller never gets the socket to close
        sock.close()
        raise
    return sock
