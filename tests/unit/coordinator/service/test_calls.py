"""Between the node's callbacks and asyncio: errors, time-outs and cancellations."""

import asyncio
from typing import Any

import pytest

from smq.coordinator.limits import TIMEOUT_MS_DEFAULT, TIMEOUT_MS_MAX
from smq.coordinator.service.calls import Answer, Patience, timeout_of
from smq.raft_state.errors import ErrorCode, SmqError


class Withdrawals:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_a_result_is_returned_and_an_error_raised() -> None:
    async def test() -> None:
        good, bad = Answer[int](Patience()), Answer[int](Patience())
        good.done(7)
        bad.done(SmqError(ErrorCode.NO_QUORUM, "m"))
        withdrawn = Withdrawals()
        assert await good.result(1000, withdrawn) == 7
        with pytest.raises(SmqError, match="NO_QUORUM"):
            await bad.result(1000, withdrawn)
        assert withdrawn.count == 0  # what has been answered is not withdrawn

    asyncio.run(test())


def test_a_node_that_never_answers_costs_no_more_than_the_timeout() -> None:
    async def test() -> None:
        answer, withdrawn = Answer[int](Patience()), Withdrawals()
        with pytest.raises(SmqError) as e:
            await answer.result(1, withdrawn, grace_ms=0)
        assert (e.value.code, withdrawn.count) == (ErrorCode.TIMED_OUT, 1)
        answer.done(7)  # too late, and harmless

    asyncio.run(test())


def test_cancelling_the_caller_withdraws_the_long_poll() -> None:
    async def test() -> None:
        answer, withdrawn = Answer[int](Patience()), Withdrawals()
        task = asyncio.create_task(answer.result(60_000, withdrawn))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert withdrawn.count == 1
        answer.done(SmqError(ErrorCode.SHUTTING_DOWN, "m"))

    asyncio.run(test())


def test_a_thousand_calls_wait_on_one_timer_and_leave_nothing_behind() -> None:
    async def test() -> None:
        loop, patience, timers = asyncio.get_running_loop(), Patience(), 0
        call_later = loop.call_later

        def counted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return call_later(*args, **kwargs)

        loop.call_later = counted  # type: ignore[assignment] # it counts, and does what it did
        answers = [Answer[int](patience) for _ in range(1_000)]
        waiting = [asyncio.create_task(answer.result(60_000)) for answer in answers]
        await asyncio.sleep(0)
        assert timers == 1
        for number, answer in enumerate(answers):
            answer.done(number)
        assert await asyncio.gather(*waiting) == list(range(1_000))
        assert not any(patience._deadlines._buckets.values())

    asyncio.run(test())


@pytest.mark.parametrize(
    ("asked", "remaining", "expected"),
    [
        (0, None, TIMEOUT_MS_DEFAULT),
        (5, None, 5),
        (2**31 - 1, None, TIMEOUT_MS_MAX),
        (5000, 1200.7, 1200),
        (100, 1200.0, 100),
        (0, -50.0, 1),
    ],
)
def test_the_clients_own_deadline_bounds_the_timeout(asked: int, remaining: float | None, expected: int) -> None:
    assert timeout_of(asked, remaining) == expected


def test_a_negative_timeout_is_refused() -> None:
    with pytest.raises(SmqError, match="timeout_ms"):
        timeout_of(-1)
