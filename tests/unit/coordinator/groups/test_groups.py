"""A group's coordinator: joining, waiting, sessions, leaving, and static members."""

from dataclasses import replace

import pytest

from smq.coordinator.groups import coordinator as coordinator_module
from smq.coordinator.groups import member_checks
from smq.coordinator.groups.member_requests import Identity, Outcome, Sync, Synced
from smq.coordinator.limits import GROUP_ID_GIVEN_MS_MAX, GROUP_SESSION_MS_MAX
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import MEMBER_TEXT_BYTES_MAX
from smq.raft_state.state import GroupPhase
from tests.unit.coordinator.groups.world import COMMAND_MS, GROUP, World, assemble, client, restarted, static_pair
from tests.unit.raft_state.support import pid

OK = Outcome.OK


@pytest.fixture
def world() -> World:
    return World()


# -------------------------------------------------------------------------------------------------- joining
def test_new_member_gets_its_id_first_and_joins_under_it(world: World) -> None:
    a = client(world, "a").ask()
    assert (a.outcome, a.generation) == (Outcome.ID_RESERVED, -1)
    assert a.member_id.startswith("client-")
    a.ask()
    world.run()
    joined = a.joined[-1]
    assert (joined.outcome, joined.generation, joined.protocol, joined.leader) == (OK, 1, "range", a.member_id)
    assert joined.members == ((a.member_id, "", b"m"),)


def test_two_members_share_a_generation_and_the_leader_alone_sees_the_members(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    assert world.group.phase is GroupPhase.STABLE
    assert len(a.joined[-1].members) == 2
    assert b.joined[-1].members == ()


def test_first_round_waits_for_more_members_and_longer_when_one_comes() -> None:
    world = World(initial_delay_ms=3_000)
    a = client(world, "a").join()
    world.run(2_500)
    b = client(world, "b").join()
    world.run(2_500)
    assert a.joined[-1].outcome is Outcome.ID_RESERVED
    world.run(600)
    assert (a.outcome, b.outcome, a.generation, b.generation) == (OK, OK, 1, 1)


def test_first_round_waits_no_longer_than_the_rebalance_time_out() -> None:
    world = World(initial_delay_ms=3_000)
    a = client(world, "a", session_ms=4_000).join()
    for n in range(3):
        world.run(1_900)
        client(world, f"b{n}", session_ms=4_000).join()
    assert a.outcome is OK
    hasty = World(initial_delay_ms=3_000)
    c = client(hasty, "c", session_ms=2_000).join()
    hasty.run(2_100)
    assert c.outcome is OK


def test_member_that_does_not_come_back_in_time_is_left_out(world: World) -> None:
    a, b = client(world, "a", session_ms=5_000), client(world, "b", session_ms=5_000)
    assemble(world, a, b)
    c = client(world, "c", session_ms=5_000).join()
    for _ in range(4):
        world.run(1_000)
        assert b.beat() is Outcome.REBALANCING  # it is alive, but does not join
    a.ask()
    world.run(2_000)
    assert (a.generation, c.generation) == (3, 3)
    assert set(world.group.members) == {a.member_id, c.member_id}
    assert b.beat() is Outcome.UNKNOWN_MEMBER


def test_follower_that_joins_again_unchanged_gets_its_generation_and_the_leader_a_new_one(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    leader, follower = (a, b) if world.group.leader == a.member_id else (b, a)
    follower.ask()
    world.run()
    assert (follower.outcome, follower.generation) == (OK, world.group.generation)
    before = world.group.generation
    leader.ask()
    follower.ask()
    world.run()
    assert leader.generation == follower.generation == before + 1


def test_member_with_other_metadata_starts_a_rebalance(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    follower, leader = (b, a) if world.group.leader == a.member_id else (a, b)
    follower.metadata = b"other"
    follower.ask()
    world.run()
    assert leader.beat() is Outcome.REBALANCING


def test_answer_lost_before_the_assignment_is_given_again(world: World) -> None:
    a = client(world, "a").join()
    world.run()
    a.ask()
    world.run()
    assert [(j.outcome, j.generation) for j in a.joined[1:]] == [(OK, 1), (OK, 1)]
    assert len(a.joined[-1].members) == 1


def test_protocol_that_all_know_and_most_prefer_is_chosen(world: World) -> None:
    a = client(world, "a", protocols=("sticky", "range", "roundrobin"))
    b = client(world, "b", protocols=("roundrobin", "range"))
    c = client(world, "c", protocols=("roundrobin", "range", "sticky"))
    assemble(world, a, b, c)
    assert world.group.protocol == "roundrobin"


@pytest.mark.parametrize(
    "fields", [{"protocols": ("sticky",)}, {"protocol_type": "connect"}, {"protocol_type": ""}, {"protocols": ()}]
)
def test_member_that_shares_no_protocol_is_inconsistent(world: World, fields: dict[str, object]) -> None:
    assemble(world, client(world, "a"))
    assert client(world, "b", **fields).ask().outcome is Outcome.PROTOCOL_MISMATCH


@pytest.mark.parametrize("session_ms", [0, 999, GROUP_SESSION_MS_MAX + 1])
def test_session_that_is_too_short_or_too_long_is_refused(world: World, session_ms: int) -> None:
    assert client(world, "a", session_ms=session_ms).ask().outcome is Outcome.BAD_SESSION_TIMEOUT


def test_full_group_takes_no_more_members(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_checks, "GROUP_MEMBERS_MAX", 2)
    assemble(world, client(world, "a"))
    b = client(world, "b").ask()
    assert b.outcome is Outcome.ID_RESERVED
    assert client(world, "c").ask().outcome is Outcome.GROUP_FULL
    world.run(GROUP_ID_GIVEN_MS_MAX + 100)
    assert b.ask().outcome is Outcome.UNKNOWN_MEMBER  # b did not join in time


def test_groups_max_refuses_a_new_group_and_not_an_existing_one(world: World) -> None:
    assemble(world, client(world, "a"))
    world.machine.state.groups_max = 1
    join = client(world, "b")
    join.ask()
    assert join.outcome is Outcome.ID_RESERVED
    other = next(n for n in ("x", "y", "z", "w", "v", "u") if world.coordinator.refusal(n) is OK)
    outcomes: list[Outcome] = []
    world.coordinator.join(replace(join.request(), group=other), lambda joined: outcomes.append(joined.outcome))
    assert outcomes == [Outcome.TOO_MANY_GROUPS]


def test_an_address_has_a_bound_of_groups_without_members(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "GROUPS_NEW_PER_ADDRESS_MAX", 2)
    names = [name for name in map(str, range(50)) if world.coordinator.refusal(name) is OK][:4]
    requested = client(world, "a").request()
    outcomes: list[Outcome] = []

    def ask(name: str, address: str) -> Outcome:
        member = replace(requested.member, client_host=address)
        world.coordinator.join(
            replace(requested, group=name, member=member), lambda joined: outcomes.append(joined.outcome)
        )
        return outcomes[-1]

    assert [ask(name, "/a") for name in names[:2]] == [Outcome.ID_RESERVED] * 2
    assert ask(names[2], "/a") is Outcome.TOO_MANY_NEW_GROUPS
    assert ask(names[0], "/a") is Outcome.ID_RESERVED, "an existing group may be joined"
    assert ask(names[2], "/b") is Outcome.ID_RESERVED, "other addresses are not held up"
    world.run(GROUP_ID_GIVEN_MS_MAX + 6_000)  # no member came: what was kept for them is swept
    assert ask(names[3], "/a") is Outcome.ID_RESERVED


def test_names_that_are_too_long_are_refused_before_they_travel(world: World) -> None:
    a = client(world, "a", instance="i" * (MEMBER_TEXT_BYTES_MAX + 1)).ask()
    assert a.outcome is Outcome.BAD_MEMBER
    assert world.nodes[world.owner].proposed == []


def test_unknown_member_is_refused_everywhere(world: World) -> None:
    ghost = client(world, "x", member_id="ghost", generation=1)
    for is_there in (False, True):
        if is_there:
            assemble(world, client(world, "a"))
        assert ghost.ask().outcome is Outcome.UNKNOWN_MEMBER
        ghost.member_id = "ghost"
        assert ghost.beat() is Outcome.UNKNOWN_MEMBER
        assert ghost.leave() == [Outcome.UNKNOWN_MEMBER]
        ghost.sync()
        assert ghost.synced[-1].outcome is Outcome.UNKNOWN_MEMBER


def test_joiner_whose_connection_ends_is_no_member(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    b = client(world, "b").join()
    world.run()
    b.withdraw()
    a.ask()
    world.run()
    assert list(world.group.members) == [a.member_id]


def test_only_joiner_whose_connection_ends_leaves_nothing_behind() -> None:
    world = World(initial_delay_ms=1_000)
    a = client(world, "a").join()
    a.withdraw()
    world.run(60_000)
    assert world.machine.state.groups == {}
    assert world.coordinator._live == {}


def test_member_that_asks_twice_is_answered_once_with_the_generation(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a)
    b.join()
    b.ask()
    a.ask()
    world.run()
    assert [j.outcome for j in b.joined[-2:]] == [Outcome.REBALANCING, OK]


# -------------------------------------------------------------------------------------------------- syncing
def test_followers_wait_for_the_leaders_assignment(world: World) -> None:
    a, b = client(world, "a", takes_id_first=False), client(world, "b", takes_id_first=False)
    assemble(world, a)
    b.ask()
    a.ask()
    world.run()
    b.sync()
    world.run()
    assert b.synced == []
    assert b.commit(5) is ErrorCode.REBALANCE_IN_PROGRESS
    a.synced = b.synced  # one list: whose answer comes first
    a.sync(**{a.member_id: b"A", b.member_id: b"B", "stranger": b"C"})
    world.run()
    assert [answer.assignment for answer in a.synced] == [b"A", b"B"], "the leader's own first"
    assert b.commit(5) is None


def test_sync_of_another_generation_or_protocol_is_refused(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    answers: list[Synced] = []
    requested = Sync(group=GROUP, who=a.who, generation=1)
    for request in (
        replace(requested, generation=7),
        replace(requested, protocol="sticky"),
        replace(requested, protocol_type="connect"),
        replace(requested, protocol="range", protocol_type="consumer"),
    ):
        world.coordinator.sync(request, answers.append)
    assert [s.outcome for s in answers] == [
        Outcome.WRONG_GENERATION,
        Outcome.PROTOCOL_MISMATCH,
        Outcome.PROTOCOL_MISMATCH,
        OK,
    ]
    assert (answers[-1].assignment, answers[-1].protocol) == (b"a", "range")


def test_member_that_waits_for_an_assignment_learns_of_the_next_rebalance(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    leader, follower = (a, b) if world.group.leader == a.member_id else (b, a)
    leader.ask()
    follower.ask()
    world.run()
    follower.sync()
    client(world, "c").join()
    world.run()
    assert follower.synced[-1].outcome is Outcome.REBALANCING
    assert follower.beat() is Outcome.REBALANCING


def test_leader_that_gives_no_assignment_is_evicted(world: World) -> None:
    a, b = client(world, "a", session_ms=5_000), client(world, "b", session_ms=5_000)
    assemble(world, a, b)
    leader, follower = (a, b) if world.group.leader == a.member_id else (b, a)
    leader.ask()
    follower.ask()
    world.run()
    follower.sync()
    for _ in range(6):
        world.run(1_000)
        leader.beat()  # alive, and silent about the assignment
    assert follower.synced[-1].outcome is Outcome.REBALANCING
    follower.ask()
    world.run()
    assert list(world.group.members) == [follower.member_id]


# -------------------------------------------------------------------------------------------------- sessions
def test_silent_member_is_evicted_and_the_others_rebalance(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    for _ in range(4):
        world.run(1_000)
        outcome = a.beat()
    assert outcome is Outcome.REBALANCING
    assert list(world.group.members) == [a.member_id]
    a.ask()
    world.run()
    assert (a.outcome, a.generation) == (OK, world.group.generation)
    assert b.beat() is Outcome.UNKNOWN_MEMBER
    assert b.commit(1) is ErrorCode.UNKNOWN_MEMBER


def test_heartbeat_and_commit_keep_a_member_alive(world: World) -> None:
    a, b = client(world, "a", session_ms=3_000), client(world, "b", session_ms=3_000)
    assemble(world, a, b)
    for offset in range(8):
        world.run(1_000)
        assert a.beat() is OK
        assert b.commit(offset) is None
    assert len(world.group.members) == 2


def test_heartbeat_of_another_generation_is_illegal(world: World) -> None:
    a = client(world, "a")
    assemble(world, a)
    a.generation = 9
    assert a.beat() is Outcome.WRONG_GENERATION


def test_all_members_gone_empty_the_group_which_is_dropped_by_the_cleanup(world: World) -> None:
    assemble(world, client(world, "a", session_ms=2_000), client(world, "b", session_ms=2_000))
    world.run(10_000)
    assert world.group.phase is GroupPhase.EMPTY
    assert all(c._live == {} for c in world.coordinators.values())
    world.apply(AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=1))
    assert world.group.phase is GroupPhase.EMPTY
    world.apply(AdvanceClock(seen_ms=1, elapsed_ms=1, now_ms=2))
    assert world.machine.state.groups == {}


@pytest.mark.parametrize("beat_after_ms", [0.0, 7.0, 20.0, 49.0])
def test_session_ends_on_time_and_not_before(world: World, beat_after_ms: float) -> None:
    """Whenever the last heartbeat came: it is not a tick that ends the session."""
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    world.run(1_000 + beat_after_ms)
    assert a.beat() is OK
    world.run(1_999)
    assert a.member_id in world.group.members
    world.run(1 + 2 + COMMAND_MS)
    assert a.member_id not in world.group.members


def test_heartbeat_while_its_eviction_is_under_way_does_not_say_that_the_member_is_alive(world: World) -> None:
    a = client(world, "a", session_ms=2_000)
    assemble(world, a)
    assert a.beat() is OK
    world.run(2_000 + COMMAND_MS / 2 + 0.5)
    assert a.member_id in world.group.members
    assert a.beat() is Outcome.UNKNOWN_MEMBER


def test_members_of_many_sessions_are_each_evicted_on_time(world: World) -> None:
    members = [client(world, f"c{n}", session_ms=2_000 + 10 * n, rebalance_ms=60_000) for n in range(10)]
    assemble(world, *members)
    removed: dict[str, float] = {}
    for c in members:
        assert c.beat() is OK
    start_ns = world.clock.monotonic_ns()
    while len(removed) < len(members):
        world.run(0.5)
        now_ms = (world.clock.monotonic_ns() - start_ns) / 1e6
        removed |= {c.name: now_ms for c in members if c.member_id not in world.group.members and c.name not in removed}
    assert all(0 <= removed[c.name] - c.session_ms <= 2 + 2 * COMMAND_MS for c in members)


# -------------------------------------------------------------------------------------------------- leaving
def test_member_that_leaves_makes_the_others_rebalance_and_the_last_empties_the_group(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a, b)
    assert a.commit(7) is None
    assert b.leave() == [OK]
    assert b.commit(8) is ErrorCode.UNKNOWN_MEMBER
    assert a.beat() is Outcome.REBALANCING
    a.ask()
    world.run()
    assert a.leave() == [OK]
    assert (world.group.phase, world.group.offsets[pid(1)].offset) == (GroupPhase.EMPTY, 7)


def test_members_leave_in_one_request_each_with_its_own_answer(world: World) -> None:
    a, b = client(world, "a"), client(world, "b", instance="i")
    assemble(world, a, b)
    outcomes: list[Outcome] = []
    leaving = [Identity(member_id="ghost"), *(Identity(member_id="", instance_id=i) for i in ("j", "i")), a.who]
    world.coordinator.leave(GROUP, leaving, outcomes.extend)
    world.run()
    assert outcomes == [Outcome.UNKNOWN_MEMBER, Outcome.UNKNOWN_MEMBER, OK, OK]
    assert world.group.is_unused


def test_member_that_has_only_a_reserved_id_leaves(world: World) -> None:
    a = client(world, "a").ask()
    assert a.leave() == [OK]
    assert a.ask().outcome is Outcome.UNKNOWN_MEMBER


def test_joiner_that_leaves_is_answered(world: World) -> None:
    a, b = client(world, "a"), client(world, "b")
    assemble(world, a)
    b.join()
    assert b.leave() == [OK]
    assert b.outcome is Outcome.UNKNOWN_MEMBER


# -------------------------------------------------------------------------------------------------- static members
def test_static_member_is_back_without_a_rebalance_and_its_former_process_is_fenced(world: World) -> None:
    a, b = static_pair(world)
    generation = world.group.generation
    again = restarted(a).ask()
    world.run()
    assert (again.outcome, again.generation) == (OK, generation)
    assert again.member_id != a.member_id
    again.sync()
    assert again.synced[-1].assignment == b"a"
    assert b.beat() is OK
    assert a.beat() is Outcome.FENCED_INSTANCE
    assert a.commit(1) is ErrorCode.FENCED_INSTANCE
    assert a.ask().outcome is Outcome.FENCED_INSTANCE


@pytest.mark.parametrize("can_skip", [True, False])
def test_static_leader_that_is_back_computes_no_assignment(world: World, can_skip: bool) -> None:
    a = client(world, "a", instance="i", can_skip=can_skip)
    assemble(world, a)
    again = restarted(a).ask()
    world.run()
    joined = again.joined[-1]
    assert world.group.leader == again.member_id
    assert joined.skip_assignment is can_skip
    assert (joined.leader == again.member_id) is can_skip
    assert bool(joined.members) is can_skip


def test_static_member_is_kept_over_a_rebalance_until_its_session_ends(world: World) -> None:
    a = client(world, "a", instance="i", session_ms=20_000, rebalance_ms=5_000)
    b, c = (client(world, name, session_ms=60_000, rebalance_ms=5_000) for name in "bc")
    assemble(world, a, b)
    c.join()
    b.ask()
    world.run(5_100)
    assert (b.outcome, c.outcome) == (OK, OK)
    b.sync(**{a.member_id: b"a"})
    c.sync()
    world.run(14_000)
    assert set(world.group.members) == {a.member_id, b.member_id, c.member_id}
    assert (b.beat(), c.beat()) == (OK, OK)
    world.run(1_000)
    assert set(world.group.members) == {b.member_id, c.member_id}
    assert b.beat() is Outcome.REBALANCING


def test_static_member_of_other_subscription_or_protocol_starts_a_rebalance(world: World) -> None:
    a, b = static_pair(world)
    again = restarted(a)
    again.metadata = b"other"
    again.ask()
    world.run()
    assert b.beat() is Outcome.REBALANCING
    b.ask()
    world.run()
    assert (again.outcome, again.generation) == (OK, b.generation)


def test_static_member_that_does_not_know_the_protocol_any_more_joins_as_a_new_one(world: World) -> None:
    a = client(world, "a", instance="i", protocols=("range",))
    assemble(world, a)
    again = restarted(a)
    again.protocols = ("sticky",)
    again.ask()
    world.run()
    assert (again.outcome, world.group.protocol) == (OK, "sticky")
    assert list(world.group.members) == [again.member_id]


def test_instance_that_is_unknown_or_another_members_is_refused(world: World) -> None:
    a, b = static_pair(world)
    assert client(world, "x", instance="j", member_id="ghost").ask().outcome is Outcome.UNKNOWN_MEMBER
    b.instance = "i"
    assert b.beat() is Outcome.FENCED_INSTANCE
    assert b.leave() == [Outcome.FENCED_INSTANCE]
    assert a.beat() is OK


def test_second_process_of_a_new_instance_fences_the_first(world: World) -> None:
    b = client(world, "b")
    assemble(world, b)
    first = client(world, "a", instance="i").ask()
    second = client(world, "a", instance="i").ask()
    b.ask()
    world.run()
    assert (first.outcome, second.outcome) == (Outcome.FENCED_INSTANCE, OK)
    assert set(world.group.members) == {b.member_id, second.member_id}
