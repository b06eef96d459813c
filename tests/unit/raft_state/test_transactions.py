"""Transactions in the replicated state: a decision over everything, the fence, and what a late command cannot do."""

from dataclasses import replace

import pytest

from smq.raft_state import limits
from smq.raft_state.commands import AllocateProducerId, Command, DeleteTopic, JoinTransactions
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import transactions
from smq.raft_state.ids import ProducerEpoch, ProducerId
from smq.raft_state.invariants import InvariantBroken, check_steps
from smq.raft_state.machine import Machine
from smq.raft_state.replies import Done, ProducerIdAllocated, Rejected, Results
from smq.raft_state.state import TransactionOutcome, TransactionPhase, TransactionState
from smq.raft_state.topic_config import MIRRORED
from tests.unit.raft_state.support import (
    Driver,
    add,
    assign_members,
    commit,
    coordinated,
    delete_group,
    delete_offsets,
    elect,
    end,
    expire,
    external_topic,
    form,
    init_transactions,
    join,
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
def fresh() -> Driver:
    driver = coordinated()
    driver.ok(topic(2, partitions=1, replicas=1))
    return driver


@pytest.fixture
def driver(fresh: Driver) -> Driver:
    """Producer 0 of transactional id "t" is in epoch 0."""
    fresh.ok(init_transactions("t"))
    return fresh


def of(driver: Driver, name: str = "t") -> TransactionState:
    return driver.machine.state.transactions[name]


def started(driver: Driver, name: str = "t", **fields: int) -> tuple[int, int]:
    """(producer id, epoch) of a producer that starts now."""
    reply = driver.ok(init_transactions(name, **fields))
    assert isinstance(reply, ProducerIdAllocated)
    return reply.producer_id, reply.producer_epoch


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


# ------------------------------------------------------------------------------------------------- producers
def test_a_new_id_gets_a_fresh_producer_and_each_start_the_next_epoch(fresh: Driver) -> None:
    assert started(fresh) == (0, 0)
    assert started(fresh, "other") == (1, 0)
    assert started(fresh) == (0, 1)


def test_a_producer_that_goes_on_gets_the_next_epoch_and_the_same_one_if_it_asks_again(driver: Driver) -> None:
    assert started(driver, producer=0, epoch=0) == (0, 1)
    assert started(driver, producer=0, epoch=0) == (0, 1)
    assert started(driver, producer=0, epoch=1) == (0, 2)


def test_a_producer_that_another_one_has_replaced_cannot_go_on(driver: Driver) -> None:
    started(driver)
    driver.refused(init_transactions("t", 0, 0), ErrorCode.PRODUCER_FENCED)
    driver.refused(init_transactions("t", 5, 1), ErrorCode.PRODUCER_FENCED)


def test_a_producer_whose_id_has_been_forgotten_begins_again(fresh: Driver) -> None:
    expire(fresh, HOUR_MS)
    assert started(fresh) == (0, 0)
    assert started(fresh) == (0, 1)
    fresh.ok(settings(transactional_id_expiration_ms=1))
    expire(fresh, HOUR_MS + 10_000)
    assert "t" not in fresh.machine.state.transactions
    fresh.refused(add("t", 0, 1, pid(1)), ErrorCode.UNKNOWN_TRANSACTIONAL_ID)
    assert started(fresh, producer=0, epoch=1) == (1, 0)
    assert fresh.machine.state.transactional_ids == {1: "t"}
    fresh.ok(add("t", 1, 0, pid(1)))
    fresh.refused(init_transactions("t", 0, 1), ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize(("producer", "epoch"), [(0, -1), (-1, 0)])
def test_a_producer_that_names_half_of_itself_gets_no_epoch(driver: Driver, producer: int, epoch: int) -> None:
    driver.refused(init_transactions("t", producer, epoch), ErrorCode.INVALID_REQUEST)


def test_an_id_without_epochs_gets_another_producer(driver: Driver) -> None:
    of(driver).producer_epoch = ProducerEpoch(limits.PRODUCER_EPOCH_RETIRED - 1)
    assert started(driver) == (1, 0)
    assert driver.machine.state.transactional_ids == {1: "t"}


def test_the_last_epoch_can_still_be_fenced(fresh: Driver) -> None:
    last = limits.PRODUCER_EPOCH_RETIRED - 1
    started(fresh)
    of(fresh).producer_epoch = ProducerEpoch(last)
    fresh.ok(add("t", 0, last, pid(1)))
    fresh.ok(end("t", 0, last, commit=False, fencing=True))
    complete(fresh)
    assert started(fresh, producer=0, epoch=last) == (1, 0)


def test_a_fenced_producer_may_go_on_unless_another_takes_its_place(driver: Driver) -> None:
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
def test_nobody_can_use_the_retired_epoch(fresh: Driver, command: Command) -> None:
    """It would grow with the next fence, beyond what a batch and a snapshot can hold."""
    last = limits.PRODUCER_EPOCH_RETIRED - 1
    started(fresh)
    of(fresh).producer_epoch = ProducerEpoch(last)
    fresh.ok(add("t", 0, last, pid(1)))
    fresh.ok(end("t", 0, last, commit=False, fencing=True))
    complete(fresh)
    fresh.refused(command, ErrorCode.PRODUCER_FENCED)
    assert started(fresh, producer=0, epoch=last) == (1, 0)


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_timeout_beyond_the_limit_is_refused_with_the_limit(fresh: Driver, timeout_ms: int) -> None:
    refused = fresh.refused(init_transactions("t", timeout_ms=timeout_ms), ErrorCode.INVALID_TRANSACTION_TIMEOUT)
    assert "from 1 to 900000 ms" in refused.message
    fresh.ok(settings(transaction_max_timeout_ms=1_000_000))
    if timeout_ms > 0:
        started(fresh, timeout_ms=timeout_ms)


@pytest.mark.parametrize("name", ["", "x" * 513])
def test_an_id_of_a_wrong_length_is_refused(fresh: Driver, name: str) -> None:
    fresh.refused(init_transactions(name), ErrorCode.INVALID_REQUEST)


def test_ids_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTIONAL_IDS_MAX", 1)
    driver.refused(init_transactions("other"), ErrorCode.LIMIT_EXCEEDED)
    started(driver)


def test_the_producer_of_an_id_cannot_be_bumped_as_if_it_had_none(driver: Driver) -> None:
    command = AllocateProducerId(producer_id=ProducerId(0), producer_epoch=ProducerEpoch(0))
    driver.refused(command, ErrorCode.INVALID_REQUEST)


# ---------------------------------------------------------------------------------------------- one transaction
def test_rule_29_one_decision_is_over_all_partitions_and_all_staged_offsets(driver: Driver) -> None:
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


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("x stages 100", "commit 200", "x ends"), 200),
        (("commit 200", "x stages 100", "x ends"), 100),
        (("x stages 100", "commit 200", "x stages 150", "x ends"), 150),
        (("x stages 100", "y stages 200", "y ends", "x ends"), 200),
        (("y stages 200", "x stages 100", "y ends", "x ends"), 100),
        (("x stages 100", "commit 200", "y stages 300", "y ends", "x ends"), 300),
        (("x stages 100", "delete offsets", "x ends"), None),
        (("x stages 100", "delete group", "x ends"), None),
        (("commit 200", "x stages 100", "delete group", "x ends"), None),
        (("x stages 100", "delete group", "x stages 150", "x ends"), 150),
        (("x stages 100", "delete group", "commit 200", "x ends"), 200),
    ],
)
def test_the_end_of_a_transaction_replaces_no_offset_that_is_newer_than_its_own(
    driver: Driver, steps: tuple[str, ...], expected: int | None
) -> None:
    """As Kafka compares the places of the records in its log of offsets; a deletion takes what is staged with it."""
    driver.ok(commit("g", (pid(2), 1)))
    producers = {}
    for name in ("x", "y"):
        reply = driver.ok(init_transactions(name))
        assert isinstance(reply, ProducerIdAllocated)
        producers[name] = reply.producer_id
        driver.ok(add(name, reply.producer_id, 0, groups=("g",)))
    for step in steps:
        who, what, offset = (*step.split(), "0")[:3]
        if what == "stages":
            driver.ok(stage(who, producers[who], 0, "g", (pid(1), int(offset))))
        elif what == "ends":
            driver.ok(end(who, producers[who], 0, commit=True))
        elif who == "commit":
            driver.ok(commit("g", (pid(1), int(what))))
        else:
            driver.ok(delete_group("g") if what == "group" else delete_offsets("g", 0, pid(1)))
        driver.machine = Machine.restore(driver.machine.snapshot())
    group = driver.machine.state.groups.get("g")
    found = group.offsets.get(pid(1)) if group is not None else None
    assert (found.offset if found is not None else None) == expected
    assert driver.machine.state.transaction_items == sum(t.items for t in driver.machine.state.transactions.values())


def test_an_abort_commits_no_offset(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 1)))
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    driver.ok(end("t", 0, 0, commit=False))
    assert driver.machine.state.groups["g"].offsets[pid(1)].offset == 1
    assert of(driver).phase is TransactionPhase.ABORTING


def test_rule_29_the_next_one_begins_once_every_marker_is_written(driver: Driver) -> None:
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
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.ok(written((pid(1), epoch, 0, of(driver).changes + changes), (pid(9), 0, 0, 0), (pid(1), 0, 9, 0)))
    assert of(driver).phase is TransactionPhase.COMMITTING


def test_rule_29_a_marker_of_the_leader_before_does_not_count(driver: Driver) -> None:
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.ok(elect(pid(1), 0, candidate=1, end=0, seals=(seal(1, 0), seal(2, 0))))
    driver.ok(written((pid(1), 0, 0, of(driver).changes)))
    assert of(driver).phase is TransactionPhase.COMMITTING
    complete(driver)


@pytest.mark.parametrize("is_commit", [True, False])
def test_rule_29_a_repeated_decision_is_answered_and_the_opposite_one_refused(driver: Driver, is_commit: bool) -> None:
    driver.refused(end("t", 0, 0, commit=is_commit), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("t", 0, 0, pid(1)))
    driver.ok(end("t", 0, 0, commit=is_commit))
    for step in range(2):
        driver.ok(end("t", 0, 0, commit=is_commit))
        driver.refused(end("t", 0, 0, commit=not is_commit), ErrorCode.INVALID_TRANSACTION_STATE)
        if not step:
            complete(driver)


def test_only_groups_without_partitions_need_no_marker(driver: Driver) -> None:
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
    driver.ok(add("t", 0, 1, pid(1), groups=("g",)))
    driver.refused(command, ErrorCode.PRODUCER_FENCED)


@pytest.mark.parametrize("command", ZOMBIE.values(), ids=ZOMBIE)
def test_a_command_of_the_transaction_before_changes_nothing(driver: Driver, command: Command) -> None:
    """The same producer and epoch: it was proposed, its caller gave up, and it arrives after the next has begun."""
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    late = driver.proposed(command)  # type: ignore[arg-type] # all of them are Coordinated
    driver.ok(end("t", 0, 0, commit=False))
    complete(driver)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.refused(
        late, ErrorCode.TRANSACTION_ENDING if command is ZOMBIE["staged offsets"] else ErrorCode.NOT_COORDINATOR
    )


@pytest.mark.parametrize("joining", [False, True], ids=["first protocol", "second protocol"])
def test_staged_offsets_that_arrive_after_newer_ones_are_refused(driver: Driver, joining: bool) -> None:
    if not joining:
        driver.ok(add("t", 0, 0, groups=("g",)))
    late = driver.proposed(stage("t", 0, 0, "g", (pid(1), 1), joining=joining))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 2), joining=joining))
    driver.refused(late, ErrorCode.TRANSACTION_ENDING)
    assert of(driver).offsets["g"][pid(1)].offset == 2


def test_a_commit_of_the_group_that_arrives_after_the_transactions_is_refused(driver: Driver) -> None:
    driver.ok(commit("g", (pid(1), 1)))
    driver.ok(add("t", 0, 0, groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 5)))
    late = driver.proposed(commit("g", (pid(1), 2)))
    driver.ok(end("t", 0, 0, commit=True))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert driver.machine.state.groups["g"].offsets[pid(1)].offset == 5


def test_a_change_by_a_former_coordinator_is_refused(driver: Driver) -> None:
    late = driver.proposed(init_transactions("t"))
    driver.ok(register(1, 2, kafka="host:1"))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)


def test_a_late_start_of_a_forgotten_id_is_refused(fresh: Driver) -> None:
    expire(fresh, HOUR_MS)
    late = fresh.proposed(init_transactions("t"))
    started(fresh)
    fresh.ok(settings(transactional_id_expiration_ms=1))
    expire(fresh, HOUR_MS + 10_000)
    assert "t" not in fresh.machine.state.transactions
    fresh.refused(late, ErrorCode.NOT_COORDINATOR)
    assert started(fresh) == (1, 0)


# --------------------------------------------------------------------------------------------- wrong requests
def test_unknown_external_and_mirrored_partitions_are_refused_whole(fresh: Driver) -> None:
    fresh.ok(external_topic(4))
    fresh.ok(replace(topic(5, replicas=1), config=((MIRRORED, "true"),)))
    started(fresh)
    fresh.refused(add("t", 0, 0, pid(1), pid(9)), ErrorCode.UNKNOWN_PARTITION)
    fresh.refused(add("t", 0, 0, pid(1), pid(4)), ErrorCode.WRONG_STORAGE)
    fresh.refused(add("t", 0, 0, pid(1), pid(5)), ErrorCode.WRONG_WRITER)
    fresh.refused(add("t", 0, 0, pid(1), groups=("",)), ErrorCode.INVALID_REQUEST)
    assert of(fresh).phase is TransactionPhase.EMPTY


def test_an_unknown_id_or_another_producer_is_refused(driver: Driver) -> None:
    for command in (add("no", 0, 0), add("t", 3, 0), end("no", 0, 0, commit=True), stage("no", 0, 0, "g", seen=0)):
        driver.refused(command, ErrorCode.UNKNOWN_TRANSACTIONAL_ID)


def test_offsets_of_a_group_outside_the_transaction_are_refused(driver: Driver) -> None:
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("t", 0, 0, groups=("h",)))
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.refused(stage("t", 0, 0, "h", (pid(9), 1)), ErrorCode.UNKNOWN_PARTITION)


def test_offsets_of_a_former_member_are_refused(driver: Driver) -> None:
    driver.ok(form("g", 1, 0, member("m")))
    driver.ok(assign_members("g", 1, 1, m=b""))
    driver.ok(add("t", 0, 0, groups=("g",)))
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1), generation=0, member_id="m"), ErrorCode.ILLEGAL_GENERATION)
    driver.refused(stage("t", 0, 0, "g", (pid(1), 1), generation=1, member_id="x"), ErrorCode.UNKNOWN_MEMBER)
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1), generation=1, member_id="m"))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))  # an old client names no member


def test_an_abort_alone_may_fence(driver: Driver) -> None:
    driver.ok(add("t", 0, 0, pid(1)))
    driver.refused(end("t", 0, 0, commit=True, fencing=True), ErrorCode.INVALID_REQUEST)
    driver.ok(end("t", 0, 0, commit=False, fencing=True))
    assert of(driver).producer_epoch == 1


def test_partitions_and_offsets_of_all_open_transactions_are_bounded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_ITEMS_CLUSTER_MAX", 3)
    driver.ok(add("t", 0, 0, pid(1), groups=("g",)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    driver.ok(stage("t", 0, 0, "g", (pid(1), 2)))
    driver.refused(stage("t", 0, 0, "g", (pid(1, 1), 1)), ErrorCode.LIMIT_EXCEEDED)
    driver.refused(add("t", 0, 0, pid(1, 1)), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(end("t", 0, 0, commit=True))
    complete(driver)
    driver.ok(add("t", 0, 0, pid(1), pid(1, 1)))


def test_a_commit_whose_group_has_no_room_changes_nothing_and_can_be_aborted(fresh: Driver) -> None:
    fresh.machine.state.groups_max = 1
    started(fresh)
    fresh.ok(commit("full", (pid(1), 1)))
    fresh.ok(add("t", 0, 0, pid(1), groups=("g",)))
    fresh.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    fresh.refused(end("t", 0, 0, commit=True), ErrorCode.LIMIT_EXCEEDED)
    fresh.ok(end("t", 0, 0, commit=False))


# --------------------------------------------------------------------------------------- deletion, expiry, restart
@pytest.mark.parametrize("is_open", [True, False])
def test_a_transaction_goes_on_without_a_deleted_topic(driver: Driver, is_open: bool) -> None:
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


def test_an_open_transaction_is_aborted_after_its_time_and_its_producer_fenced(fresh: Driver) -> None:
    expire(fresh, HOUR_MS)
    started(fresh, timeout_ms=60_000)
    fresh.ok(add("t", 0, 0, pid(1), groups=("g",)))
    fresh.ok(stage("t", 0, 0, "g", (pid(1), 1)))
    expire(fresh, HOUR_MS + 500_000)  # its time begins here: the clock had stood
    expire(fresh, HOUR_MS + 559_999)
    assert of(fresh).phase is TransactionPhase.ONGOING
    expire(fresh, HOUR_MS + 560_000)
    assert (of(fresh).phase, of(fresh).producer_epoch) == (TransactionPhase.ABORTING, 1)
    fresh.refused(end("t", 0, 0, commit=True), ErrorCode.PRODUCER_FENCED)
    assert fresh.machine.state.groups == {}
    complete(fresh)
    assert started(fresh, producer=0, epoch=0) == (0, 1)


def test_an_abort_by_time_touches_its_partitions(fresh: Driver) -> None:
    expire(fresh, HOUR_MS)
    started(fresh, timeout_ms=1)
    fresh.ok(add("t", 0, 0, pid(1)))
    expire(fresh, HOUR_MS + 1)
    late = fresh.proposed(end("t", 0, 0, commit=True))
    expire(fresh, HOUR_MS + 2)
    assert fresh.machine.state.endings == {pid(1): {0}}
    fresh.refused(late, ErrorCode.NOT_COORDINATOR)


def test_an_id_expires_only_without_a_transaction(fresh: Driver) -> None:
    expire(fresh, HOUR_MS)
    fresh.ok(settings(transactional_id_expiration_ms=2 * HOUR_MS))
    started(fresh)
    started(fresh, "open", timeout_ms=900_000)
    fresh.ok(add("open", 1, 0, pid(1)))
    for step in range(1, 16):
        expire(fresh, HOUR_MS + step * 600_000)
    assert set(fresh.machine.state.transactions) == {"open"}
    assert fresh.machine.state.transactional_ids == {1: "open"}


def test_ids_from_before_the_first_step_of_the_clock_do_not_expire_with_it(driver: Driver) -> None:
    expire(driver, 30 * 24 * HOUR_MS)
    assert "t" in driver.machine.state.transactions


def test_a_repeated_request_gets_its_first_reply(fresh: Driver) -> None:
    command = replace(init_transactions("t"), request_id=rid(1))
    first = fresh.ok(command)
    assert fresh.ok(command) == first
    assert of(fresh).producer_epoch == 0
    assert of(fresh).changes == 1


# ------------------------------------------------------------------------------------------------------ second protocol
# Kafka's second protocol of transactions: the end of each begins the next epoch, so nothing late counts.
LAST = limits.PRODUCER_EPOCH_RETIRED - 1


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
