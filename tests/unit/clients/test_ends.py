"""Consumers that read to an end: offsets, the present end, and times, over real gRPC."""

import asyncio
from typing import Any

import pytest

from smq.clients import SmqError, SyncConsumer
from smq.raft_state.errors import ErrorCode
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of
from tests.unit.clients.test_consumer import consumer_of, fill, take

PARTITIONS = [("t", 0), ("t", 1)]


async def _read(cluster: FakeCluster, partitions: Any, **ends: Any) -> dict[int, list[int]]:
    """The offsets that iteration returns until it stops, by partition."""
    found: dict[int, list[int]] = {partition: [] for _, partition in partitions}
    async with consumer_of(cluster) as consumer, asyncio.timeout(20):
        await consumer.assign(partitions, **ends)
        async for record in consumer:
            found[record.partition].append(record.offset)
        assert consumer.is_finished
        assert await consumer.getmany(timeout_ms=60_000) == {}
        assert await consumer.getbatch(timeout_ms=60_000) is None
    return found


@pytest.mark.parametrize(
    ("ends", "counts"),
    [
        ({"end_offset": 5}, (5, 5)),
        ({"end_offset": 6}, (6, 6)),
        ({"end_offset": 0}, (0, 0)),
        ({"end_offset": "latest"}, (10, 7)),
        ({"end_offset": {("t", 0): 4, ("t", 1): 7}}, (4, 7)),
        ({"until_ms": 1_004}, (4, 4)),
        ({"until_ms": 1_008}, (8, 7)),
        ({"until_ms": 9_999}, (10, 7)),
        ({"until_ms": 1_006, "end_offset": {("t", 0): 2}}, (2, 6)),
        ({"until_ms": 1_002, "end_offset": 5}, (2, 2)),
    ],
    ids=str,
)
async def test_iteration_stops_at_the_ends(ends: dict[str, Any], counts: tuple[int, int]) -> None:
    async with cluster_of(1, t=2) as cluster:
        fill(cluster, 10)
        fill(cluster, 7, partition=1)
        assert await _read(cluster, PARTITIONS, **ends) == {p: list(range(n)) for p, n in enumerate(counts)}


async def test_a_start_at_or_beyond_the_end_returns_nothing() -> None:
    async with cluster_of(1, t=1) as cluster:
        fill(cluster, 10)
        assert await _read(cluster, PARTITIONS[:1], start=7, end_offset=7) == {0: []}
        assert await _read(cluster, PARTITIONS[:1], start=8, end_offset=7) == {0: []}


async def test_an_end_that_is_not_reached_yet_is_waited_for() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, max_wait_ms=10_000) as consumer:
        fill(cluster, 3)
        await consumer.assign([("t", 0)], end_offset=5)
        await take(consumer, 3)
        assert not consumer.is_finished
        waiting = asyncio.create_task(take(consumer, 2))
        await asyncio.sleep(0)
        fill(cluster, 6)
        assert [r.offset for r in await waiting] == [3, 4]
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)


async def test_positions_and_commits_stop_at_the_end_within_a_batch() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, group="g") as consumer:
        fill(cluster, 9, per_batch=9)
        await consumer.assign([("t", 0)], end_offset=4)
        found = await consumer.getmany(timeout_ms=5_000)
        assert [r.offset for r in found["t", 0]] == [0, 1, 2, 3]
        assert consumer.position("t", 0) == 4
        assert consumer.is_finished
        await consumer.commit()
        assert (await consumer.committed())["t", 0].offset == 4
        await consumer.assign([("t", 0)])
        assert [r.offset for r in await take(consumer, 5)] == [4, 5, 6, 7, 8]


async def test_a_seek_back_reads_to_the_end_again() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 9)
        await consumer.assign([("t", 0)], end_offset=4)
        assert len([r async for r in consumer]) == 4
        await consumer.seek("t", 0, 1)
        assert not consumer.is_finished
        assert [r.offset async for r in consumer] == [1, 2, 3]


async def test_a_partition_without_an_end_is_read_for_ever() -> None:
    async with cluster_of(1, t=2) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 4)
        fill(cluster, 4, partition=1)
        await consumer.assign(PARTITIONS, end_offset={("t", 0): 2})
        await take(consumer, 6)
        assert not consumer.is_finished
        fill(cluster, 1)
        fill(cluster, 1, partition=1)
        assert (await anext(consumer)).partition == 1


@pytest.mark.parametrize("end", [-1, True, 1.5, "earliest", {("t", 1): 3}, {("t", 0): "x"}], ids=str)
async def test_what_is_no_end_is_refused_and_the_old_assignment_stays(end: Any) -> None:
    async with cluster_of(1, t=2) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 2)
        await consumer.assign([("t", 0)])
        with pytest.raises(SmqError) as refused:
            await consumer.assign([("t", 0)], end_offset=end)
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        assert len(await take(consumer, 2)) == 2


async def test_the_blocking_consumer_stops_at_its_ends() -> None:
    async with cluster_of(1, t=1) as cluster:
        fill(cluster, 9)

        def read() -> list[int]:
            with SyncConsumer(cluster.servers, max_wait_ms=50) as consumer:
                consumer.assign([("t", 0)], 1, end_offset=5)
                offsets = [record.offset for record in consumer]
                assert consumer.is_finished
                return offsets

        assert await asyncio.to_thread(read) == [1, 2, 3, 4]
