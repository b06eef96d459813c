"""A group's coordinator when nodes die, commands fail, or nobody can be heard: what members notice of it."""

import pytest

from smq.coordinator.groups import live as live_module
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import Command, DeleteGroup, ExpireOffsets, RemoveMembers, SetOffsetsRetention
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Incarnation
from smq.raft_state.replies import Rejected, Reply
from smq.replication.api import DoneFn
from tests.unit.coordinator.groups.world import GROUP, World, assemble, client, converge, restarted, static_pair
from tests.unit.raft_state.support import commit, pid, register, remove

NONE = KafkaError.NONE


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------------------------- the coordinator's death
def test_new_coordinator_goes_on_without_a_rebalance(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    generation = world.group.generation
    former = world.fence_owner()
    assert world.owner != former
    assert a.beat(at=former) is KafkaError.NOT_COORDINATOR
    for offset in range(5):
        world.run(1_000)
        assert a.beat() is NONE
        assert b.commit(offset) is None
    assert world.group.generation == generation


def test_new_coordinator_gives_each_member_one_fresh_session_and_no_more(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    world.run(2_500)
    world.fence_owner()
    world.run(2_800)
    assert len(world.group.members) == 2
    assert a.beat() is NONE
    world.run(400)
    assert list(world.group.members) == [a.member_id]


def test_all_nodes_restart_one_after_the_other_and_nobody_rebalances(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    generation = world.group.generation
    for node in (1, 2, 3):
        world.nodes[node].incarnation = Incarnation(2)
        world.apply(register(node, 2, kafka=f"host:{node}"))
        for _ in range(3):
            world.run(800)
            assert (a.beat(), b.beat()) == (NONE, NONE)
    assert world.group.generation == generation


def test_restarted_process_coordinates_nothing_that_its_former_life_was_given(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    world.nodes[world.owner].incarnation = Incarnation(2)
    assert a.beat() is KafkaError.NOT_COORDINATOR
    assert a.ask().code is KafkaError.NOT_COORDINATOR


def test_who_waits_at_a_former_coordinator_is_sent_on(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    former = world.fence_owner()
    world.run(100)
    assert b.code is KafkaError.NOT_COORDINATOR
    assert b.ask(at=former).joined[-1].code is KafkaError.NOT_COORDINATOR
    assert b.ask().joined[-1].code is KafkaError.UNKNOWN_MEMBER_ID  # the id was that coordinator's to know
    converge(world, a, b)


def test_assignment_is_given_to_the_next_coordinator(world: World) -> None:
    a = client(world, "a").join()
    world.run()
    world.fence_owner()
    world.run(100)
    a.sync(**{a.member_id: b"A"})
    world.run()
    assert (a.synced[-1].code, a.synced[-1].assignment) == (NONE, b"A")


def test_next_coordinator_collects_those_that_must_rebalance(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    b.leave()
    world.fence_owner()
    world.run(100)
    assert a.beat() is KafkaError.REBALANCE_IN_PROGRESS
    a.ask()
    world.run()
    assert (a.code, list(world.group.members)) == (NONE, [a.member_id])


def test_two_coordinators_cannot_both_change_the_group(world: World) -> None:
    """The former one has not applied that it was replaced, and goes on."""
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    world.run()
    a.ask()  # the round is over: the former coordinator proposes a generation ...
    world.fence_owner()  # ... and another one is chosen before it is committed
    world.run()
    assert (a.code, b.code) == (KafkaError.NOT_COORDINATOR, KafkaError.NOT_COORDINATOR)
    assert (world.group.generation, list(world.group.members)) == (1, [a.member_id])


@pytest.mark.parametrize("is_applied", [True, False])
def test_generation_whose_outcome_is_not_known_sends_everybody_back_to_the_state(
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
    assert (a.code, b.code) == (KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_NOT_AVAILABLE)
    world.run(100)
    converge(world, a, b)
    assert set(world.group.members) == {a.member_id, b.member_id}


def test_member_that_is_too_large_is_refused_alone(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    for metadata in (bytes(1_000_000), bytes(899_200)):
        assert client(world, "b", metadata=metadata).ask().code is KafkaError.GROUP_MAX_SIZE_REACHED
    assert client(world, "b", protocols=("range", *map(str, range(99)))).ask().code is KafkaError.INVALID_REQUEST
    assert a.beat() is NONE


def test_removal_that_is_applied_after_its_proposer_gave_it_up_still_makes_the_others_rebalance(world: World) -> None:
    """Else nobody would take over what was assigned to the member that has gone."""
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    node = world.nodes[world.owner]
    node.fail_next = SmqError(ErrorCode.TIMED_OUT, "lost")
    b.leave()
    world.run(100)
    assert a.beat() is NONE  # the next object has taken the group up as it was
    late = node.proposed[-1]
    assert isinstance(late, RemoveMembers)
    assert not isinstance(world.apply(late), Rejected)
    assert a.beat() is KafkaError.REBALANCE_IN_PROGRESS
    a.ask()
    world.run()
    assert (a.code, list(world.group.members)) == (NONE, [a.member_id])


def test_limit_that_the_state_machine_keeps_is_told_as_a_policy(world: World) -> None:
    world.machine.state.groups_max = 1
    a = client(world, "a").ask()
    world.apply(commit("another", (pid(1), 1)))
    a.ask()
    world.run()
    assert a.code is KafkaError.POLICY_VIOLATION
    assert list(world.machine.state.groups) == ["another"]


def test_generation_that_was_overtaken_before_its_answer_came_is_not_told(world: World) -> None:
    """It took effect, and by then another coordinator had emptied the group: nobody may take it for the present one."""
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
    assert a.code is KafkaError.NOT_COORDINATOR
    assert world.machine.state.groups == {}


def test_leave_and_replacement_that_fail_are_answered(world: World) -> None:
    a, _ = static_pair(world)
    node = world.nodes[world.owner]
    node.fail_next = SmqError(ErrorCode.NO_QUORUM, "lost")
    assert a.leave() == [KafkaError.COORDINATOR_NOT_AVAILABLE]
    node.fail_next = SmqError(ErrorCode.SHUTTING_DOWN, "lost")
    again = restarted(a).ask()
    world.run()
    assert again.code is KafkaError.NOT_COORDINATOR


def test_requests_during_a_change_wait_for_it_and_too_many_do_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "GROUP_QUEUE_MAX", 1)
    a = client(world, "a", takes_id_first=False).ask()
    b = client(world, "b", takes_id_first=False).ask()
    c = client(world, "c", takes_id_first=False).ask()
    assert c.code is KafkaError.COORDINATOR_NOT_AVAILABLE
    world.run()
    assert a.code is NONE
    a.ask()
    world.run()
    assert (a.generation, b.generation) == (2, 2)


# ---------------------------------------------------------------------------------------- when a node hears nobody
def test_node_without_a_quorum_refuses_and_evicts_nobody_for_it(world: World) -> None:
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    node = world.nodes[world.owner]
    node.is_ready = False
    assert a.beat() is KafkaError.COORDINATOR_NOT_AVAILABLE
    assert a.ask().code is KafkaError.COORDINATOR_NOT_AVAILABLE
    world.run(10_000)
    node.is_ready = True
    world.run(1_500)
    a.generation = world.group.generation
    assert a.beat() is NONE


def test_process_that_stood_still_gives_everybody_time(world: World) -> None:
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    world.process.pause()
    world.run(10_000)
    world.process.resume()
    world.run(1_500)
    assert a.beat() is NONE


def test_stopped_coordinator_sends_everybody_on(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    world.coordinator.stop()
    assert b.code is KafkaError.NOT_COORDINATOR
    assert a.beat() is KafkaError.NOT_COORDINATOR


# -------------------------------------------------------------------------------------------------- the rest
def test_group_that_is_deleted_while_members_join_begins_anew(world: World) -> None:
    world.apply(commit(GROUP, (pid(1), 3)))
    a = client(world, "a").ask()
    world.apply(DeleteGroup(group=GROUP))
    a.ask()
    world.run()
    assert (a.code, a.generation, world.group.offsets) == (NONE, 1, {})


def test_expiry_is_proposed_by_one_node(world: World) -> None:
    assert not isinstance(world.apply(SetOffsetsRetention(retention_ms=4_000)), Rejected)
    world.apply(commit(GROUP, (pid(1), 3)))
    world.run(6_000)  # the first look starts the clock of expiry
    proposers = [n for n, node in world.nodes.items() if any(isinstance(c, ExpireOffsets) for c in node.proposed)]
    assert proposers == [world.machine.state.coordinators[0].node]
    assert world.machine.state.groups == {}  # committed long before the virtual clock's time


def test_churn_of_members_leaves_none_behind(world: World) -> None:
    clients = [client(world, f"c{n}", session_ms=3_000, takes_id_first=bool(n % 2)) for n in range(50)]
    for n, c in enumerate(clients):
        c.join()
        world.run(30)
        if n % 3 == 0:
            c.withdraw()
        if n % 5 == 0:
            c.leave()
    world.run(30_000)
    assert world.machine.state.groups == {}
    assert all(coordinator._live == {} for coordinator in world.coordinators.values())
