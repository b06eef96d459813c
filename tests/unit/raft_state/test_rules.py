"""The numbered replication rules that the state machine enforces at apply: 2, 9, 11, 14, 18, 20, 22, 23."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AdvanceLogStart, AlterTopicConfig, FenceNode, RetainedStart, UnfenceNode
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.elections import commit_floor, seals_needed
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionId
from smq.raft_state.replies import Done, HwmsAdvanced, LeaderElected, Rejected
from smq.raft_state.state import EpochStart
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
    retained,
    retention,
    seal,
    topic,
)


# ---------------------------------------------------------------------------------------------------------------- rules
# The numbered replication rules that the state machine enforces at apply: 2, 9, 11, 14, 20.
@pytest.fixture
def driver() -> Driver:
    """Topic 1, one partition on nodes 1-3, led by node 1 in epoch 0."""
    driver = cluster()
    driver.ok(topic(1))
    assert driver.partition(pid(1)).leader == 1
    return driver


def log_start(offset: int) -> AdvanceLogStart:
    return AdvanceLogStart(partition=pid(1), offset=Offset(offset))


# ------------------------------------------------------------------------------------------------ rule 9
def test_rule_09_hwm_of_the_current_epoch_moves_hwm_next_offset_and_ts(driver: Driver) -> None:
    applied = driver.apply(advances(advance(pid(1), 0, hwm=10, next_offset=12, ts_ns=77)))
    assert applied.reply == HwmsAdvanced(accepted=(True,))
    assert applied.touched == (pid(1),)
    p = driver.partition(pid(1))
    assert (p.hwm, p.next_offset, p.ts_ns) == (10, 12, 77)


@pytest.mark.parametrize("epoch", [0, 2])
def test_rule_09_hwm_of_another_epoch_changes_nothing(driver: Driver, epoch: int) -> None:
    driver.ok(elect(pid(1), 0, candidate=2, end=0))
    before = driver.machine.digest()
    applied = driver.apply(advances(advance(pid(1), epoch, hwm=10)))
    assert applied.reply == HwmsAdvanced(accepted=(False,))
    assert applied.touched == ()
    assert driver.machine.digest() == before


def test_rule_09_each_value_takes_the_maximum_so_that_a_late_proposal_is_harmless(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10, next_offset=20, ts_ns=77)))
    applied = driver.apply(advances(advance(pid(1), 0, hwm=8, next_offset=9, ts_ns=70)))
    assert applied.reply == HwmsAdvanced(accepted=(True,))
    assert applied.touched == ()
    p = driver.partition(pid(1))
    assert (p.hwm, p.next_offset, p.ts_ns) == (10, 20, 77)


def test_rule_09_next_offset_never_stays_below_the_hwm(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10, next_offset=4)))
    assert driver.partition(pid(1)).next_offset == 10


def test_rule_09_items_are_accepted_one_by_one_and_an_unknown_partition_is_not(driver: Driver) -> None:
    driver.ok(topic(2, partitions=2))
    applied = driver.apply(
        advances(
            advance(pid(1), 0, hwm=5),
            advance(pid(9), 0, hwm=5),
            advance(pid(2, 0), 7, hwm=5),
            advance(pid(2, 1), 0, hwm=6),
            advance(pid(2, 2), 0, hwm=6),
        )
    )
    assert applied.reply == HwmsAdvanced(accepted=(True, False, False, True, False))
    assert applied.touched == (pid(1), pid(2, 1))


def test_rule_09_partition_named_twice_is_touched_once(driver: Driver) -> None:
    applied = driver.apply(advances(advance(pid(1), 0, hwm=5), advance(pid(1), 0, hwm=6)))
    assert applied.reply == HwmsAdvanced(accepted=(True, True))
    assert applied.touched == (pid(1),)


# ------------------------------------------------------------------------------------------------ rule 11
def test_rule_11_next_offset_falls_to_the_new_epochs_start(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10, next_offset=15)))
    applied = driver.apply(elect(pid(1), 0, candidate=2, end=12))
    assert applied.reply == LeaderElected(epoch=Epoch(1), start=Offset(12))
    assert applied.touched == (pid(1),)
    p = driver.partition(pid(1))
    assert (p.leader, p.epoch, p.hwm, p.next_offset) == (2, 1, 10, 12)
    assert p.history == [EpochStart(Epoch(0), Offset(0)), EpochStart(Epoch(1), Offset(12))]
    assert p.epoch_range(Epoch(0)) == (0, 12)
    assert p.epoch_range(Epoch(1)) == (12, None)
    assert p.epoch_range(Epoch(2)) is None


@pytest.mark.parametrize("expected", [0, 2])
def test_rule_11_election_for_an_epoch_that_is_not_current_is_rejected(driver: Driver, expected: int) -> None:
    driver.ok(elect(pid(1), 0, candidate=2, end=0))
    driver.refused(elect(pid(1), expected, candidate=3, end=0), ErrorCode.STALE_EPOCH)


def test_rule_11_candidate_below_the_hwm_at_apply_is_rejected(driver: Driver) -> None:
    """The report was right when it was made; the hwm has moved on since."""
    stale = elect(pid(1), 0, candidate=2, end=5)
    driver.ok(advances(advance(pid(1), 0, hwm=6)))
    reply = driver.refused(stale, ErrorCode.ELECTION_REJECTED)
    assert "ends at 5" in reply.message
    driver.ok(elect(pid(1), 0, candidate=2, end=6))


def test_rule_11_candidate_of_another_incarnation_is_rejected(driver: Driver) -> None:
    """Rule 2: a process leads only epochs of its own incarnation."""
    driver.ok(register(2, incarnation=5))
    driver.refused(elect(pid(1), 0, candidate=2, end=0, incarnation=1), ErrorCode.STALE_INCARNATION)
    driver.ok(elect(pid(1), 0, candidate=2, end=0, incarnation=5))
    assert driver.partition(pid(1)).leader_incarnation == 5


def test_rule_11_fenced_candidate_is_rejected_until_it_is_unfenced(driver: Driver) -> None:
    driver.ok(FenceNode(node=NodeId(2), incarnation=Incarnation(1)))
    driver.refused(elect(pid(1), 0, candidate=2, end=0), ErrorCode.ELECTION_REJECTED)
    driver.ok(UnfenceNode(node=NodeId(2), incarnation=Incarnation(1)))
    driver.ok(elect(pid(1), 0, candidate=2, end=0))


def test_rule_11_candidate_that_is_no_replica_is_rejected() -> None:
    driver = cluster(4)
    driver.ok(topic(1, replicas=3))
    outsider = ({1, 2, 3, 4} - set(driver.partition(pid(1)).replicas)).pop()
    driver.refused(elect(pid(1), 0, candidate=outsider, end=0), ErrorCode.ELECTION_REJECTED)


def test_rule_11_election_of_an_unknown_partition_is_rejected(driver: Driver) -> None:
    driver.refused(elect(pid(1, 1), 0, candidate=2, end=0), ErrorCode.UNKNOWN_PARTITION)


def test_rule_11_restarted_leader_needs_a_new_epoch_and_may_win_it(driver: Driver) -> None:
    driver.ok(register(1, incarnation=2))
    assert driver.partition(pid(1)).leader_incarnation == 1
    assert driver.ok(elect(pid(1), 0, candidate=1, end=0, incarnation=2)) == LeaderElected(
        epoch=Epoch(1), start=Offset(0)
    )


def test_rule_11_epochs_may_start_at_the_same_offset(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=4)))
    for epoch, candidate in enumerate([2, 3, 1]):
        driver.ok(elect(pid(1), epoch, candidate, end=4))
    p = driver.partition(pid(1))
    assert [(e.epoch, e.start) for e in p.history] == [(0, 0), (3, 4)]
    assert (p.epoch_range(Epoch(2)), p.epoch_range(Epoch(3))) == (None, (4, None))


# ------------------------------------------------------------------------------------------------ rule 14
def test_rule_14_log_start_moves_up_to_the_hwm(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10)))
    applied = driver.apply(log_start(10))
    assert applied.reply == Done()
    assert applied.touched == (pid(1),)
    assert driver.partition(pid(1)).log_start == 10


def test_rule_14_log_start_beyond_the_hwm_is_out_of_range_with_the_range(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10, next_offset=20)))
    driver.ok(log_start(3))
    reply = driver.refused(log_start(11), ErrorCode.OFFSET_OUT_OF_RANGE)
    assert (reply.lo, reply.hi) == (3, 10)


def test_rule_14_log_start_never_goes_back(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10)))
    driver.ok(log_start(7))
    for offset in (7, 3, 0):
        applied = driver.apply(log_start(offset))
        assert (applied.reply, applied.touched) == (Done(), ())
    assert driver.partition(pid(1)).log_start == 7


def test_rule_14_negative_log_start_is_an_invalid_offset(driver: Driver) -> None:
    driver.refused(log_start(-1), ErrorCode.INVALID_OFFSET)


def test_rule_14_log_start_of_an_unknown_partition_is_rejected(driver: Driver) -> None:
    unknown = AdvanceLogStart(partition=pid(8), offset=Offset(0))
    driver.refused(unknown, ErrorCode.UNKNOWN_PARTITION)


@pytest.mark.parametrize("size", [0, 17, 21])
def test_partition_id_of_a_wrong_length_names_no_partition(driver: Driver, size: int) -> None:
    """The codec refuses it at the proposer; the machine does not mistake it for another partition either."""
    partition = PartitionId(pid(1).ljust(21, b"\0")[:size])
    applied = driver.machine.apply(LogIndex(99), AdvanceLogStart(partition=partition, offset=Offset(0)))
    assert isinstance(applied.reply, Rejected)
    assert applied.reply.code is ErrorCode.UNKNOWN_PARTITION
    assert driver.machine.apply(LogIndex(100), retention(retained(partition, 0, 1))).touched == ()


@pytest.fixture
def limited(driver: Driver) -> Driver:
    """Of the partitions of topic 2 three records are to be kept; their high water mark is 10, in epoch 0."""
    driver.ok(replace(topic(2, partitions=3), config=(("retention.records", "3"),)))
    driver.ok(advances(*(advance(pid(2, index), 0, hwm=10) for index in range(3))))
    return driver


def test_rule_14_retention_moves_the_log_starts_of_many_partitions(limited: Driver) -> None:
    items = [retained(pid(2, index), 0, offset, records=3) for index, offset in enumerate((7, 0, 10))]
    applied = limited.apply(retention(*items))
    assert (applied.reply, applied.touched) == (Done(), (pid(2, 0), pid(2, 2)))
    assert [limited.partition(pid(2, index)).log_start for index in range(3)] == [7, 0, 10]


@pytest.mark.parametrize(
    "item",
    [
        retained(pid(2), 1, 7, records=3),
        retained(pid(2), 0, 11, records=3),
        retained(pid(2), 0, 4, records=3),
        retained(pid(2), 0, -1, records=3),
        retained(pid(2), 0, 7, records=4),
        retained(pid(2), 0, 7, ms=1, records=3),
        retained(pid(2), 0, 7, size=1, records=3),
        retained(pid(1), 0, 7),
        retained(pid(2, 3), 0, 7, records=3),
        retained(pid(8), 0, 7, records=3),
    ],
    ids=[
        "another epoch",
        "above the hwm",
        "where it is",
        "negative",
        "other records",
        "other age",
        "other bytes",
        "no limits",
        "no such partition",
        "no such topic",
    ],
)
def test_rule_14_retention_passes_over_an_item_that_is_not_current(limited: Driver, item: RetainedStart) -> None:
    limited.ok(AdvanceLogStart(partition=pid(2), offset=Offset(4)))
    applied = limited.apply(retention(item, retained(pid(2, 1), 0, 7, records=3)))
    assert (applied.reply, applied.touched) == (Done(), (pid(2, 1),))
    assert limited.partition(pid(2)).log_start == 4


def test_rule_14_what_an_operator_decides_to_keep_before_it_is_deleted_stays(limited: Driver) -> None:
    limited.ok(AlterTopicConfig(name="t2", unset=("retention.records",)))
    assert limited.apply(retention(retained(pid(2), 0, 7, records=3))).touched == ()


def test_rule_20_retention_drops_the_epochs_that_it_has_passed(limited: Driver) -> None:
    limited.ok(elect(pid(2), 0, candidate=2, end=10))
    limited.ok(advances(advance(pid(2), 1, hwm=20)))
    limited.ok(retention(retained(pid(2), 1, 17, records=3)))
    assert [start.epoch for start in limited.partition(pid(2)).history] == [1]


def test_rule_14_partition_emptied_to_its_hwm_can_still_elect(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=10)))
    driver.ok(log_start(10))
    driver.ok(elect(pid(1), 0, candidate=3, end=10))


def test_rule_20_the_history_of_an_idle_partition_does_not_grow(driver: Driver) -> None:
    """Two entries, the oldest and the current one, after any number of elections without a record in between."""
    for epoch in range(50):
        driver.ok(elect(pid(1), epoch, candidate=epoch % 3 + 1, end=0))
    assert [(e.epoch, e.start) for e in driver.partition(pid(1)).history] == [(0, 0), (50, 0)]


def test_rule_20_the_history_has_one_entry_per_epoch_with_records(driver: Driver) -> None:
    """The log start never moves; three of every four epochs have no record."""
    for epoch in range(40):
        driver.ok(elect(pid(1), epoch, candidate=epoch % 3 + 1, end=epoch - epoch % 4 + 1))
    kept = [(e.epoch, e.start) for e in driver.partition(pid(1)).history]
    assert kept == [(0, 0), *((epoch, epoch - 3) for epoch in range(4, 40, 4)), (40, 37)]


def test_rule_20_epochs_are_pruned_only_when_they_end_below_the_log_start(driver: Driver) -> None:
    for epoch, (hwm, candidate) in enumerate([(5, 2), (8, 3), (8, 1)]):
        driver.ok(advances(advance(pid(1), epoch, hwm=hwm)))
        driver.ok(elect(pid(1), epoch, candidate, end=hwm))
    driver.ok(advances(advance(pid(1), 3, hwm=12)))
    epochs = []
    for offset in (4, 5, 7, 8, 12):
        driver.ok(log_start(offset))
        epochs.append([(e.epoch, e.start) for e in driver.partition(pid(1)).history])
    assert epochs == [
        [(0, 0), (1, 5), (3, 8)],
        [(0, 0), (1, 5), (3, 8)],
        [(1, 5), (3, 8)],
        [(1, 5), (3, 8)],
        [(3, 8)],
    ]


def test_rule_20_election_at_the_log_start_keeps_the_epoch_that_waiters_may_still_name(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, hwm=5)))
    driver.ok(log_start(5))
    driver.ok(elect(pid(1), 0, candidate=2, end=5))
    assert driver.partition(pid(1)).epoch_range(Epoch(0)) == (0, 5)


# ---------------------------------------------------------------------------------------------------------------- seals
# The numbered replication rules on seals and incomplete replicas, at apply: 11, 18, 22, 23.
def made(replicas: int = 3) -> Driver:
    """Topic 1, one partition on nodes 1 to `replicas`, led by node 1 in epoch 0."""
    driver = cluster(replicas)
    driver.ok(topic(1, replicas=replicas))
    assert driver.partition(pid(1)).leader == 1
    return driver


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
