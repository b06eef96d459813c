"""A reset of a consumer that has read ahead: nothing that was read is lost, and nothing new is passed over."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from smq.clients import Consumer, SyncConsumer
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of
from tests.unit.clients.test_consumer import consumer_of, fill

P = ("t", 0)
DEADLINE_S = 10  # of what takes milliseconds


def recreate(cluster: FakeCluster) -> None:
    cluster.delete("t")
    cluster.create("t", 1)
    fill(cluster, 5)


def trim(cluster: FakeCluster) -> None:
    """Records 10 and 11 are gone before the consumer has asked for them."""
    fill(cluster, 5)
    cluster.topics["t"][0].log_start = 12


async def after_reset(cluster: FakeCluster, consumer: Consumer, change: Callable[[FakeCluster], None]) -> None:
    """Returns once a fetch after the change was out of range, and the new position has been looked up."""
    fetch = consumer._planner.assigned[P]
    generation = fetch.generation
    change(cluster)
    async with asyncio.timeout(DEADLINE_S):
        while fetch.generation == generation:  # noqa: ASYNC110 a position does not signal its moves
            await asyncio.sleep(0)


async def by_iteration(consumer: Consumer) -> list[int]:
    return [(await anext(consumer)).offset]


async def by_getmany(consumer: Consumer) -> list[int]:
    """As an application that polls and does not wait."""
    return [r.offset for records in (await consumer.getmany()).values() for r in records]


Take = Callable[[Consumer], Awaitable[list[int]]]


async def read(consumer: Consumer, take: Take, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(found) < count:
            found += await take(consumer)
    return found


@pytest.mark.parametrize("take", [by_iteration, by_getmany])
@pytest.mark.parametrize(("change", "first", "end"), [(recreate, 0, 5), (trim, 12, 15)])
@pytest.mark.parametrize("more", [0, 15])
@pytest.mark.parametrize("per_batch", [3, 10])
async def test_what_was_read_before_a_reset_comes_first_and_then_everything_from_its_position(
    take: Take, change: Callable[[FakeCluster], None], first: int, end: int, more: int, per_batch: int
) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, auto_offset_reset="earliest") as consumer:
        fill(cluster, 10, per_batch=per_batch)
        await consumer.assign("t")
        assert await read(consumer, by_iteration, 2) == [0, 1]
        await after_reset(cluster, consumer, change)
        assert consumer.position(*P) == 2
        fill(cluster, more)  # so that the new log of a topic reaches beyond the old one
        new = range(first, end + more)
        assert await read(consumer, take, 8 + len(new)) == [*range(2, 10), *new]
        assert consumer.position(*P) == end + more


async def test_latest_is_the_end_at_the_reset_and_not_after_what_was_read() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, auto_offset_reset="latest") as consumer:
        fill(cluster, 10, per_batch=10)
        await consumer.assign("t", "earliest")
        await read(consumer, by_iteration, 2)
        await after_reset(cluster, consumer, recreate)
        fill(cluster, 3)
        assert await read(consumer, by_iteration, 8 + 3) == [*range(2, 10), 5, 6, 7]


async def test_a_discard_of_what_was_read_before_a_reset_passes_over_no_new_record() -> None:
    """A pause fetches again from the position, which in the new log is not at its beginning."""

    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, auto_offset_reset="earliest") as consumer:
        fill(cluster, 10, per_batch=10)
        await consumer.assign("t")
        await read(consumer, by_iteration, 2)
        await after_reset(cluster, consumer, recreate)
        fill(cluster, 15)
        await consumer.pause([P])
        await consumer.resume([P])
        assert await read(consumer, by_iteration, 20) == list(range(20))


async def test_a_rewind_after_a_reset_passes_over_no_new_record() -> None:
    """As the blocking consumer does, which holds old records when the position has been reset."""

    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, auto_offset_reset="earliest") as consumer:
        fill(cluster, 10, per_batch=10)
        await consumer.assign("t")
        assert len((await consumer.getmany(timeout_ms=10_000))[P]) == 10
        await after_reset(cluster, consumer, recreate)
        fill(cluster, 15)
        await consumer.rewind({P: 3})
        assert await read(consumer, by_iteration, 20) == list(range(20))


async def test_a_commit_before_the_reset_is_over_names_no_later_place_of_the_new_log() -> None:
    options = {"auto_offset_reset": "earliest", "group": "g"}
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, **options) as consumer:
        fill(cluster, 10, per_batch=10)
        await consumer.assign("t")
        await read(consumer, by_iteration, 2)
        await after_reset(cluster, consumer, recreate)
        fill(cluster, 15)
        await consumer.commit()
        assert (await consumer.committed())[P].offset == 0


async def test_a_commit_of_the_blocking_consumer_names_no_later_place_of_the_new_log() -> None:
    """It returns records of the old one that it has read ahead, when the position is in the new one."""

    async with cluster_of(1, t=1) as cluster:
        fill(cluster, 10, per_batch=10)
        consumer = await asyncio.to_thread(
            lambda: SyncConsumer(cluster.servers, group="g", auto_offset_reset="earliest", max_wait_ms=50)
        )
        try:
            await asyncio.to_thread(consumer.assign, "t")
            records = iter(consumer)
            assert [(await asyncio.to_thread(next, records)).offset for _ in range(4)] == [0, 1, 2, 3]
            await asyncio.to_thread(consumer.commit)
            assert (await asyncio.to_thread(consumer.committed))[P].offset == 4
            await after_reset(cluster, consumer._consumer, recreate)
            await asyncio.to_thread(consumer.commit)
            assert (await asyncio.to_thread(consumer.committed))[P].offset == 0
            found = [(await asyncio.to_thread(next, records)).offset for _ in range(6 + 5)]
            assert found == [*range(4, 10), *range(5)]
        finally:
            await asyncio.to_thread(consumer.close)
