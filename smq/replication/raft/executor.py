"""Carries out the results of Raft's turns: the one place where they reach disk, network and callers.

Owns the order: submit the changes, queue the messages after them, and only then answer and report. The barrier itself
is in raft/outbox.py. It must never decide anything. Only the engine imports it.
"""

from collections.abc import Callable, Sequence

from smq.raft_state.ids import NodeId
from smq.replication.ports import Buffer, Disk
from smq.replication.raft.journal import Changes, RaftJournal
from smq.replication.raft.outbox import Outbox
from smq.replication.raft.ready import Ready
from smq.replication.raft.writer import JournalWriter


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

    def execute(self, ready: Ready) -> None:
        """An exception from a callback ends the engine. The engine may have been stopped within the turn, by the state
        machine, and any callback may stop it."""
        if self._is_stopped:
            return
        if ready.has_more:
            self._wake()
        if ready.changes is not None:
            self._persist(ready.changes)
        self._outbox.put(ready.messages)
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
