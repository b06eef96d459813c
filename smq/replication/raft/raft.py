"""Raft as the node calls it: inputs, turns, and the end when something goes wrong.

Owns what is around a turn: events until the next one, and the wake-up. A turn is `Core.step` with what it says to
peers, the state machine's share (raft/applier.py), `Core.conclude`, and the rest of the result (raft/executor.py), in
this order. It must never call back before a turn has ended. The node composes it; parts of the node call it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from smq.raft_state.binary import CodecError
from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.replication.net.disk_marks import START_BYTES
from smq.replication.ports import (
    Buffer,
    Clock,
    Disk,
    ProposalDone,
    ProposalLost,
    Quorum,
    ReadIndexDone,
    Rng,
    Table,
)
from smq.replication.raft.applier import Applier, StateMachine
from smq.replication.raft.core import Core
from smq.replication.raft.executor import Executor
from smq.replication.raft.journal import RaftJournal, damaged_marks
from smq.replication.raft.messages import COMMAND_BYTES_MAX, Message, decode
from smq.replication.raft.timing import RaftTiming
from smq.replication.raft.voters import DiskMarks, Voters
from smq.replication.runtime.heard_time import HeardTime

log = logging.getLogger(__name__)


class Raft:
    """It persists (through the Disk given to it) before it sends.

    Events request turns (`_wake`), coalesced into one per iteration of the loop. `tick` adds turns for time-outs only.
    The node gives it the CONTROL sessions, and carries the marks of disks between the nodes.
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
        flush: Callable[[], None],
        timing: RaftTiming,
        disk_id: Callable[[], DiskId],
        registered_disk: Callable[[NodeId], DiskId | None],
        born_disk: Callable[[NodeId], DiskId | None],
        on_leader_change: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`peers` are all other voters. `send` may drop a message if no session is open, and keep it until `flush` or
        the end of the loop's turn. `disk_id` is asked from `start` on; `registered_disk` answers from the applied state
        of `machine`, `born_disk` from the birth of the cluster."""
        if node_id in peers or len(set(peers)) != len(peers):
            raise ValueError("peers are the other nodes, each once")
        self._node_id = node_id
        self._peers = tuple(sorted(peers))
        self._clock = clock
        self._rng = rng
        self._disk = disk
        self.timing = timing
        self._heard_time = HeardTime(clock, timing.election_timeout_min_ms, timing.tick_ms)
        self._on_fatal = on_fatal
        self.journal = RaftJournal()
        start = rng.randbytes(START_BYTES)
        self.marks = DiskMarks(node_id, self._peers, disk_id, registered_disk, start, self.journal)
        self.voters = Voters(node_id, self._peers, disk_id, registered_disk, self.marks.doubts, born_disk)
        self._applier = Applier(machine, self.journal, timing.snapshot_entries, flush)
        self._executor = Executor(
            disk=disk,
            journal=self.journal,
            peers=self._peers,
            send=send,
            wake=self._wake,
            on_durable=self._on_durable,
            on_leader_change=on_leader_change,
        )
        self._core: Core | None = None  # from start
        self._inbox: deque[tuple[NodeId, Message]] = deque()  # emptied by every turn
        self._is_waking = False
        self._is_stopped = False
        self._malformed_from: set[NodeId] = set()  # peers that sent such a message in this session: logged once

    # ------------------------------------------------------------------------------------------------ properties
    @property
    def term(self) -> Term:
        return Term(self._core.term if self._core else 0)

    @property
    def leader(self) -> NodeId | None:
        """The last leader that this node has heard. May be stale."""
        return self._core.leader if self._core and not self._is_stopped else None

    @property
    def is_leader(self) -> bool:
        """May be stale; only a proposal proves it."""
        return self._core is not None and self._core.is_leader and not self._is_stopped

    @property
    def applied_index(self) -> LogIndex:
        return self._applier.applied_index if self._core else LogIndex(0)

    @property
    def commit_index(self) -> LogIndex:
        return LogIndex(self._core.commit_index if self._core else 0)

    @property
    def snapshot(self) -> tuple[LogIndex, int]:
        """The last entry in the newest snapshot of this node, and the size of its state; zeros if there is none."""
        found = self.journal.snapshot
        return (LogIndex(found.index), len(found.state)) if found is not None else (LogIndex(0), 0)

    def now(self) -> float:
        """Seconds of the clock by which silence is measured."""
        return self._heard_time.now_ns() / 1e9

    # ------------------------------------------------------------------------------------------------- lifecycle
    def start(self) -> Iterator[None]:
        """Loads snapshot and journal, with one step of work between two yields, and then takes part. Raises DataDamaged
        if either fails its CRC."""
        yield from self.journal.load(self._disk)
        try:
            self.marks.load()
        except CodecError as e:
            raise damaged_marks(e) from e
        if self.journal.snapshot is not None:
            yield from self._applier.restore(self.journal.snapshot)
        self._core = Core(
            node_id=self._node_id,
            peers=self._peers,
            journal=self.journal,
            voters=self.voters,
            timing=self.timing,
            now=self.now,
            rng=self._rng,
        )
        self._wake()

    def stop(self) -> None:
        """From now on nothing is sent, applied or called back."""
        self._is_stopped = True
        self._executor.stop()
        self._inbox.clear()

    # ---------------------------------------------------------------------------------------------------- inputs
    def propose(self, command: bytes, done: ProposalDone) -> None:
        """`done` is called exactly once, unless the process stops. Callers set their own deadline. ValueError for a
        command above COMMAND_BYTES_MAX: limits above this layer keep them smaller."""
        if len(command) > COMMAND_BYTES_MAX:
            raise ValueError(f"a command of {len(command)} bytes: the limit is {COMMAND_BYTES_MAX}")
        if self._is_stopped:
            return
        if not self.is_leader or self._core is None:
            self._clock.call_soon(lambda: done(ProposalLost.NOT_LEADER))
            return
        self._core.propose(command, done)
        self._wake()

    def read_index(self, done: ReadIndexDone) -> None:
        """`done` gets an index: a node that has applied it has applied everything that was committed, on any node, at
        the time of the call. Nothing is written. `done` is called once, as for a proposal; NOT_LEADER if the leadership
        ended first."""
        if self._is_stopped:
            return
        if not self.is_leader or self._core is None:
            self._clock.call_soon(lambda: done(ProposalLost.NOT_LEADER))
            return
        self._core.begin_read(done)
        self._wake()

    def on_session_open(self, peer: NodeId) -> None:
        self._forget(peer)
        self._enter(lambda core: core.session_opened(peer))
        self._wake()

    def on_session_close(self, peer: NodeId) -> None:
        self._forget(peer)
        self._enter(lambda core: core.session_closed(peer))
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
        except CodecError as e:
            if peer not in self._malformed_from:
                self._malformed_from.add(peer)
                log.warning("node %d sent something that is not a Raft message: %s", peer, e)
            return
        self._inbox.append((peer, message))
        if self._core is None or self._core.is_due_for(peer, message):
            self._wake()

    def rewrite_row(self, table: Table, key: bytes) -> None:
        """Rewrites a row of its tables whose bytes on disk are damaged."""
        if self._core is not None:
            self.journal.rewrite_row(table, key)
            self._executor.flush()

    def flush_marks(self) -> None:
        """Saves the marks heard, if no write of the journal has yet. To be called once per heartbeat."""
        if not self._is_stopped:
            self._executor.flush_marks()

    def tick(self) -> None:
        if self._core is not None and self._core.is_tick_due:
            self._turn()

    def transfer_leadership(self, to: NodeId | None) -> None:
        """Best effort; nothing happens if this node does not lead or the target lags."""
        if self.is_leader:
            self._enter(lambda core: core.lead.hand_over(to))
            self._wake()

    def quorum(self) -> Quorum | None:
        """None unless this node leads. Its times are later than they were if this node has slept since."""
        if self._core is None or not self.is_leader:
            return None
        now, wall_ns = self.now(), self._clock.wall_ns()
        return self._core.lead.quorum(self._node_id, lambda at: (wall_ns - round((now - at) * 1e9)) // 1_000_000)

    def renounce(self) -> None:
        """Ends a leadership or a candidacy of this node: its disk is no longer the one that stood for it."""
        self._enter(lambda core: core.renounce())
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
        if self._core is not None and self._core.may_commit:
            self._wake()

    def _turn(self) -> None:
        self._enter(self._work)

    def _work(self, core: Core) -> None:
        messages, self._inbox = self._inbox, deque()
        work, output = core.step(messages)
        self._executor.say(output)
        self._executor.execute(core.conclude(self._applier.run(work)))

    def _enter(self, work: Callable[[Core], None]) -> None:
        """An exception from `work` is fatal."""
        if self._is_stopped or self._core is None:
            return
        try:
            work(self._core)
        except Exception as e:  # noqa: BLE001  # it ends the process, through on_fatal
            self.stop()
            self._on_fatal(e)
