"""A group's coordinator when nodes die, commands fail, or no member can be heard: what members notice."""

import pytest

from smq.coordinator.groups import live
from smq.coordinator.groups.member_requests import Outcome
from smq.coordinator.limits import GROUP_COMMAND_MS_MAX
from smq.raft_state.commands import AssignMembers, Command, FormGeneration, RemoveMembers
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, Incarnation
from smq.raft_state.replies import Done, Rejected, Reply
from smq.raft_state.state import GroupPhase
from smq.replication.api import DoneFn
from tests.unit.coordinator.groups.world import GROUP, World, assemble, client, converge, restarted, static_pair
from tests.unit.raft_state.support import commit, delete_group, pid, register, remove

OK = Outcome.OK


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------------------------- the coordinator's death
def test_new_coordinator_continues_without_a_rebalance(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    generation = world.group.generation
    former = world.fence_owner()
    assert world.owner != former
    assert a.beat(at=former) is Outcome.NOT_COORDINATOR
    for offset in range(5):
        world.run(1_000)
        assert a.beat() is OK
        assert b.commit(offset) is None
    assert world.group.generation == generation


def test_deletion_at_another_node_is_refused_and_evicts_no_member(world: World) -> None:
    a, b = client(world, "a", session_ms=2_000), client(world, "b", session_ms=2_000)
    assemble(world, a, b)
    other = next(n for n in world.nodes if n != world.owner)
    answers: list[Reply | SmqError] = []
    world.coordinators[other].delete_group(GROUP, NO_REQUEST, 1_000, answers.append)
    (refused,) = answers
    assert isinstance(refused, SmqError)
    assert (refused.code, refused.details.leader) == (ErrorCode.NOT_COORDINATOR, world.owner)
    for _ in range(16):
        world.run(500)
        assert (a.beat(), b.beat()) == (OK, OK)
    assert world.nodes[other].proposed == []


def test_deletion_is_refused_while_the_group_has_members(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    answers: list[Reply | SmqError] = []
    world.coordinator.delete_group(GROUP, NO_REQUEST, 1_000, answers.append)
    world.run()
    assert a.leave() == [OK]
    world.coordinator.delete_group(GROUP, NO_REQUEST, 1_000, answers.append)
    world.run()
    assert [getattr(answer, "code", answer) for answer in answers] == [ErrorCode.GROUP_NOT_EMPTY, Done()]
    assert GROUP not in world.machine.state.groups


def test_question_about_a_rebalance_at_another_node_makes_no_group_there(world: World) -> None:
    assemble(world, client(world, "a"))
    other = world.coordinators[next(n for n in world.nodes if n != world.owner)]
    assert not other.is_rebalancing(GROUP)
    assert other._find(GROUP) is None
    assert other._live == {}


def test_new_coordinator_gives_each_member_one_fresh_session_and_no_more(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    world.run(2_500)
    world.fence_owner()
    world.run(2_800)
    assert len(world.group.members) == 2
    assert a.beat() is OK
    world.run(400)
    assert list(world.group.members) == [a.member_id]


def test_all_nodes_restart_one_after_the_other_without_a_rebalance(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    generation = world.group.generation
    for node in (1, 2, 3):
        world.nodes[node].incarnation = Incarnation(2)
        world.apply(register(node, 2, kafka=f"host:{node}"))
        for _ in range(3):
            world.run(800)
            assert (a.beat(), b.beat()) == (OK, OK)
    assert world.group.generation == generation


def test_restarted_process_coordinates_nothing_that_its_former_life_was_given(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    world.nodes[world.owner].incarnation = Incarnation(2)
    assert a.beat() is Outcome.NOT_COORDINATOR
    assert a.ask().outcome is Outcome.NOT_COORDINATOR


def test_member_that_waits_at_a_former_coordinator_is_sent_on(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    former = world.fence_owner()
    world.run(100)
    assert b.outcome is Outcome.NOT_COORDINATOR
    assert b.ask(at=former).joined[-1].outcome is Outcome.NOT_COORDINATOR
    assert b.ask().joined[-1].outcome is Outcome.UNKNOWN_MEMBER  # the id was that coordinator's to know
    converge(world, a, b)


def test_assignment_is_given_to_the_next_coordinator(world: World) -> None:
    a = client(world, "a").join()
    world.run()
    world.fence_owner()
    world.run(100)
    a.sync(**{a.member_id: b"A"})
    world.run()
    assert (a.synced[-1].outcome, a.synced[-1].assignment) == (OK, b"A")


def test_next_coordinator_collects_those_that_must_rebalance(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    b.leave()
    world.fence_owner()
    world.run(100)
    assert a.beat() is Outcome.REBALANCING
    a.ask()
    world.run()
    assert (a.outcome, list(world.group.members)) == (OK, [a.member_id])


def test_two_coordinators_cannot_both_change_the_group(world: World) -> None:
    """The former one has not applied that it was replaced, and goes on."""
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    world.run()
    a.ask()  # the round is over: the former coordinator proposes a generation ...
    world.fence_owner()  # ... and another one is chosen before it is committed
    world.run()
    assert (a.outcome, b.outcome) == (Outcome.NOT_COORDINATOR, Outcome.NOT_COORDINATOR)
    assert (world.group.generation, list(world.group.members)) == (1, [a.member_id])


@pytest.mark.parametrize("is_applied", [True, False])
def test_generation_whose_outcome_is_unknown_sends_all_members_back_to_the_state(
    world: World, is_applied: bool
) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a)
    b.join()
    world.run()
    node = world.nodes[world.owner]
    node.fail_next, node.is_applied = SmqError(ErrorCode.TIMED_OUT, "lost"), is_applied
    a.ask()
    world.run()
    assert (a.outcome, b.outcome) == (Outcome.UNCERTAIN, Outcome.UNCERTAIN)
    world.run(100)
    converge(world, a, b)
    assert set(world.group.members) == {a.member_id, b.member_id}


def test_member_that_is_too_large_is_refused_alone(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    for metadata in (bytes(1_000_000), bytes(899_200)):
        assert client(world, "b", metadata=metadata).ask().outcome is Outcome.GROUP_FULL
    assert client(world, "b", protocols=("range", *map(str, range(99)))).ask().outcome is Outcome.BAD_MEMBER
    assert a.beat() is OK


def test_removal_that_is_applied_after_its_proposer_gave_it_up_still_makes_the_others_rebalance(world: World) -> None:
    """Otherwise no member would take over the assignment of the one that has gone."""
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    node = world.nodes[world.owner]
    node.fail_next = SmqError(ErrorCode.TIMED_OUT, "lost")
    b.leave()
    world.run(100)
    assert a.beat() is OK  # the next object has taken the group up as it was
    late = node.proposed[-1]
    assert isinstance(late, RemoveMembers)
    assert not isinstance(world.apply(late), Rejected)
    assert a.beat() is Outcome.REBALANCING
    a.ask()
    world.run()
    assert (a.outcome, list(world.group.members)) == (OK, [a.member_id])


def test_assignment_that_is_applied_after_its_proposer_gave_it_up_is_given_to_those_that_wait(world: World) -> None:
    members = [client(world, name, session_ms=5_000, rebalance_ms=300_000) for name in "abc"]
    converge(world, *members)
    leader = next(c for c in members if world.group.leader == c.member_id)
    first, second = (c for c in members if c is not leader)
    shares = {c.member_id: c.name.encode() for c in members}
    node = world.nodes[world.owner]
    node.fail_next = SmqError(ErrorCode.TIMED_OUT, "lost")
    leader.sync(**shares)
    first.sync()
    world.run(100)
    assert [c.synced[-1].outcome for c in (leader, first)] == [Outcome.UNCERTAIN] * 2
    late = node.proposed[-1]
    assert isinstance(late, AssignMembers)
    first.sync()
    second.sync()
    world.run(100)
    assert [len(c.synced) for c in (first, second)] == [1, 0]  # the next object holds them
    assert not isinstance(world.apply(late), Rejected)
    assert leader.beat() is OK
    assert [c.synced[-1].assignment for c in (first, second)] == [c.name.encode() for c in (first, second)]
    leader.sync(**shares)
    assert leader.synced[-1].assignment == leader.name.encode()
    world.run(4_900)  # their sessions began with the answer
    assert [c.beat() for c in (first, second)] == [OK, OK]


def test_sync_that_waits_does_not_get_the_assignment_of_a_later_generation(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    converge(world, a, b)
    leader, follower = (a, b) if world.group.leader == a.member_id else (b, a)
    node = world.nodes[world.owner]
    leader.metadata = follower.metadata = b"other"
    leader.ask()
    node.fail_next = SmqError(ErrorCode.TIMED_OUT, "lost")
    follower.ask()
    world.run(100)
    late, former = node.proposed[-1], world.group.generation
    assert isinstance(late, FormGeneration)
    follower.generation = former
    follower.sync()  # the next object holds it
    assert not isinstance(world.apply(late), Rejected)
    leader.ask()
    world.run()
    assert leader.generation == former + 1
    leader.sync(**{follower.member_id: b"later"})
    world.run()
    assert [s.outcome for s in follower.synced] == [Outcome.WRONG_GENERATION]


def test_limit_of_the_state_machine_has_an_outcome_of_its_own(world: World) -> None:
    world.machine.state.groups_max = 1
    a = client(world, "a").ask()
    world.apply(commit("another", (pid(1), 1)))
    a.ask()
    world.run()
    assert a.outcome is Outcome.LIMIT_EXCEEDED
    assert list(world.machine.state.groups) == ["another"]


def test_generation_that_was_overtaken_before_its_reply_is_not_answered(world: World) -> None:
    """It took effect, but by then another coordinator had emptied the group: it is not the present generation."""
    a = client(world, "a").ask()
    former = world.nodes[world.owner]
    original = former.propose

    def propose(command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        def overtaken(reply: Reply | SmqError) -> None:
            world.fence_owner()
            epoch = coordinator_of(world.machine.state, GROUP).epoch
            world.apply(remove(GROUP, epoch, 1, a.member_id))
            done(reply)

        original(command, timeout_ms, overtaken)

    former.propose = propose  # type: ignore[method-assign]  # the moment between apply and answer
    a.ask()
    world.run()
    assert a.outcome is Outcome.NOT_COORDINATOR
    assert world.group.phase is GroupPhase.EMPTY


def test_leave_and_replacement_that_fail_are_answered(world: World) -> None:
    a, _ = static_pair(world)
    node = world.nodes[world.owner]
    node.fail_next = SmqError(ErrorCode.NO_QUORUM, "lost")
    assert a.leave() == [Outcome.UNCERTAIN]
    node.fail_next = SmqError(ErrorCode.SHUTTING_DOWN, "lost")
    again = restarted(a).ask()
    world.run()
    assert again.outcome is Outcome.NOT_COORDINATOR


def test_requests_during_a_change_wait_for_it_and_too_many_do_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "GROUP_QUEUE_MAX", 1)
    a = client(world, "a", takes_id_first=False).ask()
    b = client(world, "b", takes_id_first=False).ask()
    c = client(world, "c", takes_id_first=False).ask()
    assert c.outcome is Outcome.QUEUE_FULL
    world.run()
    assert a.outcome is OK
    a.ask()
    world.run()
    assert (a.generation, b.generation) == (2, 2)


# ---------------------------------------------------------------------------------------- when a node hears no member
def test_node_without_a_quorum_refuses_and_evicts_no_member_for_it(world: World) -> None:
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    node = world.nodes[world.owner]
    node.is_ready = False
    assert a.beat() is Outcome.NOT_READY
    assert a.ask().outcome is Outcome.NOT_READY
    world.run(10_000)
    node.is_ready = True
    world.run(1_500)
    a.generation = world.group.generation
    assert a.beat() is OK


def test_process_that_stood_still_gives_all_members_time(world: World) -> None:
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    world.process.pause()
    world.run(10_000)
    world.process.resume()
    world.run(1_500)
    assert a.beat() is OK


def test_stopped_coordinator_sends_all_members_on(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    world.coordinator.stop()
    assert b.outcome is Outcome.NOT_COORDINATOR
    assert a.beat() is Outcome.NOT_COORDINATOR


def test_members_of_a_generation_that_formed_after_it_was_given_up_are_evicted_in_time(world: World) -> None:
    node, late = world.nodes[world.owner], list[FormGeneration]()
    propose = node.propose

    def hold_the_first(command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        if not isinstance(command, FormGeneration) or late:
            propose(command, timeout_ms, done)
            return
        late.append(command)
        world.clock.call_later(timeout_ms, lambda: done(SmqError(ErrorCode.TIMED_OUT, "no quorum")))

    node.propose = hold_the_first  # type: ignore[method-assign]  # one answer is lost
    client(world, "a", session_ms=2_000).join()
    world.run(2 * GROUP_COMMAND_MS_MAX)
    assert GROUP not in world.machine.state.groups
    world.apply(late[0])  # the quorum is back, and the client is gone
    assert world.group.members
    world.run(20_000)
    assert not world.group.members


# -------------------------------------------------------------------------------------------------- the rest
def test_group_that_is_deleted_while_members_join_starts_over(world: World) -> None:
    world.apply(commit(GROUP, (pid(1), 3)))
    a = client(world, "a").ask()
    world.apply(delete_group(GROUP))
    a.ask()
    world.run()
    assert (a.outcome, a.generation, world.group.offsets) == (OK, 1, {})
