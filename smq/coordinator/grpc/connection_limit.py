"""How many connections one address may have to the gRPC port.

Owns the count of that port's connections, by address, and the end of those beyond the limit, the newest first. gRPC
accepts by itself, in C++, and shows nobody its sockets before a first call: so this looks at the process's own
descriptors from time to time, and shuts down what is too much, which gRPC takes for a client that went away. It never
closes or duplicates a descriptor (a close gives up every lock that the process has on the same file), reads no byte,
and knows nothing of HTTP/2. The total is gRPC's own limit. Only the composition root makes one.
"""

import asyncio
import os
import socket
import time
from collections import defaultdict
from typing import Final

import structlog

from smq.replication.net.acceptor import AcceptCounts

log = structlog.get_logger(__name__)

_DESCRIPTORS: Final = "/dev/fd"  # of this process; on Linux it leads to /proc/self/fd
_LOOK_S: Final = 1.0
_REST: Final = 20  # times what a look took: a twentieth of one core at most, however many descriptors there are

Peer = tuple[str, int]  # address and port


class GrpcDoors:
    """`start` on the loop; the looking is done in another thread. `open` is what the last look found."""

    def __init__(self, port: int, *, per_address_max: int, look_s: float = _LOOK_S) -> None:
        self._port: Final = port
        self._max: Final = per_address_max
        self._look_s: Final = look_s
        self._peers: dict[Peer, None] = {}  # in the order in which they were first seen
        self._task: asyncio.Task[None] | None = None
        self.counts = AcceptCounts()

    @property
    def open(self) -> int:
        return len(self._peers)

    def start(self) -> None:
        if not os.path.isdir(_DESCRIPTORS):
            log.warning("grpc_connections_not_counted", advice=f"{_DESCRIPTORS} is missing: mount /proc")
            return
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                refused = await asyncio.to_thread(self._look)
            except OSError as e:  # no descriptor is left to list the others with: not for ever
                log.warning("grpc_connections_not_counted", reason=str(e))
                refused = {}
            took = time.monotonic() - began
            for address, count in refused.items():
                told = f"{count} connections beyond {self._max} of this address, which is the limit, are closed"
                log.warning("connection_refused", purpose="gRPC", address=address, reason=told)
                self.counts.refused += count
            await asyncio.sleep(max(self._look_s, _REST * took))

    def _look(self) -> dict[str, int]:
        """Shuts down what is too much; how many those were, by address."""
        found = self._connections()
        self._peers = {p: None for p in self._peers if p in found} | dict.fromkeys(found)
        by_address: dict[str, list[Peer]] = defaultdict(list)
        for peer in self._peers:
            by_address[peer[0]].append(peer)
        refused = {}
        for address, peers in by_address.items():
            newest = peers[self._max :]
            for peer in newest:
                self._shut(found[peer], peer)
                del self._peers[peer]
            if newest:
                refused[address] = len(newest)
        return refused

    def _connections(self) -> dict[Peer, int]:
        """Those of our port, each with its descriptor."""
        found = {}
        for name in os.listdir(_DESCRIPTORS):
            peer = self._peer(int(name))
            if peer is not None:
                found[peer] = int(name)
        return found

    def _peer(self, descriptor: int) -> Peer | None:
        """None for whatever is no connection to our port, or is gone by now."""
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                return None
            address, port = sock.getpeername()[:2]
        except OSError:
            return None  # the listener
        finally:
            sock.detach()  # it is gRPC's
        return address, port

    def _shut(self, descriptor: int, peer: Peer) -> None:
        if self._peer(descriptor) != peer:
            return  # another has the number now
        sock = socket.socket(fileno=descriptor)
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it ended by itself
        finally:
            sock.detach()
