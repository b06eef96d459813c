"""The engine's turns: everything of the Engine port that is not Raft itself.

Owns what is around a turn: events until the next one, the wake-up, and the end when something goes wrong. A turn is
`Core.step`, the state machine's share (raft/applier.py), `Core.conclude`, and the execution of the result
(raft/executor.py), in this order. It must never call back before a turn has ended. Only the engine imports it.
"""

import abc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.replication.marks import START_BYTES
from smq.replication.ports import (
    Buffer,
    Clock,
    Disk,
    ProposalDone,
    ProposalLost,
    Quorum,
    ReadIndexDone,
    Rng,
    StateMachine,
    Table,
)
from smq.replication.raft.applier import Applier
from smq.replication.raft.core import Core
from smq.replication.raft.disk_marks import DiskMarks
from smq.replication.raft.executor import Executor
from smq.replication.raft.journal import RaftJournal, damaged_marks
from smq.replication.raft.messages import COMMAND_BYTES_MAX, MalformedMessage, Message, decode
from smq.replication.raft.view import Consensus, EngineTiming, Listener, RaftSetup
from smq.replication.raft.voters import Voters

log = logging.getLogger(__name__)


class TurnEngine(abc.ABC):
    """Implements smq.replication.ports.Engine around a Core.

    Events request turns (`_wake`), coalesced into one per iteration of the loop. `tick` adds turns for time-outs.
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
        is_home: Callable[[NodeId], bool],
        on_leader_change: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`peers` are all other voters. `send` may drop a message if no session is open. `disk_id` is asked
        from `start` on; `registered_disk` answers from the applied state of `machine`, `is_home` from the network."""
        if node_id in peers or len(set(peers)) != len(peers):
            raise ValueError("peers are the other nodes, each once")
        self._node_id = node_id
        self._peers = tuple(sorted(peers))
        self._clock = clock
        self._rng = rng
        self._disk = disk
        self.timing = timing
        self._on_fatal = on_fatal
        self.journal = RaftJournal()
        start = rng.randbytes(START_BYTES)
        self.marks = DiskMarks(node_id, self._peers, disk_id, registered_disk, start, self.journal)
        self.voters = Voters(node_id, self._peers, disk_id, registered_disk, self.marks.doubts, is_home)
        self._applier = Applier(machine, self.journal, timing.snapshot_entries)
        self._executor = Executor(
            disk=disk,
            journal=self.journal,
            peers=self._peers,
            send=send,
            wake=self._wake,
            on_durable=self._on_durable,
            on_leader_change=on_leader_change,
        )
        self._raft: Core | None = None  # from start
        self._inbox: deque[tuple[NodeId, Message]] = deque()  # emptied by every turn
        self._is_waking = False
        self._is_stopped = False
        self._malformed_from: set[NodeId] = set()  # peers that sent such a message in this session: logged once

    @staticmethod
    @abc.abstractmethod
    def create_library(setup: RaftSetup, listener: Listener) -> Consensus: ...

    # ------------------------------------------------------------------------------------------------ properties
    @property
    def term(self) -> Term:
        return Term(self._raft.term if self._raft else 0)

    @property
    def leader(self) -> NodeId | None:
        return self._raft.leader if self._raft and not self._is_stopped else None

    @property
    def is_leader(self) -> bool:
        return self._raft is not None and self._raft.is_leader and not self._is_stopped

    @property
    def applied_index(self) -> LogIndex:
        return self._applier.applied_index if self._raft else LogIndex(0)

    @property
    def commit_index(self) -> LogIndex:
        return LogIndex(self._raft.commit_index if self._raft else 0)

    @property
    def snapshot(self) -> tuple[LogIndex, int]:
        found = self.journal.snapshot
        return (LogIndex(found.index), len(found.state)) if found is not None else (LogIndex(0), 0)

    def now(self) -> float:
        """Seconds, monotonic."""
        return self._clock.monotonic_ns() / 1e9

    # ------------------------------------------------------------------------------------------------- lifecycle
    def start(self) -> Iterator[None]:
        yield from self.journal.load(self._disk)
        try:
            self.marks.load()
        except ValueError as e:
            raise damaged_marks(e) from e
        if self.journal.snapshot is not None:
            yield from self._applier.restore(self.journal.snapshot)
        self._raft = Core(
            RaftSetup(
                node_id=self._node_id,
                peers=self._peers,
                journal=self.journal,
                voters=self.voters,
                timing=self.timing,
                now=self.now,
                rng=self._rng,
            ),
            self.create_library,
        )
        self._wake()

    def stop(self) -> None:
        """From now on nothing is sent, applied or called back."""
        self._is_stopped = True
        self._executor.stop()
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
        self._raft.propose(command, done)
        self._wake()

    def read_index(self, done: ReadIndexDone) -> None:
        if self._is_stopped:
            return
        if not self.is_leader or self._raft is None:
            self._clock.call_soon(lambda: done(ProposalLost.NOT_LEADER))
            return
        self._raft.begin_read(done)
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
        self._executor.drop_session(peer)

    def on_message(self, peer: NodeId, payload: memoryview) -> None:
        """A message that does not decode is dropped: Raft tolerates lost messages."""
        try:
            message = decode(payload)
        except MalformedMessage as e:
            if peer not in self._malformed_from:
                self._malformed_from.add(peer)
                log.warning("node %d sent something that is not a Raft message: %s", peer, e)
            return
        self._inbox.append((peer, message))
        if self._raft is None or self._raft.is_due_for(peer, message):
            self._wake()

    def rewrite_row(self, table: Table, key: bytes) -> None:
        if self._raft is not None:
            self.journal.rewrite_row(table, key)
            self._executor.flush()

    def flush_marks(self) -> None:
        if not self._is_stopped:
            self._executor.flush_marks()

    def tick(self) -> None:
        if self._raft is not None and self._raft.is_tick_due:
            self._turn()

    def transfer_leadership(self, to: NodeId | None) -> None:
        if self.is_leader:
            self._enter(lambda raft: raft.hand_over(to))
            self._wake()

    def quorum(self) -> Quorum | None:
        if self._raft is None or not self.is_leader:
            return None
        now, wall_ns = self.now(), self._clock.wall_ns()
        return self._raft.lead.quorum(self._node_id, lambda at: (wall_ns - round((now - at) * 1e9)) // 1_000_000)

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
        """Only a leader counts what is on its own disk."""
        if self._raft is not None and self._raft.may_commit:
            self._wake()

    def _turn(self) -> None:
        self._enter(self._work)

    def _work(self, raft: Core) -> None:
        messages, self._inbox = self._inbox, deque()
        work = raft.step(messages)
        self._executor.execute(raft.conclude(self._applier.run(work)))

    def _enter(self, work: Callable[[Core], None]) -> None:
        """An exception from `work` is fatal."""
        if self._is_stopped or self._raft is None:
            return
        try:
            work(self._raft)
        except Exception as e:  # noqa: BLE001  # it ends the process, through on_fatal
            self.stop()
            self._on_fatal(e)
