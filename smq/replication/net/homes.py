"""Asks the homes of peers which process is there, and refuses another one that speaks as the same node.

Owns when a home is asked, how long a newcomer waits for the answer, and the words of a refusal. The rule is in `twins`.
Without an answer no process is refused, and none waits long for one: a node that comes back must be in immediately,
also while its old session looks alive. `tcp` imports it.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final, Protocol

import structlog

from smq.raft_state.ids import NodeId
from smq.replication.net.connection import Connection
from smq.replication.net.home import Home
from smq.replication.net.twins import Twins

log = structlog.get_logger(__name__)

HOLD_S: Final = 0.3  # a home that is there answers within milliseconds; an election takes about as long
AGAIN_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)  # until the next question to a home that said nothing; the last repeats
WARN_AFTER: Final = 4  # questions without an answer


class Sessions(Protocol):
    """The network, as this module needs it."""

    def sessions_of(self, peer: NodeId) -> list[Connection]:
        """The open ones, on both channels."""

    def shown_home(self, peer: NodeId) -> str:
        """The peer's address under [peers], for a person."""

    async def ask_home(self, peer: NodeId) -> Home: ...

    def refuse(self, connection: Connection, reason: str) -> None:
        """Ends the connection with the reason, which ends the process at its other end."""

    def renew(self, session: Connection) -> None:
        """Ends a session that this node has dialled, and dials again."""

    def on_refusal(self, peer: NodeId, reason: str) -> None:
        """A peer holds another process for this node."""


class Homes:
    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop, me: NodeId) -> None:
        self._sessions = sessions
        self._loop = loop
        self._me = me
        self._twins = Twins()
        self._unsure: dict[NodeId, asyncio.Event] = {}  # a session was opened by a process that may not be at home
        self._held: dict[Connection, asyncio.Task[None]] = {}  # bounded by the connections without a session
        self._watches: list[asyncio.Task[None]] = []
        self._silent: dict[NodeId, str] = {}  # homes that do not answer, although their nodes are connected: why

    def start(self, diallers: Collection[NodeId]) -> None:
        """`diallers` are the peers that dial this node: a session of theirs does not show where it comes from."""
        self._unsure = {peer: asyncio.Event() for peer in diallers}
        self._watches = [self._loop.create_task(self._watch(peer)) for peer in diallers]

    def close(self) -> None:
        for task in [*self._watches, *self._held.values()]:
            task.cancel()

    def is_home(self, peer: NodeId, process: bytes) -> bool:
        return self._twins.is_home(peer, process)

    def warnings(self) -> list[str]:
        return [
            f"node {peer} is connected to this node, but does not answer at {self._sessions.shown_home(peer)}, where "
            f"this node has it under [peers] ({reason}): correct the address, the name or the firewall. At a first "
            "start its vote does not count here"
            for peer, reason in sorted(self._silent.items())
        ]

    def is_held(self, connection: Connection) -> bool:
        return connection in self._held

    def admit(self, connection: Connection, peer: NodeId, process: bytes, proceed: Callable[[], None]) -> None:
        """Proceeds; if another process of the peer is connected that was at home, only after its home was asked."""
        connected = [session.process for session in self._sessions.sessions_of(peer)]
        if self._twins.is_contested(peer, process, connected):
            held = self._loop.create_task(self._judge(connection, peer, process, proceed))
            self._held[connection] = held
            held.add_done_callback(lambda _: self._held.pop(connection, None))
        else:
            proceed()

    def replace(self, older: Connection, peer: NodeId, newer: Connection, process: bytes) -> bool:
        """Whether `newer`, which another process has opened, may come in the place of `older`. The loser is refused if
        both are known to be alive."""
        loser = self._twins.loser(peer, older.process, process)
        if loser == process:
            self._refuse(newer, peer, f"at {older.remote}, and began earlier")
        elif loser is not None:
            for session in self._sessions.sessions_of(peer):
                if session.process == loser:
                    self._refuse(session, peer, f"at {newer.remote}, and began earlier")
        return loser != process

    def on_open(self, session: Connection, peer: NodeId) -> None:
        if session.dialled is not None:
            self._twins.found(peer, session.process)
        elif peer in self._unsure and not self._twins.is_home(peer, session.process):
            self._unsure[peer].set()

    def on_close(self, peer: NodeId) -> None:
        """The peer may come back elsewhere, or hold another process for this node by now."""
        if peer in self._unsure:
            self._unsure[peer].set()

    async def _judge(self, connection: Connection, peer: NodeId, process: bytes, proceed: Callable[[], None]) -> None:
        known = self._sessions.sessions_of(peer)
        asking = self._loop.create_task(self._sessions.ask_home(peer))
        try:
            await asyncio.wait({asking}, timeout=HOLD_S)
            found = asking.result() if asking.done() else Home(reason="timed out")
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
        """Asks until the sessions that the peer has dialled are known to come from its home, and while there are none:
        then the peer may hold another process for this node, and this one would wait for ever."""
        unsure, asked = self._unsure[peer], 0
        while True:
            unsure.clear()
            known = self._sessions.sessions_of(peer)
            if known and all(self._twins.is_home(peer, session.process) for session in known):
                self._silent.pop(peer, None)
                await unsure.wait()
                asked = 0
                continue
            found = await self._sessions.ask_home(peer)
            if found.refusal:
                self._sessions.on_refusal(peer, found.refusal)
            self._settle(peer, found, known)
            asked += 1
            self._note_silence(peer, found, is_silent=bool(known) and asked >= WARN_AFTER)
            try:
                async with asyncio.timeout(AGAIN_S[min(asked, len(AGAIN_S)) - 1]):
                    await unsure.wait()
            except TimeoutError:
                pass

    def _note_silence(self, peer: NodeId, found: Home, *, is_silent: bool) -> None:
        if found.process or not is_silent:
            self._silent.pop(peer, None)
        elif peer not in self._silent:
            self._silent[peer] = found.reason
            log.warning(
                "peer_address_unreachable", peer=peer, address=self._sessions.shown_home(peer), reason=found.reason
            )

    def _settle(self, peer: NodeId, found: Home, known: list[Connection]) -> None:
        """`known` were open before the home was asked: those of another process than it has now must end."""
        if not found.process:
            return
        self._twins.found(peer, found.process)
        for session in known:
            if not session.is_alive or session.process == found.process:
                continue
            if session.dialled is not None:
                self._sessions.renew(session)
            else:
                self._refuse_stranger(session, peer)

    def _refuse_stranger(self, connection: Connection, peer: NodeId) -> None:
        home = self._sessions.shown_home(peer)
        self._refuse(connection, peer, f"at {home}, where node {self._me} has it under [peers]")

    def _refuse(self, connection: Connection, peer: NodeId, where: str) -> None:
        reason = (
            f"another process is node {peer}, {where}, and this one connects from {connection.remote}: stop one of the "
            "two, or give it a node_id and an address under [peers] of its own"
        )
        log.error("second_process_of_a_node", node=peer, remote=connection.remote, refused=reason)
        self._sessions.refuse(connection, reason)
