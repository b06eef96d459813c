"""The numbered replication rules on seals and incomplete replicas, at apply: 11, 18, 22, 23."""

import pytest

from smq.raft_state.commands import AdvanceLogStart, FenceNode
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset
from smq.raft_state.replies import LeaderElected
from smq.raft_state.seals import commit_floor, seals_needed
from tests.unit.raft_state.support import (
    Driver,
    advance,
    advances,
    cluster,
    completed,
    elect,
    external_topic,
    marked,
    pid,
    register,
    seal,
    topic,
)


def made(replicas: int = 3) -> Driver:
    """Topic 1, one partition on nodes 1 to `replicas`, led by node 1 in epoch 0."""
    driver = cluster(replicas)
    driver.ok(topic(1, replicas=replicas))
    assert driver.partition(pid(1)).leader == 1
    return driver


@pytest.fixture
def driver() -> Driver:
    return made()


def epochs(driver: Driver) -> list[tuple[int, int]]:
    return [(e.epoch, e.start) for e in driver.partition(pid(1)).history]


# ------------------------------------------------------------------------------------------------ rule 11
def test_rule_11_the_new_epoch_starts_where_the_candidates_log_ends(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10, next_offset=15)))
    applied = driver.apply(elect(pid(1), 0, candidate=2, end=14, seals=(seal(2, 14), seal(3, 12))))
    assert applied.reply == LeaderElected(epoch=Epoch(1), start=Offset(14))
    p = driver.partition(pid(1))
    assert (p.hwm, p.next_offset) == (10, 14)
    assert epochs(driver) == [(0, 0), (1, 14)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
def test_rule_11_fewer_seals_than_leave_a_majority_elect_nobody(replicas: int) -> None:
    driver = made(replicas)
    needed = seals_needed(replicas)
    seals = tuple(seal(node, 5) for node in range(1, replicas + 1))
    driver.refused(elect(pid(1), 0, candidate=1, end=5, seals=seals[: needed - 1]), ErrorCode.ELECTION_REJECTED)
    driver.ok(elect(pid(1), 0, candidate=1, end=5, seals=seals[:needed]))


@pytest.mark.parametrize(
    ("replicas", "ends", "floor"),
    [
        (1, (7,), 7),
        (2, (7,), 7),  # one of two: the other may have all of it
        (2, (3, 7), 3),
        (3, (3, 7), 7),
        (3, (3, 5, 7), 5),
        (4, (3, 7), 7),
        (4, (1, 3, 5, 7), 3),
        (5, (3, 5, 7), 7),
        (5, (1, 3, 5, 7), 5),
        (5, (1, 3, 5, 7, 9), 5),
    ],
)
def test_rule_11_the_floor_is_the_most_that_a_majority_may_hold(
    replicas: int, ends: tuple[int, ...], floor: int
) -> None:
    assert commit_floor(map(Offset, ends), replicas) == floor
    driver = made(replicas)
    seals = tuple(seal(replicas - i, end) for i, end in enumerate(ends))
    reply = driver.refused(elect(pid(1), 0, candidate=1, end=floor - 1, seals=seals), ErrorCode.ELECTION_REJECTED)
    assert f"what may be committed, {floor}" in reply.message
    driver.ok(elect(pid(1), 0, candidate=1, end=floor, seals=seals))


def test_rule_11_a_seal_of_another_process_does_not_count(driver: Driver) -> None:
    """Its replica has started again since, and its new process has promised nothing."""
    driver.ok(register(3, incarnation=2))
    seals = (seal(2, 0), seal(3, 0))
    driver.refused(elect(pid(1), 0, candidate=2, end=0, seals=seals), ErrorCode.ELECTION_REJECTED)
    driver.ok(elect(pid(1), 0, candidate=2, end=0, seals=(seal(2, 0), seal(3, 0, incarnation=2))))


def test_rule_11_a_seal_of_a_node_that_is_no_replica_does_not_count() -> None:
    driver = cluster(4)
    driver.ok(topic(1, replicas=3))
    outsider = ({1, 2, 3, 4} - set(driver.partition(pid(1)).replicas)).pop()
    candidate = driver.partition(pid(1)).replicas[1]
    command = elect(pid(1), 0, candidate, end=0, seals=(seal(candidate, 0), seal(outsider, 0)))
    driver.refused(command, ErrorCode.ELECTION_REJECTED)


def test_rule_11_a_replica_that_sealed_twice_counts_once_with_its_longer_log(driver: Driver) -> None:
    twice = (seal(2, 5), seal(2, 3))
    driver.refused(elect(pid(1), 0, candidate=2, end=5, seals=twice), ErrorCode.ELECTION_REJECTED)
    driver.refused(elect(pid(1), 0, candidate=3, end=4, seals=(*twice, seal(3, 4))), ErrorCode.ELECTION_REJECTED)
    driver.ok(elect(pid(1), 0, candidate=3, end=5, seals=(*twice, seal(3, 5))))


def test_rule_11_a_candidate_below_the_hwm_is_rejected_whatever_was_sealed(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=6)))
    seals = tuple(seal(node, 5) for node in (1, 2, 3))
    driver.refused(elect(pid(1), 0, candidate=2, end=5, seals=seals), ErrorCode.ELECTION_REJECTED)
    driver.refused(elect(pid(1), 0, candidate=2, end=5, by_leader=True), ErrorCode.ELECTION_REJECTED)


def test_rule_11_a_fenced_replica_seals_but_does_not_lead(driver: Driver) -> None:
    driver.ok(FenceNode(node=NodeId(3), incarnation=Incarnation(1)))
    seals = (seal(2, 4), seal(3, 4))
    driver.refused(elect(pid(1), 0, candidate=3, end=4, seals=seals), ErrorCode.ELECTION_REJECTED)
    driver.ok(elect(pid(1), 0, candidate=2, end=4, seals=seals))


def test_rule_11_the_leaders_own_word_needs_no_seals(driver: Driver) -> None:
    reply = driver.ok(elect(pid(1), 0, candidate=3, end=8, by_leader=True))
    assert reply == LeaderElected(epoch=Epoch(1), start=Offset(8))
    driver.refused(elect(pid(1), 0, candidate=1, end=9, by_leader=True), ErrorCode.STALE_EPOCH)


def test_rule_11_an_epoch_that_began_above_the_new_one_ends_where_that_begins(driver: Driver) -> None:
    """Nodes 2 and 3 seal after node 1, which led epoch 1 from 9 on, has died: no other log has 9."""
    driver.ok(elect(pid(1), 0, candidate=1, end=9, by_leader=True))
    driver.ok(elect(pid(1), 1, candidate=1, end=12, by_leader=True))
    driver.ok(elect(pid(1), 2, candidate=2, end=7, seals=(seal(2, 7), seal(3, 5))))
    assert epochs(driver) == [(0, 0), (3, 7)]
    p = driver.partition(pid(1))
    assert (p.epoch_range(Epoch(0)), p.epoch_range(Epoch(1)), p.epoch_range(Epoch(3))) == ((0, 7), None, (7, None))


def test_rule_11_an_epoch_that_began_below_the_new_one_keeps_its_start(driver: Driver) -> None:
    driver.ok(elect(pid(1), 0, candidate=1, end=4, by_leader=True))
    driver.ok(elect(pid(1), 1, candidate=1, end=9, by_leader=True))
    driver.ok(elect(pid(1), 2, candidate=2, end=7, seals=(seal(2, 7), seal(3, 7))))
    assert epochs(driver) == [(0, 0), (1, 4), (3, 7)]


def test_rule_20_the_log_start_keeps_an_epoch_that_begins_above_the_hwm(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=5)))
    driver.ok(elect(pid(1), 0, candidate=2, end=9, seals=(seal(2, 9), seal(3, 5))))
    driver.ok(AdvanceLogStart(partition=pid(1), offset=Offset(5)))
    assert epochs(driver) == [(0, 0), (1, 9)]


# ------------------------------------------------------------------------------------------------ rule 18
def test_rule_18_a_node_on_another_disk_is_incomplete_in_all_of_its_partitions() -> None:
    driver = cluster(4)
    driver.ok(topic(1, partitions=4, replicas=2))
    driver.ok(external_topic(2))
    applied = driver.apply(register(2, incarnation=2, disk=9))
    held = {p.pid for p in driver.machine.state.topics["t1"].partitions if 2 in p.replicas}
    assert set(applied.touched) == held
    assert 0 < len(held) < 4
    for p in driver.machine.state.topics["t1"].partitions:
        assert p.incomplete == ({2} if p.pid in held else set())


def test_rule_18_a_node_that_starts_again_on_its_disk_stays_complete(driver: Driver) -> None:
    applied = driver.apply(register(2, incarnation=2))
    assert (applied.touched, driver.partition(pid(1)).incomplete) == ((), frozenset())


# ------------------------------------------------------------------------------------------------ rule 22
def test_rule_22_the_seal_of_an_incomplete_replica_does_not_count(driver: Driver) -> None:
    """Node 2 acknowledged 0 to 5 with the leader, and lost its disk: node 3 alone cannot tell."""
    driver.ok(register(2, incarnation=2, disk=9))
    seals = (seal(2, 0, incarnation=2), seal(3, 0))
    driver.refused(elect(pid(1), 0, candidate=3, end=0, seals=seals), ErrorCode.ELECTION_REJECTED)
    driver.ok(elect(pid(1), 0, candidate=3, end=5, seals=(*seals, seal(1, 5))))


def test_rule_22_an_incomplete_replica_may_lead_and_is_complete_from_then_on(driver: Driver) -> None:
    driver.ok(register(2, incarnation=2, disk=9))
    driver.ok(elect(pid(1), 0, candidate=2, end=5, incarnation=2, seals=(seal(1, 5), seal(3, 4))))
    assert driver.partition(pid(1)).incomplete == frozenset()


def test_rule_22_a_replica_that_has_caught_up_seals_again(driver: Driver) -> None:
    driver.ok(marked(2, pid(1)))
    driver.ok(completed((pid(1), 0, 2)))
    assert driver.partition(pid(1)).incomplete == frozenset()
    driver.ok(elect(pid(1), 0, candidate=3, end=5, seals=(seal(2, 5), seal(3, 5))))


@pytest.mark.parametrize(
    ("epoch", "node", "incarnation"), [(1, 2, 2), (0, 2, 1), (0, 3, 1)], ids=["epoch", "process", "replica"]
)
def test_rule_22_a_late_word_that_a_replica_is_complete_changes_nothing(
    driver: Driver, epoch: int, node: int, incarnation: int
) -> None:
    driver.ok(register(2, incarnation=2, disk=9))
    applied = driver.apply(completed((pid(1), epoch, node), (pid(7), epoch, node), incarnation=incarnation))
    assert applied.touched == ()
    assert driver.partition(pid(1)).incomplete == {2}


# ------------------------------------------------------------------------------------------------ rule 23
def test_rule_23_a_process_marks_its_own_replicas(driver: Driver) -> None:
    driver.ok(topic(2, partitions=2))
    applied = driver.apply(marked(3, pid(2, 1), pid(1), pid(9)))
    assert applied.touched == (pid(2, 1), pid(1))
    assert [driver.partition(p).incomplete for p in (pid(1), pid(2, 0), pid(2, 1))] == [{3}, frozenset(), {3}]
    assert driver.apply(marked(3, pid(1))).touched == ()


def test_rule_23_a_mark_of_a_process_that_is_not_registered_is_refused(driver: Driver) -> None:
    driver.ok(register(3, incarnation=2))
    driver.refused(marked(3, pid(1)), ErrorCode.STALE_INCARNATION)
    driver.refused(marked(8, pid(1)), ErrorCode.UNKNOWN_NODE)
