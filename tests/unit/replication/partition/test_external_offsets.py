"""Callers of offsets without records share commands: each keeps its own answer, its own error and its own deadline."""

import weakref
from functools import partial

import pytest

from smq.raft_state.command_codec import encode_reply
from smq.raft_state.commands import Assignment, AssignOffsets, Command
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import LogIndex, Offset, RequestId
from smq.raft_state.replies import OffsetsAssigned, Rejected, Reply, Results
from smq.replication.commands import proposer as proposer_module
from smq.replication.commands.coalescing import SharedCommand
from smq.replication.net import wire
from smq.replication.partition.external_offsets import ExternalOffsets
from smq.replication.ports import ProposalLost
from tests.unit.raft_state.support import pid
from tests.unit.replication.commands.test_proposer import ME, OTHER, World, committed

Answers = list[OffsetsAssigned | SmqError]


class Callers:
    """Of one node, whose Raft the test plays."""

    def __init__(self) -> None:
        self.world = World()
        self.offsets = ExternalOffsets(self.world.host(), self.world.proposer)
        self.world.lead(ME)

    def assign(self, number: int, timeout_ms: int = 5_000, *, count: int = 1) -> Answers:
        """Caller `number` asks; what it will be answered."""
        answers: Answers = []
        self.offsets.assign(item_of(number, count), timeout_ms, answers.append)
        return answers

    def turn(self) -> None:
        """The current callback ends."""
        self.world.pass_ms(0)

    def pass_seconds(self, count: int) -> None:
        for _ in range(count):
            self.world.pass_ms(1_000)

    def proposed(self) -> list[list[int]]:
        """The callers of each command that has reached Raft, in order."""
        return [callers_of(command) for command, _ in self.world.engine.queue]

    def commit(self, index: int, reply: Reply | None = None) -> None:
        """The command at this place in the queue is applied: caller n gets the offsets from n on."""
        command, done = self.world.engine.queue[index]
        assert isinstance(command, AssignOffsets)
        given = Results(items=tuple(given_to(item) for item in command.items))
        done(committed(index + 1, reply or given))


def item_of(number: int, count: int = 1) -> Assignment:
    request_id = RequestId(number.to_bytes(16, "big"))
    return Assignment(request_id=request_id, partition=pid(1), count=count, not_before=Offset(0))


def callers_of(command: Command) -> list[int]:
    assert isinstance(command, AssignOffsets)
    return [int.from_bytes(item.request_id, "big") for item in command.items]


def given_to(item: Assignment) -> OffsetsAssigned:
    base = int.from_bytes(item.request_id, "big")
    return OffsetsAssigned(base=Offset(base), last=Offset(base + item.count - 1))


@pytest.fixture
def callers() -> Callers:
    return Callers()


def test_callers_of_one_turn_share_a_command_and_each_gets_its_own_offsets(callers: Callers) -> None:
    answers = [callers.assign(n) for n in range(5)]
    callers.turn()
    assert callers.proposed() == [[0, 1, 2, 3, 4]]
    callers.commit(0)
    assert answers == [[given_to(item_of(n))] for n in range(5)]


def test_callers_share_the_next_command_while_one_is_in_flight(callers: Callers) -> None:
    callers.assign(0)
    callers.turn()
    for n in range(1, 4):
        callers.assign(n)
        callers.turn()
    assert callers.proposed() == [[0]]
    callers.commit(0)
    assert callers.proposed() == [[0], [1, 2, 3]]


def test_a_refused_caller_costs_the_others_nothing(callers: Callers) -> None:
    good, bad, other = callers.assign(1), callers.assign(2, count=0), callers.assign(3)
    callers.turn()
    no = Rejected(code=ErrorCode.INVALID_REQUEST, message="no")
    callers.commit(0, Results(items=(given_to(item_of(1)), no, given_to(item_of(3)))))
    assert (good, other) == ([given_to(item_of(1))], [given_to(item_of(3))])
    (error,) = bad
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.INVALID_REQUEST


def test_one_command_carries_a_bounded_number_of_callers(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharedCommand.items_max < SharedCommand.waiting_max
    monkeypatch.setattr(SharedCommand, "items_max", 2)
    for n in range(5):
        callers.assign(n)
    callers.turn()
    for index in range(3):
        callers.commit(index)
    assert callers.proposed() == [[0, 1], [2, 3], [4]]


def test_callers_with_time_left_share_a_new_command_after_an_unknown_outcome(callers: Callers) -> None:
    callers.world.lead(OTHER)
    answers = callers.assign(1)
    callers.turn()
    callers.assign(2)
    ((_, sent),) = callers.world.forwarded
    callers.world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(0), b"unreadable"))
    assert answers == []
    callers.world.lead(ME)
    assert callers.proposed() == [[1, 2]]
    callers.commit(0)
    assert answers == [given_to(item_of(1))]


def test_a_commit_that_takes_seconds_answers_and_is_proposed_once(callers: Callers) -> None:
    answers = callers.assign(1, 30_000)
    callers.turn()
    callers.pass_seconds(20)
    assert callers.proposed() == [[1]]
    callers.commit(0)
    assert answers == [given_to(item_of(1))]


def test_a_command_lives_as_long_as_its_most_patient_caller(callers: Callers) -> None:
    short, long = callers.assign(1, 1_500), callers.assign(2, 5_000)
    callers.turn()
    callers.pass_seconds(4)
    assert [error.code for error in short if isinstance(error, SmqError)] == [ErrorCode.TIMED_OUT]
    assert long == []
    callers.commit(0)
    assert long == [given_to(item_of(2))]
    assert len(short) == 1


def test_after_a_second_a_command_begins_beside_for_those_that_came_since(callers: Callers) -> None:
    first = callers.assign(1, 30_000)
    callers.turn()
    callers.world.pass_ms(900)
    second = callers.assign(2, 30_000)
    callers.turn()
    assert callers.proposed() == [[1]]
    callers.world.pass_ms(110)
    assert callers.proposed() == [[1], [2]]
    third = callers.assign(3, 30_000)
    callers.turn()
    callers.commit(0)
    assert first == [given_to(item_of(1))]
    assert callers.proposed() == [[1], [2]], "the newest is not a second old"
    callers.commit(1)
    assert second == [given_to(item_of(2))]
    callers.commit(2)
    assert third == [given_to(item_of(3))]
    callers.pass_seconds(5)
    assert callers.proposed() == [[1], [2], [3]]


def test_a_caller_that_comes_after_a_slow_second_waits_for_no_other(callers: Callers) -> None:
    callers.assign(1, 30_000)
    callers.turn()
    callers.pass_seconds(3)
    callers.assign(2, 30_000)
    callers.turn()
    assert callers.proposed() == [[1], [2]]


def test_a_command_that_takes_seconds_goes_to_the_next_leader(callers: Callers) -> None:
    answers = callers.assign(1, 30_000)
    callers.turn()
    callers.pass_seconds(3)
    callers.world.lead(OTHER)
    callers.world.lead(ME)
    assert callers.proposed() == [[1], [1]]
    callers.commit(1)
    assert answers == [given_to(item_of(1))]


def test_callers_in_flight_count_for_the_bound(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedCommand, "waiting_max", 2)
    for n in range(2):
        callers.assign(n, 30_000)
        callers.pass_seconds(2)
    assert callers.proposed() == [[0], [1]]
    (error,) = callers.assign(2, 30_000)
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.OVERLOADED
    callers.commit(0)
    assert callers.assign(3, 30_000) == []


def test_at_the_end_of_the_node_the_outcome_of_what_was_sent_is_unknown(callers: Callers) -> None:
    sent = callers.assign(1)
    callers.turn()
    waiting = callers.assign(2)
    stopping = SmqError(ErrorCode.SHUTTING_DOWN, "stopping")
    callers.offsets.close(stopping)
    callers.world.proposer.close(stopping)
    codes = [answer.code for answer in sent + waiting if isinstance(answer, SmqError)]
    assert codes == [ErrorCode.TIMED_OUT, ErrorCode.SHUTTING_DOWN]


def test_an_unknown_outcome_does_not_become_a_definite_error(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that did not answer may have been carried out, whatever becomes of the next one."""
    callers.world.lead(OTHER)
    answers = callers.assign(1)
    callers.turn()
    ((_, sent),) = callers.world.forwarded
    monkeypatch.setattr(proposer_module, "PENDING_MAX", 0)
    callers.world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(0), b"unreadable"))
    assert [answer.code for answer in answers if isinstance(answer, SmqError)] == [ErrorCode.TIMED_OUT]


def test_at_the_end_of_the_node_an_unknown_outcome_stays_unknown(callers: Callers) -> None:
    callers.world.lead(OTHER)
    answers = callers.assign(1, 30_000)
    callers.pass_seconds(2)
    callers.assign(2, 30_000)
    callers.turn()
    (_, sent), _ = callers.world.forwarded
    callers.world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(0), b"unreadable"))
    assert answers == [], "it waits for the next command"
    callers.offsets.close(SmqError(ErrorCode.SHUTTING_DOWN, "stopping"))
    assert [answer.code for answer in answers if isinstance(answer, SmqError)] == [ErrorCode.TIMED_OUT]


def test_a_caller_that_has_been_answered_is_not_held_while_its_command_is_in_flight(callers: Callers) -> None:
    """What it holds may be a request of megabytes."""
    answers: Answers = []
    done = partial(answers.append)
    callers.offsets.assign(item_of(1), 100, done)
    callers.assign(2, 30_000)
    callers.turn()
    held = weakref.ref(done)
    del done
    assert held() is not None
    callers.world.pass_ms(200)
    assert len(answers) == 1
    assert held() is None
    assert callers.proposed() == [[1, 2]]


def test_a_shared_command_is_not_sent_again_after_the_deadline_of_one_of_its_callers(callers: Callers) -> None:
    short, long = callers.assign(1, 300), callers.assign(2, 5_000)
    callers.turn()
    assert callers.proposed() == [[1, 2]]
    callers.world.pass_ms(250)
    callers.world.lead(None)
    callers.world.engine.queue[0][1](ProposalLost.NOT_LEADER)
    callers.world.pass_ms(100)
    assert [error.code for error in short if isinstance(error, SmqError)] == [ErrorCode.NO_QUORUM]
    callers.world.lead(ME)
    callers.turn()
    assert callers.proposed() == [[1, 2], [2]]
    callers.commit(1)
    assert long == [given_to(item_of(2))]


def test_a_caller_whose_deadline_passed_before_the_tick_is_not_proposed(callers: Callers) -> None:
    callers.assign(0, 10_000)
    callers.turn()
    waiting = callers.assign(1, 50)
    callers.world.scheduler.run_for_ms(60)  # and no tick
    callers.commit(0)
    assert callers.proposed() == [[0]]
    (error,) = waiting
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.TIMED_OUT


def test_the_answer_of_a_command_that_was_late_for_some_still_reaches_the_others(callers: Callers) -> None:
    """It was sent in time, and nothing has to be sent again."""
    callers.world.lead(OTHER)
    short, long = callers.assign(1, 100), callers.assign(2, 5_000)
    callers.turn()
    callers.world.pass_ms(500)
    assert len(short) == 1
    ((_, sent),) = callers.world.forwarded
    callers.world.engine.applied_index = LogIndex(7)
    reply = Results(items=(given_to(item_of(1)), given_to(item_of(2))))
    callers.world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(7), encode_reply(reply)))
    assert long == [given_to(item_of(2))]


def test_callers_beyond_the_bound_are_refused(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedCommand, "waiting_max", 2)
    for n in range(2):
        callers.assign(n)
    (error,) = callers.assign(2)
    assert isinstance(error, SmqError)
    assert error.code is ErrorCode.OVERLOADED
