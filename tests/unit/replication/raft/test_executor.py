"""A turn's result is carried out in order, and messages wait for the disk."""

from collections.abc import Callable, Sequence

import pytest

from smq.raft_state.ids import DiskId, LogIndex, NodeId, Term
from smq.replication.ports import Buffer, Op
from smq.replication.raft.executor import Executor
from smq.replication.raft.journal import Changes, RaftJournal
from smq.replication.raft.messages import Append, Confirmed, Message, TermNotice, Vote, decode
from smq.replication.raft.ready import Answer, Leadership, Needs, Outgoing, Ready

A, B = NodeId(2), NodeId(3)
DISK = DiskId(b"d" * 16)
VOTE = Vote(term=5, disk=DISK)
ENTRIES = Append(term=5, number=1, commit=1, prev_index=1, prev_term=0, entries=[(5, b"\x00x")])
CONFIRMED = Confirmed(term=5, number=4, disk=DISK)


class ManualDisk:
    """Takes submissions; a test says when they are durable. Only what the executor uses of the port."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._waiting: list[Callable[[], None] | None] = []
        self.durable_seq = 0

    def submit(self, ops: Sequence[Op], done: Callable[[], None] | None = None) -> int:
        self._waiting.append(done)
        self._log.append(f"submit {self.durable_seq + len(self._waiting)}")
        return self.durable_seq + len(self._waiting)

    def sync_one(self) -> None:
        self.durable_seq += 1
        done = self._waiting.pop(0)
        if done is not None:
            done()


class Desk:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.disk = ManualDisk(self.log)
        self.journal = RaftJournal()
        self.executor = Executor(
            disk=self.disk,  # type: ignore[arg-type]  # a part of the port
            journal=self.journal,
            peers=(A, B),
            send=self._send,
            wake=lambda: self.log.append("wake"),
            on_durable=lambda: self.log.append("durable"),
            on_leader_change=lambda: self.log.append("leader"),
        )

    def _send(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        self.log.append(f"{type(decode(memoryview(b''.join(parts)))).__name__} to {peer}")

    def answer(self, outcome: object) -> None:
        self.log.append(f"answer {outcome}")

    def changes(self, *, vote: bool = False) -> Changes:
        """Something to persist, as the journal hands it out."""
        if vote:
            self.journal.set_term(self.journal.term + 1, A)
        self.journal.add(b"\x00", self.journal.last_index + 1 if len(self.journal) else 1, 0)
        changes = self.journal.take_changes()
        assert changes is not None
        return changes

    def execute(
        self,
        *messages: tuple[Message, Needs],
        changes: Changes | None = None,
        answers: tuple[Answer, ...] = (),
        leadership: Leadership | None = None,
        has_more: bool = False,
    ) -> list[str]:
        """What happened immediately."""
        outgoing = tuple(Outgoing(A, message, needs) for message, needs in messages)
        ready = Ready(has_more=has_more, changes=changes, messages=outgoing, answers=answers, leadership=leadership)
        self.log.clear()
        self.executor.execute(ready)
        return list(self.log)

    def sync_one(self) -> list[str]:
        """What happened when the next submission was durable."""
        self.log.clear()
        self.disk.sync_one()
        return list(self.log)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_result_is_carried_out_in_the_order_of_its_fields(desk: Desk) -> None:
    happened = desk.execute(
        (TermNotice(term=5), Needs.VOTE),
        changes=desk.changes(),
        answers=(Answer(desk.answer, LogIndex(3)), Answer(desk.answer, LogIndex(4))),
        leadership=Leadership(Term(5), A),
        has_more=True,
    )
    assert happened == ["wake", "submit 1", "TermNotice to 2", "answer 3", "answer 4", "leader"]


def test_a_vote_leaves_when_it_is_on_disk(desk: Desk) -> None:
    assert desk.execute((VOTE, Needs.EVERYTHING), changes=desk.changes(vote=True)) == ["submit 1"]
    assert desk.sync_one() == ["Vote to 2", "durable"]


def test_a_leaders_entries_leave_while_they_are_written_but_not_before_its_vote_is(desk: Desk) -> None:
    assert desk.execute((ENTRIES, Needs.VOTE), changes=desk.changes(vote=True)) == ["submit 1"]
    assert desk.sync_one() == ["Append to 2", "durable"]
    assert desk.execute((ENTRIES, Needs.VOTE), changes=desk.changes()) == ["submit 2", "Append to 2"]


def test_a_message_waits_for_changes_of_earlier_turns_too(desk: Desk) -> None:
    desk.execute(changes=desk.changes())
    assert desk.execute((VOTE, Needs.EVERYTHING)) == []
    assert desk.sync_one() == ["Vote to 2", "durable"]


def test_a_message_that_need_not_wait_does_not_overtake_one_that_must(desk: Desk) -> None:
    desk.execute((VOTE, Needs.EVERYTHING), changes=desk.changes())
    assert desk.execute((ENTRIES, Needs.VOTE)) == []
    assert desk.sync_one() == ["Vote to 2", "Append to 2", "durable"]


def test_a_sign_of_life_overtakes_entries_and_is_dropped_if_the_vote_is_not_on_disk(desk: Desk) -> None:
    desk.execute((VOTE, Needs.EVERYTHING), changes=desk.changes())
    assert desk.execute((CONFIRMED, Needs.ALIVE)) == ["Confirmed to 2"]
    assert desk.execute((CONFIRMED, Needs.ALIVE), changes=desk.changes(vote=True)) == ["submit 2"]
    assert desk.sync_one() == ["Vote to 2", "durable"]
    assert desk.sync_one() == ["durable"], "it was not kept"


def test_what_waited_for_a_session_does_not_leave_with_the_first_message_of_the_next(desk: Desk) -> None:
    desk.execute((VOTE, Needs.EVERYTHING), changes=desk.changes())
    desk.executor.drop_session(A)
    assert desk.execute((TermNotice(term=6), Needs.EVERYTHING)) == []
    assert desk.sync_one() == ["TermNotice to 2", "durable"]


def test_a_message_waits_for_changes_that_were_flushed_outside_a_turn(desk: Desk) -> None:
    desk.journal.add(b"\x00", 1, 0)
    desk.executor.flush()
    assert desk.execute((VOTE, Needs.EVERYTHING)) == []
    assert desk.sync_one() == ["Vote to 2", "durable"]
    desk.executor.flush()
    assert desk.execute((VOTE, Needs.EVERYTHING)) == ["Vote to 2"], "nothing had changed"


def test_the_journal_learns_what_is_durable_before_the_engine_does(desk: Desk) -> None:
    desk.execute(changes=desk.changes())
    assert desk.journal.durable_index == 0
    desk.execute(changes=desk.changes())
    desk.sync_one()
    assert desk.journal.durable_index == 1, "the second is not on disk yet"
    desk.sync_one()
    assert desk.journal.durable_index == 2


def test_a_stopped_engine_neither_answers_nor_sends_what_waited(desk: Desk) -> None:
    desk.execute((VOTE, Needs.EVERYTHING), changes=desk.changes())
    desk.executor.stop()
    answers = (Answer(desk.answer, LogIndex(3)),)
    assert desk.execute(answers=answers, leadership=Leadership(Term(5), A)) == []
    assert desk.sync_one() == []


def test_a_turn_in_which_the_engine_was_stopped_has_no_result(desk: Desk) -> None:
    changes = desk.changes()
    desk.executor.stop()
    happened = desk.execute((ENTRIES, Needs.VOTE), (CONFIRMED, Needs.ALIVE), changes=changes, has_more=True)
    assert happened == []


def test_an_answer_that_stops_the_engine_is_the_last_report() -> None:
    desk = Desk()
    stopping = Answer(lambda _outcome: desk.executor.stop(), LogIndex(3))
    assert desk.execute(answers=(stopping,), leadership=Leadership(Term(5), A)) == []
    desk = Desk()
    assert desk.execute(answers=(stopping, Answer(desk.answer, LogIndex(4)))) == []


def test_a_disk_that_takes_nothing_more_stops_the_result_before_anything_is_sent_or_answered(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = desk.changes()

    def refuse(_ops: Sequence[Op], _done: object = None) -> int:
        raise RuntimeError("the disk is closed")

    monkeypatch.setattr(desk.disk, "submit", refuse)
    with pytest.raises(RuntimeError):
        desk.execute((ENTRIES, Needs.VOTE), changes=changes, answers=(Answer(desk.answer, LogIndex(3)),))
    assert desk.log == []
