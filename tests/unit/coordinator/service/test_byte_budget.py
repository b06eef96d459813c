"""The byte budget: first come, first served, nothing lost to a cancellation."""

import asyncio
from functools import partial

from smq.coordinator.service.byte_budget import ByteBudget, acquire_all, release_all, try_acquire_all


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_that_fits_does_not_wait_and_another_waits_its_turn() -> None:
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


async def test_a_piece_larger_than_the_budget_goes_alone() -> None:
    budget = ByteBudget(10)
    assert budget.try_acquire(1)
    large = asyncio.create_task(budget.acquire(50))
    await settle()
    assert not large.done()
    budget.release(1)
    await settle()
    assert large.done()
    assert not budget.try_acquire(1)


async def test_thousands_of_withdrawals_the_last_first_do_not_block_the_loop() -> None:
    """Each was once searched for among all the others: 10,000 blocked it, and a node's heartbeats, for ten seconds."""
    compared = 0

    class Place(asyncio.Future[None]):
        __hash__ = asyncio.Future.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

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


async def test_a_cancelled_waiter_leaves_its_place_to_the_next() -> None:
    budget = ByteBudget(10)
    budget.try_acquire(8)
    large, small = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(2))
    await settle()
    large.cancel()
    await settle()
    assert (small.done(), budget.used_bytes) == (True, 10)


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_gives_the_bytes_back() -> None:
    budget = ByteBudget(10)
    budget.try_acquire(8)
    waiter = asyncio.create_task(budget.acquire(5))
    await settle()
    budget.release(8)
    await asyncio.sleep(0)
    assert budget.used_bytes == 5  # granted, and not yet taken
    waiter.cancel()
    await settle()
    assert (waiter.cancelled(), budget.used_bytes) == (True, 0)


async def test_a_grant_in_the_moment_of_a_cancellation_is_not_lost() -> None:
    budget = ByteBudget(10)
    budget.try_acquire(8)
    waiter, next_one = asyncio.create_task(budget.acquire(5)), asyncio.create_task(budget.acquire(9))
    await settle()
    waiter.cancel()
    budget.release(8)
    await settle()
    assert (waiter.cancelled(), next_one.done(), budget.used_bytes) == (True, True, 9)


async def test_a_budget_that_may_overshoot_admits_until_it_is_full() -> None:
    budget = ByteBudget(10, may_overshoot=True)
    assert budget.try_acquire(9)
    assert budget.try_acquire(50)
    assert budget.is_full
    waiter = asyncio.create_task(budget.acquire(1))
    await settle()
    assert not waiter.done()
    budget.release(50)
    await settle()
    assert (waiter.done(), budget.used_bytes) == (True, 10)


async def test_a_listener_is_called_once_and_after_all_that_wait() -> None:
    budget, calls = ByteBudget(10, may_overshoot=True), list[str]()
    budget.take(10)
    waiter = asyncio.create_task(budget.acquire(10))
    await settle()
    first, second = partial(calls.append, "first"), partial(calls.append, "second")
    for listener in (first, second):
        budget.notify_when_free(listener)
    budget.forget(second)
    budget.release(10)
    await settle()
    assert (waiter.done(), calls) == (True, []), "the waiter took it all"
    for _ in range(2):
        budget.release(1)
        await settle()
    assert calls == ["first"]


async def test_bytes_that_are_counted_again_right_after_their_release_are_not_granted() -> None:
    budget = ByteBudget(10)
    budget.take(10)
    waiter = asyncio.create_task(budget.acquire(5))
    await settle()
    budget.release(10)
    budget.take(10)
    await settle()
    assert (waiter.done(), budget.used_bytes) == (False, 10)
    waiter.cancel()


async def test_several_budgets_are_taken_together_or_not_at_all() -> None:
    small, large = ByteBudget(10), ByteBudget(15)
    large.take(10)
    assert not try_acquire_all((small, large), 6)
    assert small.used_bytes == 0
    waiter = asyncio.create_task(acquire_all((small, large), 6))
    await settle()
    assert (waiter.done(), small.used_bytes) == (False, 6)
    waiter.cancel()
    await settle()
    assert (small.used_bytes, large.used_bytes) == (0, 10)
    assert try_acquire_all((small, large), 5)
    release_all((small, large), 5)
    assert (small.used_bytes, large.used_bytes) == (0, 10)
