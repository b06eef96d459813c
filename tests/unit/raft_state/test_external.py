"""Offsets without records: which request gets which, the answer to a repetition, and that nothing takes one back."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.command_codec import CodecError, encode_command
from smq.raft_state.commands import AddPartitions, AdvanceLogStart, AlterTopicConfig, DeleteTopic, FenceNode
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import external_offsets as external
from smq.raft_state.ids import NO_NODE, Incarnation, NodeId, Offset, PartitionId, RequestId
from smq.raft_state.limits import ASSIGN_COUNT_MAX, ASSIGN_ITEMS_MAX, START_OFFSET_MAX
from smq.raft_state.replies import ExternalHwm, HwmsAdvanced, OffsetsAssigned, Rejected, Results
from tests.unit.raft_state.support import (
    Driver,
    advance,
    advance_external,
    advances,
    assign,
    cluster,
    commit,
    elect,
    external_topic,
    pid,
    register,
    rid,
    topic,
)

Ranges = list[tuple[int, int] | ErrorCode]


@pytest.fixture
def driver() -> Driver:
    """Topic 1 is of external storage, with two partitions; topic 2 is not."""
    driver = cluster()
    driver.ok(external_topic(1, partitions=2))
    driver.ok(topic(2))
    return driver


def ranges(driver: Driver, *items: tuple[RequestId, PartitionId, int], not_before: int = 0) -> Ranges:
    reply = driver.ok(assign(*items, not_before=not_before))
    assert isinstance(reply, Results)
    return [(r.base, r.last) if isinstance(r, OffsetsAssigned) else code_of(r) for r in reply.items]


def code_of(result: object) -> ErrorCode:
    assert isinstance(result, Rejected), result
    return result.code


def hwms(driver: Driver, *items: tuple[PartitionId, int]) -> list[int | ErrorCode]:
    reply = driver.ok(advance_external(*items))
    assert isinstance(reply, Results)
    return [r.hwm if isinstance(r, ExternalHwm) else code_of(r) for r in reply.items]


def test_ten_singles_give_0_to_9(driver: Driver) -> None:
    given = [ranges(driver, (rid(n), pid(1), 1))[0] for n in range(10)]
    assert given == [(n, n) for n in range(10)]
    assert driver.partition(pid(1)).hwm == 0
    assert hwms(driver, (pid(1), 10)) == [10]


def test_batches_of_5_then_3_give_0_to_4_and_5_to_7(driver: Driver) -> None:
    assert ranges(driver, (rid(1), pid(1), 5), (rid(2), pid(1), 3)) == [(0, 4), (5, 7)]
    assert hwms(driver, (pid(1), 8)) == [8]


def test_two_partitions_number_independently(driver: Driver) -> None:
    assert ranges(driver, (rid(1), pid(1), 5), (rid(2), pid(1, 1), 2), (rid(3), pid(1), 1)) == [(0, 4), (0, 1), (5, 5)]


@pytest.mark.parametrize("count", [0, -1, ASSIGN_COUNT_MAX + 1])
def test_empty_or_endless_batch_is_refused_alone(driver: Driver, count: int) -> None:
    assert ranges(driver, (rid(1), pid(1), count), (rid(2), pid(1), ASSIGN_COUNT_MAX)) == [
        ErrorCode.INVALID_REQUEST,
        (0, ASSIGN_COUNT_MAX - 1),
    ]


def test_repeated_request_gets_its_first_answer_and_nothing_new(driver: Driver) -> None:
    first = ranges(driver, (rid(1), pid(1), 5))
    ranges(driver, (rid(2), pid(1), 1))
    assert ranges(driver, (rid(1), pid(1), 5)) == first
    assert ranges(driver, (rid(1), pid(1), 5), (rid(1), pid(1), 5), not_before=6) == [*first, *first]
    assert driver.partition(pid(1)).next_offset == 6


def test_request_repeated_within_one_command_gets_offsets_once(driver: Driver) -> None:
    assert ranges(driver, (rid(1), pid(1), 5), (rid(1), pid(1), 5)) == [(0, 4), (0, 4)]
    assert driver.partition(pid(1)).next_offset == 5


@pytest.mark.parametrize(("partition", "count"), [(pid(1), 4), (pid(1, 1), 5)])
def test_request_id_of_another_request_is_refused(driver: Driver, partition: PartitionId, count: int) -> None:
    ranges(driver, (rid(1), pid(1), 5))
    assert ranges(driver, (rid(1), partition, count)) == [ErrorCode.INVALID_REQUEST]


@pytest.mark.parametrize("size", [0, 15, 17])
def test_request_id_of_a_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(CodecError, match="ids have 16"):
        encode_command(assign((RequestId(bytes(size)), pid(1), 1)))


def test_request_that_may_be_a_forgotten_repetition_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "ASSIGNED_MAX", 3)
    for n in range(5):
        ranges(driver, (rid(n), pid(1), 2), not_before=2 * n)
    # The answers to 0 and 1, offsets 0 to 3, are forgotten: their request ids are refused from now on.
    assert ranges(driver, (rid(0), pid(1), 2), (rid(1), pid(1), 2)) == [ErrorCode.REQUEST_EXPIRED] * 2
    assert ranges(driver, (rid(1), pid(1), 2), not_before=3) == [ErrorCode.REQUEST_EXPIRED]
    assert ranges(driver, (rid(2), pid(1), 2)) == [(4, 5)]
    assert driver.partition(pid(1)).next_offset == 10
    # A new one was first made when at least these had been assigned.
    assert ranges(driver, (rid(9), pid(1), 1), not_before=4) == [(10, 10)]
    # The other partition has lost nothing: whatever is asked of it is new.
    assert ranges(driver, (rid(8), pid(1, 1), 1)) == [(0, 0)]


def test_bound_that_was_never_true_is_refused(driver: Driver) -> None:
    assert ranges(driver, (rid(1), pid(1), 1), not_before=1) == [ErrorCode.INVALID_OFFSET]
    assert ranges(driver, (rid(1), pid(1), 1), not_before=-1) == [ErrorCode.INVALID_OFFSET]


def test_offsets_end_at_int64_and_not_beyond_it() -> None:
    driver = cluster()
    driver.ok(external_topic(1, start=START_OFFSET_MAX))
    driver.partition(pid(1)).next_offset = Offset(2**63 - 3)
    assert ranges(driver, (rid(1), pid(1), 3), not_before=2**62) == [ErrorCode.LIMIT_EXCEEDED]
    assert ranges(driver, (rid(1), pid(1), 2), not_before=2**62) == [(2**63 - 3, 2**63 - 2)]


def test_partition_with_storage_log_is_refused_by_both_commands(driver: Driver) -> None:
    assert ranges(driver, (rid(1), pid(2), 1)) == [ErrorCode.WRONG_STORAGE]
    assert hwms(driver, (pid(2), 0)) == [ErrorCode.WRONG_STORAGE]
    assert driver.ok(advances(advance(pid(1), 0, hwm=5))) == HwmsAdvanced(accepted=(False,))
    assert driver.partition(pid(1)).next_offset == 0


def test_hwm_moves_up_to_what_was_assigned_and_never_back(driver: Driver) -> None:
    ranges(driver, (rid(1), pid(1), 10))
    assert hwms(driver, (pid(1), 4), (pid(1), 2), (pid(1), 11), (pid(1), -1), (pid(1), 10)) == [
        4,
        4,
        ErrorCode.OFFSET_OUT_OF_RANGE,
        ErrorCode.INVALID_OFFSET,
        10,
    ]


def test_log_start_follows_the_mark_and_groups_commit(driver: Driver) -> None:
    ranges(driver, (rid(1), pid(1), 10))
    hwms(driver, (pid(1), 6))
    driver.ok(AdvanceLogStart(partition=pid(1), offset=Offset(5)))
    driver.refused(AdvanceLogStart(partition=pid(1), offset=Offset(7)), ErrorCode.OFFSET_OUT_OF_RANGE)
    driver.ok(commit("g", (pid(1), 6)))
    assert driver.partition(pid(1)).log_start == 5


def test_too_many_items_are_refused_all_together(driver: Driver) -> None:
    item = (rid(1), pid(1), 1)
    driver.refused(assign(*[item] * (ASSIGN_ITEMS_MAX + 1)), ErrorCode.LIMIT_EXCEEDED)


def test_rule_19_neither_an_election_nor_a_node_takes_back_an_offset(driver: Driver) -> None:
    """External storage has no leader, so no epoch can begin; an assigned offset stays assigned."""
    ranges(driver, (rid(1), pid(1), 10))
    driver.refused(elect(pid(1), 0, candidate=2, end=10), ErrorCode.ELECTION_REJECTED)
    driver.ok(FenceNode(node=NodeId(1), incarnation=Incarnation(1)))
    driver.ok(register(2, incarnation=2))
    partition = driver.partition(pid(1))
    assert (partition.leader, partition.epoch, partition.next_offset) == (NO_NODE, 0, 10)


def test_rule_17_external_storage_has_no_replica_set_and_gets_none(driver: Driver) -> None:
    driver.ok(AddPartitions(name="t1", partition_count=4))
    assert [p.replicas for p in driver.machine.state.topics["t1"].partitions] == [()] * 4
    driver.refused(AlterTopicConfig(name="t1", unset=("storage",)), ErrorCode.INVALID_CONFIG)
    driver.refused(AlterTopicConfig(name="t2", set_=(("storage", "external"),)), ErrorCode.INVALID_CONFIG)


def test_a_topic_of_external_storage_is_not_compacted(driver: Driver) -> None:
    change = AlterTopicConfig(name="t1", set_=(("cleanup.policy", "compact"),))
    assert "storage=external" in driver.refused(change, ErrorCode.INVALID_CONFIG).message


def test_topic_of_external_storage_does_not_count_in_placement(driver: Driver) -> None:
    driver.ok(external_topic(3, partitions=3))
    driver.ok(topic(4, partitions=3, replicas=1))
    leaders = [p.leader for p in driver.machine.state.topics["t4"].partitions]
    assert sorted(leaders) == [1, 2, 3]


def test_deleted_topic_leaves_only_its_answers(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "ASSIGNED_MAX", 2)
    for n in range(4):
        ranges(driver, (rid(n), pid(1), 1), not_before=n)
    driver.ok(DeleteTopic(name="t1"))
    assert driver.machine.state.assigned_before == {}
    assert ranges(driver, (rid(3), pid(1), 1), (rid(7), pid(1), 1)) == [(3, 3), ErrorCode.UNKNOWN_PARTITION]
    driver.ok(external_topic(5, name="t1"))
    items = [(rid(n), pid(5), 1) for n in (10, 11, 12)]
    assert ranges(driver, *items) == [(0, 0), (1, 1), (2, 2)]
    assert list(driver.machine.state.assigned_before) == [pid(5)]


requested = st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(0, 40))


@given(st.lists(st.lists(requested, min_size=1, max_size=4), max_size=20), st.integers(1, 6))
def test_repetitions_at_any_time_assign_no_offset_twice_and_skip_none(
    rounds: list[list[tuple[int, int, int]]], kept: int
) -> None:
    """A request has a number, which decides its count. Its bound is the next offset at its first attempt, as an honest
    caller knows it."""
    driver = cluster(1)
    driver.ok(external_topic(1))
    answers: OrderedDict[int, tuple[int, int]] = OrderedDict()
    bounds: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external, "ASSIGNED_MAX", kept)
        for items in rounds:
            for number, _, _ in items:
                bound = bounds.setdefault(number, driver.partition(pid(1)).next_offset)
                [got] = ranges(driver, (rid(number), pid(1), 1 + number % 3), not_before=bound)
                if number in answers:
                    assert got in (answers[number], ErrorCode.REQUEST_EXPIRED)
                elif got is not ErrorCode.REQUEST_EXPIRED:
                    assert isinstance(got, tuple)
                    answers[number] = got
    covered = sorted(offset for base, last in answers.values() for offset in range(base, last + 1))
    assert covered == list(range(driver.partition(pid(1)).next_offset))
