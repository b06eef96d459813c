"""Adapts pysyncobj, the consensus library, with everything repaired that docs/rules.md lists as its findings.

The ONE file that imports pysyncobj or knows any of its names (docs/decisions/pysyncobj-behind-one-adapter.md), pinned
to 0.3.17 because the repairs go through its private names; a test fails when one of them moves. To replace the library
is to write another `Library` with these methods: nothing else in this package names pysyncobj, which a test checks,
too.

The library keeps: the Raft state, elections and votes, the first entry of a term, the command queue, and which proposal
waits for which index. It is used through these private names of `SyncObj`, and these of its module:

    names                                             what they are used for
    __raftState, __raftLeader, __raftCurrentTerm      read: role, leader and term
    __setState, __setCurrentTerm                      called: a newer term, stepping down, following, standing
    __raftCommitIndex                                 read, and moved forward by what our roles have counted
    __raftElectionDeadline, __generateRaftTimeout     when the next election is due
    __onMessageReceived                               called with votes and requests for them, with no other message
    __votesCount, __onBecomeLeader                    its election, begun here and won there; the term's first entry
    _applyCommand, _checkCommandsToApply              proposals: queued, and taken into the journal
    __commandsQueue                                   replaced by a queue without a lock
    __commandsWaitingCommit                           the proposals that wait for an index; answered here
    __sendAppendEntries                               overridden: the leader's role sends
    __doApplyCommand, __loadDumpFile, _onTick         overridden: never reached, as the turn does their work
    __parseChangeClusterRequest                       overridden: membership is not the library's (finding 14)
    monotonicTime, random                             replaced by the clock and the random source of the entered engine
    createJournal, createPoller, pickle,              replaced: our journal, no socket, no pickle, no pipe
    PIPE_NOTIFIER_ENABLED
    SyncObjConf, Node, Transport, FAIL_REASON,        its options, base classes and constants
    _RAFT_STATE, _COMMAND_TYPE, Queue

It must never do I/O, nor let a callback or an exception of ours pass through the library, which swallows some and
retries others for ever: what happens is data, and is carried out after the turn. Only the core imports it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

# The library has no type hints; `Library` below is the typed view of it.
from pysyncobj import syncobj as library
from pysyncobj.config import FAIL_REASON, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from smq.raft_state.ids import NodeId
from smq.replication.ports import Committed, ProposalDone, ProposalLost, Rng
from smq.replication.raft.journal import Entry, RaftJournal
from smq.replication.raft.messages import NO_OP, REGULAR, RequestVote, Vote
from smq.replication.raft.ready import AppliedEntry, RaftViolation
from smq.replication.raft.timing import RaftTiming
from smq.replication.raft.voters import Voters

P = ParamSpec("P")
R = TypeVar("R")

COMMANDS_QUEUED_MAX: Final = 50_000  # above 65,536 the library reports failure for commands it did queue (finding 19)


class _LibraryConstantsMoved(Exception):
    """The installed pysyncobj is not the one this file was written for."""


if library._COMMAND_TYPE.REGULAR != REGULAR or library._COMMAND_TYPE.NO_OP != NO_OP:
    raise _LibraryConstantsMoved("install pysyncobj==0.3.17: its entry types are not those of our journal")


_LEADER: Final = library._RAFT_STATE.LEADER
_FOLLOWER: Final = library._RAFT_STATE.FOLLOWER


# ----------------------------------------------------------------------------------- the library's surroundings
class _Surroundings:
    """Stands for the library's module globals: answers for the engine whose library has been entered.

    Many engines live in one process in the simulation, and each has its own clock and random source.
    """

    def __init__(self) -> None:
        self._entered: list[Library] = []

    @contextmanager
    def of(self, entered: "Library") -> Iterator[None]:
        self._entered.append(entered)
        try:
            yield
        finally:
            self._entered.pop()

    def monotonic(self) -> float:
        return self._entered[-1].now()

    def random(self) -> float:
        return self._entered[-1].rng.random()

    def create_journal(self, _file: None) -> "_Journal":
        return _Journal(self._entered[-1].journal)


class _NoPoller:
    """The library owns no socket."""

    def poll(self, _timeout: float) -> None:
        pass


class _NoPickle:
    """Every path of the library that would reach pickle ends here (docs/rules.md, finding 16)."""

    def loads(self, *_args: object) -> object:
        raise RaftViolation("pysyncobj tried to unpickle something")

    dumps = loads


class _Journal:
    """The journal in the shape of the library's.

    The library would call `clear` and `deleteEntriesTo` in its own tick and when it loads a snapshot. Both are
    replaced, so these are refused: they would drop entries without the snapshot that stands for them.
    """

    def __init__(self, journal: RaftJournal) -> None:
        self._journal = journal

    def __len__(self) -> int:
        return len(self._journal)

    def __getitem__(self, position: int) -> Entry:
        return self._journal[position]

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._journal.add(command, idx, term)

    def clear(self) -> None:
        # The library calls it only to install a snapshot of its own, which the adapter never lets it do: one that gets
        # here would empty the journal without the snapshot that replaces it.
        raise AssertionError("snapshots are installed with `install`")

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        self._journal.truncate_from(self._journal.first_index + entryFrom)

    def deleteEntriesTo(self, entryTo: int) -> None:
        # As `clear`: only after a snapshot of the library's own.
        raise AssertionError("the journal is trimmed together with its snapshot, by `compact`")

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        self._journal.commit_to(raftCommitIndex)

    def getRaftCommitIndex(self) -> int:
        return self._journal.commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: NodeId | None) -> None:
        self._journal.set_term(term, votedForNodeId)

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> NodeId | None:
        return self._journal.voted_for

    def onOneSecondTimer(self) -> None:
        """Nothing waits for a timer."""

    def _destroy(self) -> None:
        """The disk is the node's to close."""


_surroundings = _Surroundings()
library.monotonicTime = _surroundings.monotonic
library.random = _surroundings
library.createPoller = lambda _kind: _NoPoller()
library.createJournal = _surroundings.create_journal
library.PIPE_NOTIFIER_ENABLED = False
library.pickle = _NoPickle()


class _Peer(Node):  # type: ignore[misc]  # the library is untyped
    """A node with a stable hash: the library iterates over sets of them."""

    def __hash__(self) -> int:
        return int(self._id)

    def __str__(self) -> str:
        return str(self._id)


class _CommandQueue(deque[tuple[bytes, Callable[[object, int], None]]]):
    """The library's queue without its lock: there is one thread, and every turn looks at the queue."""

    def put_nowait(self, item: tuple[bytes, Callable[[object, int], None]]) -> None:
        if len(self) >= COMMANDS_QUEUED_MAX:
            raise library.Queue.Full
        self.append(item)

    def get_nowait(self) -> tuple[bytes, Callable[[object, int], None]]:
        if not self:
            raise library.Queue.Empty
        return self.popleft()


class _VotesOnly(Transport):  # type: ignore[misc]  # the library is untyped
    """Takes the one message that the library sends itself, a vote. The roles send all others."""

    ready = True

    def __init__(self) -> None:
        super().__init__(None, None, [])
        self.has_voted = False

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        if message["type"] != "response_vote":
            raise RaftViolation(f"pysyncobj tried to send {message['type']}")
        self.has_voted = True
        return True

    def destroy(self) -> None:
        pass


# ------------------------------------------------------------------------------------------- the repaired library
def _inside(method: Callable[Concatenate["Library", P], R]) -> Callable[Concatenate["Library", P], R]:
    """While the method runs, the library sees the clock, random source and journal of this engine."""

    @wraps(method)
    def run(self: "Library", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _surroundings.of(self):
            return method(self, *args, **kwargs)

    return run


class Library(library.SyncObj):  # type: ignore[misc]  # the library is untyped
    """SyncObj with its faulty parts replaced: term, vote and leader, elections, and the proposals that wait for a
    commit. It changes term, vote and entries through the journal, where the commit index begins, and does nothing by
    itself."""

    _SyncObj__raftLeader: Node | None

    def __init__(
        self,
        *,
        node_id: NodeId,
        peers: tuple[NodeId, ...],
        journal: RaftJournal,
        voters: Voters,
        timing: RaftTiming,
        now: Callable[[], float],
        rng: Rng,
        began_to_lead: Callable[[], None],
        ceased_to_lead: Callable[[], None],
    ) -> None:
        """`began_to_lead` is called once the first entry of the term has been added. Neither may raise."""
        # All this before the library's own: its constructor looks at every attribute of the class.
        self.journal = journal
        self.now = now
        self.rng = rng
        self._began_to_lead = began_to_lead
        self._ceased_to_lead = ceased_to_lead
        self._nodes = {peer: _Peer(peer) for peer in (*peers, node_id)}
        self._id = node_id
        self._voters = voters
        self._voted: set[NodeId] = set()  # who voted for us in the present term (finding 11)
        self._commands = _CommandQueue()
        self._votes = _VotesOnly()
        with _surroundings.of(self):
            super().__init__(
                self._nodes[node_id],
                [self._nodes[peer] for peer in peers],
                conf=_conf(timing),
                transport=self._votes,
            )
        self._SyncObj__commandsQueue = self._commands
        if not peers:
            self._SyncObj__raftElectionDeadline = 0.0  # there is no other node to wait for

    # ---------------------------------------------------------------------------------------------------- state
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
    def is_follower(self) -> bool:
        """Neither a leader nor a candidate."""
        return bool(self._SyncObj__raftState == _FOLLOWER)

    @property
    def commit_index(self) -> int:
        return int(self._SyncObj__raftCommitIndex)

    def commit_to(self, index: int) -> None:
        """Forward, never back. The journal's own is not touched."""
        self._SyncObj__raftCommitIndex = max(self.commit_index, index)

    @_inside
    def adopt_term(self, term: int) -> None:
        """A newer one; no leader of it is known yet."""
        self._SyncObj__setCurrentTerm(term, None)
        self.step_down()

    @_inside
    def step_down(self) -> None:
        """Within the present term: its vote stays cast."""
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None

    @_inside
    def follow(self, leader: NodeId) -> None:
        """`leader` leads the present term; the election deadline is set again."""
        self._SyncObj__raftLeader = self._nodes[leader]
        self._SyncObj__setState(_FOLLOWER)
        self._postpone_election()

    # ------------------------------------------------------------------------------------------------ elections
    @property
    def is_election_due(self) -> bool:
        """The election deadline has passed."""
        return bool(self._SyncObj__raftElectionDeadline < self.now())

    def expedite_election(self, at: float) -> None:
        """Moves the election deadline there, if it is later."""
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, at)

    @_inside
    def postpone_election(self) -> None:
        """Sets the election deadline again; no leader is known."""
        self._postpone_election()
        self._SyncObj__raftLeader = None

    def _postpone_election(self) -> None:
        self._SyncObj__raftElectionDeadline = self.now() + self._SyncObj__generateRaftTimeout()

    @_inside
    def stand(self) -> None:
        """A candidate of the next term, with its own vote. The caller asks the others. This is the library's own
        election (its _onTick), which can only be reached there by a passed deadline."""
        self.postpone_election()
        self._SyncObj__setState(library._RAFT_STATE.CANDIDATE)
        self._SyncObj__setCurrentTerm(self.term + 1, self._id)
        self._SyncObj__votesCount = 1
        self._voted = set()

    @_inside
    def lead(self) -> None:
        """Elected by its own vote alone: a cluster of one."""
        self._SyncObj__onBecomeLeader()

    def votes_for(self, peer: NodeId, m: RequestVote) -> bool:
        """Answers a disk that may be elected, in this term or a newer one. A vote is in the journal."""
        self._votes.has_voted = False
        self._to_library(
            peer,
            {"type": "request_vote", "term": m.term, "last_log_index": m.last_index, "last_log_term": m.last_term},
        )
        return self._votes.has_voted

    def on_vote(self, peer: NodeId, m: Vote) -> None:
        """Counts it at most once, in its own term, if the disk is the voter's. The majority makes this node the
        leader."""
        if self._counts_vote(peer, m):
            self._voted.add(peer)
            self._to_library(peer, {"type": "response_vote", "term": m.term})

    def _counts_vote(self, peer: NodeId, m: Vote) -> bool:
        """A vote of the present term, once per voter, by the disk that is registered for it."""
        return m.term == self.term and peer not in self._voted and self._voters.counts(peer, m.disk)

    @_inside
    def _to_library(self, peer: NodeId, message: dict[str, Any]) -> None:
        self._SyncObj__onMessageReceived(self._nodes[peer], message)

    # ------------------------------------------------------------------------------------------------ proposals
    def propose(self, command: bytes, done: ProposalDone) -> None:
        """Queues it. `done` must not raise, and is called in one of the following methods, or within this call with
        NOT_LEADER if too many are queued."""
        self._applyCommand(command, lambda result, reason: done(_outcome(result, reason)), REGULAR)

    @property
    def has_proposals(self) -> bool:
        return bool(self._commands)

    @_inside
    def take_proposals(self) -> None:
        """Queued commands enter the journal, of a leader. Nothing is ever forwarded (docs/rules.md, finding 10)."""
        self._checkCommandsToApply()

    def refuse_proposals(self) -> None:
        while self._commands:
            _, callback = self._commands.popleft()
            callback(None, FAIL_REASON.NOT_LEADER)

    def answer_waiting(self, entry: AppliedEntry) -> None:
        """The proposals that wait for this index: Committed if the entry is of the same term, otherwise lost."""
        for term, callback in self._SyncObj__commandsWaitingCommit.pop(entry.index, ()):
            is_ours = term == entry.term
            callback((entry.index, entry.outcome), FAIL_REASON.SUCCESS if is_ours else FAIL_REASON.DISCARDED)

    def give_up_waiting(self, *, up_to: int) -> None:
        """Proposals at these indexes: UNKNOWN. Another node decides whether they are committed."""
        waiting = self._SyncObj__commandsWaitingCommit
        for index in sorted(waiting):
            if index <= up_to:
                for _, callback in waiting.pop(index):
                    callback(None, FAIL_REASON.LEADER_CHANGED)

    # ------------------------------------------------------------- what the library calls and must not do its way
    def _SyncObj__setState(self, newState: int) -> None:
        if self.is_leader and newState != _LEADER:
            self._postpone_election()  # otherwise the deadline of the time before it led would be long past
            self._ceased_to_lead()
        super()._SyncObj__setState(newState)

    def _SyncObj__sendAppendEntries(self) -> None:
        # Only __onBecomeLeader calls it, as the tick is ours, and after it has added the first entry of the term.
        self._began_to_lead()

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:
        raise RaftViolation("entries are applied by the state machine's part of a turn")

    def _SyncObj__parseChangeClusterRequest(self, command: bytes) -> None:
        """Membership is not the library's (finding 14)."""

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:
        raise RaftViolation("snapshots are installed by the follower's role")

    def _onTick(self, timeToWait: float = 0.0) -> None:
        raise RaftViolation("the engine's turns replace the library's tick")


def _conf(timing: RaftTiming) -> SyncObjConf:
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


def _outcome(result: Any, reason: int) -> Committed | ProposalLost:
    """The library's answer to a proposal, in our words."""
    if reason == FAIL_REASON.SUCCESS:
        index, applied = result
        return Committed(index, applied)
    if reason in (FAIL_REASON.NOT_LEADER, FAIL_REASON.QUEUE_FULL):
        return ProposalLost.NOT_LEADER
    return ProposalLost.UNKNOWN
