"""The engine's turns: everything of the Engine port that is not the consensus library.

Owns what is around a turn: messages that wait to be read, proposals that wait for an answer, the wake-up, the
barrier's place (journal, then messages, then callbacks), and the end when something goes wrong. It knows the
library only as RaftCore. It must never call anybody back from within a turn. Only the engine imports it.
"""

import abc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.replication.marks import START_BYTES
from smq.replication.ports import (
    Buffer,
    Clock,
    Committed,
    Disk,
    ProposalDone,
    ProposalLost,
    ReadIndexDone,
    Rng,
    StateMachine,
    Table,
)
from smq.replication.raft.disk_marks import DiskMarks
from smq.replication.raft.journal import RaftJournal, Snapshot, damaged_marks
from smq.replication.raft.messages import COMMAND_BYTES_MAX, MalformedMessage, Message, decode
from smq.replication.raft.outbox import Outbox
from smq.replication.raft.view import EngineTiming
from smq.replication.raft.voters import Voters

log = logging.getLogger(__name__)

Result: TypeAlias = Committed | ProposalLost
ReadResult: TypeAlias = LogIndex | ProposalLost


class RaftCore(Protocol):
    """The consensus library with its repairs. Called only within its engine's `with`."""

    @property
    def term(self) -> int: ...

    @property
    def leader(self) -> NodeId | None: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def commit_index(self) -> int: ...

    @property
    def applied_index(self) -> int: ...

    @property
    def has_backlog(self) -> bool:
        """Committed entries wait for the next turn to be applied."""

    def resume_after(self, snapshot: Snapshot) -> None: ...

    def session_opened(self, peer: NodeId) -> None: ...

    def session_closed(self, peer: NodeId) -> None: ...

    def receive(self, peer: NodeId, message: Message) -> None: ...

    def queue_command(self, command: bytes, on_result: Callable[[Result], None]) -> None: ...

    def begin_read(self, on_result: Callable[[ReadResult], None]) -> None: ...

    def hand_over(self, to: NodeId | None) -> None: ...

    def renounce(self) -> None: ...

    @property
    def is_tick_due(self) -> bool:
        """Time alone gives the next turn something to do."""

    def run(self) -> None:
        """Elections, commit, apply, queued commands, sending, snapshot."""


class TurnEngine(abc.ABC):
    """Implements smq.replication.ports.Engine around a RaftCore.

    It works in turns. A turn takes what has arrived, lets the library run once, submits what changed to the
    disk, hands messages to the barrier, and only then calls anybody back. Turns are asked for by events
    (`_wake`), coalesced into one a loop iteration; `tick` is one more turn, for the sake of time-outs.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        peers: Sequence[NodeId],
        clock: Clock,
        rng: Rng,
        disk: Disk,
        machine: StateMachine,
        send: Callable[[NodeId, Sequence[Buffer]], None],
        timing: EngineTiming,
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        on_leader_change: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`peers` are all other voters. `send` may drop a message where no session is open. `disk_id` is asked
        from `start` on; `registered_disk` answers from the applied state of `machine`."""
        if node_id in peers or len(set(peers)) != len(peers):
            raise ValueError("peers are the other nodes, each once")
        self._node_id = node_id
        self._peers = tuple(sorted(peers))
        self._clock = clock
        self.rng = rng
        self.machine = machine
        self.timing = timing
        self._on_leader_change = on_leader_change
        self._on_fatal = on_fatal
        self.journal = RaftJournal(disk, self._on_durable)
        start = rng.randbytes(START_BYTES)
        self.marks = DiskMarks(node_id, self._peers, disk_id, registered_disk, start, self.journal)
        self.voters = Voters(node_id, self._peers, disk_id, registered_disk, self.marks.doubts)
        self.outbox = Outbox(disk, self.journal, send, self._peers)
        self._raft: RaftCore | None = None  # from start
        self._inbox: deque[tuple[NodeId, Message]] = deque()  # emptied by every turn
        self._results: list[Callable[[], None]] = []
        self._is_waking = False
        self._is_stopped = False
        self._leadership_told: tuple[int, NodeId | None] = (0, None)
        self._malformed_from: set[NodeId] = set()  # who sent such a message in this session: logged once

    @abc.abstractmethod
    def __enter__(self) -> None:
        """From here on the library sees this engine's clock, random source and journal."""

    @abc.abstractmethod
    def __exit__(self, *_exception: object) -> None: ...

    @abc.abstractmethod
    def _create_core(self, node_id: NodeId, peers: tuple[NodeId, ...]) -> RaftCore: ...

    # ------------------------------------------------------------------------------------------------ properties
    @property
    def term(self) -> Term:
        return Term(self._raft.term if self._raft else 0)

    @property
    def leader(self) -> NodeId | None:
        return self._raft.leader if self._raft else None

    @property
    def is_leader(self) -> bool:
        return self._raft is not None and self._raft.is_leader

    @property
    def applied_index(self) -> LogIndex:
        return LogIndex(self._raft.applied_index if self._raft else 0)

    @property
    def commit_index(self) -> LogIndex:
        return LogIndex(self._raft.commit_index if self._raft else 0)

    def now(self) -> float:
        """Seconds, monotonic."""
        return self._clock.monotonic_ns() / 1e9

    # ------------------------------------------------------------------------------------------------- lifecycle
    def start(self) -> Iterator[None]:
        yield from self.journal.load()
        try:
            self.marks.load()
        except ValueError as e:
            raise damaged_marks(e) from e
        snapshot = self.journal.snapshot
        if snapshot is not None:
            yield from self.machine.restore(LogIndex(snapshot.index), snapshot.state)
        with self:
            self._raft = self._create_core(self._node_id, self._peers)
            if snapshot is not None:
                self._raft.resume_after(snapshot)
        self._wake()

    def stop(self) -> None:
        """Nothing is sent, applied or called back any more."""
        self._is_stopped = True
        self._inbox.clear()

    # ---------------------------------------------------------------------------------------------------- inputs
    def propose(self, command: bytes, done: ProposalDone) -> None:
        """ValueError for a command above COMMAND_BYTES_MAX: limits above this layer keep them smaller."""
        if len(command) > COMMAND_BYTES_MAX:
            raise ValueError(f"a command of {len(command)} bytes: the limit is {COMMAND_BYTES_MAX}")
        if self._is_stopped:
            return
        if not self.is_leader or self._raft is None:
            self._clock.call_soon(lambda: done(ProposalLost.NOT_LEADER))
            return
        # The answer is given after the turn, outside the library.
        self._raft.queue_command(command, lambda result: self._results.append(partial(done, result)))
        self._wake()

    def read_index(self, done: ReadIndexDone) -> None:
        if self._is_stopped:
            return
        if not self.is_leader or self._raft is None:
            self._clock.call_soon(lambda: done(ProposalLost.NOT_LEADER))
            return
        self._raft.begin_read(lambda result: self._results.append(partial(done, result)))
        self._wake()

    def on_session_open(self, peer: NodeId) -> None:
        self._forget(peer)
        self._enter(lambda raft: raft.session_opened(peer))
        self._wake()

    def on_session_close(self, peer: NodeId) -> None:
        self._forget(peer)
        self._enter(lambda raft: raft.session_closed(peer))
        self._wake()

    def _forget(self, peer: NodeId) -> None:
        """A new session shares nothing with the one before it (docs/rules.md, finding 11: FIFO, at most once)."""
        self._inbox = deque(item for item in self._inbox if item[0] != peer)
        self._malformed_from.discard(peer)
        self.marks.session_over(peer)
        self.outbox.drop(peer)

    def on_message(self, peer: NodeId, payload: memoryview) -> None:
        """A message that does not decode is dropped; Raft lives with lost messages."""
        try:
            self._inbox.append((peer, decode(payload)))
        except MalformedMessage as e:
            if peer not in self._malformed_from:
                self._malformed_from.add(peer)
                log.warning("node %d sent something that is no Raft message: %s", peer, e)
            return
        self._wake()

    def mend(self, table: Table, key: bytes) -> None:
        if self._raft is not None:
            self.journal.mend(table, key)

    def flush_marks(self) -> None:
        if not self._is_stopped:
            self.journal.flush_marks()

    def tick(self) -> None:
        if self._raft is not None and self._raft.is_tick_due:
            self._turn()

    def transfer_leadership(self, to: NodeId | None) -> None:
        if self.is_leader:
            self._enter(lambda raft: raft.hand_over(to))
            self._wake()

    def renounce(self) -> None:
        self._enter(lambda raft: raft.renounce())
        self._wake()

    # ----------------------------------------------------------------------------------------------------- turns
    def _wake(self) -> None:
        if not self._is_waking and not self._is_stopped:
            self._is_waking = True
            self._clock.call_soon(self._on_wake)

    def _on_wake(self) -> None:
        self._is_waking = False
        self._turn()

    def _on_durable(self) -> None:
        """Messages leave at once; what the leader may commit now is for the turn."""
        if self._is_stopped:
            return
        self.outbox.release()
        if self.is_leader:
            self._wake()

    def _turn(self) -> None:
        self._enter(self._work)
        self._call_back()

    def _work(self, raft: RaftCore) -> None:
        while self._inbox:
            raft.receive(*self._inbox.popleft())
        raft.run()
        if raft.has_backlog:
            self._wake()

    def _enter(self, work: Callable[[RaftCore], None]) -> None:
        """Runs `work` inside the library's surroundings, then makes durable what it changed and seals its
        messages. Whatever it raises is fatal."""
        if self._is_stopped or self._raft is None:
            return
        try:
            with self:
                work(self._raft)
            self.journal.flush()
            self.outbox.seal()
        except Exception as e:  # noqa: BLE001  # it ends the process, through on_fatal
            self._fail(e)

    def _fail(self, error: Exception) -> None:
        self.stop()
        self._on_fatal(error)

    def _call_back(self) -> None:
        """Answers proposals and reads, and tells of a new leader: outside the library, in order, after the barrier."""
        try:
            while self._results and not self._is_stopped:
                results, self._results = self._results, []
                for answer in results:
                    answer()
            raft = self._raft
            if raft is not None and (raft.term, raft.leader) != self._leadership_told and not self._is_stopped:
                self._leadership_told = (raft.term, raft.leader)
                self._on_leader_change()
        except Exception as e:  # noqa: BLE001  # it ends the process, through on_fatal
            self._fail(e)
