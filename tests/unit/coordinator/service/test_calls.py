"""The node's callbacks as awaitable calls: errors, timeouts and cancellations."""

import asyncio
from typing import Any

import pytest

from smq.coordinator.service.calls import Answer, Timeouts
from smq.raft_state.errors import ErrorCode, SmqError


class Withdrawals:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_a_result_is_returned_and_an_error_raised() -> None:
    good, bad = Answer[int](Timeouts()), Answer[int](Timeouts())
    good.done(7)
    bad.done(SmqError(ErrorCode.NO_QUORUM, "m"))
    withdrawn = Withdrawals()
    assert await good.result(1000, withdrawn) == 7
    with pytest.raises(SmqError, match="NO_QUORUM"):
        await bad.result(1000, withdrawn)
    assert withdrawn.count == 0  # an answered call is not withdrawn


async def test_a_node_that_never_answers_costs_no_more_than_the_timeout() -> None:
    answer, withdrawn = Answer[int](Timeouts()), Withdrawals()
    with pytest.raises(SmqError) as e:
        await answer.result(1, withdrawn, grace_ms=0)
    assert (e.value.code, withdrawn.count) == (ErrorCode.TIMED_OUT, 1)
    answer.done(7)  # too late, and harmless


async def test_cancelling_the_caller_withdraws_the_long_poll() -> None:
    answer, withdrawn = Answer[int](Timeouts()), Withdrawals()
    task = asyncio.create_task(answer.result(60_000, withdrawn))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert withdrawn.count == 1
    answer.done(SmqError(ErrorCode.SHUTTING_DOWN, "m"))


async def test_a_thousand_calls_wait_on_one_timer_and_leave_nothing_behind() -> None:
    loop, timeouts, timers = asyncio.get_running_loop(), Timeouts(), 0
    call_later = loop.call_later

    def counted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return call_later(*args, **kwargs)

    loop.call_later = counted  # type: ignore[assignment] # counts, and then does the same
    answers = [Answer[int](timeouts) for _ in range(1_000)]
    waiting = [asyncio.create_task(answer.result(60_000)) for answer in answers]
    await asyncio.sleep(0)
    assert timers == 1
    for number, answer in enumerate(answers):
        answer.done(number)
    assert await asyncio.gather(*waiting) == list(range(1_000))
    assert not any(timeouts._deadlines._buckets.values())
