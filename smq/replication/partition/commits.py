"""Commit points to followers: one message per peer and turn of the loop (rule 24).

Owns the collection. A leader's own readers and producers learn of a commit immediately; the readers of its followers
learn of it by this message, or by the next append, whichever comes first. Losing one loses nothing: the next one says
more, and Raft's high water mark follows. Only `replicas` uses it.
"""

from collections.abc import Callable
from typing import Final

from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.replication.net import wire
from smq.replication.net.links import Links
from smq.replication.partition.due import untold_commits
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel

POINTS_MAX: Final = 5_000  # per message: 160 KB, a millisecond at either end


class Commits:
    def __init__(self, links: Links, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._links = links
        self._call_soon = call_soon
        self._moved: dict[Replica, None] = {}  # bounded by the node's partitions

    def mark(self, replica: Replica) -> None:
        """The commit point of a led partition has moved, or a follower may not know it."""
        if not self._moved:
            self._call_soon(self._flush)
        self._moved[replica] = None

    def _flush(self) -> None:
        moved, self._moved = self._moved, {}
        by_peer: dict[NodeId, list[tuple[PartitionId, Epoch, Offset]]] = {}
        for replica in moved:
            for peer, epoch, commit in untold_commits(replica):
                by_peer.setdefault(peer, []).append((replica.pid, epoch, commit))
        for peer, points in by_peer.items():
            for start in range(0, len(points), POINTS_MAX):
                self._links.send(peer, Channel.DATA, wire.Commits(tuple(points[start : start + POINTS_MAX])))
