"""One TCP connection between two nodes: reads and writes frames, nothing else.

Owns the socket's protocol object. It never decides which peer may speak: its owner, `smq.replication.net.tcp`, does,
and is the only importer.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, cast

from smq.raft_state.ids import NodeId
from smq.replication.net.acceptor import Ticket
from smq.replication.net.frames import FrameError, FrameKind, FrameReader, frame_header
from smq.replication.net.listening import plain_host
from smq.replication.net.peer_tls import uris_of
from smq.replication.ports import Buffer, Channel

HANDLING_NS_MAX: Final = 5_000_000  # in one turn of the loop: a chunk holds thousands of small frames
HANDLING_NS_MIN: Final = 500_000  # guaranteed to each connection, so that none starves behind a busy one
_JOIN_BYTES_MAX: Final = 16 << 10  # below it one copy is cheaper than one more entry of writev


class Turn:
    """The time that all connections of a node together may handle frames before the loop's other work runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends_ns = 0

    def ends_ns(self) -> int:
        """When one connection that starts now must stop."""
        now_ns = time.monotonic_ns()
        if not self._ends_ns:
            self._ends_ns = now_ns + HANDLING_NS_MAX
            self._loop.call_soon(self._end)
        return max(self._ends_ns, now_ns + HANDLING_NS_MIN)

    def _end(self) -> None:
        self._ends_ns = 0


class ConnectionOwner(Protocol):
    @property
    def turn(self) -> Turn: ...

    def on_connected(self, connection: "Connection") -> None: ...

    def on_frame(self, connection: "Connection", kind: FrameKind, payload: memoryview) -> None: ...

    def on_bad_frame(self, connection: "Connection", error: FrameError) -> None: ...

    def on_lost(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """`key` is set once the peer is known. After `abort` nothing more is delivered."""

    def __init__(
        self,
        owner: ConnectionOwner,
        *,
        dialled: tuple[NodeId, Channel] | None,
        serial: int,
        ticket: Ticket | None = None,
    ) -> None:
        """`ticket`: the acceptor's, for a connection that was not dialled."""
        self._owner = owner
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._frames: Iterator[tuple[FrameKind, memoryview]] | None = None  # of the chunk that is being handled
        self._chunks: deque[bytes] = deque()  # the following chunks, read before reading was paused
        self.dialled = dialled
        self.serial = serial  # of this process's dial; of the peer's once its hello has arrived
        self.process = b""  # of the peer
        self.key: tuple[NodeId, Channel] | None = None
        self.is_alive = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.opened_s = self.received_s = self.sent_s = self._loop.time()

    # ------------------------------------------------------------------------------------ asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_alive = True
        self.opened_s = self.received_s = self.sent_s = self._loop.time()  # a TLS handshake has its own time
        self._owner.on_connected(self)

    def data_received(self, data: bytes) -> None:
        self._chunks.append(data)
        if self._frames is None:
            self._handle()

    def _handle(self) -> None:
        """Delivers frames until the turn ends. The rest waits until the loop's other work has run, and nothing more is
        read until then: so a session stays first in, first out, and its memory bounded."""
        self.received_s = self._loop.time()
        until_ns = self._owner.turn.ends_ns()
        try:
            while self._frames is not None or self._chunks:
                if self._frames is None:
                    self._frames = self._reader.feed(self._chunks.popleft())
                for kind, payload in self._frames:
                    if not self.is_alive:
                        return
                    self._owner.on_frame(self, kind, payload)
                    if time.monotonic_ns() >= until_ns:
                        self._pause()
                        return
                self._frames = None
        except FrameError as e:
            if self.is_alive:
                self._owner.on_bad_frame(self, e)

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        try:
            self._handle()
        except BaseException:  # the transport closes on any exception of `data_received`, and this continues one
            self.abort()
            raise
        if self._frames is None and self.is_alive and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_alive = False
        if self._ticket is not None:
            self._ticket.close()
        self._owner.on_lost(self)
        if not self.closed.done():
            self.closed.set_result(None)

    # ----------------------------------------------------------------------------------------------- owner's
    def allow(self, payload_bytes_max: int) -> None:
        """The peer is known: from now on its frames may be as long as a message."""
        self._reader.payload_bytes_max = payload_bytes_max

    def write(self, kind: FrameKind, parts: Sequence[Buffer]) -> None:
        """Queues one frame. Large parts go to the operating system as they are, never joined."""
        if self._transport is None or not self.is_alive:
            return
        head = frame_header(kind, parts)
        self.sent_s = self._loop.time()
        if sum(map(len, parts)) <= _JOIN_BYTES_MAX:
            self._transport.write(b"".join((head, *parts)))
        else:
            self._transport.writelines((head, *parts))

    @property
    def backlog_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None and self.is_alive else 0

    @property
    def remote(self) -> str:
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{plain_host(peer[0])}:{peer[1]}" if peer else "unknown"

    @property
    def uris(self) -> tuple[str, ...]:
        """The URIs in the peer's certificate; none without TLS."""
        tls = self._transport.get_extra_info("ssl_object") if self._transport is not None else None
        return uris_of(tls.getpeercert()) if tls is not None else ()

    def finish(self) -> None:
        """Sends what is queued, and then ends the connection."""
        self.is_alive = False
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drops the connection and its unsent bytes; `on_lost` follows in a callback of its own."""
        self.is_alive = False
        if self._transport is not None:
            self._transport.abort()
