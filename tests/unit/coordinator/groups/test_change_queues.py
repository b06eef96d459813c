"""Changes of one group take effect in the order in which they came, and late ones not at all."""

from collections.abc import Callable
from typing import Any

import pytest

from smq.coordinator.groups import change_queues
from smq.coordinator.groups.coordinator import NO_MEMBER
from smq.raft_state.commands import NO_GENERATION, Command, CommitOffsets, OffsetCommit
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, RequestId
from smq.raft_state.replies import Done, Rejected, Reply
from smq.replication.api import DoneFn
from smq.replication.commands.proposer import rejection
from tests.unit.coordinator.groups.world import GROUP, Client, World, assemble, client
from tests.unit.raft_state.support import pid, register

LATE = SmqError(ErrorCode.TIMED_OUT, "no answer came")


@pytest.fixture
def world() -> World:
    return World()


class Road:
    """The way of one node's commands into Raft: the test says when each takes effect, and when it is answered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.proposed: list[tuple[Command, DoneFn[Reply]]] = []
        world.nodes[world.owner].propose = self._propose  # type: ignore[method-assign]  # the test is the road

    def _propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        assert timeout_ms > 0
        if isinstance(command, CommitOffsets):
            self.proposed.append((command, done))

    @property
    def offsets(self) -> list[int]:
        return [c.items[0].offset for c, _ in self.proposed if isinstance(c, CommitOffsets)]

    def arrive(self, number: int) -> Reply:
        """The command takes effect, or is refused."""
        return self.world.apply(self.proposed[number][0])

    def answer(self, number: int, result: Reply | SmqError) -> None:
        self.proposed[number][1](rejection(result) if isinstance(result, Rejected) else result)

    def deliver(self, number: int) -> None:
        self.answer(number, self.arrive(number))


def commit(
    world: World, offset: int, *, at: int | None = None, timeout_ms: int = 1_000, request: bytes = b""
) -> tuple[list[Any], Callable[[], None]]:
    """The answers so far, and a function that withdraws the request."""
    answers: list[Any] = []
    items = (OffsetCommit(partition=pid(1), offset=Offset(offset)),)
    coordinator = world.coordinators[at or world.owner]
    withdraw = coordinator.commit(
        GROUP, NO_MEMBER, NO_GENERATION, items, RequestId(request), timeout_ms, answers.append
    )
    return answers, withdraw


def committed(world: World) -> int:
    return world.group.offsets[pid(1)].offset


def test_second_commit_waits_for_the_answer_to_the_first(world: World) -> None:
    """Otherwise it overtakes the first, which waits for a new leader of Raft."""
    road = Road(world)
    first, _ = commit(world, 5)
    second, _ = commit(world, 10)
    assert road.offsets == [5]
    road.deliver(0)
    assert first == [Done()]
    assert road.offsets == [5, 10]
    road.deliver(1)
    assert second == [Done()]
    assert committed(world) == 10


def test_commit_without_an_answer_has_no_effect_after_the_next_one(world: World) -> None:
    road = Road(world)
    commit(world, 1)
    road.deliver(0)
    first, _ = commit(world, 5)
    second, _ = commit(world, 10)
    road.answer(1, LATE)
    assert first == [LATE]
    road.deliver(2)
    assert second == [Done()]
    assert isinstance(road.arrive(1), Rejected)
    assert committed(world) == 10


def test_commit_is_proposed_again_after_an_earlier_one_without_an_answer_took_effect(world: World) -> None:
    """The same request id does not bring back the refusal."""
    road = Road(world)
    commit(world, 5)
    second, _ = commit(world, 10, request=b"r" * 16)
    road.answer(0, LATE)
    road.arrive(0)
    road.deliver(1)
    assert second == []
    assert road.offsets == [5, 10, 10]
    road.deliver(2)
    assert second == [Done()]
    assert committed(world) == 10


def test_commit_whose_time_is_over_before_its_turn_is_definitely_refused(world: World) -> None:
    road = Road(world)
    commit(world, 5, timeout_ms=5_000)
    second, _ = commit(world, 10, timeout_ms=500)
    third, _ = commit(world, 15, timeout_ms=5_000)
    world.run(600)
    assert [(e.code, e.code.is_definite) for e in second] == [(ErrorCode.OVERLOADED, True)]
    road.deliver(0)
    assert road.offsets == [5, 15]
    road.deliver(1)
    assert third == [Done()]


def test_commit_whose_time_ran_out_while_the_node_stood_still_is_not_proposed(world: World) -> None:
    road = Road(world)
    commit(world, 5)
    second, _ = commit(world, 10, timeout_ms=500)
    world.process.pause()
    world.run(600)
    road.answer(0, LATE)  # before the tick that looks at deadlines
    assert road.offsets == [5]
    assert [e.code for e in second] == [ErrorCode.OVERLOADED]


def test_withdrawn_commit_is_not_proposed(world: World) -> None:
    road = Road(world)
    commit(world, 5)
    _, withdraw = commit(world, 10)
    withdraw()
    withdraw()
    road.deliver(0)
    assert road.offsets == [5]


def test_waiting_commits_are_refused_once_another_node_coordinates_the_group(world: World) -> None:
    road = Road(world)
    commit(world, 5)
    second, _ = commit(world, 10)
    owner = world.owner
    world.apply(register(owner, 2, kafka=f"host:{owner}"))
    road.deliver(0)
    assert [e.code for e in second] == [ErrorCode.NOT_COORDINATOR]
    assert GROUP not in world.machine.state.groups


def test_answer_may_ask_for_the_next_change(world: World) -> None:
    road = Road(world)
    answers: list[Any] = []

    def again(reply: Any) -> None:
        answers.append(reply)
        items = (OffsetCommit(partition=pid(1), offset=Offset(20)),)
        world.coordinator.commit(GROUP, NO_MEMBER, NO_GENERATION, items, RequestId(b""), 1_000, answers.append)

    items = (OffsetCommit(partition=pid(1), offset=Offset(5)),)
    world.coordinator.commit(GROUP, NO_MEMBER, NO_GENERATION, items, RequestId(b""), 1_000, again)
    commit(world, 10)
    road.deliver(0)
    assert road.offsets == [5, 10]
    road.deliver(1)
    assert road.offsets == [5, 10, 20]
    road.deliver(2)
    assert answers == [Done(), Done()]


def test_waiting_changes_are_bounded_per_group_and_in_total(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_queues, "GROUP_CHANGES_WAITING_MAX", 2)
    road = Road(world)
    commit(world, 1)
    commit(world, 2)
    third, _ = commit(world, 3)
    assert [e.code for e in third] == [ErrorCode.OVERLOADED]
    monkeypatch.setattr(change_queues, "GROUP_CHANGES_WAITING_MAX", 9)
    monkeypatch.setattr(change_queues, "GROUP_CHANGES_MAX", 2)
    fourth, _ = commit(world, 4)
    assert [e.code for e in fourth] == [ErrorCode.OVERLOADED]
    road.deliver(0)
    road.deliver(1)
    assert commit(world, 5)[0] == []


def test_stopping_answers_what_waits(world: World) -> None:
    Road(world)
    first, _ = commit(world, 1)
    second, _ = commit(world, 2)
    world.coordinator.stop()
    assert first == []  # the node answers it
    assert [e.code for e in second] == [ErrorCode.SHUTTING_DOWN]
    third, _ = commit(world, 3)
    assert [e.code for e in third] == [ErrorCode.NOT_COORDINATOR]


def test_other_nodes_name_the_coordinator_and_its_address(world: World) -> None:
    other = next(n for n in world.nodes if n != world.owner)
    (refusal,), _ = commit(world, 1, at=other)
    assert (refusal.code, refusal.details.leader) == (ErrorCode.NOT_COORDINATOR, world.owner)
    assert refusal.details.leader_address == "host:1"


@pytest.mark.parametrize("is_owner", [True, False])
def test_node_without_a_quorum_names_no_coordinator(world: World, is_owner: bool) -> None:
    node = next(n for n in world.nodes if (n == world.owner) == is_owner)
    world.nodes[node].is_ready = False
    (refusal,), _ = commit(world, 1, at=node)
    assert (refusal.code, refusal.details.leader_address) == (ErrorCode.NODE_NOT_READY, None)


def test_commit_of_no_member_is_refused_while_the_group_has_members(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    answers, _ = commit(world, 3)
    world.run()
    assert [e.code for e in answers] == [ErrorCode.UNKNOWN_MEMBER]
    assert a.commit(4) is None


def test_leave_does_not_overtake_the_commit_before_it(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    answers: list[Any] = []
    items = (OffsetCommit(partition=pid(1), offset=Offset(5)),)
    world.coordinator.commit(GROUP, a.who, a.generation, items, RequestId(b""), 1_000, answers.append)
    _leave_now(world, a)
    world.run()
    assert answers == [Done()]
    assert committed(world) == 5
    assert world.group.members == {}


def _leave_now(world: World, a: Client) -> None:
    world.coordinator.leave(GROUP, [a.who], lambda _outcomes: None)
