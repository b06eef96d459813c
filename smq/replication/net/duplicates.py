"""Two processes with one node id: which of them is the node, and how the other one learns that it must end.

A node is the process that answers at its address, the one that this node has for it under [peers]
(docs/decisions/a-node-is-the-process-at-its-address.md). Owns the rule, the question who answers there, when it is
asked, how long a newcomer waits for the answer, and the words of a refusal. Without an answer no process is refused,
and none waits long for one: a node that comes back must be in immediately, also while its old session looks alive. That
nothing answers proves little: not every network lets a machine reach itself, or each other, by that address. It must
never judge by which process came first: the mistaken one may have. `tcp` imports it.
"""

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from smq.raft_state.ids import NodeId
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
from smq.replication.net.peer_connection import Connection
from smq.replication.net.peer_tls import uris_of

if TYPE_CHECKING:  # the network makes the one instance
    from smq.replication.net.tcp import TcpNetwork

log = structlog.get_logger(__name__)

RETURNS_MAX: Final = 3  # connections of a process that are older than its successor's, and were accepted after them
_REPLACED_KEPT: Final = 8  # processes per peer; a mistake makes two
HOLD_S: Final = 0.3  # a process that is there answers within milliseconds; an election takes longer
AGAIN_S: Final = (
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
)  # until the next question to a silent address; the last repeats
WARN_AFTER: Final = 4  # questions without an answer
_READ_BYTES: Final = 4096  # an answer is far smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressAnswer:
    """`process`: of the node that answered; empty with the reason if none did. `refusal`: the node that answered holds
    another process for the one that asks, and why."""

    process: bytes = b""
    reason: str = ""
    refusal: str = ""


async def ask_address(
    address: tuple[str, int], question: Hello, *, tls: ssl.SSLContext | None, name: str, timeout_ms: int
) -> AddressAnswer:
    """`name` is the asked node's in a certificate: an answer under another one says nothing."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(*address, ssl=tls)
            try:
                secure = writer.get_extra_info("ssl_object")
                if secure is not None and name not in uris_of(secure.getpeercert()):
                    return AddressAnswer(reason="another node's certificate is shown there")
                payload = encode_hello(question)
                writer.write(frame_header(FrameKind.WHO, (payload,)) + payload)
                return await _answer(reader, question)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, FrameError) as e:
        return AddressAnswer(reason=str(e) or "timed out")


async def _answer(reader: asyncio.StreamReader, question: Hello) -> AddressAnswer:
    frames = FrameReader()
    while data := await reader.read(_READ_BYTES):
        for kind, payload in frames.feed(data):
            if kind is FrameKind.REFUSED:
                return AddressAnswer(refusal=decode_reason(payload))
            if kind is FrameKind.HELLO:
                found = decode_hello(payload)
                if found.sender != question.receiver:
                    raise FrameError(f"node {found.sender} answers there")
                return AddressAnswer(process=found.process)
    raise FrameError("the connection was closed: another node, or another program, listens there")


class DuplicateRule:
    """Which of two processes is the peer, without sockets and clock: the one that answered last at its address, as far
    as this node knows."""

    def __init__(self) -> None:
        self._at_address: dict[NodeId, bytes] = {}
        self._returns: dict[NodeId, dict[bytes, int]] = {}  # of each process that was replaced, the oldest first

    def found(self, peer: NodeId, process: bytes) -> None:
        """The process has just answered at the peer's address."""
        self._at_address[peer] = process

    def is_at_address(self, peer: NodeId, process: bytes) -> bool:
        return self._at_address.get(peer) == process

    def is_contested(self, peer: NodeId, process: bytes, connected: Iterable[bytes]) -> bool:
        """Whether the peer's address must be asked before `process` may replace those that are `connected`: one of
        them answered there last. It may have ended without a word, so that alone refuses none."""
        present = self._at_address.get(peer)
        return present is not None and present != process and present in connected

    def loser(self, peer: NodeId, older: bytes, newer: bytes) -> bytes | None:
        """`newer` comes in the place of `older`, and the peer's address gives no answer. A process that comes back
        again and again after it was replaced is alive, so there are two: which must end? The later one, by when they
        began, so that all nodes end the same."""
        returns = self._returns.setdefault(peer, {})
        if newer in returns:
            returns[newer] += 1
        else:  # it comes for the first time: late connections around an earlier restart are no sign of two now
            returns.update(dict.fromkeys(returns, 0))
        returns.setdefault(older, 0)
        if len(returns) > _REPLACED_KEPT:
            del returns[next(iter(returns))]
        if returns.get(newer, 0) < RETURNS_MAX:
            return None
        del self._returns[peer]
        present = self._at_address.get(peer)
        if present in (older, newer):
            return older if present == newer else newer
        return max(older, newer)


class Duplicates:
    def __init__(self, network: "TcpNetwork", loop: asyncio.AbstractEventLoop, me: NodeId) -> None:
        self._network = network
        self._loop = loop
        self._me = me
        self._rule = DuplicateRule()
        self._unsure: dict[NodeId, asyncio.Event] = {}  # a session's process may not be at the address
        self._held: dict[Connection, asyncio.Task[None]] = {}  # bounded by the connections without a session
        self._watches: list[asyncio.Task[None]] = []
        self._silent: dict[NodeId, str] = {}  # why an address does not answer, although its node is connected

    def start(self, diallers: Collection[NodeId]) -> None:
        """`diallers` are the peers that dial this node: a session of theirs does not show where it comes from."""
        self._unsure = {peer: asyncio.Event() for peer in diallers}
        self._watches = [self._loop.create_task(self._watch(peer)) for peer in diallers]

    def close(self) -> None:
        for task in [*self._watches, *self._held.values()]:
            task.cancel()

    def is_at_address(self, peer: NodeId, process: bytes) -> bool:
        return self._rule.is_at_address(peer, process)

    def warnings(self) -> list[str]:
        return [
            f"node {peer} is connected to this node, but does not answer at {self._network.shown_address(peer)}, "
            f"where this node has it under [peers] ({reason}): correct the address, the name or the firewall. At a "
            "first start its vote does not count here"
            for peer, reason in sorted(self._silent.items())
        ]

    def is_held(self, connection: Connection) -> bool:
        return connection in self._held

    def admit(self, connection: Connection, peer: NodeId, process: bytes, proceed: Callable[[], None]) -> None:
        """Proceeds; if another process of the peer is connected that was at its address, only after that was
        asked."""
        connected = [session.process for session in self._network.sessions_of(peer)]
        if self._rule.is_contested(peer, process, connected):
            held = self._loop.create_task(self._judge(connection, peer, process, proceed))
            self._held[connection] = held
            held.add_done_callback(lambda _: self._held.pop(connection, None))
        else:
            proceed()

    def replace(self, older: Connection, peer: NodeId, newer: Connection, process: bytes) -> bool:
        """Whether `newer`, which another process has opened, may come in the place of `older`. The loser is refused if
        both are known to be alive."""
        loser = self._rule.loser(peer, older.process, process)
        if loser == process:
            self._refuse(newer, peer, f"at {older.remote}, and began earlier")
        elif loser is not None:
            for session in self._network.sessions_of(peer):
                if session.process == loser:
                    self._refuse(session, peer, f"at {newer.remote}, and began earlier")
        return loser != process

    def on_open(self, session: Connection, peer: NodeId) -> None:
        if session.dialled is not None:
            self._rule.found(peer, session.process)
        elif peer in self._unsure and not self._rule.is_at_address(peer, session.process):
            self._unsure[peer].set()

    def on_close(self, peer: NodeId) -> None:
        """The peer may come back elsewhere, or hold another process for this node by now."""
        if peer in self._unsure:
            self._unsure[peer].set()

    async def _judge(self, connection: Connection, peer: NodeId, process: bytes, proceed: Callable[[], None]) -> None:
        known = self._network.sessions_of(peer)
        asking = self._loop.create_task(self._network.ask_address(peer))
        try:
            await asyncio.wait({asking}, timeout=HOLD_S)
            found = asking.result() if asking.done() else AddressAnswer(reason="timed out")
        finally:
            asking.cancel()
        self._settle(peer, found, known)
        if not connection.is_alive:
            return
        if found.process and found.process != process:
            self._refuse_stranger(connection, peer)
        else:
            proceed()

    async def _watch(self, peer: NodeId) -> None:
        """Asks until the sessions that the peer has dialled are known to come from its address, and while there are
        none: then the peer may hold another process for this node, and this one would wait for ever."""
        unsure, asked = self._unsure[peer], 0
        while True:
            unsure.clear()
            known = self._network.sessions_of(peer)
            if known and all(self._rule.is_at_address(peer, session.process) for session in known):
                self._silent.pop(peer, None)
                await unsure.wait()
                asked = 0
                continue
            found = await self._network.ask_address(peer)
            if found.refusal:
                self._network.on_refusal(peer, found.refusal)
            self._settle(peer, found, known)
            asked += 1
            self._note_silence(peer, found, is_silent=bool(known) and asked >= WARN_AFTER)
            try:
                async with asyncio.timeout(AGAIN_S[min(asked, len(AGAIN_S)) - 1]):
                    await unsure.wait()
            except TimeoutError:
                pass

    def _note_silence(self, peer: NodeId, found: AddressAnswer, *, is_silent: bool) -> None:
        if found.process or not is_silent:
            self._silent.pop(peer, None)
        elif peer not in self._silent:
            self._silent[peer] = found.reason
            log.warning(
                "peer_address_unreachable", peer=peer, address=self._network.shown_address(peer), reason=found.reason
            )

    def _settle(self, peer: NodeId, found: AddressAnswer, known: list[Connection]) -> None:
        """`known` were open before the address was asked: those of another process than it has now must end."""
        if not found.process:
            return
        self._rule.found(peer, found.process)
        for session in known:
            if not session.is_alive or session.process == found.process:
                continue
            if session.dialled is not None:
                self._network.renew(session)
            else:
                self._refuse_stranger(session, peer)

    def _refuse_stranger(self, connection: Connection, peer: NodeId) -> None:
        address = self._network.shown_address(peer)
        self._refuse(connection, peer, f"at {address}, where node {self._me} has it under [peers]")

    def _refuse(self, connection: Connection, peer: NodeId, where: str) -> None:
        reason = (
            f"another process is node {peer}, {where}, and this one connects from {connection.remote}: stop one of the "
            "two, or give it a node_id and an address under [peers] of its own"
        )
        log.error("second_process_of_a_node", node=peer, remote=connection.remote, refused=reason)
        self._network.refuse(connection, reason)
