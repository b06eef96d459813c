"""Leader, follower and pre-vote against a view that only records: the rules one by one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from chaos_tests.sim.raft import planted
from smq.raft_state.ids import DiskId, NodeId
from smq.replication.raft import leader as raft_leader
from smq.replication.raft.core import Core, PreVoting
from smq.replication.raft.follower import Follower
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.leader import WINDOW_BYTES_MAX, Leader
from smq.replication.raft.messages import (
    NO_ANSWER,
    NO_OP,
    REGULAR,
    Append,
    AppendReply,
    Confirm,
    Confirmed,
    Message,
    PreVote,
    SnapshotChunk,
    TermNotice,
)
from smq.replication.raft.ready import Needs, RaftViolation
from smq.replication.raft.timing import RaftTiming
from smq.replication.raft.voters import Voters
from tests.unit.replication.raft.test_journal import Desk

ME, A, B = NodeId(1), NodeId(2), NodeId(3)
DISK, ANOTHER = DiskId(b"d" * 16), DiskId(b"e" * 16)


@dataclass
class View:
    """Stands for the core of a node of three, as the roles see it. Everything added to its journal is durable."""

    journal: RaftJournal
    desk: Desk
    timing: RaftTiming = field(default_factory=RaftTiming)
    peers: tuple[NodeId, ...] = (A, B)
    term: int = 1
    leader: NodeId | None = None
    is_leader: bool = False
    commit_index: int = 1
    time: float = 100.0
    sent: list[tuple[NodeId, Message]] = field(default_factory=list)
    installed: list[Snapshot] = field(default_factory=list)
    installing: list[tuple[Snapshot, Callable[[], None]]] = field(default_factory=list)
    installs_slowly: bool = False  # only when `finish_install` is called
    disks: dict[NodeId, DiskId] = field(default_factory=dict)  # those that are registered

    @property
    def voters(self) -> Voters:
        return Voters(
            ME, self.peers, lambda: DISK, self.disks.get, lambda _node, _disk: False, {A: DISK, B: DISK, ME: DISK}.get
        )

    def now(self) -> float:
        return self.time

    def is_connected(self, peer: NodeId) -> bool:
        return True

    def send(self, peer: NodeId, message: Message, needs: Needs = Needs.EVERYTHING) -> None:
        self.sent.append((peer, message))

    def adopt_term(self, term: int) -> None:
        self.term, self.leader, self.is_leader = term, None, False

    def follow(self, leader: NodeId) -> None:
        self.leader = leader

    def commit_to(self, index: int) -> None:
        self.commit_index = max(self.commit_index, index)

    @property
    def is_installing(self) -> bool:
        return bool(self.installing)

    def install(self, snapshot: Snapshot, done: Callable[[], None]) -> None:
        self.installing.append((snapshot, done))
        if not self.installs_slowly:
            self.finish_install()

    def finish_install(self) -> None:
        snapshot, done = self.installing.pop()
        self.installed.append(snapshot)
        self.journal.install(snapshot)
        self.commit_to(snapshot.index)
        done()

    def take_sent(self) -> list[Message]:
        sent, self.sent = self.sent, []
        return [message for _, message in sent]


def view_of(*terms: int) -> View:
    """A journal whose entries 2, 3, ... have these terms; the view's term is the last."""
    desk = Desk()
    desk.journal.add(bytes([NO_OP]), 1, 0)
    for index, term in enumerate(terms, 2):
        desk.journal.add(bytes([REGULAR, term]), index, term)
    desk.sync()
    view = View(desk.journal, desk, term=max(terms, default=1))
    return view


def follower_of(view: View) -> Follower:
    return Follower(cast(Core, view))


def leading(*terms: int, term: int) -> tuple[View, Leader]:
    view = view_of(*terms)
    view.term, view.is_leader, view.leader = term, True, ME
    lead = Leader(cast(Core, view))
    lead.begin(view.journal.last_index + 1)
    return view, lead


def success(view: View, number: int, index: int) -> AppendReply:
    return AppendReply(term=view.term, number=number, next_index=index + 1, success=True, reset=False, disk=DISK)


def reset(view: View, number: int, next_index: int) -> AppendReply:
    return AppendReply(term=view.term, number=number, next_index=next_index, success=False, reset=True, disk=DISK)


def append(*entry_terms: int, term: int, prev: tuple[int, int], commit: int = 1) -> Append:
    entries = [(t, bytes([REGULAR, t])) for t in entry_terms]
    return Append(term=term, number=1, commit=commit, prev_index=prev[0], prev_term=prev[1], entries=entries)


# --------------------------------------------------------------------------------------------------------- leader
def figure_8() -> int:
    """Entry 3 of term 2 is on a majority, the leader of term 4 has no entry of its own there yet."""
    view, lead = leading(1, 2, term=4)
    lead.on_reply(A, success(view, 1, 3))
    lead.on_reply(B, success(view, 1, 3))
    lead.advance_commit()
    return view.commit_index


def test_an_entry_of_an_older_term_is_not_committed_by_counting() -> None:
    assert figure_8() == 1
    with planted.BUGS["commit-older-terms"].planted():
        assert figure_8() == 3


def test_an_entry_of_the_term_commits_what_is_before_it() -> None:
    view, lead = leading(1, 2, term=4)
    view.journal.add(bytes([NO_OP]), 4, 4)
    view.desk.sync()
    lead.on_reply(A, success(view, 1, 4))
    lead.advance_commit()
    assert view.commit_index == 4


def test_the_leader_does_not_count_itself_before_its_own_disk_does() -> None:
    view, lead = leading(1, term=2)
    view.journal.add(bytes([NO_OP]), 3, 2)
    lead.on_reply(A, success(view, 1, 3))
    lead.advance_commit()
    assert view.commit_index == 1
    lead.on_reply(B, success(view, 1, 3))
    lead.advance_commit()
    assert view.commit_index == 3, "two followers are a majority without the leader"


def test_success_never_rewinds_what_is_sent_next() -> None:
    view, lead = leading(term=1)
    for index in range(2, 6):
        view.journal.add(bytes([REGULAR]), index, 1)
        lead.send()
    view.take_sent()
    lead.on_reply(A, success(view, 1, 2))
    lead.send()
    assert view.take_sent() == []


@pytest.mark.parametrize("peer", [A, B])
def test_late_refusals_of_messages_before_a_reset_rewind_once(peer: NodeId) -> None:
    view, lead = leading(1, 1, 1, 1, 1, term=1)
    for index in range(7, 12):
        view.journal.add(bytes([REGULAR]), index, 1)
        lead.send()
    numbers = [m.number for p, m in view.sent if p == peer and isinstance(m, Append)]
    view.take_sent()
    for number in numbers:
        lead.on_reply(peer, reset(view, number, 3))
        lead.send()
    resent = [m for m in view.take_sent() if isinstance(m, Append) and m.entries]
    assert [m.prev_index for m in resent] == [2]


def test_what_is_in_flight_to_a_silent_follower_is_bounded() -> None:
    view, lead = leading(term=1)
    for index in range(2, 40):
        view.journal.add(bytes(1 << 20), index, 1)
        lead.send()
    to_a = sum(len(entry) for p, m in view.sent if p == A and isinstance(m, Append) for _, entry in m.entries)
    assert WINDOW_BYTES_MAX <= to_a <= WINDOW_BYTES_MAX + (1 << 20)


def test_followers_that_report_nonsense_do_no_harm() -> None:
    view, lead = leading(1, 1, term=1)
    lead.on_reply(B, reset(view, 9, 0))
    lead.send()
    for peer in (A, B):  # a majority without the leader
        lead.on_reply(peer, success(view, 9, 10**9))
    lead.send()
    lead.advance_commit()
    assert view.commit_index == view.journal.last_index


def test_a_majority_that_is_silent_is_noticed() -> None:
    view, lead = leading(term=1)
    assert lead.hears_from_majority()
    view.time += 0.6
    assert not lead.hears_from_majority()
    lead.on_reply(A, success(view, 1, 1))
    assert lead.hears_from_majority()


def test_a_moved_commit_index_is_reported_immediately_and_only_a_heartbeat_asks_for_an_answer() -> None:
    view, lead = leading(1, term=1)
    lead.send(is_forced=True)
    view.take_sent()
    view.commit_index = 2
    lead.send()
    reports = [m for m in view.take_sent() if isinstance(m, Append)]
    assert [(m.number, m.commit, m.entries) for m in reports] == [(NO_ANSWER, 2, [])] * 2
    lead.send()
    assert view.take_sent() == [], "it is reported once"
    view.time += 1
    lead.send()
    assert all(isinstance(m, Append) and m.number != NO_ANSWER for m in view.take_sent())


def test_the_first_message_of_a_session_is_answered() -> None:
    view, lead = leading(1, term=1)
    lead.send(is_forced=True)
    view.take_sent()
    lead.forget_session(A)
    view.commit_index = 2
    lead.send()
    numbers = {peer: m.number for peer, m in view.sent if isinstance(m, Append)}
    assert numbers[A] != NO_ANSWER, "a new session may lead to another disk"
    assert numbers[B] == NO_ANSWER


# ---------------------------------------------------------------------------------------------------------- reads
def confirmed(view: View, number: int) -> Confirmed:
    return Confirmed(term=view.term, number=number, disk=DISK)


def questions(view: View) -> dict[NodeId, int]:
    """Taken from what was sent."""
    sent, view.sent = view.sent, []
    return {peer: m.number for peer, m in sent if isinstance(m, Confirm)}


def test_a_read_is_confirmed_by_answers_to_a_question_that_was_sent_after_it_began() -> None:
    view, lead = leading(1, term=2)
    indexes: list[int | None] = []
    lead.begin_read(lambda _index: None)
    lead.send()
    before = questions(view)
    lead.begin_read(indexes.append)
    lead.on_confirmed(A, confirmed(view, before[A]))
    lead.on_confirmed(B, confirmed(view, before[B]))
    lead.confirm_reads()
    assert indexes == [], "these were sent before it began"
    lead.send()
    after = questions(view)
    assert set(after) == {A, B}, "it asks immediately, without waiting for the next heartbeat"
    lead.on_confirmed(B, confirmed(view, after[B]))
    lead.confirm_reads()
    assert indexes == [3], "the first entry of the term: what earlier leaders committed lies before it"


def test_a_read_of_a_term_that_has_committed_gets_the_commit_index() -> None:
    view, lead = leading(1, term=2)
    view.commit_index = 7
    indexes: list[int | None] = []
    lead.begin_read(indexes.append)
    view.commit_index = 8
    lead.send()
    lead.on_confirmed(A, confirmed(view, 9))
    lead.confirm_reads()
    assert indexes == [7]


def test_a_follower_that_does_not_answer_is_asked_once_a_heartbeat_whatever_is_read() -> None:
    view, lead = leading(1, term=2)
    asked: list[NodeId] = []
    for _ in range(10):
        lead.begin_read(lambda _index: None)
        lead.send()
        asked += (found := questions(view))
        lead.on_confirmed(B, confirmed(view, found[B]))
        lead.confirm_reads()
    assert (asked.count(A), asked.count(B)) == (1, 10)
    view.time += 1
    lead.begin_read(lambda _index: None)
    lead.send()
    assert set(questions(view)) == {A, B}, "its answer may have been dropped"


def of_a_replaced_disk(view: View, lead: Leader) -> None:
    view.disks[A] = ANOTHER
    lead.on_confirmed(A, confirmed(view, 9))


def of_an_earlier_session(view: View, lead: Leader) -> None:
    """A new one may lead to another disk."""
    lead.on_confirmed(A, confirmed(view, 9))
    lead.forget_session(A)


def to_no_question(view: View, lead: Leader) -> None:
    lead.on_reply(A, success(view, 9, 2))
    lead.on_confirmed(A, confirmed(view, 0))


@pytest.mark.parametrize("answer", [of_a_replaced_disk, of_an_earlier_session, to_no_question])
def test_an_answer_confirms_no_read(answer: Callable[[View, Leader], None]) -> None:
    view, lead = leading(1, term=2)
    indexes: list[int | None] = []
    lead.begin_read(indexes.append)
    lead.send()
    answer(view, lead)
    lead.confirm_reads()
    assert indexes == []


def test_reads_of_callers_that_gave_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_leader, "READS_MAX", 2)
    _, lead = leading(1, term=2)
    indexes: list[int | None] = []
    for _ in range(3):
        lead.begin_read(indexes.append)
    assert indexes == [None]


# ------------------------------------------------------------------------------------------------------- follower
def test_a_question_is_answered_by_followers_of_its_term_only() -> None:
    view = view_of(1, 1)
    follower = follower_of(view)
    follower.on_confirm(A, Confirm(term=1, number=4))
    assert view.take_sent() == [confirmed(view, 4)]
    view.term = 2
    follower.on_confirm(A, Confirm(term=1, number=5))
    assert view.take_sent() == [TermNotice(term=2)]


def test_what_wants_no_answer_gets_none_and_counts_all_the_same() -> None:
    view = view_of(1, 1)
    follower = follower_of(view)
    follower.on_append(A, replace(append(term=1, prev=(3, 1), commit=3), number=NO_ANSWER))
    assert (view.commit_index, view.leader, follower.heard_at) == (3, A, view.time)
    follower.on_append(A, replace(append(term=1, prev=(9, 1), commit=9), number=NO_ANSWER))
    assert view.commit_index == 3
    assert view.take_sent() == [], "what does not fit is found out by the next heartbeat"


def test_a_shorter_message_truncates_nothing() -> None:
    view = view_of(1, 1, 1)
    follower_of(view).on_append(A, append(1, term=1, prev=(1, 0)))
    assert view.journal.last_index == 4
    assert view.take_sent() == [success(view, 1, 2)]


def test_a_conflict_truncates_from_there_and_not_before() -> None:
    view = view_of(1, 1, 1)
    follower_of(view).on_append(A, append(1, 2, term=2, prev=(1, 0)))
    assert (view.journal.last_index, view.journal.term_at(2), view.journal.term_at(3)) == (3, 1, 2)


def test_the_commit_index_stops_where_comparison_did() -> None:
    view = view_of(1, 1, 1)
    follower_of(view).on_append(A, append(term=2, prev=(2, 1), commit=4))
    assert view.commit_index == 2


def test_a_missing_predecessor_asks_from_the_end() -> None:
    view = view_of(1, 1)
    follower_of(view).on_append(A, append(1, term=1, prev=(9, 1)))
    assert view.take_sent() == [reset(view, 1, 4)]


def test_a_conflicting_predecessor_asks_from_the_committed_prefix() -> None:
    view = view_of(1, 1, 1, 1)
    view.commit_index = 2
    follower_of(view).on_append(A, append(3, term=3, prev=(5, 2)))
    assert view.take_sent() == [reset(view, 1, 3)]


def test_a_committed_entry_that_differs_is_a_violation() -> None:
    view = view_of(1, 1)
    view.commit_index = 3
    with pytest.raises(RaftViolation, match="committed entry 3"):
        follower_of(view).on_append(A, append(1, 2, term=2, prev=(1, 0)))


def test_a_second_leader_of_the_term_is_a_violation() -> None:
    view = view_of(1)
    follower = follower_of(view)
    follower.on_append(A, append(term=1, prev=(1, 0)))
    with pytest.raises(RaftViolation, match="leads term 1"):
        follower.on_append(B, append(term=1, prev=(1, 0)))


def chunks(snapshot: Snapshot, size: int, *, term: int = 5) -> list[SnapshotChunk]:
    state = snapshot.state
    return [
        SnapshotChunk(
            term=term,
            number=number,
            index=snapshot.index,
            index_term=snapshot.term,
            size=len(state),
            crc=snapshot.crc,
            offset=offset,
            data=state[offset : offset + size],
        )
        for number, offset in enumerate(range(0, len(state), size), 1)
    ]


SNAPSHOT = Snapshot(index=9, term=4, state=b"0123456789")


def test_a_snapshot_is_installed_when_it_is_whole() -> None:
    view = view_of(1)
    follower = follower_of(view)
    for chunk in chunks(SNAPSHOT, 4):
        assert view.installed == []
        follower.on_chunk(A, chunk)
    assert view.installed == [SNAPSHOT]
    assert view.take_sent()[-1] == success(view, 3, 9)


def test_a_snapshot_that_fails_its_checksum_is_refused() -> None:
    view = view_of(1)
    follower = follower_of(view)
    damaged = Snapshot(index=9, term=4, state=b"0123456780")
    for good, bad in zip(chunks(SNAPSHOT, 4), chunks(damaged, 4), strict=True):
        follower.on_chunk(A, SnapshotChunk(**{f: getattr(good, f) for f in good.__slots__} | {"data": bad.data}))
    assert view.installed == []
    assert view.take_sent()[-1] == reset(view, 3, 3)


def test_a_chunk_that_is_not_the_next_is_refused() -> None:
    view = view_of(1)
    follower = follower_of(view)
    first, _, third = chunks(SNAPSHOT, 4)
    follower.on_chunk(A, first)
    follower.on_chunk(A, third)
    assert view.take_sent()[-1] == reset(view, 3, 3)
    follower.on_chunk(A, chunks(SNAPSHOT, 4)[1])
    assert view.installed == []


def test_a_snapshot_of_what_the_journal_holds_is_not_installed() -> None:
    view = view_of(1, 1, 4, 4)
    for chunk in chunks(Snapshot(index=4, term=4, state=b"s"), 4):
        follower_of(view).on_chunk(A, chunk)
    assert (view.installed, view.commit_index) == ([], 4)
    assert view.take_sent() == [success(view, 1, 4)]


def installing(snapshot: Snapshot) -> tuple[View, Follower]:
    """A follower of A that has all of a snapshot, and is not done with it."""
    view = view_of(1)
    view.installs_slowly = True
    follower = follower_of(view)
    for chunk in chunks(snapshot, 4):
        follower.on_chunk(A, chunk)
    view.take_sent()
    return view, follower


def take_all_held(follower: Follower) -> None:
    while follower.has_held:
        follower.take_held()


def alive(view: View) -> AppendReply:
    return AppendReply(term=view.term, number=0, next_index=1, success=False, reset=False, disk=DISK)


def test_messages_that_come_during_an_installation_are_taken_after_it() -> None:
    """Were it dropped, a busy leader could have compacted it away by the time that it is sent again, for ever."""
    view, follower = installing(SNAPSHOT)
    entries = Append(term=5, number=4, commit=10, prev_index=9, prev_term=4, entries=[(5, bytes([REGULAR]))])
    follower.on_append(A, entries)
    follower.on_append(A, replace(entries, entries=[], number=5))
    follower.on_chunk(A, replace(chunks(SNAPSHOT, 100)[0], number=6))
    assert view.take_sent() == [alive(view)], "the leader hears that this node lives"
    assert (view.journal.last_index, view.commit_index, len(view.installing)) == (2, 1, 1)
    view.finish_install()
    take_all_held(follower)
    assert view.take_sent() == [success(view, 3, 9), success(view, 4, 10), success(view, 6, 9)]
    assert view.commit_index == 10


def test_what_came_while_a_snapshot_was_installed_goes_with_its_session() -> None:
    view, follower = installing(SNAPSHOT)
    follower.on_append(
        A, Append(term=5, number=4, commit=10, prev_index=9, prev_term=4, entries=[(5, bytes([REGULAR]))])
    )
    follower.forget_session(A)
    view.take_sent()
    view.finish_install()
    assert not follower.has_held
    assert view.take_sent() == [success(view, 3, 9)]
    assert view.commit_index == 9


def test_a_snapshot_installed_under_the_next_leader_is_not_acknowledged_to_the_last() -> None:
    view, follower = installing(SNAPSHOT)
    follower.on_append(A, Append(term=5, number=4, commit=9, prev_index=9, prev_term=4, entries=[(5, b"\x00")]))
    follower.on_append(B, Append(term=6, number=1, commit=9, prev_index=2, prev_term=1, entries=[(6, b"\x00")]))
    assert view.take_sent() == [replace(alive(view), term=5)]
    view.finish_install()
    take_all_held(follower)
    assert (view.take_sent(), view.journal.last_index, view.commit_index) == ([success(view, 1, 3)], 9, 9)


# ------------------------------------------------------------------------------------------------------- pre-vote
def asked(view: View, *, term: int, last: tuple[int, int], heard_at: float = 0.0) -> bool:
    return PreVoting(cast(Core, view)).would_vote(
        A, PreVote(term=term, last_index=last[0], last_term=last[1], disk=DISK, is_admitted=False), heard_at
    )


def test_a_pre_vote_is_given_to_a_log_that_is_level() -> None:
    assert asked(view_of(1, 1), term=2, last=(3, 1))
    assert asked(view_of(1, 1), term=3, last=(2, 2))
    assert not asked(view_of(1, 1), term=2, last=(2, 1))


def test_no_pre_vote_against_a_leader_that_is_heard() -> None:
    view = view_of(1)
    assert not asked(view, term=2, last=(9, 1), heard_at=view.time - 0.2)
    assert asked(view, term=2, last=(9, 1), heard_at=view.time - 0.4)
