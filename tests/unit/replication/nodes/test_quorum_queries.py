"""An operator's question about Raft at any node: it reaches the leader, and comes back or ends in time."""

import pytest

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NodeId, Term
from smq.replication.net import wire
from smq.replication.nodes import quorum as quorum_module
from smq.replication.nodes.quorum import PENDING_MAX, RETRY_MS, QuorumQueries
from smq.replication.ports import Quorum
from smq.testing.virtual.rng import Streams
from tests.unit.replication.commands.test_proposer import ScriptedEngine
from tests.unit.replication.support import ME, PEER_A, PEER_B, NodeParts

LATE = SmqError(ErrorCode.NO_QUORUM, "late")
Result = Quorum | SmqError


def led_by(node: NodeId) -> Quorum:
    return Quorum(leader=node, term=Term(3), committed_end=9, voters=(), observers=())


class Engine(ScriptedEngine):
    def quorum(self) -> Quorum | None:
        return led_by(ME) if self.is_leader else None


class World(NodeParts):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.results: list[Result] = []
        self.queries = QuorumQueries(self.node_host(), Streams(1).stream("n"), lambda: LATE)

    def describe(self, timeout_ms: int = 1_000) -> None:
        self.queries.describe(timeout_ms, self.results.append)

    def asked(self) -> list[NodeId]:
        assert all(isinstance(message, wire.DescribeQuorum) for _, message in self.sent)
        return [peer for peer, _ in self.sent]

    def answer_last(self, quorum: Quorum) -> None:
        message = self.sent[-1][1]
        assert isinstance(message, wire.DescribeQuorum)
        self.queries.on_described(wire.QuorumDescribed(message.request, quorum))


@pytest.fixture
def world() -> World:
    return World()


def test_the_leader_answers_itself(world: World) -> None:
    world.engine.leader = ME
    world.describe()
    assert world.results == [], "never from within the call"
    world.run(10)
    assert world.results == [led_by(ME)]
    assert world.sent == []


def test_another_node_asks_the_leader(world: World) -> None:
    world.engine.leader = PEER_A
    world.describe()
    assert world.asked() == [PEER_A]
    world.answer_last(led_by(PEER_A))
    world.run(5_000)
    assert world.results == [led_by(PEER_A)]
    assert world.asked() == [PEER_A], "answered, and so not repeated"


def test_a_lost_question_is_repeated_at_whoever_leads_by_then(world: World) -> None:
    world.describe()
    world.engine.leader = PEER_A
    world.run(2 * RETRY_MS)
    world.engine.leader = PEER_B
    world.run(2 * RETRY_MS)
    assert set(world.asked()) == {PEER_A, PEER_B}
    world.answer_last(led_by(PEER_B))
    world.run(10)
    assert world.results == [led_by(PEER_B)]


def test_without_a_leader_it_fails_at_its_deadline(world: World) -> None:
    world.describe(500)
    world.run(490)
    assert world.results == []
    world.run(200)
    assert world.results == [LATE]


def test_an_answer_to_nothing_is_ignored(world: World) -> None:
    world.queries.on_described(wire.QuorumDescribed(5, led_by(PEER_A)))
    world.run(10)
    assert world.results == []


def test_only_the_leader_answers_a_peer(world: World) -> None:
    world.queries.on_query(PEER_A, wire.DescribeQuorum(7))
    assert world.sent == []
    world.engine.leader = ME
    world.queries.on_query(PEER_A, wire.DescribeQuorum(7))
    assert world.sent == [(PEER_A, wire.QuorumDescribed(7, led_by(ME)))]


def test_waiting_callers_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PENDING_MAX >= 100
    monkeypatch.setattr(quorum_module, "PENDING_MAX", 2)
    for _ in range(3):
        world.describe()
    world.run(10)
    (refused,) = world.results
    assert isinstance(refused, SmqError)
    assert refused.code is ErrorCode.OVERLOADED


def test_a_node_that_stops_answers_all(world: World) -> None:
    stopping = SmqError(ErrorCode.SHUTTING_DOWN, "stopping")
    world.describe()
    world.queries.close(stopping)
    world.run(3 * RETRY_MS)
    assert world.results == [stopping]
