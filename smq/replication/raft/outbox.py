"""The barrier between the disk and the wire: no message of Raft leaves before what it says is on disk.

Owns the messages that wait, one FIFO per peer, so that a message that need not wait never overtakes one that
must. This is the one place that decides it (docs/decisions/persist-then-speak.md). Only the executor imports it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from smq.raft_state.ids import NodeId
from smq.replication.ports import Buffer, Disk
from smq.replication.raft.messages import encode
from smq.replication.raft.ready import Needs, Outgoing


class Outbox:
    """Bounded by the leader's window per follower and by one answer for each message received."""

    def __init__(
        self,
        disk: Disk,
        send: Callable[[NodeId, Sequence[Buffer]], None],
        peers: Iterable[NodeId],
    ) -> None:
        self._disk = disk
        self._send = send
        self._changed_seq = 0  # submission that holds the last change of anything
        self._vote_seq = 0  # submission that holds the last change of term or vote
        self._held = 0  # messages in `_waiting`
        self._waiting: dict[NodeId, deque[tuple[int, Sequence[Buffer]]]] = {peer: deque() for peer in peers}

    def on_submitted(self, seq: int, *, has_vote: bool) -> None:
        """Changes of the journal are on their way to the disk. Messages that are put from now on wait for them."""
        self._changed_seq = seq
        if has_vote:
            self._vote_seq = seq

    def put(self, messages: Iterable[Outgoing]) -> None:
        """Takes a turn's messages, after its changes have been submitted, and sends what may leave now."""
        for outgoing in messages:
            parts, seq = encode(outgoing.message), self.barrier_seq(outgoing.needs)
            if outgoing.needs is not Needs.ALIVE:
                self._waiting[outgoing.peer].append((seq, parts))
                self._held += 1
            elif seq <= self._disk.durable_seq:
                self._send(outgoing.peer, parts)
        self.release()

    def barrier_seq(self, needs: Needs) -> int:
        return self._changed_seq if needs is Needs.EVERYTHING else self._vote_seq

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
        """The session is gone. Messages that waited must not appear in the next one."""
        self._held -= len(self._waiting[peer])
        self._waiting[peer].clear()
