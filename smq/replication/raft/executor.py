"""Carries out the results of Raft's turns: the one place where they reach disk, network and callers.

Owns the order: submit the changes, queue the messages after them, and only at the end of the turn answer and report.
Owns the barrier, too: the one place that decides when a message of Raft may leave
(docs/decisions/persist-then-speak.md). It must never decide anything else. Only the engine imports it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from smq.raft_state.ids import NodeId
from smq.replication.ports import Buffer, Disk
from smq.replication.raft.journal import Changes, JournalWriter, RaftJournal
from smq.replication.raft.messages import encode
from smq.replication.raft.ready import Needs, Outgoing, Output, Ready


class Outbox:
    """The barrier between the disk and the wire: no message of Raft leaves before what it says is on disk.

    One FIFO per peer, so that a message that need not wait never overtakes one that must. Bounded by the leader's
    window per follower and by one answer for each message received.
    """

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
        """Takes messages after the changes that come with them have been submitted, and sends what may leave now."""
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


class Executor:
    def __init__(
        self,
        *,
        disk: Disk,
        journal: RaftJournal,
        peers: Sequence[NodeId],
        send: Callable[[NodeId, Sequence[Buffer]], None],
        wake: Callable[[], None],
        on_durable: Callable[[], None],
        on_leader_change: Callable[[], None],
    ) -> None:
        """`wake` requests another turn. `on_durable` is called after messages that waited for the disk have left."""
        self._writer = JournalWriter(disk, journal, self._on_durable)
        self._journal = journal
        self._outbox = Outbox(disk, send, peers)
        self._wake = wake
        self._report_durable = on_durable
        self._on_leader_change = on_leader_change
        self._is_stopped = False

    def say(self, output: Output) -> None:
        if output.changes is not None:
            self._persist(output.changes)
        self._outbox.put(output.messages)

    def execute(self, ready: Ready) -> None:
        """An exception from a callback ends the engine. The engine may have been stopped within the turn, by the state
        machine, and any callback may stop it."""
        if self._is_stopped:
            return
        if ready.has_more:
            self._wake()
        self.say(ready)
        self._call_back(ready)

    def _call_back(self, ready: Ready) -> None:
        for answer in ready.answers:
            if self._is_stopped:
                return
            answer.done(answer.outcome)
        if ready.leadership is not None and not self._is_stopped:
            self._on_leader_change()

    def flush(self) -> None:
        """Persists changes that were made outside a turn."""
        if (changes := self._journal.take_changes()) is not None:
            self._persist(changes)

    def flush_marks(self) -> None:
        self._writer.flush_marks()

    def drop_session(self, peer: NodeId) -> None:
        self._outbox.drop(peer)

    def stop(self) -> None:
        """From now on nothing is sent, answered or reported, and no turn's changes are persisted."""
        self._is_stopped = True

    def _persist(self, changes: Changes) -> None:
        seq = self._writer.write(changes)
        self._outbox.on_submitted(seq, has_vote=changes.vote is not None)

    def _on_durable(self) -> None:
        """Messages leave immediately; what the leader may commit now is for its next turn."""
        if not self._is_stopped:
            self._outbox.release()
            self._report_durable()
