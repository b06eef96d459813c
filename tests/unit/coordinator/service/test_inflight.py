"""The byte budget: first come, first served, nothing lost to a cancellation."""

import asyncio
from collections.abc import Callable, Coroutine

from smq.coordinator.service.inflight import ByteBudget


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(test())


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_fits_does_not_wait_and_what_does_not_waits_its_turn() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        assert budget.try_acquire(6)
        assert not budget.try_acquire(5)
        first, second = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(1))
        await settle()
        assert (first.done(), second.done()) == (False, False)  # the small one does not overtake
        assert not budget.try_acquire(1)
        budget.release(6)
        await settle()
        assert (first.done(), second.done(), budget.used_bytes) == (True, True, 6)

    run(test)


def test_a_piece_larger_than_the_budget_goes_alone() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        assert budget.try_acquire(1)
        large = asyncio.create_task(budget.acquire(50))
        await settle()
        assert not large.done()
        budget.release(1)
        await settle()
        assert large.done()
        assert not budget.try_acquire(1)

    run(test)


def test_thousands_who_withdraw_at_once_the_last_first_do_not_hold_the_loop() -> None:
    """Each was looked for among all the others: 10,000 held it for ten seconds, and a node's heartbeats with it."""
    compared = 0

    class Place(asyncio.Future[None]):
        __hash__ = asyncio.Future.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    async def test() -> None:
        loop = asyncio.get_running_loop()
        loop.create_future = lambda: Place(loop=loop)  # type: ignore[method-assign] # as it does, and it counts
        budget = ByteBudget(1)
        budget.take(1)
        count = 2_000
        waiting = [asyncio.create_task(budget.acquire(1)) for _ in range(count)]
        await settle()
        assert budget.waiters == count
        for task in reversed(waiting):
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (budget.waiters, budget.used_bytes) == (0, 1)
        assert compared < 10 * count

    run(test)


def test_a_cancelled_waiter_leaves_its_place_to_the_next() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        budget.try_acquire(8)
        large, small = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(2))
        await settle()
        large.cancel()
        await settle()
        assert (small.done(), budget.used_bytes) == (True, 10)

    run(test)


def test_a_waiter_cancelled_in_the_moment_of_its_grant_gives_the_bytes_back() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        budget.try_acquire(8)
        waiter = asyncio.create_task(budget.acquire(5))
        await settle()
        budget.release(8)
        waiter.cancel()
        await settle()
        assert (waiter.cancelled(), budget.used_bytes) == (True, 0)

    run(test)


def test_a_grant_in_the_moment_of_a_cancellation_is_not_lost() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        budget.try_acquire(8)
        waiter, next_one = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(9))
        await settle()
        waiter.cancel()
        budget.release(8)
        await settle()
        assert (waiter.cancelled(), next_one.done(), budget.used_bytes) == (True, True, 9)

    run(test)
