"""Late changes of a group: what is proposed before another change, and arrives after it, changes nothing."""

from dataclasses import replace

import pytest

from smq.raft_state.command_table import cache_of
from smq.raft_state.commands import Coordinated
from smq.raft_state.errors import ErrorCode
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Done, Rejected
from tests.unit.raft_state.support import (
    Driver,
    cluster,
    commit,
    delete_group,
    delete_offsets,
    form,
    member,
    pid,
    register,
    remove,
    rid,
    topic,
)


@pytest.fixture
def driver() -> Driver:
    driver = cluster(1)
    driver.ok(topic(1, partitions=2, replicas=1))
    return driver


def offset(driver: Driver) -> int | None:
    group = driver.machine.state.groups.get("g")
    return group.offsets[pid(1)].offset if group is not None and pid(1) in group.offsets else None


LATE = {
    "commit": commit("g", (pid(1), 5)),
    "deletion of the group": delete_group("g"),
    "deletion of offsets": delete_offsets("g", 0, pid(1)),
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_change_of_no_member_that_arrives_after_a_later_one_changes_nothing(driver: Driver, late: Coordinated) -> None:
    """Its caller has given up, and another commit was acknowledged and read."""
    driver.ok(commit("g", (pid(1), 1)))
    late = driver.proposed(late)
    driver.ok(commit("g", (pid(1), 10)))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert offset(driver) == 10


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_change_of_no_member_by_a_former_coordinator_changes_nothing(driver: Driver, late: Coordinated) -> None:
    driver.ok(commit("g", (pid(1), 10)))
    late = driver.proposed(late)
    driver.ok(register(1, 2))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert offset(driver) == 10


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_late_commit_does_not_undo_a_deletion(driver: Driver, with_snapshot: bool) -> None:
    driver.ok(commit("g", (pid(1), 1)))
    late = driver.proposed(commit("g", (pid(1), 5)))
    driver.ok(delete_group("g"))
    if with_snapshot:
        driver = Driver(Machine.restore(driver.machine.snapshot()))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert driver.machine.state.groups == {}
    driver.ok(commit("g", (pid(1), 0)))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert offset(driver) == 0


def test_late_deletion_does_not_touch_a_new_group_of_the_same_name(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 1)))
    late = driver.proposed(delete_group("g"))
    driver.ok(delete_group("g"))
    driver.ok(commit("g", (pid(1), 2)))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert offset(driver) == 2


def test_changes_of_members_count_too(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 1)))
    late = driver.proposed(commit("g", (pid(1), 5)))
    epoch = late.coordinator_epoch
    driver.ok(form("g", epoch, 0, member("a")))
    driver.ok(remove("g", epoch, 1, "a"))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert offset(driver) == 1


def test_repetition_gets_the_first_reply_although_the_group_has_changed_since(driver: Driver) -> None:
    first = driver.proposed(commit("g", (pid(1), 5), request=rid(1)))
    driver.ok(first)
    driver.ok(commit("g", (pid(1), 10)))
    assert driver.ok(first) == Done()
    assert offset(driver) == 10


def test_refusal_by_the_fence_is_not_remembered_as_the_answer_to_the_request(driver: Driver) -> None:
    """The coordinator proposes the request again, as it would have to after that change."""
    driver.ok(commit("g", (pid(1), 1)))
    request = commit("g", (pid(1), 5), request=rid(1))
    early = driver.proposed(request)
    driver.ok(commit("g", (pid(1), 10)))
    counted = cache_of(driver.machine.state, request).counted
    driver.refused(early, ErrorCode.NOT_COORDINATOR)
    assert cache_of(driver.machine.state, request).counted == counted
    assert driver.ok(request) == Done()
    assert offset(driver) == 5
    driver.ok(early)  # from now on it has an answer
    assert offset(driver) == 5


def test_deletion_of_another_group_refuses_the_first_change_of_a_group_at_most_once(driver: Driver) -> None:
    """All absent groups share one floor."""
    driver.ok(commit("other", (pid(1), 1)))
    first = commit("g", (pid(1), 5))
    early = driver.proposed(first)
    driver.ok(delete_group("other"))
    driver.refused(early, ErrorCode.NOT_COORDINATOR)
    driver.ok(first)
    assert offset(driver) == 5


def test_command_without_numbers_is_refused(driver: Driver) -> None:
    command = replace(driver.proposed(commit("g", (pid(1), 5))), changes_seen=-1)
    reply = driver.machine.apply(driver.next_index(), command).reply
    assert isinstance(reply, Rejected)
    assert reply.code is ErrorCode.NOT_COORDINATOR
