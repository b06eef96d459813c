"""The consensus engine: pysyncobj, with everything repaired that docs/rules.md lists as its findings.

The ONE file that imports pysyncobj (ARCHITECTURE.md says why), pinned to 0.3.17 because the repairs go through its
private names; a test fails when one of them moves. The library keeps: the Raft state, elections and votes, the
first entry of a term, the command queue, and which callback waits for which index. Ours are: journal and
snapshots (raft/journal.py), what leaves and when (raft/outbox.py), the follower's and the leader's work on entries
(raft/follower.py, raft/leader.py), pre-vote (raft/prevote.py), bytes (raft/messages.py), clock and random source.

It must never let a callback or an exception of ours pass through the library, which swallows some and retries
others for ever: whatever goes wrong inside a turn ends the engine through `on_fatal`. Only the composition
root imports this file; everybody else knows the Engine port.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

# The library has no type hints; `_Library` below is the typed view of it.
from pysyncobj import syncobj as library
from pysyncobj.config import FAIL_REASON, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from smq.raft_state.ids import DiskId, LogIndex, NodeId
from smq.raft_state.replies import Applied
from smq.replication.ports import Committed, DataDamaged, ProposalLost
from smq.replication.raft.follower import Follower
from smq.replication.raft.install import Installation
from smq.replication.raft.journal import Snapshot
from smq.replication.raft.leader import Leader
from smq.replication.raft.messages import (
    NO_OP,
    REGULAR,
    Append,
    AppendReply,
    Confirm,
    Confirmed,
    Message,
    PreVote,
    PreVoteGranted,
    RequestVote,
    SnapshotChunk,
    TermNotice,
    TimeoutNow,
    Vote,
    encode,
)
from smq.replication.raft.outbox import Needs
from smq.replication.raft.prevote import PreVoting
from smq.replication.raft.surroundings import NoPickle, NoPoller, Surroundings
from smq.replication.raft.turns import ReadResult, Result, TurnEngine
from smq.replication.raft.view import EngineTiming, RaftViolation

__all__ = ["EngineTiming", "PySyncObjEngine"]

COMMANDS_QUEUED_MAX: Final = 50_000  # above 65,536 the library reports failure for commands it did queue (finding 19)
APPLY_BATCH_MAX: Final = 200  # entries applied a turn, so that a long backlog does not starve the node's loop
APPLY_BYTES_MAX: Final = 256 << 10  # nor more of them, but for a single one: of offsets committed that is some 30 ms
APPLY_TOUCHED_MAX: Final = 500  # nor more partitions moved a turn, once an entry has been applied
SNAPSHOT_JOURNAL_BYTES: Final = 64 << 20  # a snapshot is taken when the journal grew by this, however few the entries
JOURNAL_KEPT_BYTES: Final = 8 << 20  # entries kept behind a snapshot so that a slow follower needs none
_RECONNECT_GRACE: Final = 0.5  # of the election time-out: how soon a follower whose leader's session closed asks


class _LibraryConstantsMoved(Exception):
    """The installed pysyncobj is not the one this file was written for."""


if library._COMMAND_TYPE.REGULAR != REGULAR or library._COMMAND_TYPE.NO_OP != NO_OP:
    raise _LibraryConstantsMoved("install pysyncobj==0.3.17: its entry types are not those of our journal")


_LEADER: Final = library._RAFT_STATE.LEADER


# ----------------------------------------------------------------------------------- the library's surroundings
_surroundings = Surroundings()
library.monotonicTime = _surroundings.monotonic
library.random = _surroundings
library.createPoller = lambda _kind: NoPoller()
library.createJournal = _surroundings.create_journal
library.PIPE_NOTIFIER_ENABLED = False
library.pickle = NoPickle()


class _Peer(Node):  # type: ignore[misc]  # the library is untyped
    """A node with a stable hash: the library iterates over sets of them."""

    def __hash__(self) -> int:
        return int(self._id)

    def __str__(self) -> str:
        return str(self._id)


class _CommandQueue(deque[tuple[bytes, Callable[[object, int], None]]]):
    """The library's queue without its lock: one thread, and a queue that is asked at every turn."""

    def put_nowait(self, item: tuple[bytes, Callable[[object, int], None]]) -> None:
        if len(self) >= COMMANDS_QUEUED_MAX:
            raise library.Queue.Full
        self.append(item)

    def get_nowait(self) -> tuple[bytes, Callable[[object, int], None]]:
        if not self:
            raise library.Queue.Empty
        return self.popleft()


class _Wire(Transport):  # type: ignore[misc]  # the library is untyped
    """Where the library's own messages come out. All others are sent by the roles."""

    ready = True

    def __init__(self, send: Callable[[NodeId, Message, Needs], None], own_disk: Callable[[], DiskId]) -> None:
        super().__init__(None, None, [])
        self._send = send
        self._own_disk = own_disk

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        if message["type"] != "response_vote":
            raise RaftViolation(f"pysyncobj tried to send {message['type']}")
        self._send(node.id, Vote(term=message["term"], disk=self._own_disk()), Needs.EVERYTHING)
        return True

    def destroy(self) -> None:
        pass


# ------------------------------------------------------------------------------------------- the repaired library
class _Library(library.SyncObj):  # type: ignore[misc]  # the library is untyped
    """SyncObj with its faulty parts replaced; implements RaftView. Entered only within the engine's turns."""

    _SyncObj__raftLeader: Node | None

    def __init__(self, engine: TurnEngine, node_id: NodeId, peers: tuple[NodeId, ...]) -> None:
        # Before the library's own: its constructor looks at every attribute of the class.
        self._engine = engine
        self._nodes = {peer: _Peer(peer) for peer in (*peers, node_id)}
        self._id = node_id
        self.peers = peers
        self.timing = engine.timing
        self.journal = engine.journal
        self.voters = engine.voters
        self.follower = Follower(self)
        self.lead = Leader(self)
        self.prevoting = PreVoting(self)
        self._voted: set[NodeId] = set()  # who voted for us in the present term (finding 11)
        self._connected: set[NodeId] = set()
        self._snapshotting: Iterator[bytes] | None = None  # nothing is applied while there is one
        self._pieces: list[bytes] = []  # of it, so far
        self._installing: Installation | None = None  # nor while there is one of these
        self._unsettled: tuple[int, int, object] | None = None  # applied, but for what settling it may still take
        self._size_after_snapshot = 0  # of the journal: what waits to be committed cannot be cut off
        super().__init__(
            self._nodes[node_id],
            [self._nodes[peer] for peer in peers],
            conf=_conf(engine.timing),
            transport=_Wire(self.send, lambda: self.voters.own_disk),
        )
        self._SyncObj__commandsQueue = self._commands = _CommandQueue()
        if not peers:
            self._SyncObj__raftElectionDeadline = 0.0  # nobody to wait for

    # ----------------------------------------------------------------------------------------------- RaftView
    @property
    def term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    @property
    def leader(self) -> NodeId | None:
        node = self._SyncObj__raftLeader
        return None if node is None else node.id

    @property
    def is_leader(self) -> bool:
        return bool(self._SyncObj__raftState == _LEADER)

    @property
    def commit_index(self) -> int:
        return int(self._SyncObj__raftCommitIndex)

    @property
    def applied_index(self) -> int:
        return int(self._SyncObj__raftLastApplied)

    def now(self) -> float:
        return self._engine.now()

    def is_connected(self, peer: NodeId) -> bool:
        return peer in self._connected

    def send(self, peer: NodeId, message: Message, needs: Needs = Needs.EVERYTHING) -> None:
        if peer in self._connected:
            self._engine.outbox.put(peer, needs, encode(message))

    def adopt_term(self, term: int) -> None:
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(library._RAFT_STATE.FOLLOWER)
        self._SyncObj__raftLeader = None

    def _step_down(self) -> None:
        """Within the present term: its vote stays cast."""
        self._SyncObj__setState(library._RAFT_STATE.FOLLOWER)
        self._SyncObj__raftLeader = None

    def renounce(self) -> None:
        """Neither a leadership nor a candidacy of this node goes on: another disk stood for them."""
        self.prevoting.cancel()
        if self._SyncObj__raftState != library._RAFT_STATE.FOLLOWER:
            self._step_down()

    def follow(self, leader: NodeId) -> None:
        if self.leader != leader:
            self._give_up_waiting(up_to=self.journal.last_index)
        self.prevoting.cancel()
        self._SyncObj__raftLeader = self._nodes[leader]
        self._SyncObj__setState(library._RAFT_STATE.FOLLOWER)
        self._postpone_election()

    def commit_to(self, index: int) -> None:
        if index > self.commit_index:
            self._SyncObj__raftCommitIndex = index
            self.journal.setRaftCommitIndex(index)

    @property
    def is_installing(self) -> bool:
        return self._installing is not None

    def install(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        self._drop_snapshot()
        self._unsettled = None
        steps = self._engine.machine.restore(LogIndex(snapshot.index), snapshot.state)
        self._installing = Installation(snapshot, steps, done)

    def _go_on_installing(self, installation: Installation) -> None:
        if not installation.go_on():
            return
        self._installing = None
        self.journal.install(installation.snapshot)
        self._size_after_snapshot = self.journal.size_bytes
        self.resume_after(installation.snapshot)
        self._give_up_waiting(up_to=installation.snapshot.index)
        installation.done()

    def resume_after(self, snapshot: Snapshot) -> None:
        """The machine holds the snapshot's state now."""
        self._SyncObj__raftLastApplied = snapshot.index
        self._SyncObj__raftCommitIndex = max(self.commit_index, snapshot.index)

    # --------------------------------------------------------------------------------------- sessions, messages
    def session_opened(self, peer: NodeId) -> None:
        self._connected.add(peer)
        self._forget_session(peer)
        self._SyncObj__onNodeConnected(self._nodes[peer])

    def session_closed(self, peer: NodeId) -> None:
        self._connected.discard(peer)
        self._forget_session(peer)
        self._SyncObj__onNodeDisconnected(self._nodes[peer])
        if self.leader == peer:
            self._suspect_leader()

    def _forget_session(self, peer: NodeId) -> None:
        self.follower.forget_session(peer)
        self.lead.forget_session(peer)

    def _suspect_leader(self) -> None:
        """A killed leader's sessions close at once; asking soon costs nothing where a majority still hears it."""
        self.follower.leader_lost()
        timing = self.timing
        delay_ms = timing.heartbeat_ms + timing.election_timeout_min_ms * _RECONNECT_GRACE * self._engine.rng.random()
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, self.now() + delay_ms / 1000)

    def receive(self, peer: NodeId, message: Message) -> None:
        match message:
            case Append():
                self.follower.on_append(peer, message)
            case AppendReply():
                self._on_reply(peer, message)
            case Confirm():
                self.follower.on_confirm(peer, message)
            case Confirmed():
                self._on_term(message.term)
                if self.is_leader and message.term == self.term:
                    self.lead.on_confirmed(peer, message)
            case SnapshotChunk():
                self.follower.on_chunk(peer, message)
            case RequestVote():
                self._on_request_vote(peer, message)
            case Vote():
                self._on_vote(peer, message)
            case PreVote():
                if self.prevoting.would_vote(peer, message, self.follower.heard_at):
                    self.send(peer, PreVoteGranted(term=message.term, disk=self.voters.own_disk))
            case PreVoteGranted():
                if not self.is_leader and self._may_stand and self.prevoting.on_granted(peer, message):
                    self._stand_for_election()
            case TermNotice():
                self._on_term(message.term)
            case TimeoutNow():
                if message.term == self.term and peer == self.leader and self._may_stand:
                    self._stand_for_election()

    def _on_term(self, term: int) -> None:
        if term > self.term:
            self.adopt_term(term)

    def _on_reply(self, peer: NodeId, m: AppendReply) -> None:
        self._on_term(m.term)
        if self.is_leader and m.term == self.term:
            self.lead.on_reply(peer, m)

    def _on_request_vote(self, peer: NodeId, m: RequestVote) -> None:
        if m.term < self.term:
            self.send(peer, TermNotice(term=self.term))
            return
        if not self.voters.may_be_elected(peer, m.disk, is_admitted=m.is_admitted):
            self._on_term(m.term)
            return
        self._to_library(
            peer,
            {"type": "request_vote", "term": m.term, "last_log_index": m.last_index, "last_log_term": m.last_term},
        )

    def _on_vote(self, peer: NodeId, m: Vote) -> None:
        if self._counts_vote(peer, m):
            self._voted.add(peer)
            self._to_library(peer, {"type": "response_vote", "term": m.term})

    def _counts_vote(self, peer: NodeId, m: Vote) -> bool:
        """A vote of the present term, once a voter, by the disk that is registered for it."""
        return m.term == self.term and peer not in self._voted and self.voters.counts(peer, m.disk)

    def _to_library(self, peer: NodeId, message: dict[str, Any]) -> None:
        self._SyncObj__onMessageReceived(self._nodes[peer], message)

    # ------------------------------------------------------------------------------------------------ elections
    def _ask_for_election(self) -> None:
        """The election deadline has passed: pre-vote first."""
        self._postpone_election()
        self._SyncObj__raftLeader = None
        self.follower.leader_lost()
        if not self._may_stand:
            self.prevoting.cancel()
        elif self.peers:
            self.prevoting.begin()
        else:
            self._stand_for_election()

    @property
    def _may_stand(self) -> bool:
        """A node that has yet to apply what it knows to be committed may not know that its disk is another's."""
        return self.voters.may_stand and not self._is_behind and not self.is_installing

    def _stand_for_election(self) -> None:
        """The library's own election (its _onTick), which can only be reached there by a passed deadline."""
        self.prevoting.cancel()
        self._postpone_election()
        self._SyncObj__raftLeader = None
        self._SyncObj__setState(library._RAFT_STATE.CANDIDATE)
        self._SyncObj__setCurrentTerm(self.term + 1, self._id)
        self._SyncObj__votesCount = 1
        self._voted = set()
        request = RequestVote(
            term=self.term,
            last_index=self.journal.last_index,
            last_term=self.journal.last_term,
            disk=self.voters.own_disk,
            is_admitted=self.voters.is_admitted,
        )
        for peer in self.peers:
            self.send(peer, request)
        if not self.peers:
            self._SyncObj__onBecomeLeader()

    def _postpone_election(self) -> None:
        self._SyncObj__raftElectionDeadline = self.now() + self._SyncObj__generateRaftTimeout()

    # ------------------------------------------------------------- what the library calls and must not do its way
    def _SyncObj__onBecomeLeader(self) -> None:
        self.lead.begin()
        super()._SyncObj__onBecomeLeader()

    def _SyncObj__setState(self, newState: int) -> None:
        if self.is_leader and newState != library._RAFT_STATE.LEADER:
            self._postpone_election()  # else the deadline of the time before it led would be long past
            self.lead.end()
        super()._SyncObj__setState(newState)

    def _SyncObj__sendAppendEntries(self) -> None:
        self.lead.send(is_forced=True)

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:
        raise RaftViolation("entries are applied by _apply_committed")

    def _SyncObj__parseChangeClusterRequest(self, command: bytes) -> None:
        """Membership is not the library's (finding 14)."""

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:
        raise RaftViolation("snapshots are installed by the follower's role")

    # -------------------------------------------------------------------------------------------------- the turn
    def queue_command(self, command: bytes, on_result: Callable[[Result], None]) -> None:
        self._applyCommand(command, lambda result, reason: on_result(_result(result, reason)), REGULAR)

    def begin_read(self, on_result: Callable[[ReadResult], None]) -> None:
        self.lead.begin_read(lambda index: on_result(ProposalLost.NOT_LEADER if index is None else LogIndex(index)))

    def hand_over(self, to: NodeId | None) -> None:
        self.lead.hand_over(to)

    def _onTick(self, timeToWait: float = 0.0) -> None:
        raise RaftViolation("the engine's turns call `run`")

    @property
    def is_tick_due(self) -> bool:
        return self.is_leader or self._SyncObj__raftElectionDeadline < self.now()

    def run(self) -> None:
        if self.is_leader:
            self.lead.advance_commit()
            self.lead.confirm_reads()
            if not self.lead.hears_majority():
                self._step_down()
        elif self._SyncObj__raftElectionDeadline < self.now() and self._SyncObj__connectedToAnyone():
            self._ask_for_election()
        if self._installing is not None:
            self._go_on_installing(self._installing)
        elif self.has_backlog:
            self.follower.take_held()
            if self._installing is None:  # what was held may have begun another
                self._apply_committed()
                self._compact_journal()
        if self._commands:
            self._checkCommandsToApply()
        if self.is_leader:
            self.lead.send()

    def _checkCommandsToApply(self) -> None:
        """Queued commands enter the journal, at the leader only: nothing is ever forwarded (finding 10)."""
        if self.is_leader and not self.lead.is_handing_over:
            super()._checkCommandsToApply()
            return
        while self._commands:
            _, callback = self._commands.popleft()
            callback(None, FAIL_REASON.NOT_LEADER)

    @property
    def has_backlog(self) -> bool:
        is_working = self._snapshotting is not None or self._installing is not None
        return is_working or self._is_behind or self.follower.has_held

    @property
    def _is_behind(self) -> bool:
        return bool(self._SyncObj__raftLastApplied < self._SyncObj__raftCommitIndex)

    def _apply_committed(self) -> None:
        if self._snapshotting is not None or not self._is_settled():
            return
        count = min(self.commit_index - self.applied_index, APPLY_BATCH_MAX)
        if count <= 0:
            return
        touched = 0
        entries = self.journal.entries_from(self.applied_index + 1, count_max=count, bytes_max=APPLY_BYTES_MAX)
        for entry, index, term in entries:
            applied = self._apply_entry(index, entry)
            self._unsettled = index, term, applied
            touched += len(applied.touched) if isinstance(applied, Applied) else 0
            if not self._is_settled() or touched >= APPLY_TOUCHED_MAX:
                return

    def _is_settled(self) -> bool:
        """Whether the last entry has been applied as a whole; if not, after one more step. Whoever waits for it is
        told then."""
        if self._unsettled is None:
            return True
        if not self._engine.machine.settle():
            return False
        index, term, applied = self._unsettled
        self._unsettled = None
        self._SyncObj__raftLastApplied = index
        for waiting_term, callback in self._SyncObj__commandsWaitingCommit.pop(index, ()):
            is_ours = waiting_term == term
            callback((index, applied), FAIL_REASON.SUCCESS if is_ours else FAIL_REASON.DISCARDED)
        return True

    def _apply_entry(self, index: int, entry: bytes) -> object:
        if entry[0] == REGULAR:
            return self._engine.machine.apply(LogIndex(index), entry[1:])
        if entry[0] != NO_OP:
            raise DataDamaged(f"raft_log, index {index}: entry type {entry[0]} is unknown to this version")
        self._engine.machine.pass_over(LogIndex(index))
        return None

    def _give_up_waiting(self, *, up_to: int) -> None:
        """Another node leads: whether what waits for a commit will get it is its business now."""
        waiting = self._SyncObj__commandsWaitingCommit
        for index in sorted(waiting):
            if index <= up_to:
                for _, callback in waiting.pop(index):
                    callback(None, FAIL_REASON.LEADER_CHANGED)

    def _compact_journal(self) -> None:
        """A snapshot every so many entries or bytes, and the journal cut behind it, in one submission."""
        if self._snapshotting is not None:
            self._take_snapshot()
            return
        if self._unsettled is not None:
            return
        index, journal, every = self.applied_index, self.journal, self.timing.snapshot_entries
        taken = journal.snapshot.index if journal.snapshot else 1
        grown = journal.size_bytes - self._size_after_snapshot
        if index - taken < every and (index == taken or grown < SNAPSHOT_JOURNAL_BYTES):
            return
        self._snapshotting = self._engine.machine.snapshot()

    def _take_snapshot(self) -> None:
        """One more piece of the snapshot under way; after the last it is stored. Entries wait until then, and the
        loop does not."""
        assert self._snapshotting is not None
        piece = next(self._snapshotting, None)
        if piece is not None:
            self._pieces.append(piece)
            return
        state = b"".join(self._pieces)
        self._drop_snapshot()
        index, journal, every = self.applied_index, self.journal, self.timing.snapshot_entries
        snapshot = Snapshot(index=index, term=journal.term_at(index), state=state)
        first_kept = max(journal.first_index, index - every // 4)
        journal.compact(snapshot, first_kept if journal.size_bytes <= JOURNAL_KEPT_BYTES else index)
        self._size_after_snapshot = journal.size_bytes

    def _drop_snapshot(self) -> None:
        self._snapshotting = None
        self._pieces = []


def _conf(timing: EngineTiming) -> SyncObjConf:
    """No option here may switch a faulty path of the library back on."""
    return SyncObjConf(
        autoTick=False,
        appendEntriesUseBatch=True,
        appendEntriesPeriod=timing.heartbeat_ms / 1000,
        raftMinTimeout=timing.election_timeout_min_ms / 1000,
        raftMaxTimeout=timing.election_timeout_max_ms / 1000,
        connectionTimeout=timing.election_timeout_max_ms / 1000,
        leaderFallbackTimeout=timing.leader_fallback_ms / 1000,
        commandsQueueSize=COMMANDS_QUEUED_MAX,
        dynamicMembershipChange=False,
        useFork=False,
        journalFile=None,
        fullDumpFile=None,
        password=None,
    )


def _result(result: Any, reason: int) -> Result:
    """What the library says of a proposal, in the port's words."""
    if reason == FAIL_REASON.SUCCESS:
        index, applied = result
        return Committed(LogIndex(index), applied)
    if reason in (FAIL_REASON.NOT_LEADER, FAIL_REASON.QUEUE_FULL):
        return ProposalLost.NOT_LEADER
    return ProposalLost.UNKNOWN


class PySyncObjEngine(TurnEngine):
    """The Engine port on pysyncobj."""

    def __enter__(self) -> None:
        _surroundings.enter(self)

    def __exit__(self, *_exception: object) -> None:
        _surroundings.leave()

    def _create_core(self, node_id: NodeId, peers: tuple[NodeId, ...]) -> _Library:
        return _Library(self, node_id, peers)
