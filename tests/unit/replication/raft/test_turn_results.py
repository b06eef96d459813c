"""Raft as data: events in, one result out. No disk, no network, no loop and no state machine."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.raft_state.replies import Applied, Done
from smq.replication.ports import Committed, Delete, ProposalLost, Put, Table
from smq.replication.raft.core import Core
from smq.replication.raft.journal import RaftJournal, Snapshot
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
)
from smq.replication.raft.ready import (
    AppliedEntry,
    Apply,
    Install,
    Leadership,
    MachineReport,
    Needs,
    Outgoing,
    Ready,
    Work,
)
from smq.replication.raft.timing import RaftTiming
from smq.replication.raft.voters import Voters

ME, A, B = NodeId(1), NodeId(2), NodeId(3)
DISK, OTHER_DISK = DiskId(b"d" * 16), DiskId(b"o" * 16)
OUTCOME = Applied(reply=Done())


class Raft:
    """Node 1 of three, with sessions to all others. What is persisted is what the test says."""

    def __init__(self, peers: tuple[NodeId, ...] = (A, B), *, own_disk: DiskId = DISK) -> None:
        self.time = 100.0
        self.journal = RaftJournal()
        self.answers: list[object] = []
        voters = Voters(ME, peers, lambda: own_disk, lambda _node: DISK, lambda _node, _disk: False, lambda _node: None)
        self.core = Core(
            node_id=ME,
            peers=peers,
            journal=self.journal,
            voters=voters,
            timing=RaftTiming(),
            now=lambda: self.time,
            rng=Random(1),
        )
        self.applied = LogIndex(1)
        for peer in peers:
            self.core.session_opened(peer)

    def work(self, *messages: tuple[NodeId, Message]) -> Work:
        work, self.first = self.core.step(messages)
        return work

    def conclude(self, report: MachineReport) -> Ready:
        """With what the turn has said before the state machine's share."""
        ready = self.core.conclude(report)
        messages = self.first.messages + ready.messages
        return replace(ready, changes=self.first.changes or ready.changes, messages=messages)

    def turn(self, *messages: tuple[NodeId, Message]) -> Ready:
        """One whole turn, with a state machine that applies whatever it is given."""
        work = self.work(*messages)
        entries: list[AppliedEntry] = []
        if isinstance(work, Apply):
            for entry, index, term in self.journal.entries_from(self.applied + 1, count_max=work.up_to - self.applied):
                entries.append(AppliedEntry(LogIndex(index), Term(term), OUTCOME if entry[0] == REGULAR else None))
            self.applied = work.up_to
        return self.conclude(MachineReport(up_to=self.applied, entries=tuple(entries)))

    def persist(self, ready: Ready) -> None:
        assert ready.changes is not None
        self.journal.on_durable(ready.changes.writes)

    def time_out(self) -> Ready:
        self.time += 1
        return self.turn()

    def elected(self) -> Ready:
        """The turn in which A's vote makes it the leader of term 1; nothing of that is durable."""
        self.time_out()
        self.turn((A, PreVoteGranted(term=1, disk=DISK)))
        return self.turn((A, Vote(term=1, disk=DISK)))


def sent(ready: Ready, kind: type[Message]) -> list[Outgoing]:
    return [outgoing for outgoing in ready.messages if isinstance(outgoing.message, kind)]


def entries_put(ready: Ready) -> list[int]:
    """Indexes that the result persists."""
    assert ready.changes is not None
    ops = ready.changes.ops
    return [int.from_bytes(op.key) for op in ops if isinstance(op, Put) and op.table is Table.RAFT_LOG]


def rows_put(ready: Ready) -> set[bytes]:
    assert ready.changes is not None
    return {op.key for op in ready.changes.ops if isinstance(op, Put) and op.table is Table.RAFT_META}


def vote_put(ready: Ready) -> tuple[int, NodeId | None] | None:
    assert ready.changes is not None
    return ready.changes.vote


def request(term: int) -> RequestVote:
    return RequestVote(term=term, last_index=9, last_term=term - 1, disk=DISK, is_admitted=True)


def append(term: int, *commands: bytes, prev: tuple[int, int] = (1, 0), commit: int = 1, number: int = 1) -> Append:
    entries = [(term, bytes([REGULAR]) + command) for command in commands]
    return Append(term=term, number=number, commit=commit, prev_index=prev[0], prev_term=prev[1], entries=entries)


def success(term: int, index: int, number: int) -> AppendReply:
    return AppendReply(term=term, number=number, next_index=index + 1, success=True, reset=False, disk=DISK)


@pytest.fixture
def raft() -> Raft:
    return Raft()


# -------------------------------------------------------------------------------------------------------- votes
def test_a_vote_is_persisted_in_the_turn_that_sends_it_and_the_message_waits_for_everything() -> None:
    ready = Raft().turn((A, request(5)))
    assert vote_put(ready) == (5, A)
    assert b"vote" in rows_put(ready)
    assert ready.messages == (Outgoing(A, Vote(term=5, disk=DISK), Needs.EVERYTHING),)


def test_a_second_candidate_of_the_term_gets_no_vote_and_nothing_changes(raft: Raft) -> None:
    raft.turn((A, request(5)))
    ready = raft.turn((B, request(5)))
    assert (ready.changes, ready.messages) == (None, ())


def test_the_votes_of_two_candidates_in_one_turn_are_one_vote() -> None:
    ready = Raft().turn((A, request(5)), (B, request(5)))
    assert vote_put(ready) == (5, A)
    assert [outgoing.peer for outgoing in ready.messages] == [A]


def test_a_newer_term_is_persisted_before_the_vote_in_it() -> None:
    """Both in one turn: what the first message waits for covers the term that the second one brought."""
    ready = Raft().turn((A, request(5)), (B, request(6)))
    assert vote_put(ready) == (6, B)
    assert [(m.peer, m.message) for m in ready.messages] == [
        (A, Vote(term=5, disk=DISK)),
        (B, Vote(term=6, disk=DISK)),
    ]


def test_a_time_out_asks_before_it_raises_the_term() -> None:
    ready = Raft().time_out()
    assert ready.changes is not None, "its first write"
    assert ready.changes.vote is None
    assert {outgoing.peer for outgoing in sent(ready, PreVote)} == {A, B}


def test_a_candidate_persists_its_own_vote_before_it_asks_for_others(raft: Raft) -> None:
    raft.time_out()
    ready = raft.turn((A, PreVoteGranted(term=1, disk=DISK)))
    assert vote_put(ready) == (1, ME)
    assert [outgoing.needs for outgoing in sent(ready, RequestVote)] == [Needs.EVERYTHING] * 2


def test_a_vote_that_comes_twice_is_counted_once() -> None:
    """Of five nodes: its own vote and two of A's would be a majority."""
    raft = Raft((A, B, NodeId(4), NodeId(5)))
    raft.time_out()
    raft.turn((A, PreVoteGranted(term=1, disk=DISK)), (B, PreVoteGranted(term=1, disk=DISK)))
    raft.turn((A, Vote(term=1, disk=DISK)), (A, Vote(term=1, disk=DISK)))
    assert not raft.core.is_leader
    raft.turn((B, Vote(term=1, disk=DISK)))
    assert raft.core.is_leader


def test_a_vote_of_an_older_term_does_not_stand_for_the_present_one(raft: Raft) -> None:
    for term in (1, 2):
        raft.time_out()
        raft.turn((A, PreVoteGranted(term=term, disk=DISK)))
    raft.turn((A, Vote(term=1, disk=DISK)))
    assert not raft.core.is_leader
    raft.turn((A, Vote(term=2, disk=DISK)))
    assert raft.core.is_leader


def test_a_replaced_disk_gets_no_vote_and_its_vote_does_not_count(raft: Raft) -> None:
    pre_vote = PreVote(term=5, last_index=9, last_term=4, disk=OTHER_DISK, is_admitted=False)
    vote = RequestVote(term=5, last_index=9, last_term=4, disk=OTHER_DISK, is_admitted=False)
    ready = raft.turn((A, pre_vote), (A, vote))
    assert ready.messages == ()
    assert vote_put(ready) == (5, None)
    raft.time_out()
    raft.turn((A, PreVoteGranted(term=6, disk=OTHER_DISK)))
    assert raft.core.term == 5
    raft.turn((A, PreVoteGranted(term=6, disk=DISK)))
    raft.turn((A, Vote(term=6, disk=OTHER_DISK)))
    assert not raft.core.is_leader
    raft.turn((A, Vote(term=6, disk=DISK)))
    assert raft.core.is_leader


def test_a_node_on_a_replaced_disk_does_not_stand_even_if_its_leader_asks() -> None:
    raft = Raft(own_disk=OTHER_DISK)
    assert raft.time_out().messages == ()
    ready = raft.turn((A, append(3)), (A, TimeoutNow(term=3)))
    assert (raft.core.term, sent(ready, RequestVote)) == (3, [])


def test_a_node_stands_at_its_leaders_request_once_it_has_applied_everything(raft: Raft) -> None:
    raft.work((A, append(3, b"x", commit=2)))
    ready = raft.conclude(MachineReport(up_to=LogIndex(1)))
    raft.turn((A, TimeoutNow(term=3)))
    assert raft.core.term == 3, "it was behind"
    raft.turn((B, TimeoutNow(term=3)), (A, TimeoutNow(term=2)))
    assert raft.core.term == 3, "not its leader, and not the present term"
    raft.turn((A, TimeoutNow(term=3)))
    assert raft.core.term == 3, "its disk lags or hangs, so its own vote would, too"
    raft.persist(ready)
    assert {outgoing.peer for outgoing in sent(raft.turn((A, TimeoutNow(term=3))), RequestVote)} == {A, B}
    assert raft.core.term == 4


def test_a_message_of_an_older_term_is_answered_with_the_term_and_changes_nothing(raft: Raft) -> None:
    raft.turn((A, request(5)))
    pre_vote = PreVote(term=5, last_index=9, last_term=4, disk=DISK, is_admitted=True)
    for stale in (request(4), append(4, b"x"), Confirm(term=4, number=1), pre_vote):
        ready = raft.turn((B, stale))
        assert ready.messages == (Outgoing(B, TermNotice(term=5), Needs.EVERYTHING),)
        assert (ready.changes, raft.core.leader) == (None, None)


# ----------------------------------------------------------------------------------------------------- entries
def test_a_follower_persists_entries_in_the_turn_that_acknowledges_them_and_the_answer_waits() -> None:
    ready = Raft().turn((A, append(3, b"x", b"y", number=7)))
    assert entries_put(ready) == [1, 2, 3]
    assert vote_put(ready) == (3, None)
    assert ready.messages == (Outgoing(A, success(3, 3, 7), Needs.EVERYTHING),)


def test_an_answer_to_entries_that_are_there_already_waits_for_everything_too(raft: Raft) -> None:
    raft.turn((A, append(3, b"x")))
    ready = raft.turn((A, append(3, b"x", number=8)))
    assert ready.changes is None
    assert sent(ready, AppendReply)[-1] == Outgoing(A, success(3, 2, 8), Needs.EVERYTHING)


def test_while_entries_are_being_written_only_a_sign_of_life_may_overtake(raft: Raft) -> None:
    raft.turn((A, append(3, b"x")))
    raft.time += 1
    ready = raft.turn((A, append(3, prev=(2, 3), number=8)))
    alive = AppendReply(term=3, number=0, next_index=1, success=False, reset=False, disk=DISK)
    assert ready.messages == (
        Outgoing(A, alive, Needs.ALIVE),
        Outgoing(A, success(3, 2, 8), Needs.EVERYTHING),
    )


def test_a_conflict_is_truncated_in_the_turn_that_replaces_it_and_before_it(raft: Raft) -> None:
    raft.turn((A, append(3, b"x", b"y")))
    ready = raft.turn((B, append(4, b"z")))
    assert ready.changes is not None
    log = [op for op in ready.changes.ops if op.table is Table.RAFT_LOG]
    assert [type(op) for op in log] == [Delete, Put]
    assert ready.changes.vote == (4, None)
    assert ready.changes.last_index == 2


def test_what_is_committed_is_handed_to_the_state_machine_once(raft: Raft) -> None:
    assert raft.work((A, append(3, b"x", b"y", commit=2))) == Apply(LogIndex(2))
    ready = raft.conclude(MachineReport(up_to=LogIndex(2)))
    assert not ready.has_more
    assert raft.work() is None


def test_a_state_machine_that_has_not_come_to_the_end_wants_another_turn(raft: Raft) -> None:
    raft.work((A, append(3, b"x", b"y", commit=3)))
    assert raft.conclude(MachineReport(up_to=LogIndex(2))).has_more
    assert raft.work() == Apply(LogIndex(3))


def test_a_snapshot_being_taken_wants_another_turn(raft: Raft) -> None:
    raft.work((A, append(3, b"x", commit=2)))
    assert raft.conclude(MachineReport(up_to=LogIndex(2), is_taking_snapshot=True)).has_more
    assert raft.work() == Apply(LogIndex(2))
    assert not raft.conclude(MachineReport(up_to=LogIndex(2))).has_more


# -------------------------------------------------------------------------------------------------- leadership
def test_a_leader_persists_its_first_entry_and_sends_it_meanwhile() -> None:
    ready = Raft().elected()
    assert entries_put(ready) == [2]
    appends = sent(ready, Append)
    assert {outgoing.peer for outgoing in appends} == {A, B}
    assert {outgoing.needs for outgoing in appends} == {Needs.VOTE}, "the vote must be on disk, the entry need not"
    assert ready.leadership == Leadership(Term(1), ME)


def test_leadership_is_reported_once_per_change(raft: Raft) -> None:
    raft.elected()
    assert raft.turn().leadership is None
    assert raft.turn((B, TermNotice(term=7))).leadership == Leadership(Term(7), None)
    assert raft.turn((B, append(7))).leadership == Leadership(Term(7), B)


def test_a_cluster_of_one_commits_what_is_on_its_own_disk_and_nothing_before() -> None:
    raft = Raft(())
    first = raft.turn()
    assert first.leadership == Leadership(Term(1), ME)
    raft.core.propose(b"x", raft.answers.append)
    proposed = raft.turn()
    assert (entries_put(proposed), proposed.answers, raft.core.commit_index) == ([3], (), 1)
    raft.persist(first)
    raft.turn()
    assert raft.core.commit_index == 2
    raft.persist(proposed)
    assert [answer.outcome for answer in raft.turn().answers] == [Committed(LogIndex(3), OUTCOME)]


def test_answers_of_an_earlier_leadership_do_not_count(raft: Raft) -> None:
    """Neither an acknowledgement nor a confirmation: the entry that it names may have been replaced since."""
    raft.elected()
    raft.turn((B, TermNotice(term=4)))
    raft.time_out()
    raft.turn((A, PreVoteGranted(term=5, disk=DISK)))
    raft.persist(raft.turn((A, Vote(term=5, disk=DISK))))
    raft.core.begin_read(raft.answers.append)
    (question, _) = sent(raft.turn(), Confirm)
    assert isinstance(question.message, Confirm)
    number = question.message.number
    ready = raft.turn((A, success(1, 3, 9)), (A, Confirmed(term=1, number=number, disk=DISK)))
    assert (raft.core.commit_index, ready.answers) == (1, ())
    ready = raft.turn((A, success(5, 3, 1)), (A, Confirmed(term=5, number=number, disk=DISK)))
    assert (raft.core.commit_index, [answer.outcome for answer in ready.answers]) == (3, [3])


def test_an_answer_of_a_newer_term_ends_the_leadership(raft: Raft) -> None:
    raft.elected()
    refusal = AppendReply(term=9, number=1, next_index=2, success=False, reset=True, disk=DISK)
    ready = raft.turn((A, refusal))
    assert ready.leadership == Leadership(Term(9), None)
    assert vote_put(ready) == (9, None)


def renounced(raft: Raft) -> Ready:
    raft.core.renounce()
    return raft.turn()


@pytest.mark.parametrize(
    ("step_down", "term"),
    [(Raft.time_out, 1), (renounced, 1), (lambda raft: raft.turn((B, TermNotice(term=9))), 9)],
    ids=["it hears no majority", "it renounces", "a newer term"],
)
def test_a_leader_that_steps_down_reports_it_and_its_reads_fail(
    raft: Raft, step_down: Callable[[Raft], Ready], term: int
) -> None:
    raft.elected()
    raft.core.begin_read(raft.answers.append)
    ready = step_down(raft)
    assert ready.leadership == Leadership(Term(term), None)
    assert [answer.outcome for answer in ready.answers] == [ProposalLost.NOT_LEADER]
    assert term > 1 or ready.changes is None, "its vote stays cast"


def test_a_proposal_is_answered_in_the_turn_that_applies_it(raft: Raft) -> None:
    first = raft.elected()
    raft.persist(first)
    raft.core.propose(b"x", raft.answers.append)
    proposed = raft.turn()
    assert (entries_put(proposed), proposed.answers) == ([3], ())
    raft.persist(proposed)
    ready = raft.turn((A, success(1, 3, 2)))
    assert [(answer.done, answer.outcome) for answer in ready.answers] == [
        (raft.answers.append, Committed(LogIndex(3), OUTCOME))
    ]
    assert raft.answers == [], "Raft makes no callbacks"
    assert raft.turn().answers == (), "once"


def test_a_proposal_of_a_leader_that_another_one_follows_is_answered_unknown(raft: Raft) -> None:
    raft.elected()
    raft.core.propose(b"x", raft.answers.append)
    raft.turn()
    ready = raft.turn((B, append(2, b"other")))
    assert [answer.outcome for answer in ready.answers] == [ProposalLost.UNKNOWN]


def test_a_proposal_is_not_answered_by_the_entry_of_another_term_at_its_index(raft: Raft) -> None:
    raft.elected()
    raft.core.propose(b"x", raft.answers.append)
    assert entries_put(raft.turn())[-1] == 3
    raft.work()
    other = AppliedEntry(LogIndex(3), Term(2), OUTCOME)
    ready = raft.conclude(MachineReport(up_to=LogIndex(3), entries=(other,)))
    assert [answer.outcome for answer in ready.answers] == [ProposalLost.UNKNOWN]


def test_a_proposal_that_has_not_entered_the_journal_is_answered_not_leader(raft: Raft) -> None:
    raft.elected()
    raft.core.propose(b"x", raft.answers.append)
    ready = raft.turn((B, TermNotice(term=9)))
    assert [answer.outcome for answer in ready.answers] == [ProposalLost.NOT_LEADER]
    assert raft.journal.last_index == 2


def test_a_leader_that_hands_over_takes_no_proposal(raft: Raft) -> None:
    raft.elected()
    raft.turn((A, success(1, 1, 1)))  # A lags
    raft.core.lead.hand_over(A)
    raft.core.propose(b"x", raft.answers.append)
    assert [answer.outcome for answer in raft.turn().answers] == [ProposalLost.NOT_LEADER]
    assert raft.journal.last_index == 2


def test_a_read_is_answered_once_a_majority_has_confirmed_the_leader_and_persists_nothing(raft: Raft) -> None:
    raft.elected()
    raft.core.begin_read(raft.answers.append)
    ready = raft.turn()
    (question, _) = sent(ready, Confirm)
    assert (ready.answers, ready.changes) == ((), None)
    assert isinstance(question.message, Confirm)
    ready = raft.turn((A, Confirmed(term=1, number=question.message.number, disk=DISK)))
    assert [answer.outcome for answer in ready.answers] == [2]
    assert ready.changes is None


# ---------------------------------------------------------------------------------------------------- snapshots
SNAPSHOT = Snapshot(index=9, term=2, state=b"state at 9")


def chunk(number: int = 5, snapshot: Snapshot = SNAPSHOT) -> SnapshotChunk:
    return SnapshotChunk(
        term=3,
        number=number,
        index=snapshot.index,
        index_term=snapshot.term,
        size=len(snapshot.state),
        crc=snapshot.crc,
        offset=0,
        data=snapshot.state,
    )


def test_a_snapshot_is_persisted_and_acknowledged_after_the_state_machine_has_it(raft: Raft) -> None:
    work = raft.work((A, chunk()))
    assert work == Install(SNAPSHOT)
    under_way = raft.conclude(MachineReport(up_to=LogIndex(1)))
    assert under_way.has_more
    assert not sent(under_way, AppendReply) or all(m.needs is Needs.ALIVE for m in sent(under_way, AppendReply))
    assert b"snapshot" not in rows_put(under_way)
    assert raft.work() == work
    ready = raft.conclude(MachineReport(up_to=LogIndex(9), installed=SNAPSHOT))
    assert {b"snapshot", b"journal"} <= rows_put(ready)
    assert entries_put(ready) == [9]
    assert ready.messages == (Outgoing(A, success(3, 9, 5), Needs.EVERYTHING),)
    assert (raft.core.commit_index, raft.journal.first_index, raft.journal.durable_index) == (9, 9, 0)


def test_entries_that_come_after_a_snapshot_wait_until_it_is_installed(raft: Raft) -> None:
    raft.work((A, chunk()))
    raft.conclude(MachineReport(up_to=LogIndex(1)))
    raft.work((A, append(3, b"x", prev=(9, 2), number=6)))
    installed = raft.conclude(MachineReport(up_to=LogIndex(9), installed=SNAPSHOT))
    assert entries_put(installed) == [9]
    assert installed.has_more
    raft.work()
    ready = raft.conclude(MachineReport(up_to=LogIndex(9)))
    assert entries_put(ready) == [10]
    assert ready.messages == (Outgoing(A, success(3, 10, 6), Needs.EVERYTHING),)


def test_a_write_in_flight_does_not_count_for_the_journal_that_a_snapshot_began(raft: Raft) -> None:
    in_flight = raft.turn((A, append(3, *(b"%d" % n for n in range(20)))))
    raft.work((A, chunk()))
    installed = raft.conclude(MachineReport(up_to=LogIndex(9), installed=SNAPSHOT))
    raft.persist(in_flight)
    assert (raft.journal.last_index, raft.journal.durable_index) == (9, 0)
    raft.persist(installed)
    assert raft.journal.durable_index == 9


def test_a_node_does_not_stand_while_a_snapshot_is_installed(raft: Raft) -> None:
    raft.work((A, chunk()))
    raft.conclude(MachineReport(up_to=LogIndex(1)))
    raft.work((A, TimeoutNow(term=3)))
    assert raft.core.term == 3


def test_a_snapshot_that_waited_for_another_begins_in_a_turn_of_its_own(raft: Raft) -> None:
    newer = Snapshot(index=20, term=3, state=b"state at 20")
    raft.work((A, chunk()))
    raft.conclude(MachineReport(up_to=LogIndex(1)))
    raft.work((A, chunk(6, newer)))
    raft.conclude(MachineReport(up_to=LogIndex(9), installed=SNAPSHOT))
    assert raft.work() is None
    assert raft.conclude(MachineReport(up_to=LogIndex(9))).has_more
    assert raft.work() == Install(newer)


def test_a_snapshot_of_ones_own_and_the_cut_journal_are_one_change(raft: Raft) -> None:
    raft.turn((A, append(3, *(b"%d" % n for n in range(20)), commit=21)))
    taken = Snapshot(index=11, term=3, state=b"state at 11")
    raft.core.timing = RaftTiming(snapshot_entries=8)
    raft.work()
    ready = raft.conclude(MachineReport(up_to=LogIndex(21), taken=taken))
    assert ready.changes is not None
    assert b"snapshot" in rows_put(ready)
    assert [op.stop for op in ready.changes.ops if isinstance(op, Delete)] == [(9).to_bytes(8)]
    assert raft.journal.first_index == 9


@pytest.mark.parametrize("peer", [A, B])
def test_without_a_session_nothing_is_sent(raft: Raft, peer: NodeId) -> None:
    raft.core.session_closed(peer)
    assert {outgoing.peer for outgoing in raft.time_out().messages} == {A, B} - {peer}


def test_a_turn_without_events_is_an_empty_result(raft: Raft) -> None:
    raft.turn((A, append(3, bytes([NO_OP]))))
    assert raft.turn() == Ready(has_more=False, changes=None, messages=(), answers=(), leadership=None)
