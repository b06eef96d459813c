"""Two processes with one node id: which of them is the node.

Owns the rule, and what this node knows for it: which process answered last at each peer's home (`home`). The rule is in
docs/decisions/a-node-is-the-process-at-its-address.md. It has no sockets and no clock, and must never judge by which
process came first: the mistaken one may have. `tcp` imports it.
"""

from collections.abc import Iterable
from typing import Final

from smq.raft_state.ids import NodeId

RETURNS_MAX: Final = 3  # connections of a process that are older than its successor's, and were accepted after them
_REPLACED_KEPT: Final = 8  # processes per peer; a mistake makes two


class Twins:
    def __init__(self) -> None:
        self._home: dict[NodeId, bytes] = {}
        self._returns: dict[NodeId, dict[bytes, int]] = {}  # of each process that was replaced, the oldest first

    def found(self, peer: NodeId, process: bytes) -> None:
        """The process has just answered at the peer's home."""
        self._home[peer] = process

    def is_home(self, peer: NodeId, process: bytes) -> bool:
        return self._home.get(peer) == process

    def is_contested(self, peer: NodeId, process: bytes, connected: Iterable[bytes]) -> bool:
        """Whether the peer's home must be asked before `process` may come in the place of those that are `connected`:
        one of them was last at home. It may have ended without a word, so that alone refuses none."""
        home = self._home.get(peer)
        return home is not None and home != process and home in connected

    def loser(self, peer: NodeId, older: bytes, newer: bytes) -> bytes | None:
        """`newer` comes in the place of `older`, and the peer's home says nothing. A process that comes back again and
        again after it was replaced is alive, so there are two: which must end? The later one, by when they began, so
        that all nodes end the same."""
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
        home = self._home.get(peer)
        if home in (older, newer):
            return older if home == newer else newer
        return max(older, newer)
