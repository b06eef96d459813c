"""Commit points to followers, where no append carries them (rule 24).

Owns the collection and its pace: the first message leaves with the turn, the next ones have a distance. A leader's own
readers and producers learn of a commit immediately; the readers of its followers learn of it by this message, or by the
next append, whichever comes first. Losing one loses nothing: the next one says more, and Raft's high water mark
follows. Only `replicas` uses it.
"""

from typing import Final

from smq.raft_state.ids import Epoch, NodeId, Offset, PartitionId
from smq.replication.net import wire
from smq.replication.net.links import Links
from smq.replication.partition.due import untold_commits
from smq.replication.partition.replica import Replica
from smq.replication.ports import Channel, Clock

PACE_MS: Final = 5  # a message costs more than the append that it follows; under load the next append comes sooner
POINTS_MAX: Final = 5_000  # per message: 160 KB, a millisecond at either end


class Commits:
    def __init__(self, links: Links, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._moved: dict[Replica, None] = {}  # bounded by the node's partitions
        self._is_paced = False

    def mark(self, replica: Replica) -> None:
        """The commit point of a led partition has moved, or a follower may not know it."""
        if not self._moved and not self._is_paced:
            self._clock.call_soon(self._flush)
        self._moved[replica] = None

    def _on_pace(self) -> None:
        self._is_paced = False
        if self._moved:
            self._flush()

    def _flush(self) -> None:
        self._is_paced = True
        self._clock.call_later(PACE_MS, self._on_pace)
        moved, self._moved = self._moved, {}
        by_peer: dict[NodeId, list[tuple[PartitionId, Epoch, Offset]]] = {}
        for replica in moved:
            for peer, epoch, commit in untold_commits(replica):
                by_peer.setdefault(peer, []).append((replica.pid, epoch, commit))
        for peer, points in by_peer.items():
            for start in range(0, len(points), POINTS_MAX):
                self._links.send(peer, Channel.DATA, wire.Commits(tuple(points[start : start + POINTS_MAX])))
