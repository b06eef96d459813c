"""How long a group without members keeps its offsets, by the replicated clock of expiry."""

from dataclasses import replace

import pytest

from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import CLOCK_ELAPSED_MS_MAX, OFFSETS_RETENTION_MINUTES_DEFAULT, OFFSETS_RETENTION_MINUTES_MAX
from smq.raft_state.machine import Machine
from tests.unit.raft_state.support import (
    Driver,
    commit,
    coordinated,
    expire,
    group,
    kept_minutes,
    member_commit,
    pid,
    remove,
    stable,
)

DAY_MS = 86_400_000
RETENTION_MS = OFFSETS_RETENTION_MINUTES_DEFAULT * 60_000


@pytest.fixture
def driver() -> Driver:
    return coordinated()


def expire_daily(driver: Driver, from_ms: int, to_ms: int) -> None:
    """As the Raft leader does, often enough for the clock to keep up."""
    for now_ms in range(from_ms, to_ms + 1, CLOCK_ELAPSED_MS_MAX):
        expire(driver, now_ms)


def test_consumer_finds_its_offsets_after_30_days_but_not_after_the_retention(driver: Driver) -> None:
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1_001), at_ms=DAY_MS))
    driver.ok(remove("g", 1, 1, "a", at_ms=DAY_MS))
    expire_daily(driver, DAY_MS, 16 * DAY_MS)
    driver = Driver(Machine.restore(driver.machine.snapshot()))
    driver.index = 1_000_000
    expire_daily(driver, 16 * DAY_MS, 31 * DAY_MS)
    assert group(driver).offsets[pid(1)].offset == 1_001
    expire_daily(driver, 31 * DAY_MS, DAY_MS + RETENTION_MS - 1)
    assert "g" in driver.machine.state.groups
    expire_daily(driver, DAY_MS + RETENTION_MS - 1, DAY_MS + RETENTION_MS + DAY_MS)
    assert driver.machine.state.groups == {}


def test_retention_counts_from_the_last_member_or_the_last_commit(driver: Driver) -> None:
    driver.ok(kept_minutes(1))
    expire(driver, 1_000)
    driver.ok(replace(commit("memberless", (pid(1), 1)), committed_ms=1_000))
    driver.ok(replace(commit("memberless", (pid(1, 1), 1)), committed_ms=1_050))
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1), at_ms=1_000))
    expire(driver, 61_010)
    assert list(group(driver, "memberless").offsets) == [pid(1, 1)]
    assert list(group(driver).offsets) == [pid(1)]
    driver.ok(remove("g", 1, 1, "a", at_ms=61_110))
    expire(driver, 121_109)
    assert [name for name, g in driver.machine.state.groups.items() if g.offsets] == ["g"]
    expire(driver, 121_110)
    assert list(driver.machine.state.groups) == ["g"]
    assert group(driver).is_unused


def test_retention_of_0_keeps_offsets_forever(driver: Driver) -> None:
    driver.ok(kept_minutes(0))
    driver.ok(commit("g", (pid(1), 1)))
    expire(driver, 2**60)
    assert "g" in driver.machine.state.groups


def test_one_clock_that_jumps_does_not_delete_the_offsets(driver: Driver) -> None:
    driver.ok(replace(commit("g", (pid(1), 1)), committed_ms=DAY_MS))
    expire(driver, DAY_MS)
    expire(driver, 10_000 * DAY_MS)
    assert driver.machine.state.expiry_clock_ms == DAY_MS + 2 * CLOCK_ELAPSED_MS_MAX
    expire(driver, 0)
    assert driver.machine.state.expiry_clock_ms == DAY_MS + 2 * CLOCK_ELAPSED_MS_MAX
    assert "g" in driver.machine.state.groups


def test_slow_clock_does_not_make_a_fresh_commit_expire(driver: Driver) -> None:
    driver.ok(kept_minutes(1))
    expire(driver, DAY_MS)
    driver.ok(replace(commit("memberless", (pid(1), 1)), committed_ms=5))
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1), at_ms=5))
    driver.ok(remove("g", 1, 1, "a", at_ms=5))
    expire(driver, DAY_MS + 59_999)
    assert [g.is_unused for g in driver.machine.state.groups.values()] == [False, False]
    expire(driver, DAY_MS + 60_000)
    assert [g.is_unused for g in driver.machine.state.groups.values()] == [True, True]


FUTURE_MS = 50_000 * DAY_MS


def test_commit_of_a_clock_from_the_future_expires_two_retentions_after_the_clock_has_seen_it(driver: Driver) -> None:
    driver.ok(kept_minutes(1))
    expire(driver, DAY_MS)
    driver.ok(commit("memberless", (pid(1), 1), at_ms=FUTURE_MS))
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1), at_ms=FUTURE_MS))
    driver.ok(remove("g", 1, 1, "a", at_ms=FUTURE_MS))
    for after_ms, used in ((500, 2), (120_499, 2), (120_500, 0)):
        expire(driver, DAY_MS + after_ms)
        assert sum(not g.is_unused for g in driver.machine.state.groups.values()) == used


def test_times_from_before_the_clock_started_count_as_of_its_start(driver: Driver) -> None:
    driver.ok(kept_minutes(1))
    driver.ok(commit("g", (pid(1), 1), at_ms=FUTURE_MS))
    expire(driver, DAY_MS)
    expire(driver, DAY_MS + 59_999)
    assert not group(driver).is_unused
    expire(driver, DAY_MS + 60_000)
    assert group(driver).is_unused


def test_commit_after_an_outage_does_not_expire_early_while_the_expiry_clock_catches_up(driver: Driver) -> None:
    """The expiry clock stood still for 30 days, and runs at double speed now. A right commit is ahead of it."""
    driver.ok(kept_minutes(7 * 24 * 60))
    expire(driver, DAY_MS)
    now_ms = 31 * DAY_MS
    driver.ok(commit("g", (pid(1), 1), at_ms=now_ms))
    expire_daily(driver, now_ms, now_ms + 7 * DAY_MS - CLOCK_ELAPSED_MS_MAX)
    assert not group(driver).is_unused


def test_first_clock_from_the_past_does_not_keep_right_commits_for_ever(driver: Driver) -> None:
    driver.ok(kept_minutes(60))
    expire(driver, DAY_MS)  # in 1970
    driver.ok(commit("g", (pid(1), 1), at_ms=20_000 * DAY_MS))
    for used in (True, True, True, True, True, True, False):  # 20 minutes each, at double speed
        expire(driver, 20_000 * DAY_MS)
        assert group(driver).is_unused is not used


def test_clock_from_the_past_does_not_make_right_commits_expire_early(driver: Driver) -> None:
    """The proposer's clock stood in the past for a while, and the expiry clock with it."""
    driver.ok(kept_minutes(7 * 24 * 60))
    expire(driver, DAY_MS)
    driver.ok(commit("g", (pid(1), 1), at_ms=31 * DAY_MS))
    expire_daily(driver, 0, DAY_MS // 2)
    expire_daily(driver, 31 * DAY_MS, 38 * DAY_MS - CLOCK_ELAPSED_MS_MAX)
    assert not group(driver).is_unused


def test_first_clock_that_is_years_ahead_deletes_nothing_now_or_later(driver: Driver) -> None:
    """The first time is unbounded, and the expiry clock never goes back: it must not make commits of correct clocks
    count as old."""
    driver.ok(replace(commit("before", (pid(1), 1)), committed_ms=DAY_MS))
    expire(driver, 2_000 * DAY_MS)
    driver.ok(replace(commit("after", (pid(1), 1)), committed_ms=2 * DAY_MS))
    stable(driver, "a")
    driver.ok(member_commit("g", 1, "a", (pid(1), 1), at_ms=2 * DAY_MS))
    driver.ok(remove("g", 1, 1, "a", at_ms=2 * DAY_MS))
    expire_daily(driver, 2 * DAY_MS, 40 * DAY_MS)
    assert list(driver.machine.state.groups) == ["before", "after", "g"]


@pytest.mark.parametrize("minutes", [-1, OFFSETS_RETENTION_MINUTES_MAX + 1])
def test_invalid_retention_is_refused(driver: Driver, minutes: int) -> None:
    driver.refused(kept_minutes(minutes), ErrorCode.INVALID_CONFIG)
