"""Raft as a function from events to results: the turn, the messages, and the roles around the consensus library.

Owns what the roles (follower, leader, pre-vote) have decided in this turn, until `step` and `conclude` hand it out.
It must never do I/O, look at the disk, or call back: it changes memory only, and says what is to happen. The roles are
written against it, and it is the only importer of the library's adapter. Only the engine imports it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from smq.raft_state.ids import LogIndex, NodeId, Term
from smq.replication.ports import Committed, ProposalDone, ProposalLost, ReadIndexDone, Rng
from smq.replication.raft.follower import Follower
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.leader import Leader
from smq.replication.raft.messages import (
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
)
from smq.replication.raft.pysyncobj_adapter import Library
from smq.replication.raft.ready import (
    Answer,
    Apply,
    Install,
    Leadership,
    MachineReport,
    Needs,
    Outgoing,
    Output,
    Ready,
    Work,
)
from smq.replication.raft.timing import RaftTiming
from smq.replication.raft.voters import Voters

JOURNAL_KEPT_BYTES: Final = 8 << 20  # entries kept before a snapshot so that a slow follower needs none
# The same for a follower that catches up after a snapshot: minutes of a busy cluster, and some 200 MB of memory.
CATCH_UP_BYTES: Final = 128 << 20
CATCH_UP_ENTRIES: Final = 300_000
# Within this part of the election time-out a follower without a leader to wait for asks: one whose leader's session
# closed, or one that has never heard any. At random, so that two seldom ask together; a few rounds of messages long.
_ASK_SHARE: Final = 0.3
_ASK_MS_MAX: Final = 300.0


class Core:
    """Times are seconds of the node's monotonic clock."""

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
    ) -> None:
        """The journal has been loaded, and the state machine is at its snapshot, or at its first entry. `peers` are all
        other voters, ascending."""
        self.now = now
        self.peers = peers
        self.timing = timing
        self.journal = journal
        self.voters = voters
        self.follower = Follower(self)
        self.lead = Leader(self)
        self.prevoting = PreVoting(self)
        self._rng = rng
        self._connected: set[NodeId] = set()
        self._messages: list[Outgoing] = []  # since the last output
        self._answers: list[Answer] = []  # since the last turn ended
        self._reported = Leadership(Term(0), None)
        self._applied_index = LogIndex(journal.snapshot.index) if journal.snapshot else LogIndex(1)
        self._is_taking_snapshot = False  # nothing is applied meanwhile
        self._installing: tuple[Snapshot, Callable[[], None]] | None = None  # nor while there is one of these
        self._library = Library(
            node_id=node_id,
            peers=peers,
            journal=journal,
            voters=voters,
            timing=timing,
            now=now,
            rng=rng,
            began_to_lead=self._begin_to_lead,
            ceased_to_lead=self.lead.end,
        )
        self._library.commit_to(self._applied_index)
        if not peers:
            self._library.expedite_election(now())

    # ----------------------------------------------------------------------------------------------- for the roles
    @property
    def term(self) -> int:
        return self._library.term

    @property
    def leader(self) -> NodeId | None:
        return self._library.leader

    @property
    def is_leader(self) -> bool:
        return self._library.is_leader

    @property
    def commit_index(self) -> int:
        return self._library.commit_index

    def is_connected(self, peer: NodeId) -> bool:
        return peer in self._connected

    def send(self, peer: NodeId, message: Message, needs: Needs = Needs.EVERYTHING) -> None:
        """Waits for its barrier. Dropped if there is no session."""
        if peer in self._connected:
            self._messages.append(Outgoing(peer, message, needs))

    def adopt_term(self, term: int) -> None:
        """A newer term was seen; no leader of it is known yet."""
        self._library.adopt_term(term)

    def follow(self, leader: NodeId) -> None:
        """`leader` leads the present term; the election deadline is set again."""
        if self.leader != leader:
            # The new leader decides now whether the waiting proposals are committed.
            self._library.give_up_waiting(up_to=self.journal.last_index)
        self.prevoting.cancel()
        self._library.follow(leader)

    def commit_to(self, index: int) -> None:
        """Moves the commit index forward, never back."""
        if index > self.commit_index:
            self._library.commit_to(index)
            self.journal.commit_to(index)

    @property
    def is_installing(self) -> bool:
        """A snapshot is being installed: until then, the journal must not change."""
        return self._installing is not None

    def install(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        """Begins to replace journal and state machine; `done` is called when that is complete, some turns later."""
        self._installing = snapshot, done

    def _answer(self, done: Callable[[Any], None], outcome: Committed | LogIndex | ProposalLost) -> None:
        self._answers.append(Answer(done, outcome))

    # ------------------------------------------------------------------------------------- events between two turns
    def session_opened(self, peer: NodeId) -> None:
        self._connected.add(peer)
        self._forget_session(peer)
        if self._library.is_follower and self.leader is None and 2 * (1 + len(self._connected)) > len(self.peers) + 1:
            self._ask_soon()  # as after a start: a node that has heard a leader asks when its session closes

    def session_closed(self, peer: NodeId) -> None:
        self._connected.discard(peer)
        self._forget_session(peer)
        if self.leader == peer:
            self._suspect_leader()

    def _forget_session(self, peer: NodeId) -> None:
        self.follower.forget_session(peer)
        self.lead.forget_session(peer)

    def _suspect_leader(self) -> None:
        """A killed leader's sessions close immediately; asking soon costs nothing if a majority still hears it."""
        self.follower.leader_lost()
        self._ask_soon()

    def _ask_soon(self) -> None:
        timing = self.timing
        within_ms = min(timing.election_timeout_min_ms * _ASK_SHARE, _ASK_MS_MAX)
        delay_ms = timing.heartbeat_ms + within_ms * self._rng.random()
        self._library.expedite_election(self.now() + delay_ms / 1000)

    def propose(self, command: bytes, done: ProposalDone) -> None:
        """Queues it, or answers NOT_LEADER if too many are queued."""
        self._library.propose(command, lambda outcome: self._answer(done, outcome))

    def begin_read(self, done: ReadIndexDone) -> None:
        def on_confirmed(index: int | None) -> None:
            self._answer(done, ProposalLost.NOT_LEADER if index is None else LogIndex(index))

        self.lead.begin_read(on_confirmed)

    def renounce(self) -> None:
        """As `Raft.renounce`."""
        self.prevoting.cancel()
        if not self._library.is_follower:
            self._step_down()

    # -------------------------------------------------------------------------------------------------- the turn
    @property
    def is_tick_due(self) -> bool:
        """Time alone gives the next turn something to do."""
        return self.is_leader or self._library.is_election_due

    def is_due_for(self, peer: NodeId, message: Message) -> bool:
        """The message gives a turn something to do. Otherwise it waits for the next one, at most until the next tick:
        a leader has a turn with each."""
        if not isinstance(message, AppendReply) or not self.is_leader or message.term != self.term:
            return True
        return not self.lead.may_wait(peer, message)

    @property
    def may_commit(self) -> bool:
        """A turn would move the commit index."""
        return self.is_leader and self.lead.committable_index() > self.commit_index

    def step(self, messages: Iterable[tuple[NodeId, Message]]) -> tuple[Work, Output]:
        """Begins a turn: messages, time, elections, commit, queued commands, sends. Returns the work for the state
        machine, and what must not wait for it: a slice of that work takes a busy machine long enough for an
        election."""
        for peer, message in messages:
            self._receive(peer, message)
        if self.is_leader:
            self.lead.advance_commit()
            self.lead.confirm_reads()
            if not self.lead.hears_from_majority():
                self._step_down()
        elif self._library.is_election_due and (self._connected or not self.peers):
            self._ask_for_election()
        work = self._work()
        if self._library.has_proposals:
            if self.is_leader and not self.lead.is_handing_over:
                self._library.take_proposals()
            else:
                self._library.refuse_proposals()
        if self.is_leader:
            self.lead.send()
        return work, self._output()

    def _work(self) -> Work:
        if self._installing is not None:
            return Install(self._installing[0])
        if not self._has_backlog:
            return None
        self.follower.take_held()
        if self.is_installing:  # by a message that was held
            return None
        return Apply(LogIndex(self.commit_index))

    def conclude(self, report: MachineReport) -> Ready:
        """Ends the turn: takes the report. Returns everything else that is to happen."""
        self._take_in(report)
        answers, self._answers = self._answers, []
        reported, self._reported = self._reported, Leadership(Term(self.term), self.leader)
        output = self._output()
        return Ready(
            changes=output.changes,
            messages=output.messages,
            answers=tuple(answers),
            leadership=self._reported if self._reported != reported else None,
            has_more=self._has_backlog,
        )

    def _output(self) -> Output:
        messages, self._messages = self._messages, []
        return Output(changes=self.journal.take_changes(), messages=tuple(messages))

    def _take_in(self, report: MachineReport) -> None:
        self._applied_index = report.up_to
        self._is_taking_snapshot = report.is_taking_snapshot
        for entry in report.entries:
            self._library.answer_waiting(entry)
        if report.installed is not None:
            self._on_installed(report.installed)
        if report.taken is not None:
            self._compact_journal(report.taken)

    def _on_installed(self, snapshot: Snapshot) -> None:
        assert self._installing is not None
        _, done = self._installing
        self._installing = None
        self.journal.install(snapshot)
        self._library.commit_to(snapshot.index)
        self._library.give_up_waiting(up_to=snapshot.index)
        done()

    def _compact_journal(self, snapshot: Snapshot) -> None:
        """Stores the snapshot and drops the entries before it, in one submission. Some stay for followers."""
        journal, first_kept = self.journal, snapshot.index
        quarter = max(journal.first_index, snapshot.index - self.timing.snapshot_entries // 4)
        if journal.bytes_from(quarter) <= JOURNAL_KEPT_BYTES:
            first_kept = quarter
        needed = self.lead.needed_from() if self.is_leader else None
        if needed is not None and journal.last_index - needed < CATCH_UP_ENTRIES:
            first_kept = min(first_kept, needed) if journal.bytes_from(needed) <= CATCH_UP_BYTES else first_kept
        journal.compact(snapshot, first_kept)

    @property
    def _has_backlog(self) -> bool:
        is_working = self._is_taking_snapshot or self.is_installing
        return is_working or self._is_behind or self.follower.has_held

    @property
    def _is_behind(self) -> bool:
        return self._applied_index < self.commit_index

    # ------------------------------------------------------------------------------------------------- messages
    def _receive(self, peer: NodeId, message: Message) -> None:
        match message:
            case Append():
                self.follower.on_append(peer, message)
            case AppendReply():
                self._on_term(message.term)
                if self.is_leader and message.term == self.term:
                    self.lead.on_reply(peer, message)
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
                self._library.on_vote(peer, message)
            case PreVote():
                if self.prevoting.would_vote(peer, message, self.follower.heard_at):
                    self.send(peer, PreVoteGranted(term=message.term, disk=self.voters.own_disk))
            case PreVoteGranted():
                if not self.is_leader and self._may_stand and self.prevoting.on_granted(peer, message):
                    self._stand_for_election()
            case TermNotice():
                self._on_term(message.term)
            case TimeoutNow():
                # A node whose disk hangs could not make its own vote durable either, and would leave its leader. The
                # questions of a pre-vote need no such check: they wait for the disk.
                is_stored = not self.journal.is_behind
                if message.term == self.term and peer == self.leader and self._may_stand and is_stored:
                    self._stand_for_election()

    def _on_term(self, term: int) -> None:
        if term > self.term:
            self.adopt_term(term)

    def _on_request_vote(self, peer: NodeId, m: RequestVote) -> None:
        if m.term < self.term:
            self.send(peer, TermNotice(term=self.term))
        elif self.voters.may_be_elected(peer, m.disk, is_admitted=m.is_admitted):
            if self._library.votes_for(peer, m):
                self.send(peer, Vote(term=m.term, disk=self.voters.own_disk))
        else:
            self._on_term(m.term)

    # ------------------------------------------------------------------------------------------------ elections
    def _ask_for_election(self) -> None:
        """The election deadline has passed: pre-vote first."""
        self._library.postpone_election()
        self.follower.leader_lost()
        if not self._may_stand:
            self.prevoting.cancel()
            self._ask_soon()
        elif self.peers:
            self.prevoting.begin()
        else:
            self._stand_for_election()

    @property
    def _may_stand(self) -> bool:
        """A node that has not applied all that it knows to be committed may not know yet that its disk was replaced."""
        return self.voters.may_stand and not self._is_behind and not self.is_installing

    def _stand_for_election(self) -> None:
        self.prevoting.cancel()
        self._library.stand()
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
            self._library.lead()

    def _begin_to_lead(self) -> None:
        """The first entry of the term has been added: it goes to all members."""
        self.lead.begin(self.journal.last_index)
        self.lead.send(is_forced=True)

    def _step_down(self) -> None:
        """Within the present term: its vote stays cast."""
        self._library.step_down()


class PreVoting:
    """One round of questions: a node asks whether it would be elected before it raises the term (docs/rules.md,
    finding 13). Without that, a follower that was paused or cut off deposes a healthy leader with its higher term.
    Nothing here changes term or vote, so nothing here needs the disk."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._granted: set[NodeId] = set()
        self._term = 0  # the term that the round is about; 0: there is no round

    def begin(self) -> None:
        journal, voters = self._core.journal, self._core.voters
        self._granted = set()
        self._term = self._core.term + 1
        question = PreVote(
            term=self._term,
            last_index=journal.last_index,
            last_term=journal.last_term,
            disk=voters.own_disk,
            is_admitted=voters.is_admitted,
        )
        for peer in self._core.peers:
            self._core.send(peer, question)

    def cancel(self) -> None:
        self._term = 0

    def would_vote(self, peer: NodeId, m: PreVote, heard_at: float) -> bool:
        """The answer to another node. Also False while a leader is heard, or if this node leads."""
        core, journal = self._core, self._core.journal
        if m.term <= core.term:
            core.send(peer, TermNotice(term=core.term))
            return False
        if core.is_leader or core.now() < heard_at + core.timing.election_timeout_min_ms / 1000:
            return False
        if not core.voters.may_be_elected(peer, m.disk, is_admitted=m.is_admitted):
            return False
        return (m.last_term, m.last_index) >= (journal.last_term, journal.last_index)

    def on_granted(self, peer: NodeId, m: PreVoteGranted) -> bool:
        """True if this makes a majority, which ends the round."""
        if not self._term or m.term != self._term or self._term != self._core.term + 1:
            return False
        if not self._core.voters.counts(peer, m.disk):
            return False
        self._granted.add(peer)
        if len(self._granted) + 1 <= (len(self._core.peers) + 1) // 2:
            return False
        self.cancel()
        return True
