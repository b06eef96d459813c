"""The replicated clock of expiry, and the producers that a partition forgets by it."""

import pytest

from smq.raft_state.cluster_config import producer_expiration_ms
from smq.raft_state.commands import AdvanceClock
from smq.raft_state.errors import ErrorCode
from smq.raft_state.limits import (
    CLOCK_ELAPSED_MS_MAX,
    PRODUCER_EXPIRATION_MS_DEFAULT,
    PRODUCER_EXPIRATION_MS_MAX,
    PRODUCER_EXPIRATION_MS_MIN,
    PRODUCER_MARKS_MAX,
)
from smq.raft_state.machine import Machine
from smq.raft_state.state import PartitionState
from tests.unit.raft_state.support import (
    Driver,
    advance,
    advances,
    cluster,
    external_topic,
    pid,
    producers_kept_ms,
    topic,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_2100_MS = 4_102_444_800_000
T0 = 1_700_000_000_000


def clock(driver: Driver) -> int:
    return driver.machine.state.expiry_clock_ms


def part(driver: Driver) -> PartitionState:
    return driver.partition(pid(1))


def pass_time(driver: Driver, ms: int, *, wall_ms: int | None = None) -> None:
    """Steps as the Raft leader proposes them, by a wall clock that is right unless it is given."""
    for _ in range(ms // CLOCK_ELAPSED_MS_MAX):
        before = clock(driver)
        now_ms = before + CLOCK_ELAPSED_MS_MAX if wall_ms is None else wall_ms
        driver.ok(AdvanceClock(seen_ms=before, elapsed_ms=CLOCK_ELAPSED_MS_MAX, now_ms=now_ms))


@pytest.fixture
def driver() -> Driver:
    """A running clock, and a partition with a high water mark of 10."""
    driver = cluster()
    driver.ok(topic(1))
    driver.ok(AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=T0))
    driver.ok(advances(advance(pid(1), 0, 10)))
    return driver


# ------------------------------------------------------------------------------------------------ the clock
@pytest.mark.parametrize(
    ("now_ms", "moves_ms"), [(T0 + 1_000, 1_000), (YEAR_2100_MS, 2_000), (0, 500), (T0, 500), (T0 + 501, 501)]
)
def test_the_clock_follows_a_wall_clock_at_half_to_double_speed(driver: Driver, now_ms: int, moves_ms: int) -> None:
    driver.ok(AdvanceClock(seen_ms=T0, elapsed_ms=1_000, now_ms=now_ms))
    assert clock(driver) == T0 + moves_ms


def test_a_clock_that_began_in_the_year_2100_still_moves() -> None:
    driver = cluster()
    driver.ok(AdvanceClock(seen_ms=0, elapsed_ms=0, now_ms=YEAR_2100_MS))
    pass_time(driver, HOUR_MS, wall_ms=T0)
    assert clock(driver) == YEAR_2100_MS + HOUR_MS // 2


def test_a_step_that_was_measured_before_another_one_changes_nothing(driver: Driver) -> None:
    step = AdvanceClock(seen_ms=T0, elapsed_ms=1_000, now_ms=T0 + 1_000)
    driver.ok(step)
    driver.ok(step)
    assert clock(driver) == T0 + 1_000


@pytest.mark.parametrize(("elapsed_ms", "moves_ms"), [(-1, 0), (0, 0), (2**62, 2 * CLOCK_ELAPSED_MS_MAX)])
def test_a_single_step_is_bounded(driver: Driver, elapsed_ms: int, moves_ms: int) -> None:
    driver.ok(AdvanceClock(seen_ms=T0, elapsed_ms=elapsed_ms, now_ms=YEAR_2100_MS))
    assert clock(driver) == T0 + moves_ms


# ------------------------------------------------------------------------------------------------ producers
def test_what_producers_wrote_is_forgotten_after_one_expiration_and_not_before(driver: Driver) -> None:
    pass_time(driver, DAY_MS)
    assert part(driver).producers_start == 0, "the first step after the records only marked them"
    pass_time(driver, CLOCK_ELAPSED_MS_MAX)
    assert part(driver).producers_start == 10


def test_records_of_a_busy_partition_are_remembered_for_one_expiration_to_one_and_a_quarter(driver: Driver) -> None:
    forgotten_ms = {10: 0}
    for hour in range(1, 60):
        driver.ok(advances(advance(pid(1), 0, 10 + hour)))
        forgotten_ms[10 + hour] = hour * HOUR_MS
        pass_time(driver, HOUR_MS)
        start = part(driver).producers_start
        for hwm, written_ms in forgotten_ms.items():
            age_ms = clock(driver) - T0 - written_ms
            assert hwm > start or age_ms >= DAY_MS
            assert hwm <= start or age_ms <= DAY_MS * 5 // 4 + 2 * HOUR_MS
        assert len(part(driver).producer_marks) <= PRODUCER_MARKS_MAX


def test_an_idle_partition_keeps_no_marks(driver: Driver) -> None:
    pass_time(driver, 3 * DAY_MS)
    assert (part(driver).producers_start, part(driver).producer_marks) == (10, [])


@pytest.mark.parametrize("wall_ms", [YEAR_2100_MS, 0])
def test_a_wrong_wall_clock_neither_expires_producers_early_nor_keeps_them_for_ever(
    driver: Driver, wall_ms: int
) -> None:
    pass_time(driver, DAY_MS // 2 - CLOCK_ELAPSED_MS_MAX, wall_ms=wall_ms)
    assert part(driver).producers_start == 0
    pass_time(driver, 2 * DAY_MS, wall_ms=wall_ms)
    assert part(driver).producers_start == 10


def test_the_times_of_records_do_not_matter(driver: Driver) -> None:
    driver.ok(advances(advance(pid(1), 0, 11, ts_ns=YEAR_2100_MS * 1_000_000)))
    pass_time(driver, DAY_MS + CLOCK_ELAPSED_MS_MAX)
    assert part(driver).producers_start == 11


def test_a_day_without_a_quorum_takes_no_time_from_retries(driver: Driver) -> None:
    pass_time(driver, CLOCK_ELAPSED_MS_MAX)
    driver.ok(AdvanceClock(seen_ms=clock(driver), elapsed_ms=10 * DAY_MS, now_ms=T0 + 10 * DAY_MS))
    assert part(driver).producers_start == 0


def test_a_longer_expiration_counts_for_records_that_are_marked_already(driver: Driver) -> None:
    pass_time(driver, DAY_MS)
    driver.ok(producers_kept_ms(3 * DAY_MS))
    pass_time(driver, 2 * DAY_MS)
    assert part(driver).producers_start == 0
    pass_time(driver, CLOCK_ELAPSED_MS_MAX)
    assert part(driver).producers_start == 10


def test_changes_of_the_expiration_never_make_more_marks_than_their_bound(driver: Driver) -> None:
    hwm = 10
    for expiration_ms in (PRODUCER_EXPIRATION_MS_MIN, 2 * HOUR_MS, DAY_MS, PRODUCER_EXPIRATION_MS_MAX):
        driver.ok(producers_kept_ms(expiration_ms))
        for _ in range(20):
            hwm += 1
            driver.ok(advances(advance(pid(1), 0, hwm)))
            pass_time(driver, 2 * CLOCK_ELAPSED_MS_MAX)
            assert len(part(driver).producer_marks) <= PRODUCER_MARKS_MAX


def test_marks_survive_a_snapshot(driver: Driver) -> None:
    pass_time(driver, 2 * CLOCK_ELAPSED_MS_MAX)
    driver.ok(advances(advance(pid(1), 0, 12)))
    pass_time(driver, 7 * HOUR_MS)
    assert len(part(driver).producer_marks) == 2
    restored = Machine.restore(driver.machine.snapshot())
    assert restored.state == driver.machine.state


def test_only_partitions_that_forget_producers_are_touched(driver: Driver) -> None:
    driver.ok(topic(2))
    driver.ok(external_topic(4))
    pass_time(driver, DAY_MS)
    before = clock(driver)
    step = AdvanceClock(seen_ms=before, elapsed_ms=CLOCK_ELAPSED_MS_MAX, now_ms=before + CLOCK_ELAPSED_MS_MAX)
    assert driver.machine.apply(driver.next_index(), step).touched == (pid(1),)


@pytest.mark.parametrize("expiration_ms", [-1, 0, PRODUCER_EXPIRATION_MS_MIN - 1, PRODUCER_EXPIRATION_MS_MAX + 1])
def test_an_expiration_within_the_time_of_retries_is_refused(driver: Driver, expiration_ms: int) -> None:
    driver.refused(producers_kept_ms(expiration_ms), ErrorCode.INVALID_CONFIG)
    assert producer_expiration_ms(driver.machine.state.config) == PRODUCER_EXPIRATION_MS_DEFAULT
