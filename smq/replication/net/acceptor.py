"""One listening socket: which connections are accepted, how many at a time, and how long a TLS handshake may take.

Owns the accepting of connections, their number in total and per address, and the handshakes under way. It never reads
application bytes and never waits for a peer: a connection that does not finish its handshake is dropped at its
deadline, and earlier if others wait for its slot. TCP between nodes, the Kafka port and HTTP accept through it.
"""

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from smq.replication.net.listening import plain_host
from smq.replication.net.rare_warnings import RareWarnings

log = structlog.get_logger(__name__)

_ACCEPTS_PER_WAKE: Final = 64  # then the loop's other work gets its turn
_PAUSE_S: Final = 0.1  # after the system ran out of descriptors or memory: it may have some soon
# Errors of accept(2) that mean an exhausted system; any other error ends one connection. Neither ends the listener.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLimits:
    """`descriptor_max`: a socket with this descriptor or a higher one is refused. The kernel hands out the lowest free
    descriptor, so this many are in use, and the rest is reserved for the other nodes and the disk."""

    connections_max: int
    per_address_max: int
    descriptor_max: int | None = None
    handshakes_max: int = 256  # some 50 KB and a millisecond of CPU each: more at a time only slow each other down
    handshake_grace_s: float = 1.0  # a handshake that takes longer loses its slot if others wait for it
    handshake_timeout_s: float = 5.0  # several round trips around the world


@dataclass(slots=True)
class AcceptCounts:
    """For metrics."""

    refused: int = 0
    handshakes_failed: int = 0


class Ticket:
    """The slot of one connection. The protocol that serves the connection calls `close` when it ends."""

    __slots__ = ("_acceptor", "address")

    def __init__(self, acceptor: "Acceptor", address: str) -> None:
        self._acceptor: Acceptor | None = acceptor
        self.address = address

    def close(self) -> None:
        """Gives the slot back; further calls do nothing."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor._leave(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """An accepted connection without its protocol yet: for the TLS handshake, or for one turn of the loop."""

    sock: socket.socket
    ticket: Ticket
    since_s: float


class Acceptor:
    """Runs entirely on the given loop. `make_protocol` is called for each accepted connection; the protocol must close
    the ticket when the connection is lost. `tls` returns the context of the next handshake. `wait_s_of` is asked for
    each connection's address: above 0, the address has to wait, and the connection is refused."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Ticket], asyncio.BaseProtocol],
        *,
        loop: asyncio.AbstractEventLoop,
        purpose: str,
        limits: AcceptLimits,
        tls: Callable[[], ssl.SSLContext] | None = None,
        wait_s_of: Callable[[str], float] | None = None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._loop = loop
        self._purpose = purpose
        self._limits = limits
        self._tls = tls
        self._wait_s_of = wait_s_of
        self._per_address: Counter[str] = Counter()
        self._opening: dict[asyncio.Task[None], _Opening] = {}  # oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._warnings = RareWarnings(1)
        self.open = 0
        self.counts = AcceptCounts()

    def start(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def pause(self) -> None:
        """New connections wait in the kernel until `start`."""
        self._loop.remove_reader(self._listener.fileno())

    def close(self) -> None:
        """Accepts no more connections and ends unfinished handshakes. Open connections stay with their owners."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._opening:
            task.cancel()

    # -------------------------------------------------------------------------------------------- accepting
    def _on_readable(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            if len(self._opening) >= self._limits.handshakes_max:
                self._evict()
                self._pause_accepting()  # until one has ended
                return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                if e.errno not in _EXHAUSTED:
                    continue  # this connection went away while it waited
                log.error("accept_failed", purpose=self._purpose, error=str(e), connections=self.open)
                self._pause_accepting()
                return
            self._admit(sock, plain_host(str(address[0])))

    def _pause_accepting(self) -> None:
        """A waiting connection keeps the listener readable: without a pause the loop would spin."""
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._pause is not None and not self._is_closed:
            self._pause.cancel()
            self._pause = None
            self.start()

    def _admit(self, sock: socket.socket, address: str) -> None:
        reason = self._refusal(sock, address)
        if reason:
            sock.close()
            self.counts.refused += 1
            self._warn("connection_refused", address, reason)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.open += 1
        self._per_address[address] += 1
        opening = _Opening(sock=sock, ticket=Ticket(self, address), since_s=self._loop.time())
        task = self._loop.create_task(self._open(opening))
        self._opening[task] = opening
        task.add_done_callback(self._opened)

    def _refusal(self, sock: socket.socket, address: str) -> str:
        limits = self._limits
        if self.open >= limits.connections_max:
            return f"{self.open} connections are open, which is the limit"
        if self._per_address[address] >= limits.per_address_max:
            return f"{self._per_address[address]} connections of this address are open, which is the limit"
        if limits.descriptor_max is not None and sock.fileno() >= limits.descriptor_max:
            return (
                "all file descriptors are in use except those reserved for the other nodes and the disk: raise the "
                f"limit of open files (ulimit -n, LimitNOFILE=) above {limits.descriptor_max}"
            )
        if self._wait_s_of is not None and self._wait_s_of(address):
            return "the quota of this address for new connections is used up"
        return ""

    def _leave(self, address: str) -> None:
        self.open -= 1
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]

    # ------------------------------------------------------------------------------------------- handshakes
    async def _open(self, opening: _Opening) -> None:
        context = self._tls() if self._tls is not None else None
        await self._loop.connect_accepted_socket(
            lambda: self._make_protocol(opening.ticket),
            opening.sock,
            ssl=context,
            ssl_handshake_timeout=self._limits.handshake_timeout_s if context is not None else None,
        )

    def _opened(self, task: asyncio.Task[None]) -> None:
        """Replaces a `finally` in the task: a task cancelled before it starts runs none."""
        opening = self._opening.pop(task)
        error = "others waited for its slot" if task.cancelled() else task.exception()
        if error is not None:
            opening.ticket.close()
            opening.sock.close()
            self.counts.handshakes_failed += 1
            if not self._is_closed:
                self._warn("handshake_failed", opening.ticket.address, str(error) or repr(error))
        self._resume()

    def _evict(self) -> None:
        """Ends the oldest handshake, past its grace, of the address that has most: a flood evicts its own."""
        busiest = Counter(o.ticket.address for o in self._opening.values()).most_common(1)[0][0]
        task, oldest = next((t, o) for t, o in self._opening.items() if o.ticket.address == busiest)
        if self._loop.time() - oldest.since_s >= self._limits.handshake_grace_s:
            task.cancel()

    def _warn(self, event: str, address: str, reason: str) -> None:
        self._warnings.warn(event, purpose=self._purpose, address=address, reason=reason)
