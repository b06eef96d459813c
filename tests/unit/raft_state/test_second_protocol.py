"""Kafka's second protocol of transactions: the end of each begins the next epoch, so nothing late counts."""

from dataclasses import replace

import pytest

from smq.raft_state import limits
from smq.raft_state.commands import JoinTransactions
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import transactions
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.invariants import InvariantBroken, check_steps
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Done, ProducerIdAllocated, Rejected, Results
from smq.raft_state.state import TransactionOutcome, TransactionPhase, TransactionState
from tests.unit.raft_state.support import (
    Driver,
    add,
    coordinated,
    end,
    expire,
    external_topic,
    init_transactions,
    join,
    pid,
    stage,
    topic,
    written,
)

LAST = limits.PRODUCER_EPOCH_RETIRED - 1


@pytest.fixture
def driver() -> Driver:
    """Producer 0 of transactional id "t" is in epoch 0."""
    driver = coordinated()
    driver.ok(topic(2, partitions=1, replicas=1))
    driver.ok(init_transactions("t"))
    return driver


def of(driver: Driver, name: str = "t") -> TransactionState:
    return driver.machine.state.transactions[name]


def joined(driver: Driver, command: JoinTransactions) -> list[ErrorCode | None]:
    reply = driver.ok(command)
    assert isinstance(reply, Results)
    return [item.code if isinstance(item, Rejected) else None for item in reply.items]


def ended(driver: Driver, producer: int, epoch: int, *, commit: bool = True) -> tuple[int, int]:
    """With what the producer goes on."""
    reply = driver.ok(end("t", producer, epoch, commit=commit, bumping=True))
    assert isinstance(reply, ProducerIdAllocated)
    return reply.producer_id, reply.producer_epoch


def allocated(producer: int, epoch: int) -> ProducerIdAllocated:
    return ProducerIdAllocated(producer_id=ProducerId(producer), producer_epoch=ProducerEpoch(epoch))


def complete(driver: Driver) -> None:
    """The leaders have written every marker."""
    state, transaction = driver.machine.state, of(driver)
    items = [
        (p, driver.partition(p).epoch, producer, transaction.changes)
        for p, producers in state.endings.items()
        for producer in sorted(producers)
    ]
    driver.ok(written(*items))
    assert transaction.phase is TransactionPhase.EMPTY


# ---------------------------------------------------------------------------------------------------- joining
def test_the_first_partition_begins_a_transaction_and_the_others_join_it(driver: Driver) -> None:
    changes = of(driver).changes
    assert joined(driver, join((pid(1), 0, 0), (pid(2), 0, 0), (pid(1), 0, 0))) == [None, None, None]
    assert (of(driver).phase, of(driver).partitions) == (TransactionPhase.ONGOING, {pid(1), pid(2)})
    assert driver.machine.state.transaction_items == 2
    assert of(driver).changes == changes, "it is no change by a coordinator, so none under way is overtaken"


def test_each_item_is_judged_by_itself(driver: Driver) -> None:
    driver.ok(external_topic(4, "elsewhere"))
    items = ((pid(9), 0, 0), (pid(4), 0, 0), (pid(1), 7, 0), (pid(1), 0, 1), (pid(1), 0, 0))
    assert joined(driver, join(*items)) == [
        ErrorCode.UNKNOWN_PARTITION,
        ErrorCode.WRONG_STORAGE,
        ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
        ErrorCode.PRODUCER_FENCED,
        None,
    ]
    assert of(driver).partitions == {pid(1)}


def test_partitions_are_bounded_for_those_that_join_too(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_PARTITIONS_MAX", 1)
    assert joined(driver, join((pid(1), 0, 0), (pid(2), 0, 0))) == [None, ErrorCode.LIMIT_EXCEEDED]


def test_a_group_that_joins_counts_against_the_limit_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_ITEMS_CLUSTER_MAX", 2)
    driver.ok(stage("t", 0, 0, "g", (pid(1), 7), joining=True))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 8), joining=True))
    driver.refused(stage("t", 0, 0, "other", (pid(1), 7), joining=True), ErrorCode.LIMIT_EXCEEDED)
    assert joined(driver, join((pid(1), 0, 0))) == [ErrorCode.LIMIT_EXCEEDED]
    assert set(of(driver).offsets) == {"g"}


def test_offsets_bring_their_group_with_them(driver: Driver) -> None:
    driver.ok(stage("t", 0, 0, "g", (pid(1), 7), joining=True))
    assert of(driver).phase is TransactionPhase.ONGOING
    assert driver.machine.state.transaction_items == 2
    driver.ok(stage("t", 0, 0, "g", (pid(1), 8), (pid(2), 3), joining=True))
    assert driver.machine.state.transaction_items == 3
    assert ended(driver, 0, 0) == (0, 1)
    assert {p: c.offset for p, c in driver.machine.state.groups["g"].offsets.items()} == {pid(1): 8, pid(2): 3}
    assert driver.machine.state.transaction_items == 0


def test_staged_offsets_that_arrive_after_newer_ones_are_refused(driver: Driver) -> None:
    late = stage("t", 0, 0, "g", (pid(1), 7), joining=True, seen=of(driver).changes)
    driver.ok(stage("t", 0, 0, "g", (pid(1), 8), joining=True))
    driver.refused(late, ErrorCode.TRANSACTION_ENDING)


def test_nothing_joins_while_the_markers_of_the_last_one_are_missing(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    assert joined(driver, join((pid(2), 0, 1))) == [ErrorCode.TRANSACTION_ENDING]
    driver.refused(stage("t", 0, 1, "g", (pid(1), 7), joining=True), ErrorCode.TRANSACTION_ENDING)
    complete(driver)
    assert joined(driver, join((pid(2), 0, 1))) == [None]


# ----------------------------------------------------------------------------------------- the end, and late ones
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_end_begins_the_next_epoch_and_its_repetition_is_answered_as_the_first(
    driver: Driver, is_commit: bool
) -> None:
    driver.ok(join((pid(1), 0, 0)))
    assert ended(driver, 0, 0, commit=is_commit) == (0, 1)
    assert of(driver).marked_as == (0, 1), "the control batch fences the epoch before in the log"
    assert ended(driver, 0, 0, commit=is_commit) == (0, 1)
    complete(driver)
    assert ended(driver, 0, 0, commit=is_commit) == (0, 1)
    driver.refused(end("t", 0, 0, commit=not is_commit, bumping=True), ErrorCode.INVALID_TRANSACTION_STATE)
    assert of(driver).outcome is (TransactionOutcome.COMMITTED if is_commit else TransactionOutcome.ABORTED)


@pytest.mark.parametrize("bumping", [True, False])
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_late_end_does_not_end_the_next_transaction(driver: Driver, is_commit: bool, bumping: bool) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0, commit=is_commit)
    complete(driver)
    driver.ok(join((pid(2), 0, 1)))
    driver.refused(end("t", 0, 0, commit=is_commit, bumping=bumping), ErrorCode.PRODUCER_FENCED)
    assert (of(driver).phase, of(driver).partitions) == (TransactionPhase.ONGOING, {pid(2)})


def test_what_was_sent_before_the_end_does_not_join_the_next_transaction(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    complete(driver)
    assert joined(driver, join((pid(2), 0, 0))) == [ErrorCode.PRODUCER_FENCED]
    driver.refused(stage("t", 0, 0, "g", (pid(1), 7), joining=True), ErrorCode.PRODUCER_FENCED)
    driver.refused(add("t", 0, 0, pid(2)), ErrorCode.PRODUCER_FENCED)
    assert of(driver).phase is TransactionPhase.EMPTY


def test_an_abort_without_a_transaction_keeps_a_batch_on_its_way_from_beginning_one(driver: Driver) -> None:
    driver.refused(end("t", 0, 0, commit=True, bumping=True), ErrorCode.INVALID_TRANSACTION_STATE)
    assert ended(driver, 0, 0, commit=False) == (0, 1)
    assert ended(driver, 0, 0, commit=False) == (0, 1)
    assert joined(driver, join((pid(1), 0, 0))) == [ErrorCode.PRODUCER_FENCED]
    assert ended(driver, 0, 1, commit=False) == (0, 2)


def test_an_abort_without_a_transaction_waits_for_the_markers_of_the_last_one(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    driver.refused(end("t", 0, 1, commit=False, bumping=True), ErrorCode.TRANSACTION_ENDING)
    complete(driver)
    assert ended(driver, 0, 1, commit=False) == (0, 2)


def test_the_end_of_a_replaced_producer_is_no_repetition(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    complete(driver)
    driver.ok(init_transactions("t"))
    driver.refused(end("t", 0, 0, commit=True, bumping=True), ErrorCode.PRODUCER_FENCED)


def test_an_abort_by_time_is_not_the_repetition_of_an_end(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    expire(driver, 1)
    expire(driver, 60_002)
    assert of(driver).phase is TransactionPhase.ABORTING
    for is_commit in (True, False):
        driver.refused(end("t", 0, 0, commit=is_commit, bumping=True), ErrorCode.PRODUCER_FENCED)


def test_a_producer_may_ask_for_an_epoch_after_an_end_whose_answer_it_lacks(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    complete(driver)
    assert driver.ok(init_transactions("t", 0, 0)) == allocated(0, 1)


@pytest.mark.parametrize("flags", [{"fencing": True}, {"fencing": True, "replacing": True}])
def test_an_end_either_fences_or_moves_its_producer_on(driver: Driver, flags: dict[str, bool]) -> None:
    driver.ok(join((pid(1), 0, 0)))
    driver.refused(end("t", 0, 0, commit=False, bumping=True, **flags), ErrorCode.INVALID_REQUEST)


# ------------------------------------------------------------------------------------------------- both protocols
def test_nothing_joins_by_itself_in_an_epoch_that_has_outlived_a_transaction(driver: Driver) -> None:
    """Of a client that ends its transactions by the first protocol: a late batch looks like one of the next."""
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    complete(driver)
    assert joined(driver, join((pid(1), 0, 0))) == [ErrorCode.INVALID_TRANSACTION_STATE]
    driver.refused(stage("t", 0, 0, "g", (pid(1), 7), joining=True), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("t", 0, 0, pid(2)))
    assert joined(driver, join((pid(1), 0, 0))) == [ErrorCode.INVALID_TRANSACTION_STATE]
    assert ended(driver, 0, 0, commit=False) == (0, 1)
    complete(driver)
    assert joined(driver, join((pid(1), 0, 1))) == [None]


def test_an_id_moves_to_the_second_protocol_and_back(driver: Driver) -> None:
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    complete(driver)
    driver.ok(init_transactions("t"))  # a newer client: epoch 1
    driver.ok(join((pid(1), 0, 1)))
    assert ended(driver, 0, 1) == (0, 2)
    complete(driver)
    driver.ok(init_transactions("t"))  # an older one again: epoch 3
    driver.refused(end("t", 0, 3, commit=True), ErrorCode.INVALID_TRANSACTION_STATE)
    for _ in range(2):
        driver.ok(add("t", 0, 3, pid(1)))
        assert isinstance(driver.ok(end("t", 0, 3, commit=True)), Done)
        assert isinstance(driver.ok(end("t", 0, 3, commit=True)), Done)
        complete(driver)


def test_the_first_protocol_does_not_repeat_an_end_of_the_second(driver: Driver) -> None:
    driver.ok(join((pid(1), 0, 0)))
    ended(driver, 0, 0)
    complete(driver)
    driver.refused(end("t", 0, 0, commit=True), ErrorCode.PRODUCER_FENCED)
    driver.refused(end("t", 0, 1, commit=True), ErrorCode.INVALID_TRANSACTION_STATE)


# ------------------------------------------------------------------------------------------------- the last epoch
def test_after_the_last_epoch_a_producer_goes_on_under_a_fresh_id(driver: Driver) -> None:
    of(driver).producer_epoch = ProducerEpoch(LAST)
    driver.ok(join((pid(1), 0, LAST)))
    assert ended(driver, 0, LAST) == (1, 0)
    assert of(driver).marked_as == (0, limits.PRODUCER_EPOCH_RETIRED)
    assert driver.machine.state.transactional_ids == {0: "t", 1: "t"}
    assert joined(driver, join((pid(2), 1, 0), (pid(2), 0, LAST))) == [
        ErrorCode.TRANSACTION_ENDING,
        ErrorCode.PRODUCER_FENCED,
    ]
    driver.machine = Machine.restore(driver.machine.snapshot())
    assert ended(driver, 0, LAST) == (1, 0)
    complete(driver)
    assert driver.machine.state.transactional_ids == {1: "t"}
    assert ended(driver, 0, LAST) == (1, 0)
    assert driver.ok(init_transactions("t", 0, LAST)) == allocated(1, 0), "or it asks so, without the answer"
    driver.ok(join((pid(2), 1, 0)))
    driver.refused(end("t", 0, LAST, commit=True, bumping=True), ErrorCode.PRODUCER_FENCED)
    assert joined(driver, join((pid(1), 0, LAST))) == [ErrorCode.UNKNOWN_TRANSACTIONAL_ID]
    assert ended(driver, 1, 0) == (1, 1)


def test_a_fresh_id_without_markers_to_write_replaces_the_former_one_at_once(driver: Driver) -> None:
    of(driver).producer_epoch = ProducerEpoch(LAST)
    assert ended(driver, 0, LAST, commit=False) == (1, 0)
    assert driver.machine.state.transactional_ids == {1: "t"}


@pytest.mark.parametrize(
    ("ended_id", "ended_epoch"), [(-1, 0), (0, 2), (0, limits.PRODUCER_EPOCH_RETIRED), (7, 1), (7, LAST)]
)
def test_more_than_one_step_since_the_last_end_breaks_an_invariant(
    driver: Driver, ended_id: int, ended_epoch: int
) -> None:
    transaction = of(driver)
    transaction.producer_epoch = ProducerEpoch(4)
    assert [*check_steps(driver.machine.state)]
    fields = {"ended_id": ended_id, "ended_epoch": ended_epoch}
    driver.machine.state.transactions["t"] = replace(transaction, **fields)  # type: ignore[arg-type] # plain numbers
    with pytest.raises(InvariantBroken, match="'t'"):
        _ = [*check_steps(driver.machine.state)]
