"""CommitBatch in the replicated state: all transactions or none, each batch of an app once, and what expires."""

from dataclasses import replace

import pytest

from smq.raft_state.commands import Command, DeleteTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers import batches
from smq.raft_state.machine import Machine
from smq.raft_state.replies import BatchCommitted
from smq.raft_state.state import TransactionPhase
from tests.unit.raft_state.support import (
    Driver,
    add,
    batch,
    coordinated,
    end,
    expire,
    init_transactions,
    pid,
    rid,
    settings,
    stage,
    topic,
    written,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def driver() -> Driver:
    """Two tasks have staged a transaction each: producers 0 and 1 in epoch 0."""
    driver = coordinated()
    driver.ok(topic(2, partitions=1, replicas=1))
    for number, name in enumerate(("a", "b")):
        driver.ok(init_transactions(name))
        driver.ok(add(name, number, 0, pid(1 + number)))
    return driver


def phases(driver: Driver) -> dict[str, str]:
    return {name: t.phase.name for name, t in driver.machine.state.transactions.items()}


def committed(driver: Driver, command: Command) -> bool:
    """Whether it was committed now; False for a replay."""
    reply = driver.ok(command)
    assert isinstance(reply, BatchCommitted)
    return not reply.is_replay


def complete(driver: Driver) -> None:
    """The leaders have written every marker."""
    state = driver.machine.state
    for p, producers in list(state.endings.items()):
        for producer in list(producers):
            transaction = state.transaction_of(producer)
            assert transaction is not None
            driver.ok(written((p, driver.partition(p).epoch, producer, transaction.changes)))


def test_rule_31_one_entry_commits_all_transactions_of_a_batch(driver: Driver) -> None:
    assert committed(driver, batch("app", 0, ("a", 0, 0), ("b", 1, 0)))
    assert phases(driver) == {"a": "COMMITTING", "b": "COMMITTING"}
    assert driver.machine.state.endings == {pid(1): {0}, pid(2): {1}}
    assert driver.machine.state.apps["app"].batch_id == 0


@pytest.mark.parametrize("batch_id", [0, 5])
def test_rule_31_a_batch_that_is_not_newer_drops_what_is_staged_and_is_answered_as_done(
    driver: Driver, batch_id: int
) -> None:
    assert committed(driver, batch("app", 5))
    assert not committed(driver, batch("app", batch_id, ("a", 0, 0)))
    assert phases(driver) == {"a": "ABORTING", "b": "ONGOING"}
    assert driver.machine.state.apps["app"].batch_id == 5
    assert committed(driver, batch("app", 6, ("b", 1, 0)))


@pytest.mark.parametrize(
    ("batch_id", "before", "now", "why"),
    [
        (5, (10, b"1"), (15, b"2"), "batch 5 of 'app' was committed with 10 rows, and this one has 15"),
        (5, (10, b"1"), (10, b"2"), "with 10 other rows, and this one has 10"),
        (5, (10, b"1"), (0, b""), "with 10 rows, and this one has 0"),
        (5, (0, b""), (10, b"1"), "with 0 rows, and this one has 10"),
        (4, (10, b"1"), (10, b"1"), "batch 4 of 'app' is older than the last one, 5: its rows cannot be compared"),
        (5, (10, b"1"), (10, b"1"), None),
        (5, (10, b"1"), None, None),
        (4, (10, b"1"), None, None),
        (5, None, (10, b"1"), None),
    ],
)
def test_rule_31_a_replay_with_other_rows_is_refused_and_changes_nothing(
    driver: Driver, batch_id: int, before: tuple[int, bytes] | None, now: tuple[int, bytes] | None, why: str | None
) -> None:
    """Dropped, its rows would be lost unnoticed. Without a fingerprint no node can compare them."""
    assert committed(driver, batch("app", 5, ("a", 0, 0), wrote=before))
    replay = batch("app", batch_id, ("b", 1, 0), wrote=now)
    if why is None:
        assert not committed(driver, replay)
        assert phases(driver)["b"] == "ABORTING"
    else:
        assert why in driver.refused(replay, ErrorCode.BATCH_DIFFERS).message
        assert phases(driver)["b"] == "ONGOING", "its writer aborts it, or commits it as another batch"
        assert committed(driver, replace(replay, batch_id=6))
    assert driver.machine.state.apps["app"].batch_id == (5 if why is None else 6)


def test_a_repetition_changes_nothing(driver: Driver) -> None:
    first = batch("app", 5, ("a", 0, 0), ("b", 1, 0))
    assert committed(driver, first)
    assert not committed(driver, first)
    assert phases(driver) == {"a": "COMMITTING", "b": "COMMITTING"}


def test_rule_31_a_late_repetition_does_not_end_the_next_transaction(driver: Driver) -> None:
    """Of the same producer, in the same epoch: it is not what the batch had staged."""
    first = batch("app", 5, ("a", 0, 0))
    assert committed(driver, first)
    complete(driver)
    driver.ok(add("a", 0, 0, pid(1)))
    assert not committed(driver, first)
    assert phases(driver)["a"] == "ONGOING"
    driver.refused(batch("app", 6, ("a", 0, 0)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(end("a", 0, 0, commit=True))


def test_a_late_change_of_a_producer_does_not_touch_its_committed_transaction(driver: Driver) -> None:
    late = driver.proposed(end("a", 0, 0, commit=False))
    assert committed(driver, batch("app", 5, ("a", 0, 0)))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert phases(driver)["a"] == "COMMITTING"


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (("b", 1, 1), ErrorCode.PRODUCER_FENCED),
        (("b", 9, 0), ErrorCode.UNKNOWN_TRANSACTIONAL_ID),
        (("none", 1, 0), ErrorCode.UNKNOWN_TRANSACTIONAL_ID),
        (("a", 0, 0), ErrorCode.INVALID_REQUEST),
    ],
)
def test_rule_31_if_one_transaction_cannot_be_committed_none_is(
    driver: Driver, item: tuple[str, int, int], code: ErrorCode
) -> None:
    driver.refused(batch("app", 5, ("a", 0, 0), item), code)
    assert phases(driver) == {"a": "ONGOING", "b": "ONGOING"}
    assert driver.machine.state.apps == {}


def test_rule_31_what_is_not_open_or_has_offsets_is_no_part_of_a_batch(driver: Driver) -> None:
    driver.ok(init_transactions("idle"))
    driver.refused(batch("app", 5, ("a", 0, 0), ("idle", 2, 0)), ErrorCode.INVALID_TRANSACTION_STATE)
    driver.ok(add("a", 0, 0, groups=("g",)))
    driver.ok(stage("a", 0, 0, "g", (pid(1), 3)))
    driver.refused(batch("app", 5, ("b", 1, 0), ("a", 0, 0)), ErrorCode.INVALID_TRANSACTION_STATE)
    assert phases(driver) == {"a": "ONGOING", "b": "ONGOING", "idle": "EMPTY"}


def test_a_transaction_that_has_timed_out_takes_its_batch_with_it(driver: Driver) -> None:
    expire(driver, HOUR_MS)
    expire(driver, HOUR_MS + 60_001)  # both have 60 s
    driver.refused(batch("app", 5, ("a", 0, 0), ("b", 1, 0)), ErrorCode.PRODUCER_FENCED)
    assert set(phases(driver).values()) == {"ABORTING"}


def test_two_apps_do_not_know_each_other(driver: Driver) -> None:
    assert committed(driver, batch("app", 5, ("a", 0, 0)))
    assert committed(driver, batch("other", 5, ("b", 1, 0)))


def test_without_an_app_the_request_id_makes_a_repetition_harmless(driver: Driver) -> None:
    command = replace(batch("", 0, ("a", 0, 0)), request_id=rid(1))
    assert committed(driver, command)
    assert committed(driver, command), "the first answer"
    driver.refused(batch("", 0, ("a", 0, 0)), ErrorCode.INVALID_TRANSACTION_STATE)
    assert driver.machine.state.apps == {}


def test_bad_shapes_are_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.refused(batch("app", -1, ("a", 0, 0)), ErrorCode.INVALID_REQUEST)
    driver.refused(batch("app", 1, ("a", 0, 0), wrote=(-2, b"")), ErrorCode.INVALID_REQUEST)
    driver.refused(batch("x" * 513, 1), ErrorCode.INVALID_REQUEST)
    monkeypatch.setattr(batches, "BATCH_TRANSACTIONS_MAX", 1)
    driver.refused(batch("app", 1, ("a", 0, 0), ("b", 1, 0)), ErrorCode.LIMIT_EXCEEDED)


@pytest.mark.parametrize(
    ("minutes", "way_out"),
    [(60, "go by themselves"), (0, "none is ever forgotten, because offsets.retention.minutes is 0: set it")],
)
def test_a_full_table_refuses_new_apps_and_forgets_none(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, minutes: int, way_out: str
) -> None:
    monkeypatch.setattr(batches, "APPS_MAX", 1)
    driver.ok(settings(offsets_retention_minutes=minutes))
    assert committed(driver, batch("app", 1))
    refused = driver.refused(batch("other", 1, ("a", 0, 0)), ErrorCode.LIMIT_EXCEEDED)
    assert way_out in refused.message
    assert phases(driver)["a"] == "ONGOING"
    assert committed(driver, batch("app", 2, ("a", 0, 0)))


def test_a_retention_makes_room_in_a_table_that_kept_its_apps_for_ever(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "APPS_MAX", 1)
    driver.ok(settings(offsets_retention_minutes=0))
    expire(driver, HOUR_MS)
    assert committed(driver, batch("app", 1))
    for step in range(1, 4):
        expire(driver, HOUR_MS + step * 500_000)
    driver.refused(batch("other", 1), ErrorCode.LIMIT_EXCEEDED)
    driver.ok(settings(offsets_retention_minutes=1))
    expire(driver, HOUR_MS + 4 * 500_000)
    assert committed(driver, batch("other", 1))


# ------------------------------------------------------------------------------------------------------- expiry
def test_an_app_expires_one_retention_of_offsets_after_its_last_batch(driver: Driver) -> None:
    assert committed(driver, batch("early", 1))
    expire(driver, HOUR_MS)
    driver.ok(settings(offsets_retention_minutes=60))
    expire(driver, HOUR_MS + 500_000)
    assert committed(driver, batch("app", 1))
    at = HOUR_MS + 500_000
    while at < 2 * HOUR_MS:
        at += 500_000
        expire(driver, at)
    assert set(driver.machine.state.apps) == {"app"}, "the first one counts from the beginning of the clock"
    assert not committed(driver, batch("app", 1)), "a replay shows that it is alive"
    for _ in range(7):
        at += 500_000
        expire(driver, at)
    assert set(driver.machine.state.apps) == {"app"}
    expire(driver, at + 500_000)
    assert driver.machine.state.apps == {}


def test_apps_are_kept_for_ever_if_offsets_are(driver: Driver) -> None:
    driver.ok(settings(offsets_retention_minutes=0))
    assert committed(driver, batch("app", 1))
    for step in range(1, 50):
        expire(driver, step * 600_000)
    assert set(driver.machine.state.apps) == {"app"}


# ------------------------------------------------------------------------------------------------ temporary ids
@pytest.mark.parametrize("way", ["batch", "abort", "time", "topic"])
def test_a_temporary_id_is_forgotten_once_its_transaction_has_ended(driver: Driver, way: str) -> None:
    driver.ok(replace(init_transactions("x"), is_temporary=True))
    driver.ok(add("x", 2, 0, pid(2)))
    late = driver.proposed(end("x", 2, 0, commit=True))
    if way == "batch":
        assert committed(driver, batch("app", 1, ("x", 2, 0)))
    elif way == "time":
        expire(driver, HOUR_MS)
        expire(driver, HOUR_MS + 60_001)
    else:
        driver.ok(end("x", 2, 0, commit=False))
    assert "x" in driver.machine.state.transactions
    if way == "topic":
        driver.ok(DeleteTopic(name="t2"))
    else:
        complete(driver)
    assert "x" not in driver.machine.state.transactions
    assert 2 not in driver.machine.state.transactional_ids
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    driver.ok(replace(init_transactions("x"), is_temporary=True))
    driver.refused(late, ErrorCode.NOT_COORDINATOR)
    assert "x" in driver.machine.state.transactions


def test_only_a_batch_commits_the_transaction_of_a_temporary_id(driver: Driver) -> None:
    """Its repetition gets the first answer, when nothing is left that could answer that of a commit."""
    driver.ok(replace(init_transactions("x"), is_temporary=True))
    driver.ok(add("x", 2, 0, pid(2)))
    driver.refused(end("x", 2, 0, commit=True), ErrorCode.INVALID_REQUEST)
    command = replace(batch("", 0, ("x", 2, 0)), request_id=rid(7))
    assert committed(driver, command)
    complete(driver)
    assert "x" not in driver.machine.state.transactions
    assert committed(driver, command)


def test_a_restart_keeps_everything(driver: Driver) -> None:
    driver.ok(replace(init_transactions("x"), is_temporary=True))
    driver.ok(add("x", 2, 0, pid(2)))
    for command in (
        batch("app", 2**62, ("a", 0, 0)),
        batch("äpp", 0, ("x", 2, 0), wrote=(1, b"d")),
        batch("app", 1, ("b", 1, 0)),
    ):
        driver.ok(command)
        restored = Machine.restore(driver.machine.snapshot())
        assert restored.state == driver.machine.state
        driver.machine = restored
    assert driver.machine.state.transactions["b"].phase is TransactionPhase.ABORTING
