"""Runs a node as `smq serve` does, with two faults that a test may impose: cut links to other nodes, and a wrong clock.

Owns how the faults reach the node: by a file beside its configuration, which it reads many times per second, and which
it answers by another, so that the test knows when a fault holds. Run as a module it is the node's process. Everything
else is the production code. Only `smq.testing.faults` starts it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from smq.raft_state.ids import NodeId
from smq.replication.net.frames import FrameError, Hello
from smq.replication.net.peer_connection import Connection
from smq.replication.net.tcp import TcpNetwork
from smq.replication.ports import Buffer, Channel, NetworkHandler

COMMAND: Final = (sys.executable, "-m", "smq.testing.faulty_node", "serve", "--config")
POLL_S: Final = 0.01
FAULTS_FILE: Final = "faults.json"  # {"number": N, "cut": [node, ...], "clock_ns": N}
APPLIED_FILE: Final = "faults.applied"  # the number of the last one that holds

_directory = Path()
_real_time_ns = time.time_ns
_shift_ns = 0


def _shifted_time_ns() -> int:
    return _real_time_ns() + _shift_ns


class CuttableNetwork(TcpNetwork):
    """No bytes pass between this node and those that it is cut off from, in either direction."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._cut: frozenset[NodeId] = frozenset()
        self._number = 0

    def start(self, handler: NetworkHandler) -> None:
        super().start(handler)
        self._watch()

    def _watch(self) -> None:
        """Reads the file whole: it is replaced, never changed."""
        global _shift_ns
        try:
            faults = json.loads((_directory / FAULTS_FILE).read_text())
        except FileNotFoundError:
            faults = {"number": 0}
        if faults["number"] != self._number:
            self._number = faults["number"]
            _shift_ns = faults["clock_ns"]
            self._cut_off(frozenset(map(NodeId, faults["cut"])))
            (_directory / APPLIED_FILE).write_text(str(self._number))
        self._loop.call_later(POLL_S, self._watch)

    def _cut_off(self, nodes: frozenset[NodeId]) -> None:
        self._cut = nodes
        for key, session in list(self._sessions.items()):
            if key[0] in nodes:
                self._retire(session)
                session.abort()

    def send(self, peer: NodeId, channel: Channel, parts: list[Buffer]) -> bool:  # type: ignore[override]  # lists come
        return peer not in self._cut and super().send(peer, channel, parts)

    def _check(self, connection: Connection, hello: Hello) -> None:
        if hello.sender in self._cut:
            raise FrameError("a test has cut this link")
        super()._check(connection, hello)


def main() -> None:
    """As `smq`, with the network and the clock of this module."""
    global _directory
    from smq.coordinator.cli.main import main as smq
    from smq.coordinator.server import composition
    from smq.replication.runtime.asyncio_runtime import AsyncioClock

    _directory = Path(sys.argv[-1]).parent  # the configuration's
    composition.TcpNetwork = CuttableNetwork  # type: ignore[attr-defined]  # what the composition root makes
    time.time_ns = _shifted_time_ns
    AsyncioClock.wall_ns = staticmethod(_shifted_time_ns)  # it took the function itself, for its speed
    smq()


if __name__ == "__main__":
    main()
