"""The barrier between the disk and the wire: no message of Raft leaves before what it tells is on disk.

Owns the messages that wait, one FIFO a peer, so that a message that need not wait never overtakes one that
must. This is the one place that decides it (ARCHITECTURE.md, "Persist, then speak"). Only the engine imports it.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from smq.raft_state.ids import NodeId
from smq.replication.ports import Buffer, Disk
from smq.replication.raft.journal import RaftJournal


class Needs(enum.Enum):
    """What must be on disk before a message may leave."""

    EVERYTHING = enum.auto()  # every change of journal, term and vote made before it
    VOTE = enum.auto()  # term and vote only: a leader's entries may travel while they are being written
    # (Ongaro's thesis 10.2.1; the leader counts itself only once they are on its own disk)
    ALIVE = enum.auto()  # term and vote, too, but tells no more than that: may overtake, is dropped rather than kept


class Outbox:
    """Bounded by the leader's window a follower and by one answer for each message received."""

    def __init__(
        self,
        disk: Disk,
        journal: RaftJournal,
        send: Callable[[NodeId, Sequence[Buffer]], None],
        peers: Iterable[NodeId],
    ) -> None:
        self._disk = disk
        self._journal = journal
        self._send = send
        self._staged: list[tuple[NodeId, Needs, Sequence[Buffer]]] = []
        self._held = 0  # messages in `_waiting`
        self._waiting: dict[NodeId, deque[tuple[int, Sequence[Buffer]]]] = {peer: deque() for peer in peers}

    def put(self, peer: NodeId, needs: Needs, parts: Sequence[Buffer]) -> None:
        """Queues a message of the present turn of the engine."""
        self._staged.append((peer, needs, parts))

    def seal(self) -> None:
        """Ends a turn: its changes have been submitted, so what its messages wait for is known now."""
        if self._staged:
            staged, self._staged = self._staged, []
            for peer, needs, parts in staged:
                if needs is not Needs.ALIVE:
                    self._waiting[peer].append((self.barrier_seq(needs), parts))
                    self._held += 1
                elif self.barrier_seq(needs) <= self._disk.durable_seq:
                    self._send(peer, parts)
        self.release()

    def barrier_seq(self, needs: Needs) -> int:
        return self._journal.changed_seq if needs is Needs.EVERYTHING else self._journal.vote_seq

    def release(self) -> None:
        """Sends what may leave now."""
        if not self._held:
            return
        durable_seq = self._disk.durable_seq
        for peer, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= durable_seq:
                self._held -= 1
                self._send(peer, waiting.popleft()[1])

    def drop(self, peer: NodeId) -> None:
        """The session is gone; what waited for it must not appear in the next one."""
        self._held -= len(self._waiting[peer])
        self._waiting[peer].clear()
        self._staged = [staged for staged in self._staged if staged[0] != peer]
