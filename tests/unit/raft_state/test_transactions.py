"""Transactions in the replicated state: a decision over everything, the fence, and what a late command cannot do."""

from dataclasses import replace

import pytest

from smq.raft_state import limits
from smq.raft_state.commands import AllocateProducerId, Command, DeleteTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import transactions
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.machine import Machine
from smq.raft_state.replies import ProducerIdAllocated
from smq.raft_state.state import TransactionOutcome, TransactionPhase, TransactionState
from tests.unit.raft_state.support import (
    Driver,
    add,
    assign_members,
    commit,
    coordinated,
    elect,
    end,
    expire,
    external_topic,
    form,
    init_transactions,
    member,
    pid,
    register,
    rid,
    seal,
    settings,
    stage,
    topic,
    written,
)

HOUR_MS = 3_600_000


@pytest.fixture
def driver() -> Driver:
    driver = coordinated()
    driver.ok(topic(2, partitions=1, replicas=1))
    return driver


def of(driver: Driver, name: str = "t") -> TransactionState:
    return driver.machine.state.transactions[name]


def started(driver: Driver, name: str = "t", **fields: int) -> tuple[int, int]:
    """(producer id, epoch) of a producer that starts now."""
    reply = driver.ok(init_transactions(name, **fields))
    assert isinstance(reply, ProducerIdAllocated)
    return reply.producer_id, reply.producer_epoch


def complete(driver: Driver, name: str = "t") -> None:
    """The leaders have written every marker."""
    transaction = of(driver, name)
    state = driver.machine.state
    items = [(p, driver.partition(p).epoch, transaction.producer_id, transaction.changes) for p in state.endings]
    driver.ok(written(*items))
    assert transaction.phase is TransactionPhase.EMPTY


# ------------------------------------------------------------------------------------------------- producers
def test_a_new_id_gets_a_fresh_producer_and_each_start_the_next_epoch(driver: Driver) -> None:
    assert started(driver) == (0, 0)
    assert started(driver, "other") == (1, 0)
    assert started(driver) == (0, 1)


def test_a_producer_that_goes_on_gets_the_next_epoch_and_the_same_one_if_it_asks_again(driver: Driver) -> None:
    started(driver)
    assert started(driver, producer=0, epoch=0) == (0, 1)
    assert started(driver, producer=0, epoch=0) == (0, 1)
    assert started(driver, producer=0, epoch=1) == (0, 2)


def test_a_producer_that_another_one_has_replaced_cannot_go_on(driver: Driver) -> None:
    started(driver)
    started(driver)
    driver.refused(init_transactions("t", 0, 0), ErrorCode.PRODUCER_FENCED)
    driver.refused(init_transactions("t", 5, 1), ErrorCode.PRODUCER_FENCED)


def test_a_producer_whose_id_has_been_forgotten_begins_again(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    assert started(driver) == (0, 0)
    assert started(driver) == (0, 1)
    driver.ok(settings(transactional_id_expiration_ms=1))
    expire(driver, HOUR_MS + 10_000)
    assert "t" not in driver.machine.state.transactions
    driver.refused(add("t", 0, 1, pid(1)), ErrorCode.UNKNOWN_TRANSACTIONAL_ID)
    assert started(driver, producer=0, epoch=1) == (1, 0)
    assert driver.machine.state.transactional_ids == {1: "t"}
    driver.ok(add("t", 1, 0, pid(1)))
    driver.refused(init_transactions("t", 0, 1), ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize(("producer", "epoch"), [(0, -1), (-1, 0)])
def test_a_producer_that_names_half_of_itself_gets_no_epoch(driver: Driver, producer: int, epoch: int) -> None:
    started(driver)
    driver.refused(init_transactions("t", producer, epoch), ErrorCode.INVALID_REQUEST)


def test_an_id_without_epochs_gets_another_producer(driver: Driver) -> None:
    started(driver)
    of(driver).producer_epoch = ProducerEpoch(limits.PRODUCER_EPOCH_RETIRED - 1)
    assert started(driver) == (1, 0)
    assert driver.machine.state.transactional_ids == {1: "t"}


def test_the_last_epoch_can_still_be_fenced(driver: Driver) -> None:
    last = limits.PRODUCER_EPOCH_RETIRED - 1
    started(driver)
    of(driver).producer_epoch = ProducerEpoch(last)
    driver.ok(add("t", 0, last, pid(1)))
    driver.ok(end("t", 0, last, commit=False, fencing=True))
    complete(driver)
    assert started(driver, producer=0, epoch=last) == (1, 0)


def test_a_fenced_producer_may_go_on_unless_another_takes_its_place(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.refused(end("t", 0, 0, commit=False, replacing=True), ErrorCode.INVALID_REQUEST)
    driver.ok(end("t", 0, 0, commit=False, fencing=True))
    complete(driver)
    assert started(driver, producer=0, epoch=0) == (0, 1)
    driver.ok(add("t", 0, 1, pid(1)))
    driver.ok(end("t", 0, 1, commit=False, fencing=True, replacing=True))
    complete(driver)
    driver.refused(init_transactions("t", 0, 1), ErrorCode.PRODUCER_FENCED)
    assert started(driver) == (0, 3)


@pytest.mark.parametrize(
    "command",
    [
        add("t", 0, limits.PRODUCER_EPOCH_RETIRED, pid(1)),
        add("t", 0, limits.PRODUCER_EPOCH_RETIRED, groups=("g",)),
        end("t", 0, limits.PRODUCER_EPOCH_RETIRED, commit=False, fencing=True),
    ],
)
def test_nobody_can_use_the_retired_epoch(driver: Driver, command: Command) -> None:
    """It would grow with the next fence, beyond what a batch and a snapshot can hold."""
    last = limits.PRODUCER_EPOCH_RETIRED - 1
    started(driver)
    of(driver).producer_epoch = ProducerEpoch(last)
    driver.ok(add("t", 0, last, pid(1)))
    driver.ok(end("t", 0, last, commit=False, fencing=True))
    complete(driver)
    driver.refused(command, ErrorCode.PRODUCER_FENCED)
    assert started(driver, producer=0, epoch=last) == (1, 0)


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_timeout_beyond_the_limit_is_refused_with_the_limit(driver: Driver, timeout_ms: int) -> None:
    refused = driver.refused(init_transactions("t", timeout_ms=timeout_ms), ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    assert "from 1 to 900000 ms" in refused.message
    driver.ok(settings(transaction_max_timeout_ms=1_000_000))
    if timeout_ms > 0:
        started(driver, timeout_ms=timeout_ms)


@pytest.mark.parametrize("name", ["", "x" * 513])
def test_an_id_of_a_wrong_length_is_refused(driver: Driver, name: str) -> None:
    driver.refused(init_transactions(name), ErrorCode.INVALID_REQUEST)


def test_ids_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTIONAL_IDS_MAX", 1)
    started(driver)
    driver.refused(init_transactions("other"), ErrorCode.LIMIT_EXCEEDED)
    started(driver)


def test_the_producer_of_an_id_cannot_be_bumped_as_if_it_had_none(driver: Driver) -> None:
    started(driver)
    command = AllocateProducerId(producer_id=ProducerId(0), producer_epoch=ProducerEpoch(0))
    driver.refused(command, ErrorCode.INVALID_REQUEST)


# ---------------------------------------------------------------------------------------------- one transaction
def test_rule_29_one_decision_is_over_all_partitions_and_all_staged_offsets(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1), pid(1, 1), groups=("g", "h")))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    driver.ok(stage("t", 0, 0, "h", (pid(1, 1), 6), (pid(2), 7)))
    groups = driver.machine.state.groups
    assert groups == {}
    applied = driver.apply(end("t", 0, 0, commit=True))
    assert applied.touched == (pid(1), pid(1, 1))
    assert {name: {p: c.offset for p, c in g.offsets.items()} for name, g in groups.items()} == {
        "g": {pid(1): 5},
        "h": {pid(1, 1): 6, pid(2): 7},
    }
    assert driver.machine.state.endings == {pid(1): {0}, pid(1, 1): {0}}
    assert (of(driver).phase, of(driver).outcome) == (TransactionPhase.COMMITTING, TransactionOutcome.COMMITTED)


def test_an_abort_commits_no_offset(driver: Driver) -> None:
    started(driver)
    driver.ok(commit("g", (pid(1), 1)))
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    driver.ok(end("t", 0, 0, commit=False))
    assert driver.machine.state.groups["g"].offsets[pid(1)].offset == 1
    assert of(driver).phase is TransactionPhase.ABORTING


def test_rule_29_the_next_one_begins_once_every_marker_is_written(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1), pid(1, 1)))
    driver.ok(end("t", 0, 0, commit=True))
    changes = of(driver).changes
    driver.ok(written((pid(1), 0, 0, changes)))
    for command in (add("t", 0, 0, pid(1)), init_transactions("t")):
        driver.refused(command, ErrorCode.TRANSACTION_ENDING)
    driver.ok(written((pid(1, 1), 0, 0, changes)))
    driver.ok(add("t", 0, 0, pid(1)))
    assert of(driver).phase is TransactionPhase.ONGOING


@pytest.mark.parametrize(("epoch", "changes"), [(1, 0), (0, -1), (0, 1)], ids=["other epoch", "earlier", "later"])
def test_rule_29_a_marker_of_another_leader_or_another_transaction_does_not_count(
    driver: Driver, epoch: int, changes: int
) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.ok(written((pid(1), epoch, 0, of(driver).changes + changes), (pid(9), 0, 0, 0), (pid(1), 0, 9, 0)))
    assert of(driver).phase is TransactionPhase.COMMITTING


def test_rule_29_a_marker_of_the_leader_before_does_not_count(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.ok(elect(pid(1), 0, candidate=1, end=0, seals=(seal(1, 0), seal(2, 0))))
    driver.ok(written((pid(1), 0, 0, of(driver).changes)))
    assert of(driver).phase is TransactionPhase.COMMITTING
    complete(driver)


@pytest.mark.parametrize("is_commit", [True, False])
def test_rule_29_a_repeated_decision_is_answered_and_the_opposite_one_refused(driver: Driver, is_commit: bool) -> None:
    started(driver)
    driver.refused(end("t", 0, 0, commit=is_commit), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=is_commit))
    for step in range(2):
        driver.ok(end("t", 0, 0, commit=is_commit))
        driver.refused(end("t", 0, 0, commit=not is_commit), ErrorCode.INVALID_TRANSACTION_STATE)
        if not step:
            complete(driver)


def test_only_groups_without_partitions_need_no_marker(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    driver.ok(end("t", 0, 0, commit=True))
    assert of(driver).phase is TransactionPhase.EMPTY


# -------------------------------------------------------------------------------------------------- the zombies
ZOMBIE: dict[str, Command] = {
    "addition": add("t", 0, 0, pid(1, 1)),
    "commit": end("t", 0, 0, commit=True),
    "abort": end("t", 0, 0, commit=False),
    "staged offsets": stage("t", 0, 0, "g", (pid(1), 1)),
}


@pytest.mark.parametrize("command", ZOMBIE.values(), ids=ZOMBIE)
def test_a_fenced_producer_changes_nothing(driver: Driver, command: Command) -> None:
    started(driver)
    started(driver)
    driver.ok(add("t", 0, 1, pid(1), groups=("g",)))
    driver.refused(command, ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("command", ZOMBIE.values(), ids=ZOMBIE)
def test_a_command_of_the_transaction_before_changes_nothing(driver: Driver, command: Command) -> None:
    """The same producer and epoch: it was proposed, its caller gave up, and it arrives after the next has begun."""
    started(driver)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    late = driver.proposed(command)  # type: ignore[arg-type] # all of them are Coordinated
    driver.ok(end("t", 0, 0, commit=False))
    complete(driver)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.refused(
        late,
        ErrorCode.TRANSACTION_ENDING if command is ZOMBIE["staged offsets"] else ErrorCode.NOT_COORDINATOR,
    )


def test_staged_offsets_that_arrive_after_newer_ones_are_refused(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, groups=("g",)))
    late = driver.proposed(stage("t", 0, 0, "g", (pid(1), 1)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 2)))
    driver.refused(late, ErrorCode.TRANSACTION_ENDING)
    assert of(driver).offsets["g"][pid(1)].offset == 2


def test_a_commit_of_the_group_that_arrives_after_the_transactions_is_refused(driver: Driver) -> None:
    started(driver)
    driver.ok(commit("g", (pid(1), 1)))
    driver.ok(add("t", 0, 0, groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    late = driver.proposed(commit("g", (pid(1), 2)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert driver.machine.state.groups["g"].offsets[pid(1)].offset == 5


def test_a_change_by_a_former_coordinator_is_refused(driver: Driver) -> None:
    started(driver)
    late = driver.proposed(init_transactions("t"))
    driver.ok(register(1, 2, kafka="host:1"))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)


def test_a_late_start_of_a_forgotten_id_is_refused(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    late = driver.proposed(init_transactions("t"))
    started(driver)
    driver.ok(settings(transactional_id_expiration_ms=1))
    expire(driver, HOUR_MS + 10_000)
    assert "t" not in driver.machine.state.transactions
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert started(driver) == (1, 0)


# --------------------------------------------------------------------------------------------- wrong requests
def test_unknown_and_external_partitions_are_refused_whole(driver: Driver) -> None:
    driver.ok(external_topic(4))
    started(driver)
    driver.refused(add("t", 0, 0, pid(1), pid(9)), ErrorCode.UNKNOWN_PARTITION)
    driver.refused(add("t", 0, 0, pid(1), pid(4)), ErrorCode.WRONG_STORAGE)
    driver.refused(add("t", 0, 0, pid(1), groups=("",)), ErrorCode.INVALID_REQUEST)
    assert of(driver).phase is TransactionPhase.EMPTY


def test_an_unknown_id_or_another_producer_is_refused(driver: Driver) -> None:
    started(driver)
    for command in (add("no", 0, 0), add("t", 3, 0), end("no", 0, 0, commit=True), stage("no", 0, 0, "g", seen=0)):
        driver.refused(command, ErrorCode.UNKNOWN_TRANSACTIONAL_ID)


def test_offsets_of_a_group_outside_the_transaction_are_refused(driver: Driver) -> None:
    started(driver)
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("t", 0, 0, groups=("h",)))
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.refused(stage("t", 0, 0, "h", (pid(9), 1)), ErrorCode.UNKNOWN_PARTITION)


def test_offsets_of_a_former_member_are_refused(driver: Driver) -> None:
    started(driver)
    driver.ok(form("g", 1, 0, member("m")))
    driver.ok(assign_members("g", 1, 1, m=b""))
    driver.ok(add("t", 0, 0, groups=("g",)))
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1), generation=0, member_id="m"), ErrorCode.ILLEGAL_GENERATION)
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1), generation=1, member_id="x"), ErrorCode.UNKNOWN_MEMBER)
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1), generation=1, member_id="m"))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))  # an old client names no member


def test_an_abort_alone_may_fence(driver: Driver) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.refused(end("t", 0, 0, commit=True, fencing=True), ErrorCode.INVALID_REQUEST)
    driver.ok(end("t", 0, 0, commit=False, fencing=True))
    assert of(driver).producer_epoch == 1


def test_partitions_and_offsets_of_all_open_transactions_are_bounded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_ITEMS_CLUSTER_MAX", 3)
    started(driver)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 2)))
    driver.refused(stage("t", 0, 0, "g", (pid(1, 1), 1)), ErrorCode.LIMIT_EXCEEDED)
    driver.refused(add("t", 0, 0, pid(1, 1)), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(end("t", 0, 0, commit=True))
    complete(driver)
    driver.ok(add("t", 0, 0, pid(1), pid(1, 1)))


def test_a_commit_whose_group_has_no_room_changes_nothing_and_can_be_aborted(driver: Driver) -> None:
    driver.machine.state.groups_max = 1
    started(driver)
    driver.ok(commit("full", (pid(1), 1)))
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    driver.refused(end("t", 0, 0, commit=True), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(end("t", 0, 0, commit=False))


# --------------------------------------------------------------------------------------- deletion, expiry, restart
@pytest.mark.parametrize("is_open", [True, False])
def test_a_transaction_goes_on_without_a_deleted_topic(driver: Driver, is_open: bool) -> None:
    started(driver)
    driver.ok(add("t", 0, 0, pid(1), pid(2), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1), (pid(2), 2)))
    if not is_open:
        driver.ok(end("t", 0, 0, commit=True))
    driver.ok(DeleteTopic(name="t1"))
    assert of(driver).partitions == {pid(2)}
    if is_open:
        driver.ok(end("t", 0, 0, commit=True))
    assert set(driver.machine.state.groups["g"].offsets) == {pid(2)}
    driver.ok(DeleteTopic(name="t2"))
    assert of(driver).phase is TransactionPhase.EMPTY


def test_an_open_transaction_is_aborted_after_its_time_and_its_producer_fenced(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    started(driver, timeout_ms=60_000)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    expire(driver, HOUR_MS + 500_000)  # its time begins here: the clock had stood
    expire(driver, HOUR_MS + 559_999)
    assert of(driver).phase is TransactionPhase.ONGOING
    expire(driver, HOUR_MS + 560_000)
    assert (of(driver).phase, of(driver).producer_epoch) == (TransactionPhase.ABORTING, 1)
    driver.refused(end("t", 0, 0, commit=True), ErrorCode.PRODUCER_FENCED)
    assert driver.machine.state.groups == {}
    complete(driver)
    assert started(driver, producer=0, epoch=0) == (0, 1)


def test_an_abort_by_time_touches_its_partitions(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    started(driver, timeout_ms=1)
    driver.ok(add("t", 0, 0, pid(1)))
    expire(driver, HOUR_MS + 1)
    late = driver.proposed(end("t", 0, 0, commit=True))
    expire(driver, HOUR_MS + 2)
    assert driver.machine.state.endings == {pid(1): {0}}
    driver.refused(late, ErrorCode.NOT_COORDINATOR)


def test_an_id_expires_only_without_a_transaction(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    driver.ok(settings(transactional_id_expiration_ms=2 * HOUR_MS))
    started(driver)
    started(driver, "open", timeout_ms=900_000)
    driver.ok(add("open", 1, 0, pid(1)))
    for step in range(1, 16):
        expire(driver, HOUR_MS + step * 600_000)
    assert set(driver.machine.state.transactions) == {"open"}
    assert driver.machine.state.transactional_ids == {1: "open"}


def test_ids_from_before_the_first_step_of_the_clock_do_not_expire_with_it(driver: Driver) -> None:
    started(driver)
    expire(driver, 30 * 24 * HOUR_MS)
    assert "t" in driver.machine.state.transactions


def test_a_restart_in_each_phase_keeps_everything(driver: Driver) -> None:
    steps: list[Command] = [
        init_transactions("t"),
        add("t", 0, 0, pid(1), pid(2), groups=("g", "h")),
        stage("t", 0, 0, "g", (pid(1), 1)),
        end("t", 0, 0, commit=True),
        written((pid(1), 0, 0, 4)),
        written((pid(2), 0, 0, 4)),
        add("t", 0, 0, pid(1)),
        end("t", 0, 0, commit=False, fencing=True),
    ]
    for command in steps:
        driver.ok(command)
        restored = Machine.restore(driver.machine.snapshot())
        assert restored.state == driver.machine.state
        driver.machine = restored
    assert of(driver).phase is TransactionPhase.ABORTING


def test_a_repeated_request_gets_its_first_reply(driver: Driver) -> None:
    command = replace(init_transactions("t"), request_id=rid(1))
    first = driver.ok(command)
    assert driver.ok(command) == first
    assert of(driver).producer_epoch == 0
    assert of(driver).changes == 1
