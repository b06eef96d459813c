"""How many connections one address may have to the gRPC ports.

Owns the count of those ports' connections per address, and the end of those beyond the limit, newest first. gRPC
accepts connections itself, in C++, and does not expose their sockets before a first call. So this file scans the
process's own descriptors from time to time and shuts down the excess connections; to gRPC it looks as if the client
went away. It must never close or duplicate a descriptor: a close gives up every lock that the process has on the same
file. It reads no byte and knows nothing of HTTP/2. gRPC itself limits the total. Only the composition root makes one.
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
_SCAN_INTERVAL_S: Final = 1.0
_PAUSE_FACTOR: Final = 20  # pause this many times a scan: it costs at most 5 % of a core, however many descriptors

Peer = tuple[str, int]  # address and port


class ConnectionLimit:
    """Call `start` on the loop; the scans run in another thread. `open` is the result of the last scan."""

    def __init__(
        self, ports: frozenset[int], *, per_address_max: int, scan_interval_s: float = _SCAN_INTERVAL_S
    ) -> None:
        self._ports: Final = ports
        self._max: Final = per_address_max
        self._scan_interval_s: Final = scan_interval_s
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
                refused = await asyncio.to_thread(self._scan)
            except OSError as e:  # no descriptor is left to list the others with; that passes
                log.warning("grpc_connections_not_counted", reason=str(e))
                refused = {}
            took = time.monotonic() - began
            for address, count in refused.items():
                reason = f"closed {count} connections: this address has more than its limit of {self._max}"
                log.warning("connection_refused", purpose="gRPC", address=address, reason=reason)
                self.counts.refused += count
            await asyncio.sleep(max(self._scan_interval_s, _PAUSE_FACTOR * took))

    def _scan(self) -> dict[str, int]:
        """Shuts down the excess connections, and returns how many those were per address."""
        found = self._connections()
        self._peers = {p: None for p in self._peers if p in found} | dict.fromkeys(found)
        by_address: dict[str, list[Peer]] = defaultdict(list)
        for peer in self._peers:
            by_address[peer[0]].append(peer)
        refused = {}
        for address, peers in by_address.items():
            newest = peers[self._max :]
            for peer in newest:
                self._shut_down(found[peer], peer)
                del self._peers[peer]
            if newest:
                refused[address] = len(newest)
        return refused

    def _connections(self) -> dict[Peer, int]:
        """The connections of our ports, each with its descriptor."""
        found = {}
        for name in os.listdir(_DESCRIPTORS):
            peer = self._peer(int(name))
            if peer is not None:
                found[peer] = int(name)
        return found

    def _peer(self, descriptor: int) -> Peer | None:
        """None for a descriptor that is not a connection to our ports, or that is gone by now."""
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:
            return None
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] not in self._ports:
                return None
            address, port = sock.getpeername()[:2]
        except OSError:
            return None  # the listener
        finally:
            sock.detach()  # it is gRPC's
        return address, port

    def _shut_down(self, descriptor: int, peer: Peer) -> None:
        if self._peer(descriptor) != peer:
            return  # the number belongs to another connection now
        sock = socket.socket(fileno=descriptor)
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it ended by itself
        finally:
            sock.detach()
