"""The production Network: length-framed TCP between nodes, one ordered session per peer and channel.

Owns listening, dialling, the check of a peer's identity, and the decision that a session is dead. It never looks into
a message. The node with the lower id dials the other, so there is one connection per pair and channel, without a race.
Under TLS both sides show a certificate, and a node may speak only as the node that its certificate names. Only the
composition root imports it.
"""

import asyncio
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from smq.raft_state.ids import NodeId
from smq.replication.net.acceptor import AcceptLimits, Acceptor
from smq.replication.net.duplicates import AddressAnswer, Duplicates, ask_address
from smq.replication.net.frames import (
    FrameDamaged,
    FrameError,
    FrameKind,
    Hello,
    decode_hello,
    decode_reason,
    encode_hello,
    encode_reason,
)
from smq.replication.net.listening import bind_listener
from smq.replication.net.peer_connection import Connection, Turn
from smq.replication.net.peer_tls import PeerContexts, node_uri
from smq.replication.ports import Buffer, Channel, NetworkHandler

log = structlog.get_logger(__name__)

Key = tuple[NodeId, Channel]

_STABLE_S: Final = 1.0  # a session that lived this long was healthy: dial again immediately when it ends

_REFUSAL_S: Final = 1.0  # for a peer to read why it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSettings:
    """`silence_ms_max` is well above the time of a slow fsync in the peer's loop, and below a client's timeout.
    `frame_bytes_max` is the largest batch (100 MiB) plus slack. `session_buffer_bytes_max` is far above the
    replication windows: only a peer that has stopped reading gets there."""

    connect_timeout_ms: int = 1_000
    tls_connect_timeout_ms: int = 3_000  # including the handshake, on a busy machine
    hello_timeout_ms: int = 2_000
    redial_min_ms: int = 20
    redial_max_ms: int = 500
    idle_ping_ms: int = 500
    silence_ms_max: int = 3_000
    frame_bytes_max: int = 128 << 20
    session_buffer_bytes_max: int = 256 << 20
    pending_connections_max: int = 64  # connections before their hello: strangers cannot take all our sockets


class TcpNetwork:
    """Implements smq.replication.ports.Network. Runs entirely on the given loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        node_id: NodeId,
        cluster_id: str,
        peers: Mapping[NodeId, tuple[str, int]],
        listener: socket.socket | None = None,
        settings: TcpSettings | None = None,
        tls: PeerContexts | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        on_clock: Callable[[NodeId, int], None] | None = None,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        """Without a `listener`, binds this node's address in `peers`. `on_error` receives every exception of the
        handler: the node's state is then unknown. `on_clock` gets how many milliseconds a peer's clock is ahead.
        `on_refused` gets a peer's reason to hold another process for this node: this one must end."""
        self._loop = loop
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._peers = {peer: address for peer, address in peers.items() if peer != node_id}
        self._listener = listener or bind_listener(*peers[node_id])
        self._settings = settings or TcpSettings()
        self._tls = tls
        self._on_error = on_error
        self._on_clock = on_clock
        self._on_refused = on_refused
        self._wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self._process = struct.pack(">Q", max(time.time_ns(), 0)) + secrets.token_bytes(8)
        self._serial = 0
        self._handler: NetworkHandler | None = None
        self._is_asking = False  # before the start: other nodes are refused, and dial again
        self._sessions: dict[Key, Connection] = {}
        self._pending: dict[Connection, None] = {}  # connected, without a session; oldest first
        self._duplicates = Duplicates(self, loop, node_id)
        self._tasks: list[asyncio.Task[None]] = []
        self.acceptor = Acceptor(
            self._listener,
            lambda ticket: Connection(self, dialled=None, serial=0, ticket=ticket),
            loop=loop,
            purpose="nodes",
            limits=self._accept_limits(),
            tls=(lambda: tls.listening) if tls is not None else None,
        )
        self.damaged_frames = dict.fromkeys(self._peers, 0)  # by sender; each has cost its session
        self.turn = Turn(loop)
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_s = 0.0

    @property
    def port(self) -> int:
        """The port of the listener."""
        return int(self._listener.getsockname()[1])

    async def ask_own_address(self, address: tuple[str, int]) -> AddressAnswer:
        """Before `start`: the process that answers at the address that the peers have of this node. `is_me` says
        whether it is this one."""
        self._is_asking = True
        self.acceptor.start()
        try:
            return await self._ask(self._node_id, address)
        finally:
            self.acceptor.pause()  # peers that dial now wait for the start, instead of being refused

    async def ask_address(self, peer: NodeId) -> AddressAnswer:
        return await self._ask(peer, self._peers[peer])

    async def _ask(self, node: NodeId, address: tuple[str, int]) -> AddressAnswer:
        return await ask_address(
            address,
            self._hello(node, Channel.CONTROL, serial=0),
            tls=self._tls.dialling if self._tls is not None else None,
            name=node_uri(self._cluster_id, node),
            timeout_ms=self._timeout_ms,
        )

    def is_me(self, process: bytes) -> bool:
        return process == self._process

    # -------------------------------------------------------------------------------------------------- port
    def start(self, handler: NetworkHandler) -> None:
        self._handler = handler
        self.acceptor.start()
        self._duplicates.start([peer for peer in self._peers if peer < self._node_id])
        for peer in self._peers:
            if self._node_id < peer:
                self._tasks.extend(self._loop.create_task(self._keep_dialling(peer, c)) for c in Channel)
        self._swept_s = self._loop.time()
        self._sweep()

    def send(self, peer: NodeId, channel: Channel, parts: Sequence[Buffer]) -> bool:
        session = self._sessions.get((peer, channel))
        if session is None or not session.is_alive:
            return False
        if sum(map(len, parts)) > self._settings.frame_bytes_max:
            raise ValueError(f"the message exceeds the frame limit of {self._settings.frame_bytes_max} bytes")
        if session.backlog_bytes > self._settings.session_buffer_bytes_max:
            self._drop(session, "the peer does not read")
            return False
        session.write(FrameKind.MESSAGE, parts)
        return True

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        session = self._sessions.get((peer, channel))
        return session is not None and session.is_alive

    def is_at_address(self, peer: NodeId) -> bool:
        session = self._sessions.get((peer, Channel.CONTROL))
        return session is not None and self._duplicates.is_at_address(peer, session.process)

    def warnings(self) -> list[str]:
        """Of addresses under [peers] that are wrong, as far as this node can tell."""
        return self._duplicates.warnings()

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        session = self._sessions.get((peer, channel))
        return session.backlog_bytes if session is not None else 0

    def close(self) -> None:
        """Ends all sessions; the handler is not called any more."""
        self._handler, self._is_asking = None, False
        self._duplicates.close()
        for task in self._tasks:
            task.cancel()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.acceptor.close()
        for connection in [*self._pending, *self._sessions.values()]:
            connection.abort()

    # --------------------------------------------------------------------------------------------- connecting
    def _accept_limits(self) -> AcceptLimits:
        """Unknown connections have slots of their own beside those of the peers' old and new sessions."""
        slots = self._settings.pending_connections_max + self._peer_slots
        return AcceptLimits(
            connections_max=2 * slots,
            per_address_max=2 * slots,
            handshakes_max=self._settings.pending_connections_max,
            handshake_timeout_s=self._settings.hello_timeout_ms / 1000,
        )

    @property
    def _peer_slots(self) -> int:
        return 2 * len(Channel) * len(self._peers)

    async def _keep_dialling(self, peer: NodeId, channel: Channel) -> None:
        backoff_ms: float = self._settings.redial_min_ms
        failures = 0
        while True:
            lived_s, error = await self._dial(peer, channel)
            if lived_s >= _STABLE_S:
                backoff_ms, failures = self._settings.redial_min_ms, 0
            elif error and failures == 0:
                log.warning("peer_unreachable", peer=peer, channel=channel.name, error=error)
            failures += 1
            # Jitter, so that nodes that lost each other at the same moment do not redial in step.
            await asyncio.sleep(backoff_ms * random.uniform(0.5, 1.0) / 1000)
            backoff_ms = min(backoff_ms * 2, self._settings.redial_max_ms)

    async def _dial(self, peer: NodeId, channel: Channel) -> tuple[float, str]:
        """Dials once and waits for the end: (seconds as a session, error if there was none)."""
        host, port = self._peers[peer]
        self._serial += 1
        connection = Connection(self, dialled=(peer, channel), serial=self._serial)
        context = self._tls.dialling if self._tls is not None else None
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._loop.create_connection(lambda: connection, host, port, ssl=context)
        except (OSError, TimeoutError) as e:
            return 0.0, str(e) or "timed out"
        await connection.closed
        return (self._loop.time() - connection.opened_s, "") if connection.key else (0.0, "closed during the hello")

    @property
    def _timeout_ms(self) -> int:
        return self._settings.connect_timeout_ms if self._tls is None else self._settings.tls_connect_timeout_ms

    def _check_name(self, connection: Connection, peer: NodeId) -> None:
        """FrameError if the certificate does not name `peer`."""
        name = node_uri(self._cluster_id, peer)
        if self._tls is not None and name not in connection.uris:
            names = ", ".join(connection.uris) or "no node"
            raise FrameError(f"the certificate names {names}; a peer that speaks as node {peer} must be {name}")

    # ------------------------------------------------------------------------------------- owner of connections
    def on_connected(self, connection: Connection) -> None:
        if self._handler is None and not self._is_asking:
            connection.abort()
            return
        if connection.dialled is None:
            self._evict_oldest_unidentified()
        self._pending[connection] = None
        if connection.dialled is not None:
            try:
                self._check_name(connection, connection.dialled[0])
            except FrameError as e:
                self._drop(connection, str(e))
                return
            self._send_hello(connection, *connection.dialled, connection.serial)

    def _evict_oldest_unidentified(self) -> None:
        """Makes room for a new connection. A peer sends its hello immediately, so a peer is never refused. While it is
        held for the answer of its address, it has a slot beside these; strangers that pretend to be one cannot have
        more."""
        held = [c for c in self._pending if self._duplicates.is_held(c)][: self._peer_slots]
        unidentified = [c for c in self._pending if c.dialled is None and c not in held]
        if len(unidentified) >= self._settings.pending_connections_max:
            self._drop(unidentified[0], "no hello yet, and others wait for its slot")
            self._pending.pop(unidentified[0])

    def on_frame(self, connection: Connection, kind: FrameKind, payload: memoryview) -> None:
        if kind is FrameKind.REFUSED:
            self._take_refusal(connection, payload)
        elif connection.key is not None:
            if kind is FrameKind.MESSAGE:
                self._deliver(connection.key, payload)
            elif kind is FrameKind.HELLO:
                raise FrameError("a second hello")
        elif self._duplicates.is_held(connection):
            raise FrameError("a frame before our hello")
        elif kind is FrameKind.HELLO:
            self._admit(connection, decode_hello(payload))
        elif kind is FrameKind.WHO:
            self._answer(connection, decode_hello(payload))
        else:
            raise FrameError("the first frame is not a hello")

    def on_bad_frame(self, connection: Connection, error: FrameError) -> None:
        if connection.key is not None and isinstance(error, FrameDamaged):
            self.damaged_frames[connection.key[0]] += 1
        self._drop(connection, str(error))

    def on_lost(self, connection: Connection) -> None:
        self._pending.pop(connection, None)
        self._retire(connection)

    # ------------------------------------------------------------------------------------------------ sessions
    def _send_hello(self, connection: Connection, peer: NodeId, channel: Channel, serial: int) -> None:
        connection.write(FrameKind.HELLO, (encode_hello(self._hello(peer, channel, serial=serial)),))

    def _hello(self, peer: NodeId, channel: Channel, *, serial: int) -> Hello:
        return Hello(
            sender=self._node_id,
            receiver=peer,
            channel=channel,
            process=self._process,
            serial=serial,
            wall_ms=self._wall_ms(),
            cluster_id=self._cluster_id,
        )

    def _admit(self, connection: Connection, hello: Hello) -> None:
        """Opens the session that the hello asks for, perhaps a little later; FrameError if that is not allowed."""
        self._check(connection, hello)
        self._check_direction(connection, hello)
        if connection.dialled is not None:
            self._open(connection, hello)
        else:
            self._duplicates.admit(connection, hello.sender, hello.process, lambda: self._try_open(connection, hello))

    def _try_open(self, connection: Connection, hello: Hello) -> None:
        try:
            self._open(connection, hello)
        except FrameError as e:
            self._drop(connection, str(e))

    def _open(self, connection: Connection, hello: Hello) -> None:
        key = (hello.sender, hello.channel)
        older = self._sessions.get(key)
        if older is not None:
            if older.process == hello.process:
                if older.serial > hello.serial:
                    raise FrameError("a newer session of this peer is open")
            elif not self._duplicates.replace(older, hello.sender, connection, hello.process):
                return
            log.info("session_replaced", peer=hello.sender, channel=hello.channel.name)
            if self._sessions.get(key) is older:  # or else it was refused, and ends once it has sent the reason
                self._retire(older)
                older.abort()
        self._pending.pop(connection, None)
        if self._on_clock is not None:
            self._on_clock(hello.sender, hello.wall_ms - self._wall_ms())
        if connection.dialled is None:
            self._send_hello(connection, hello.sender, hello.channel, hello.serial)
        connection.process, connection.serial, connection.key = hello.process, hello.serial, key
        connection.allow(self._settings.frame_bytes_max)
        connection.opened_s = self._loop.time()
        self._sessions[key] = connection
        self._duplicates.on_open(connection, hello.sender)
        log.info("session_open", peer=hello.sender, channel=hello.channel.name, remote=connection.remote)
        if self._handler is not None:
            self._guard(partial(self._handler.on_session_open, *key))

    def _answer(self, connection: Connection, hello: Hello) -> None:
        """A node asks which process is here, perhaps a starting process of this very node: see `duplicates`."""
        if connection.dialled is not None:
            raise FrameError("the answer is a question")

        def answer() -> None:
            self._send_hello(connection, hello.sender, hello.channel, hello.serial)
            connection.finish()

        if hello.sender == hello.receiver == self._node_id and hello.cluster_id == self._cluster_id:
            self._check_name(connection, self._node_id)
            if hello.process != self._process:
                log.warning("second_process_of_this_node", remote=connection.remote, node=self._node_id)
            answer()
        else:
            self._check(connection, hello)
            self._duplicates.admit(connection, hello.sender, hello.process, answer)

    def _take_refusal(self, connection: Connection, payload: memoryview) -> None:
        """Only a node that this one has dialled may end it: it is the one at that address, and of that certificate."""
        if connection.dialled is None:
            raise FrameError("a refusal from a connection that this node has not dialled")
        self.on_refusal(connection.dialled[0], decode_reason(payload))
        self._drop(connection, "it holds another process for this node")

    def _check(self, connection: Connection, hello: Hello) -> None:
        if self._handler is None:
            raise FrameError("this node is still starting")
        if hello.cluster_id != self._cluster_id:
            raise FrameError("the peer belongs to another cluster")
        if hello.receiver != self._node_id:
            raise FrameError(f"the peer looks for node {hello.receiver}, but this is node {self._node_id}")
        if hello.sender not in self._peers:
            raise FrameError(f"node {hello.sender} is not among this node's peers")
        self._check_name(connection, hello.sender)

    def _check_direction(self, connection: Connection, hello: Hello) -> None:
        if connection.dialled is None:
            if hello.sender > self._node_id:
                raise FrameError(f"node {hello.sender} must not dial: the node with the lower id does")
        elif connection.dialled != (hello.sender, hello.channel) or hello.serial != connection.serial:
            raise FrameError("the answer does not match our hello")

    def _retire(self, session: Connection) -> None:
        """Reports the end of a session to the handler, once."""
        if session.key is None or self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        session.is_alive = False
        log.info("session_closed", peer=session.key[0], channel=session.key[1].name)
        self._duplicates.on_close(session.key[0])
        if self._handler is not None:
            self._guard(partial(self._handler.on_session_close, *session.key))

    # ---------------------------------------------------------------------------------------------- for duplicates
    def sessions_of(self, peer: NodeId) -> list[Connection]:
        """The open ones, on both channels."""
        found = (self._sessions.get((peer, channel)) for channel in Channel)
        return [session for session in found if session is not None and session.is_alive]

    def shown_address(self, peer: NodeId) -> str:
        """The peer's address under [peers], for a person."""
        host, port = self._peers[peer]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def refuse(self, connection: Connection, reason: str) -> None:
        """Ends the connection with the reason, which ends the process at its other end."""
        connection.write(FrameKind.REFUSED, (encode_reason(reason),))
        self._retire(connection)
        connection.finish()
        self._loop.call_later(_REFUSAL_S, connection.abort)

    def renew(self, session: Connection) -> None:
        """Ends a session that this node has dialled, and dials again."""
        self._drop(session, "another process answers at the peer's address")

    def on_refusal(self, peer: NodeId, reason: str) -> None:
        """A peer holds another process for this node."""
        if self._on_refused is not None:
            self._on_refused(f"node {peer} refuses this process of node {self._node_id}: {reason}")

    def _drop(self, connection: Connection, reason: str) -> None:
        peer = connection.key or connection.dialled
        log.warning(
            "connection_dropped",
            peer=peer[0] if peer else None,
            channel=peer[1].name if peer else None,
            remote=connection.remote,
            reason=reason,
        )
        connection.abort()

    def _deliver(self, key: Key, payload: memoryview) -> None:
        if self._handler is not None:
            self._guard(partial(self._handler.on_message, *key, payload))

    def _guard(self, call: Callable[[], None]) -> None:
        """Calls the handler. An exception there ends the node, not the connection."""
        try:
            call()
        except Exception as e:
            if self._on_error is None:
                raise
            self._on_error(e)

    # ----------------------------------------------------------------------------------------------- keepalive
    def _sweep(self) -> None:
        """Pings idle sessions and drops silent ones."""
        interval_s = self._settings.idle_ping_ms / 2000
        now = self._loop.time()
        # After a stall of this process (a stopped machine) the peers' messages wait unread in the kernel: the silence
        # was ours, so its count starts again.
        stalled = now - self._swept_s > 4 * interval_s
        self._swept_s = now
        for session in list(self._sessions.values()):
            if stalled:
                session.received_s = now
            if now - session.received_s > self._settings.silence_ms_max / 1000:
                self._drop(session, "the peer is silent")
            elif now - session.sent_s > self._settings.idle_ping_ms / 1000:
                session.write(FrameKind.PING, ())
        for connection in list(self._pending):
            if now - connection.opened_s > self._settings.hello_timeout_ms / 1000:
                self._drop(connection, "no hello in time")
        self._sweeper = self._loop.call_later(interval_s, self._sweep)
