"""Groups with members: generations, assignments, fencing, and when empty groups end."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceClock, Command, DeleteTopic, FenceNode, SetNodeDrained, UnfenceNode
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import members as members_module
from smq.raft_state.ids import Generation, Incarnation, NodeId
from smq.raft_state.limits import (
    COORDINATOR_SLOTS,
    GENERATION_MAX,
    GROUP_BYTES_MAX,
    GROUP_MEMBERS_MAX,
    MEMBER_PROTOCOLS_MAX,
    MEMBER_TEXT_BYTES_MAX,
    OFFSETS_RETENTION_MINUTES_DEFAULT,
    default_init,
)
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Done, GenerationFormed
from smq.raft_state.state import GroupPhase
from tests.unit.raft_state.support import (
    Driver,
    assign_members,
    cluster,
    commit,
    coordinated,
    delete_group,
    delete_offsets,
    expire,
    form,
    group,
    kept_minutes,
    member,
    member_commit,
    pid,
    register,
    remove,
    replaced,
    rid,
    stable,
    topic,
)

DAY_MS = 86_400_000
RETENTION_MS = OFFSETS_RETENTION_MINUTES_DEFAULT * 60_000


@pytest.fixture
def driver() -> Driver:
    return coordinated()


# ------------------------------------------------------------------------------------------------ coordinators
def counts(driver: Driver) -> dict[int, int]:
    slots = driver.machine.state.coordinators
    return {node: sum(slot.node == node for slot in slots) for node in sorted({slot.node for slot in slots})}


def test_slots_are_balanced_over_the_nodes_that_clients_can_reach() -> None:
    driver = cluster(kafka=True)
    driver.ok(register(4))
    assert sorted(counts(driver)) == [1, 2, 3]
    assert sorted(counts(driver).values()) == [21, 21, 22]


def test_fenced_node_coordinates_nothing_until_it_returns() -> None:
    driver = cluster(kafka=True)
    before = list(driver.machine.state.coordinators)
    driver.ok(FenceNode(node=NodeId(2), incarnation=Incarnation(1)))
    after = driver.machine.state.coordinators
    assert counts(driver) == {1: 32, 3: 32}
    for old, new in zip(before, after, strict=True):
        assert (new == old) if old.node != 2 else (new.epoch == old.epoch + 1)
    driver.ok(UnfenceNode(node=NodeId(2), incarnation=Incarnation(1)))
    assert sorted(counts(driver).values()) == [21, 21, 22]


def test_new_process_of_a_node_coordinates_in_a_new_epoch(driver: Driver) -> None:
    driver.ok(register(1, 2, kafka="host:1"))
    assert {(slot.incarnation, slot.epoch) for slot in driver.machine.state.coordinators} == {(2, 2)}


def test_drained_node_coordinates_only_if_there_is_no_other() -> None:
    driver = cluster(2, kafka=True)
    driver.ok(SetNodeDrained(node=NodeId(1), drained=True))
    assert counts(driver) == {2: 64}
    driver.ok(FenceNode(node=NodeId(2), incarnation=Incarnation(1)))
    assert counts(driver) == {1: 64}


def test_without_a_live_node_the_table_does_not_change(driver: Driver) -> None:
    before = list(driver.machine.state.coordinators)
    driver.ok(FenceNode(node=NodeId(1), incarnation=Incarnation(1)))
    assert driver.machine.state.coordinators == before


def test_nodes_coordinate_without_kafka_listeners_until_one_has_one() -> None:
    """Clients of gRPC reach every node."""
    driver = cluster()
    assert sorted(counts(driver).values()) == [21, 21, 22]
    driver.ok(register(4, kafka="host:4"))
    assert counts(driver) == {4: COORDINATOR_SLOTS}


def test_no_node_coordinates_before_one_has_registered() -> None:
    driver = Driver()
    driver.ok(default_init("test"))
    assert {slot.node for slot in driver.machine.state.coordinators} == {0}
    assert len(driver.machine.state.coordinators) == COORDINATOR_SLOTS
    driver.refused(form("g", 0, 0, member("m")), ErrorCode.NOT_COORDINATOR)


def changes(epoch: int) -> list[Command]:
    return [
        form("g", epoch, 1, member("m")),
        assign_members("g", epoch, 1),
        remove("g", epoch, 1, "m"),
        replaced("g", epoch, "s", member("t", instance="i")),
    ]


@pytest.mark.parametrize("index", range(4))
def test_former_coordinator_changes_nothing(driver: Driver, index: int) -> None:
    driver.ok(form("g", 1, 0, member("m"), member("s", instance="i")))
    driver.ok(register(1, 2, kafka="host:1"))
    assert coordinator_of(driver.machine.state, "g").epoch == 2
    driver.refused(changes(1)[index], ErrorCode.NOT_COORDINATOR)
    driver.ok(changes(2)[index])


def test_late_commit_of_a_former_coordinator_does_not_replace_a_newer_one(driver: Driver) -> None:
    """A member without an answer has since committed at the next coordinator, twice."""
    stable(driver, "a")
    late = member_commit("g", 1, "a", (pid(1), 5), epoch=1)
    driver.ok(register(1, 2, kafka="host:1"))
    for offset in (5, 55):
        driver.ok(member_commit("g", 1, "a", (pid(1), offset), epoch=2))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    driver.refused(member_commit("g", -1, "", (pid(1), 5), epoch=1), ErrorCode.NOT_COORDINATOR)
    assert group(driver).offsets[pid(1)].offset == 55


# ------------------------------------------------------------------------------------------------ generations
def test_generation_forms_waits_for_its_assignment_and_is_stable(driver: Driver) -> None:
    assert driver.ok(form("g", 1, 0, member("a"), member("b"))) == GenerationFormed(generation=Generation(1))
    assert group(driver).phase is GroupPhase.COMPLETING
    assert driver.ok(assign_members("g", 1, 1, a=b"x")) == Done()
    assert group(driver).phase is GroupPhase.STABLE
    assert {name: m.assignment for name, m in group(driver).members.items()} == {"a": b"x", "b": b""}


def test_next_generation_forgets_the_assignments(driver: Driver) -> None:
    stable(driver, "a", "b")
    driver.ok(form("g", 1, 1, member("a")))
    assert {name: m.assignment for name, m in group(driver).members.items()} == {"a": b""}


def test_generation_after_a_newer_one_changes_nothing(driver: Driver) -> None:
    stable(driver, "a")
    for command in (form("g", 1, 0, member("b")), assign_members("g", 1, 0), remove("g", 1, 0, "a")):
        driver.refused(command, ErrorCode.ILLEGAL_GENERATION)


def test_assignment_is_given_once(driver: Driver) -> None:
    stable(driver, "a")
    driver.refused(assign_members("g", 1, 1, a=b"other"), ErrorCode.REBALANCE_IN_PROGRESS)


def test_generation_of_a_group_that_was_deleted_meanwhile_is_refused(driver: Driver) -> None:
    driver.refused(form("g", 1, 3, member("a")), ErrorCode.ILLEGAL_GENERATION)
    driver.refused(assign_members("g", 1, 3), ErrorCode.UNKNOWN_GROUP)
    driver.refused(remove("g", 1, 3, "a"), ErrorCode.UNKNOWN_GROUP)


def test_generation_that_is_sent_twice_forms_once(driver: Driver) -> None:
    command = replace(form("g", 1, 0, member("a")), request_id=rid(1))
    assert driver.ok(command) == driver.ok(command) == GenerationFormed(generation=Generation(1))
    assert group(driver).generation == 1


def test_recreated_group_continues_the_generations_so_that_old_commands_do_not_fit_it(driver: Driver) -> None:
    driver.ok(form("g", 1, 0, member("a")))
    late = assign_members("g", 1, 1, a=b"old")
    driver.ok(remove("g", 1, 1, "a"))
    driver.ok(delete_group("g"))
    assert driver.ok(form("g", 1, 0, member("b"))) == GenerationFormed(generation=Generation(3))
    driver.refused(late, ErrorCode.ILLEGAL_GENERATION)  # even by a coordinator that has seen all changes
    driver.ok(assign_members("g", 1, 3, b=b"new"))
    assert group(driver).members["b"].assignment == b"new"


SWEEPS: list[Command] = [
    AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=1),
    AdvanceClock(seen_ms=1, elapsed_ms=1, now_ms=2),
]  # the second drops what the first has seen
GONE: dict[str, list[Command]] = {
    "emptied": [remove("g", 1, 1, "a"), *SWEEPS],
    "deleted": [member_commit("g", 1, "a", (pid(1), 1)), remove("g", 1, 1, "a"), delete_group("g")],
    "without its topic": [
        member_commit("g", 1, "a", (pid(1), 1)),
        remove("g", 1, 1, "a"),
        DeleteTopic(name="t1"),
        *SWEEPS,
    ],
    "expired": [
        kept_minutes(1),
        AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=1),
        member_commit("g", 1, "a", (pid(1), 1)),
        remove("g", 1, 1, "a"),
        AdvanceClock(seen_ms=1, elapsed_ms=62_000, now_ms=62_000),
        AdvanceClock(seen_ms=62_000, elapsed_ms=1, now_ms=62_001),
    ],
}


@pytest.mark.parametrize("way", GONE)
def test_every_end_of_a_group_keeps_its_generation_as_the_floor(driver: Driver, way: str) -> None:
    stable(driver, "a")
    for command in GONE[way]:
        driver.ok(command)
    assert driver.machine.state.groups == {}
    assert driver.machine.state.generation_floor == 2
    driver = Driver(Machine.restore(driver.machine.snapshot()))
    driver.ok(topic(2, "t2", replicas=1))
    driver.ok(commit("other", (pid(2), 1)))
    assert group(driver, "other").generation == 2


def test_generations_begin_again_after_the_largest(driver: Driver) -> None:
    stable(driver, "a")
    group(driver).generation = Generation(GENERATION_MAX)
    assert driver.ok(form("g", 1, GENERATION_MAX, member("a"))) == GenerationFormed(generation=Generation(1))
    group(driver).generation = Generation(GENERATION_MAX)
    driver.ok(remove("g", 1, GENERATION_MAX, "a"))
    assert driver.machine.state.generation_floor <= GENERATION_MAX


BIG = member("b", metadata=bytes(GROUP_BYTES_MAX))
BAD_GENERATIONS = {
    "no member": (form("g", 1, 0), ErrorCode.LIMIT_EXCEEDED),
    "too many": (form("g", 1, 0, *(member(f"m{i}") for i in range(GROUP_MEMBERS_MAX + 1))), ErrorCode.LIMIT_EXCEEDED),
    "a member twice": (form("g", 1, 0, member("a"), member("a")), ErrorCode.INVALID_REQUEST),
    "an instance twice": (
        form("g", 1, 0, member("a", instance="i"), member("b", instance="i")),
        ErrorCode.INVALID_REQUEST,
    ),
    "a leader that is no member": (replace(form("g", 1, 0, member("a")), leader="b"), ErrorCode.INVALID_REQUEST),
    "a protocol that one does not know": (
        form("g", 1, 0, member("a"), member("b", "sticky")),
        ErrorCode.INVALID_REQUEST,
    ),
    "too much metadata": (form("g", 1, 0, BIG), ErrorCode.LIMIT_EXCEEDED),
    "too many protocols": (
        form("g", 1, 0, member("a", "range", *(f"p{i}" for i in range(MEMBER_PROTOCOLS_MAX)))),
        ErrorCode.LIMIT_EXCEEDED,
    ),
    "an id too long": (form("g", 1, 0, member("m" * (MEMBER_TEXT_BYTES_MAX + 1))), ErrorCode.LIMIT_EXCEEDED),
    "no id": (form("g", 1, 0, member("")), ErrorCode.LIMIT_EXCEEDED),
    "no session": (form("g", 1, 0, member("a", session_ms=0)), ErrorCode.INVALID_REQUEST),
    "a bad group name": (form("", 1, 0, member("a")), ErrorCode.INVALID_REQUEST),
}


@pytest.mark.parametrize(("command", "code"), BAD_GENERATIONS.values(), ids=BAD_GENERATIONS)
def test_invalid_generation_is_refused(driver: Driver, command: Command, code: ErrorCode) -> None:
    driver.refused(command, code)
    assert driver.machine.state.groups == {}


def test_groups_max_counts_groups_with_members_and_stops_no_change_of_a_group_that_exists() -> None:
    driver = Driver()
    driver.ok(replace(default_init("c"), groups_max=1))
    driver.ok(register(1, kafka="host:1"))
    driver.ok(topic(1, replicas=1))
    driver.ok(form("a", 1, 0, member("m")))
    driver.refused(form("b", 1, 0, member("m")), ErrorCode.LIMIT_EXCEEDED)
    driver.refused(commit("b", (pid(1), 1)), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(form("a", 1, 1, member("m")))
    driver.ok(remove("a", 1, 2, "m"))
    driver.ok(commit("a", (pid(1), 2)))


def test_members_of_all_groups_have_one_limit(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.ok(form("g", 1, 0, member("a", metadata=bytes(500))))
    monkeypatch.setattr(members_module, "MEMBER_BYTES_CLUSTER_MAX", driver.machine.state.member_bytes + 500)
    driver.refused(form("h", 1, 0, member("a", metadata=bytes(500))), ErrorCode.LIMIT_EXCEEDED)
    driver.refused(assign_members("g", 1, 1, a=bytes(501)), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(remove("g", 1, 1, "a"))
    assert driver.machine.state.member_bytes == 0
    driver.ok(form("h", 1, 0, member("a", metadata=bytes(500))))


def test_assignment_that_is_too_large_is_refused(driver: Driver) -> None:
    driver.ok(form("g", 1, 0, member("a")))
    driver.refused(assign_members("g", 1, 1, a=bytes(GROUP_BYTES_MAX + 1)), ErrorCode.LIMIT_EXCEEDED)


# ------------------------------------------------------------------------------------------------ leaving
def test_members_that_stay_must_rebalance_and_may_still_commit(driver: Driver) -> None:
    stable(driver, "a", "b")
    driver.ok(remove("g", 1, 1, "b", "stranger"))
    assert (group(driver).phase, group(driver).generation) == (GroupPhase.PREPARING, 1)
    driver.ok(member_commit("g", 1, "a", (pid(1), 3)))
    driver.refused(member_commit("g", 1, "b", (pid(1), 4)), ErrorCode.UNKNOWN_MEMBER)
    driver.refused(assign_members("g", 1, 1), ErrorCode.REBALANCE_IN_PROGRESS)


def test_last_member_gone_leaves_an_empty_generation_with_its_offsets(driver: Driver) -> None:
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 3)))
    driver.ok(remove("g", 1, 1, "a", at_ms=77))
    found = group(driver)
    assert (found.phase, found.generation, found.leader, found.emptied_ms) == (GroupPhase.EMPTY, 2, "", 77)
    driver.ok(commit("g", (pid(1), 4)))


def test_removal_of_an_unknown_member_changes_nothing(driver: Driver) -> None:
    stable(driver, "a")
    before = replace(group(driver))
    driver.ok(remove("g", 1, 1, "stranger"))
    assert group(driver) == replace(before, changes=before.changes + 1)


# ------------------------------------------------------------------------------------------------ static members
def test_static_member_is_replaced_in_place_and_its_former_process_fenced(driver: Driver) -> None:
    driver.ok(form("g", 1, 0, member("old", instance="i"), member("b")))
    driver.ok(assign_members("g", 1, 1, old=b"mine", b=b"x"))
    driver.ok(replaced("g", 1, "old", member("new", instance="i")))
    found = group(driver)
    assert [(name, m.assignment) for name, m in found.members.items()] == [("new", b"mine"), ("b", b"x")]
    assert (found.generation, found.phase, found.leader) == (1, GroupPhase.STABLE, "new")
    driver.refused(member_commit("g", 1, "old", (pid(1), 1), instance="i"), ErrorCode.FENCED_INSTANCE)
    driver.refused(member_commit("g", 1, "old", (pid(1), 1)), ErrorCode.UNKNOWN_MEMBER)
    driver.ok(member_commit("g", 1, "new", (pid(1), 1), instance="i"))


def test_invalid_replacement_is_refused(driver: Driver) -> None:
    driver.ok(form("g", 1, 0, member("s", instance="i"), member("b")))
    driver.refused(replaced("g", 1, "x", member("n", instance="j")), ErrorCode.UNKNOWN_MEMBER)
    driver.refused(replaced("g", 1, "b", member("n", instance="i")), ErrorCode.FENCED_INSTANCE)
    driver.refused(replaced("g", 1, "s", member("b", instance="i")), ErrorCode.INVALID_REQUEST)
    driver.refused(replaced("g", 1, "b", member("n")), ErrorCode.INVALID_REQUEST)
    driver.refused(replaced("g", 1, "s", member("n", "sticky", instance="i")), ErrorCode.INVALID_REQUEST)


# ------------------------------------------------------------------------------------------------ commits
def test_commit_is_fenced_by_member_generation_and_phase(driver: Driver) -> None:
    driver.refused(member_commit("g", 1, "a", (pid(1), 1)), ErrorCode.ILLEGAL_GENERATION)
    driver.ok(form("g", 1, 0, member("a")))
    driver.refused(member_commit("g", 1, "a", (pid(1), 1)), ErrorCode.REBALANCE_IN_PROGRESS)
    driver.ok(assign_members("g", 1, 1))
    driver.refused(member_commit("g", 0, "a", (pid(1), 1)), ErrorCode.ILLEGAL_GENERATION)
    driver.refused(member_commit("g", 2, "a", (pid(1), 1)), ErrorCode.ILLEGAL_GENERATION)
    driver.refused(member_commit("g", 1, "b", (pid(1), 1)), ErrorCode.UNKNOWN_MEMBER)
    driver.refused(member_commit("g", 1, "a", (pid(1), 1), instance="i"), ErrorCode.UNKNOWN_MEMBER)
    driver.refused(commit("g", (pid(1), 1)), ErrorCode.UNKNOWN_MEMBER)
    assert group(driver).offsets == {}
    driver.ok(member_commit("g", 1, "a", (pid(1), 1)))


def test_commit_in_no_generation_is_taken_while_the_group_is_empty(driver: Driver) -> None:
    for offset in (1, 3):  # the first makes the group
        driver.ok(member_commit("g", -1, "unknown", (pid(1), offset)))
    stable(driver, "a")
    driver.refused(member_commit("g", -1, "unknown", (pid(1), 2)), ErrorCode.UNKNOWN_MEMBER)


# ------------------------------------------------------------------------------------------------ deletion
def test_group_is_deleted_only_without_members(driver: Driver) -> None:
    driver.refused(delete_group("g"), ErrorCode.UNKNOWN_GROUP)
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1)))
    driver.refused(delete_group("g"), ErrorCode.GROUP_NOT_EMPTY)
    driver.ok(remove("g", 1, 1, "a"))
    driver.ok(delete_group("g"))
    assert driver.machine.state.groups == {}


def test_offsets_are_deleted_in_the_generation_whose_subscriptions_were_seen(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 1), (pid(1, 1), 2)))
    driver.refused(delete_offsets("g", 1, pid(1)), ErrorCode.ILLEGAL_GENERATION)
    driver.ok(delete_offsets("g", 0, pid(1), pid(7)))
    assert list(group(driver).offsets) == [pid(1, 1)]
    driver.ok(delete_offsets("g", 0, pid(1, 1)))
    assert group(driver).is_unused
    driver.refused(delete_offsets("unknown", 0, pid(1)), ErrorCode.UNKNOWN_GROUP)


# ------------------------------------------------------------------------------------------------ empty groups
def test_group_without_members_and_offsets_stays_for_a_whole_period_of_the_cleanup(driver: Driver) -> None:
    expire(driver, 1)
    stable(driver, "a")
    driver.ok(remove("g", 1, 1, "a"))
    expire(driver, 2)
    assert group(driver).phase is GroupPhase.EMPTY
    driver = Driver(Machine.restore(driver.machine.snapshot()))
    expire(driver, 3)
    assert driver.machine.state.groups == {}


def test_group_that_was_used_in_between_stays_for_another_period(driver: Driver) -> None:
    stable(driver, "a")
    driver.ok(remove("g", 1, 1, "a"))
    expire(driver, 1)
    driver.ok(commit("g", (pid(1), 1)))
    driver.ok(delete_offsets("g", 2, pid(1)))
    expire(driver, 2)
    assert group(driver).is_unused
    expire(driver, 3)
    assert driver.machine.state.groups == {}


def test_unused_groups_make_room_for_others_at_the_limit() -> None:
    driver = Driver()
    driver.ok(replace(default_init("test"), groups_max=2))
    driver.ok(register(1, kafka="host:1"))
    driver.ok(topic(1, replicas=1))
    driver.ok(commit("used", (pid(1), 1)))
    driver.ok(form("emptied", 1, 0, member("a")))
    driver.ok(remove("emptied", 1, 1, "a"))
    driver.ok(commit("new", (pid(1), 1)))
    assert sorted(driver.machine.state.groups) == ["new", "used"]
    assert driver.machine.state.generation_floor == 2
    driver.refused(commit("another", (pid(1), 1)), ErrorCode.LIMIT_EXCEEDED)


def test_deletion_of_a_topic_removes_its_offsets_and_keeps_the_members(driver: Driver) -> None:
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1)))
    driver.ok(DeleteTopic(name="t1"))
    assert (group(driver).offsets, list(group(driver).members)) == ({}, ["a"])
