"""Proposals find the Raft leader, survive its loss, and are never reported before they are applied here."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chaos_tests.sim.levels import LEVEL_TWO, Note, level_two
from smq.raft_state.binary import CodecError
from smq.raft_state.command_codec import FEATURE_LEVEL, decode_command, encode_reply
from smq.raft_state.commands import Command, CommitOffsets
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import DiskId, LogIndex, NodeId, RequestId, Term
from smq.raft_state.replies import Applied, Done, Rejected, Reply
from smq.raft_state.state import Cache, ClusterState
from smq.replication.commands.coalescing import Barriers
from smq.replication.commands.proposer import Proposer
from smq.replication.host import Host
from smq.replication.net import wire
from smq.replication.ports import Committed, ProposalDone, ProposalLost, ReadIndexDone
from tests.unit.raft_state.support import commit
from tests.unit.replication.support import NodeParts

ME, OTHER, THIRD = NodeId(1), NodeId(2), NodeId(3)
COMMIT = commit("g")


class ScriptedEngine:
    """Stands for Raft, with a leader that the test names, and answers that the test gives. Only what is called here."""

    term = Term(1)
    commit_index = LogIndex(0)
    snapshot = (LogIndex(0), 0)

    def __init__(self) -> None:
        self.leader: NodeId | None = None
        self.handed_to: NodeId | None = None
        self.applied_index = LogIndex(0)
        self.queue: list[tuple[Command, ProposalDone]] = []
        self.reads: list[ReadIndexDone] = []
        self.doubted: set[NodeId] = set()  # their disks may be old copies

    @property
    def is_leader(self) -> bool:
        return self.leader == ME

    def propose(self, command: bytes, done: ProposalDone) -> None:
        self.queue.append((decode_command(command), done))

    def read_index(self, done: ReadIndexDone) -> None:
        self.reads.append(done)

    def transfer_leadership(self, to: NodeId | None) -> None:
        self.handed_to = to

    @property
    def marks(self) -> "ScriptedEngine":
        return self

    def doubts(self, node: NodeId, disk: DiskId) -> bool:
        return node in self.doubted


class World(NodeParts):
    def __init__(self, known_level: int = FEATURE_LEVEL) -> None:
        super().__init__()
        self.engine = ScriptedEngine()
        self.results: list[Reply | SmqError] = []
        self.level = 1
        self.replies_counted = 0  # in the applied state
        self.is_leader_heard = True
        self.proposer = Proposer(
            node_id=ME,
            engine=self.engine,
            clock=self.clock,
            rng=random.Random(1),
            deadlines=self.deadlines,
            links=self.links,
            deliver=lambda fn: fn(),
            state=self._state,
            known_level=known_level,
            raft_leader=lambda: self.engine.leader if self.is_leader_heard else None,
        )

    def _state(self) -> ClusterState:
        state = ClusterState(feature_level=self.level)
        state.replies[Cache.BY_NODE].counted = self.replies_counted
        return state

    def ask(self, command: Command = COMMIT, timeout_ms: int = 1_000) -> None:
        self.proposer.propose(command, timeout_ms, self.results.append)

    def pass_ms(self, ms: int) -> None:
        self.scheduler.run_for_ms(ms)
        self.deadlines.run(self.clock.monotonic_ns())

    def lead(self, node: NodeId | None) -> None:
        self.engine.leader = node
        self.proposer.on_leader_change()

    def barriers(self) -> Barriers:
        return Barriers(self.host(), self.proposer)

    def host(self) -> Host:
        """It delivers within the call."""
        return replace(self.node_host(), deliver=lambda fn: fn())

    @property
    def forwarded(self) -> list[tuple[NodeId, wire.Propose]]:
        return self.sent_of(wire.Propose)


@pytest.fixture
def world() -> World:
    return World()


def codes(results: Sequence[object]) -> list[ErrorCode]:
    """Of errors; there is no other result."""
    found = [result.code for result in results if isinstance(result, SmqError)]
    assert len(found) == len(results)
    return found


def committed(index: int, reply: Reply) -> Committed:
    return Committed(LogIndex(index), Applied(reply=reply))


def test_at_the_leader_a_proposal_goes_to_the_engine_and_its_reply_comes_back(world: World) -> None:
    world.lead(ME)
    world.ask()
    world.engine.queue[0][1](committed(5, Done()))
    assert world.results == [Done()]


def test_a_rejection_arrives_as_a_typed_error(world: World) -> None:
    world.lead(ME)
    world.ask()
    world.engine.queue[0][1](committed(5, Rejected(code=ErrorCode.UNKNOWN_TOPIC, message="no")))
    assert codes(world.results) == [ErrorCode.UNKNOWN_TOPIC]


def test_elsewhere_a_reply_waits_until_this_node_has_applied_the_command(world: World) -> None:
    world.lead(OTHER)
    world.ask()
    ((peer, sent),) = world.forwarded
    assert peer == OTHER
    world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(7), encode_reply(Done())))
    assert world.results == []
    world.proposer.on_applied(LogIndex(6))
    assert world.results == []
    world.proposer.on_applied(LogIndex(7))
    assert world.results == [Done()]


def test_a_caller_that_waits_for_a_leader_that_is_no_longer_heard_gets_no_quorum(world: World) -> None:
    """No node succeeds a leader that died with a majority, so the engine still names it."""
    world.lead(OTHER)
    world.ask(timeout_ms=100)
    world.pass_ms(200)
    world.is_leader_heard = False
    world.ask(timeout_ms=100)
    world.pass_ms(200)
    assert codes(world.results) == [ErrorCode.TIMED_OUT, ErrorCode.NO_QUORUM]


def test_a_proposal_waits_for_a_leader_and_times_out_as_no_quorum(world: World) -> None:
    world.ask(timeout_ms=100)
    world.pass_ms(200)
    assert codes(world.results) == [ErrorCode.NO_QUORUM]
    assert ErrorCode.NO_QUORUM.is_retriable


def test_a_new_leader_gets_the_same_request_again(world: World) -> None:
    world.lead(OTHER)
    world.ask()
    world.proposer.on_session_close(OTHER)
    world.lead(THIRD)
    (first, again) = world.forwarded
    assert (first[0], again[0]) == (OTHER, THIRD)
    assert first[1].command == again[1].command
    assert first[1].request != again[1].request


def test_a_request_keeps_its_age_however_late_it_is_proposed_again(world: World) -> None:
    world.replies_counted = 7
    world.lead(OTHER)
    world.ask()
    world.proposer.on_session_close(OTHER)
    world.replies_counted = 20_000
    world.lead(THIRD)
    (first, _), (again, _) = [(sent.command, peer) for peer, sent in world.forwarded]
    assert first == again
    command = decode_command(first)
    assert isinstance(command, CommitOffsets)
    assert (command.replies_before, command.is_from_node) == (7, True)


def test_the_age_of_a_clients_request_counts_requests_of_its_kind(world: World) -> None:
    world.replies_counted = 7
    world.lead(ME)
    world.ask(replace(COMMIT, request_id=RequestId(b"a client's request")))
    command, _ = world.engine.queue[0]
    assert isinstance(command, CommitOffsets)
    assert (command.replies_before, command.is_from_node) == (0, False)


def test_an_unknown_outcome_is_tried_again_with_the_same_request_id(world: World) -> None:
    world.lead(ME)
    world.ask()
    world.engine.queue[0][1](ProposalLost.UNKNOWN)
    world.pass_ms(50)
    first, again = (command for command, _ in world.engine.queue)
    assert first == again
    assert isinstance(first, CommitOffsets)
    assert len(first.request_id) == 16


@pytest.mark.parametrize("wake", ["leader", "session", "retry"])
def test_nothing_is_proposed_again_after_the_deadline(world: World, wake: str) -> None:
    """The node stood still, and wakes up to something else before its tick looks at deadlines."""
    world.lead(OTHER)
    world.ask(timeout_ms=500)
    number = world.forwarded[0][1].request
    world.proposer.on_session_close(OTHER)
    world.scheduler.run_for_ms(600)
    if wake == "leader":
        world.lead(THIRD)
    elif wake == "session":
        world.proposer.on_session_open(OTHER)
    else:
        world.proposer.on_proposed(wire.Proposed(number, wire.NOT_LEADER, LogIndex(0), b""))
        world.scheduler.run_for_ms(50)
    assert len(world.forwarded) == 1
    (error,) = world.results
    assert isinstance(error, SmqError)
    assert not error.code.is_definite


def test_late_answers_of_an_older_attempt_are_ignored(world: World) -> None:
    world.lead(ME)
    world.ask()
    late = world.engine.queue[0][1]
    late(ProposalLost.UNKNOWN)
    world.pass_ms(50)
    world.engine.queue[1][1](committed(9, Done()))
    late(ProposalLost.UNKNOWN)
    assert world.results == [Done()]


EXPIRED = Rejected(code=ErrorCode.REQUEST_EXPIRED, message="old")


def test_a_request_of_this_nodes_own_that_was_refused_as_old_immediately_is_proposed_as_a_new_one(world: World) -> None:
    """It was made while this node lagged, or very many came before it; it certainly never ran."""
    world.lead(ME)
    world.ask()
    world.engine.queue[0][1](committed(5, EXPIRED))
    world.pass_ms(50)
    assert world.results == []
    world.engine.queue[1][1](committed(6, Done()))
    assert world.results == [Done()]


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_request_that_may_have_run_before_it_was_refused_as_old_is_not_proposed_again(
    world: World, is_ours: bool
) -> None:
    world.lead(ME)
    world.ask(COMMIT if is_ours else replace(COMMIT, request_id=RequestId(b"a client's request")))
    if is_ours:
        world.engine.queue[0][1](ProposalLost.UNKNOWN)
        world.pass_ms(50)
    world.engine.queue[-1][1](committed(5, EXPIRED))
    world.pass_ms(50)
    assert codes(world.results) == [ErrorCode.REQUEST_EXPIRED]


def test_an_answer_after_the_deadline_is_ignored(world: World) -> None:
    world.lead(OTHER)
    world.ask(timeout_ms=50)
    ((_, sent),) = world.forwarded
    world.pass_ms(200)
    world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(0), encode_reply(Done())))
    assert codes(world.results) == [ErrorCode.TIMED_OUT]
    assert not ErrorCode.TIMED_OUT.is_definite


def test_another_nodes_proposal_that_does_not_decode_never_reaches_the_engine(world: World) -> None:
    world.lead(ME)
    with pytest.raises(CodecError):
        world.proposer.on_propose(OTHER, wire.Propose(1, b"\x80\x04pickle"))
    assert world.engine.queue == []


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (bytes((FEATURE_LEVEL + 1, 1)), "a reply of feature level 2; .*: run a newer smq on this node"),
        (bytes((1, 255)), "a reply with the unknown tag 255; .*: run a newer smq on this node"),
        (b"\x00\x01", "none below 1"),
        (encode_reply(Done()) + b"more", "bytes"),
        (b"", ""),
    ],
)
def test_an_unreadable_reply_leaves_its_caller_with_an_unknown_outcome_and_harms_no_other(
    world: World, reply: bytes, says: str
) -> None:
    world.lead(OTHER)
    world.ask()
    world.ask()
    (first, second) = [sent.request for _, sent in world.forwarded]
    world.proposer.on_proposed(wire.Proposed(first, wire.COMMITTED, LogIndex(7), reply))
    (error,) = world.results
    assert isinstance(error, SmqError)
    assert not error.code.is_definite
    assert error.code.is_retriable
    assert re.search(f"cannot read the Raft leader's reply: .*{says}.*; retry: the outcome is unknown", str(error))
    world.proposer.on_proposed(wire.Proposed(second, wire.COMMITTED, LogIndex(8), encode_reply(Done())))
    world.proposer.on_applied(LogIndex(8))
    assert world.results[1:] == [Done()]
    assert world.proposer._pending == {}


def test_a_reply_above_the_level_that_the_node_is_allowed_is_not_read() -> None:
    """Its code may know more than the operator lets it use (feature_level_max)."""
    world = World(known_level=FEATURE_LEVEL - 1)
    world.lead(OTHER)
    world.ask()
    ((_, sent),) = world.forwarded
    world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(0), encode_reply(Done())))
    (error,) = world.results
    assert isinstance(error, SmqError)
    assert "this smq knows feature levels up to 0" in error.message


def test_barriers_share_one_in_flight_and_the_next_is_for_later_callers(world: World) -> None:
    world.lead(ME)
    barriers = world.barriers()
    results: list[str] = []
    for name in ("a", "b", "c"):
        barriers.wait(1_000, lambda _result, name=name: results.append(name))  # type: ignore[misc]  # bound per loop
    (first,) = world.engine.reads
    first(LogIndex(0))
    assert results == ["a"]
    (_, second) = world.engine.reads
    barriers.wait(1_000, lambda _result: results.append("d"))
    second(LogIndex(0))
    assert results == ["a", "b", "c"], "callers that came after the second had begun wait for the third"
    world.engine.reads[2](LogIndex(0))
    assert results == ["a", "b", "c", "d"]
    assert world.engine.queue == [], "a read writes nothing"


def test_a_read_at_the_leader_waits_until_its_index_has_been_applied(world: World) -> None:
    world.lead(ME)
    results: list[object] = []
    world.barriers().wait(1_000, results.append)
    world.engine.reads[0](LogIndex(3))
    world.proposer.on_applied(LogIndex(2))
    assert results == []
    world.engine.applied_index = LogIndex(3)
    world.proposer.on_applied(LogIndex(3))
    assert results == [3]


def test_a_read_elsewhere_asks_the_leader_and_waits_until_its_index_has_been_applied_here(world: World) -> None:
    world.lead(OTHER)
    results: list[object] = []
    world.barriers().wait(1_000, results.append)
    ((peer, sent),) = world.sent
    assert peer == OTHER
    assert isinstance(sent, wire.ReadIndex)
    world.proposer.on_proposed(wire.Proposed(sent.request, wire.COMMITTED, LogIndex(7), encode_reply(Done())))
    assert results == []
    world.engine.applied_index = LogIndex(7)
    world.proposer.on_applied(LogIndex(7))
    assert results == [7]


def test_a_read_that_its_leader_could_not_confirm_is_asked_of_the_next(world: World) -> None:
    world.lead(ME)
    results: list[object] = []
    world.barriers().wait(1_000, results.append)
    world.engine.reads[0](ProposalLost.NOT_LEADER)
    world.lead(OTHER)
    ((peer, sent),) = world.sent
    assert (peer, type(sent)) == (OTHER, wire.ReadIndex)
    world.engine.reads[0](LogIndex(0))
    assert results == [], "an answer of the attempt before"


def test_another_nodes_read_is_answered_with_the_index_or_with_not_leader(world: World) -> None:
    world.lead(ME)
    for request, outcome in ((1, LogIndex(9)), (2, ProposalLost.NOT_LEADER)):
        world.proposer.on_read_index(OTHER, wire.ReadIndex(request))
        world.engine.reads[-1](outcome)
    assert world.sent == [
        (OTHER, wire.Proposed(1, wire.COMMITTED, LogIndex(9), encode_reply(Done()))),
        (OTHER, wire.Proposed(2, wire.NOT_LEADER, LogIndex(0), b"")),
    ]


def test_a_late_read_index_answers_those_that_came_before_it_and_no_others(world: World) -> None:
    world.lead(ME)
    barriers = world.barriers()
    results: list[str] = []
    barriers.wait(60_000, lambda _result: results.append("a"))
    world.pass_ms(500)
    barriers.wait(60_000, lambda _result: results.append("b"))
    world.pass_ms(600)
    barriers.wait(60_000, lambda _result: results.append("c"))
    world.pass_ms(500)
    assert len(world.engine.reads) == 2, "the second began after a second"
    first, second = world.engine.reads
    first(LogIndex(0))
    assert results == ["a"]
    second(LogIndex(0))
    assert results == ["a", "b"]
    world.engine.reads[2](LogIndex(0))
    assert results == ["a", "b", "c"]
    world.pass_ms(5_000)
    assert len(world.engine.reads) == 3


def test_a_late_read_index_from_elsewhere_answers(world: World) -> None:
    world.lead(OTHER)
    results: list[object] = []
    world.barriers().wait(60_000, results.append)
    for _ in range(3):
        world.pass_ms(1_000)
    sent = world.messages(wire.ReadIndex)
    assert len(sent) > 1
    world.proposer.on_proposed(wire.Proposed(sent[0].request, wire.COMMITTED, LogIndex(0), encode_reply(Done())))
    assert results == [0]


def test_the_next_read_index_answers_for_one_that_was_lost(world: World) -> None:
    world.lead(ME)
    barriers = world.barriers()
    results: list[str] = []
    barriers.wait(60_000, lambda _result: results.append("a"))
    barriers.wait(60_000, lambda _result: results.append("b"))
    world.pass_ms(1_100)
    world.engine.reads[1](LogIndex(0))
    assert results == ["a", "b"]
    world.engine.reads[0](LogIndex(0))
    assert results == ["a", "b"]


def test_a_barrier_that_is_withdrawn_is_not_answered_and_not_asked_for_again(world: World) -> None:
    world.lead(ME)
    results: list[object] = []
    world.barriers().wait(60_000, results.append)()
    world.pass_ms(3_000)
    assert len(world.engine.reads) == 1
    world.engine.reads[0](LogIndex(0))
    assert results == []


def test_a_waiter_queued_after_a_barrier_in_flight_keeps_its_own_deadline(world: World) -> None:
    world.lead(ME)
    barriers = world.barriers()
    results: list[object] = []
    barriers.wait(5_000, results.append)
    barriers.wait(100, results.append)
    world.pass_ms(300)
    assert codes(results) == [ErrorCode.TIMED_OUT]


def test_a_barrier_without_a_quorum_ends_at_its_own_deadline(world: World) -> None:
    barriers = world.barriers()
    results: list[object] = []
    barriers.wait(100, results.append)
    barriers.wait(500, results.append)
    world.pass_ms(200)
    assert len(results) == 1
    world.pass_ms(400)
    assert len(results) == 2
    assert codes(results) == [ErrorCode.NO_QUORUM] * 2


def test_a_command_of_a_level_that_the_cluster_has_not_reached_is_refused_and_not_sent() -> None:
    with level_two():
        world = World()
        world.lead(OTHER)
        world.ask(Note(text="x"))
        assert codes(world.results) == [ErrorCode.FEATURE_NOT_ENABLED]
        assert world.sent == []
        world.level = LEVEL_TWO
        world.ask(Note(text="x"))
        (sent,) = world.sent
        assert isinstance(sent[1], wire.Propose)
        assert sent[1].command[0] == LEVEL_TWO


def test_callers_of_a_barrier_are_answered_when_the_node_stops(world: World) -> None:
    world.lead(ME)
    barriers = world.barriers()
    answers: list[LogIndex | SmqError] = []
    barriers.wait(60_000, answers.append)
    world.proposer.close(SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping"))
    barriers.wait(60_000, answers.append)
    assert codes(answers) == [ErrorCode.SHUTTING_DOWN] * 2
