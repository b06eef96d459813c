"""Searches of the consumers: filters, pages and errors, over real gRPC."""

import asyncio
from typing import Any

import pytest

from smq.clients import RecordFilter, SmqError, StartAt, SyncConsumer
from smq.raft_state.errors import ErrorCode
from smq.records import NewRecord, encode_batch
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of
from tests.unit.clients.test_consumer import consumer_of


def fill(cluster: FakeCluster) -> None:
    """Twelve records: keys a, b, c in turn, and a header for the even ones."""
    log = cluster.topics["t"][0]
    for start in range(0, 12, 4):
        records = [
            NewRecord(b"abc"[n % 3 : n % 3 + 1], b"%d" % n, 1_000 + n, [("even", b"yes")] if n % 2 == 0 else [])
            for n in range(start, start + 4)
        ]
        log.append(encode_batch(records))
    log.settle()


@pytest.mark.parametrize(
    ("wanted", "offsets"),
    [
        (RecordFilter(), list(range(12))),
        (RecordFilter(key=b"b"), [1, 4, 7, 10]),
        (RecordFilter(key_prefix=b"c"), [2, 5, 8, 11]),
        (RecordFilter(headers={"even": None}), [0, 2, 4, 6, 8, 10]),
        (RecordFilter(key=b"a", headers={"even": b"yes"}), [0, 6]),
        (RecordFilter(headers=[("even", b"yes"), ("even", None)]), [0, 2, 4, 6, 8, 10]),
        (RecordFilter(headers=[("even", b"yes"), ("even", b"no")]), []),
        (RecordFilter(headers={"even": b"no"}), []),
        (RecordFilter(from_ms=1_003, until_ms=1_006), [3, 4, 5]),
    ],
    ids=str,
)
async def test_a_search_returns_what_passes_the_filter(wanted: RecordFilter, offsets: list[int]) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster)
        found = [record async for record in consumer.search("t", 0, wanted)]
        assert [(r.offset, r.value, r.timestamp_ms) for r in found] == [(n, b"%d" % n, 1_000 + n) for n in offsets]
        assert all(list(r.headers) == [("even", b"yes")] for r in found if r.offset % 2 == 0)


async def test_pages_lead_to_one_another_across_consumers() -> None:
    async with cluster_of(1, t=1) as cluster:
        fill(cluster)
        pages: list[list[int]] = []
        cursor = None
        while not pages or cursor is not None:
            async with consumer_of(cluster) as consumer:
                page = await consumer.search_page("t", 0, RecordFilter(key=b"a"), cursor=cursor, max_records=3)
            pages.append([r.offset for r in page.records])
            cursor = page.cursor
        assert pages == [[0, 3, 6], [9]]
        assert (page.next_offset, page.end_offset) == (12, 12)


@pytest.mark.parametrize(
    ("given", "offsets"),
    [
        ({"start": 5}, [5, 8, 11]),
        ({"start": "RESET_TO_LATEST"}, []),
        ({"start": StartAt(timestamp_ms=1_006)}, [8, 11]),
        ({"end_offset": 6}, [2, 5]),
        ({"start": 3, "end_offset": 6}, [5]),
    ],
    ids=str,
)
async def test_a_search_begins_and_ends_where_it_is_asked_to(given: dict[str, Any], offsets: list[int]) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster)
        assert [r.offset async for r in consumer.search("t", 0, RecordFilter(key=b"c"), **given)] == offsets


async def test_a_search_follows_new_records_to_its_end() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, max_wait_ms=10_000) as consumer:
        fill(cluster)
        following = consumer.search("t", 0, RecordFilter(key=b"a"), start=6, end_offset=20, follow=True)
        assert [(await anext(following)).offset for _ in range(2)] == [6, 9]
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        fill(cluster)
        assert (await waiting).offset == 12
        assert [record.offset async for record in following] == [15, 18]


@pytest.mark.parametrize(
    "wanted",
    [
        RecordFilter(key="text"),  # type: ignore[arg-type] # wrong on purpose
        RecordFilter(headers=["even"]),  # type: ignore[list-item] # wrong on purpose
        RecordFilter(headers={"even": "yes"}),  # type: ignore[dict-item] # wrong on purpose
        RecordFilter(from_ms=1.5),  # type: ignore[arg-type] # wrong on purpose
        RecordFilter(from_ms=9, until_ms=3),
        RecordFilter(key=b"a", key_prefix=b"b"),
    ],
    ids=str,
)
async def test_a_filter_that_cannot_be_is_refused(wanted: RecordFilter) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        with pytest.raises(SmqError) as refused:
            await consumer.search_page("t", 0, wanted)
        assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_a_search_of_a_topic_that_does_not_exist_says_so() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        for start in ("RESET_TO_EARLIEST", 0):
            with pytest.raises(SmqError) as refused:
                await consumer.search_page("nowhere", 0, RecordFilter(), start=start)
            assert refused.value.code is ErrorCode.UNKNOWN_TOPIC


async def test_the_blocking_consumer_searches_too() -> None:
    async with cluster_of(1, t=1) as cluster:
        fill(cluster)

        def read() -> list[int]:
            with SyncConsumer(cluster.servers, max_wait_ms=50) as consumer:
                first = consumer.search_page("t", 0, RecordFilter(key=b"a"), max_records=1)
                assert [r.offset for r in first.records] == [0]
                return [record.offset for record in consumer.search("t", 0, RecordFilter(key=b"a"), start=1)]

        assert await asyncio.to_thread(read) == [3, 6, 9]
