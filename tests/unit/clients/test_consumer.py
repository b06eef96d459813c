"""The asyncio consumer over real gRPC: positions, order, failover, groups' offsets."""

import asyncio
import contextlib
import struct
from typing import Any

import pytest
from crc32c import crc32c

from smq.clients import Admin, ClientClosed, Consumer, ConsumerRecord, Producer, SmqError, StartAt
from smq.raft_state.errors import ErrorCode
from smq.records import CRC_START, HEADER_BYTES, NewRecord, decode_batch, encode_batch
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of
from smq.testing.loops import run


def consumer_of(cluster: FakeCluster, **options: Any) -> Consumer:
    return Consumer(cluster.servers, **{"max_wait_ms": 50, **options})


def fill(cluster: FakeCluster, count: int, *, partition: int = 0, per_batch: int = 3, topic: str = "t") -> None:
    log = cluster.topics[topic][partition]
    at = log.end
    for start in range(at, at + count, per_batch):
        numbers = range(start, min(start + per_batch, at + count))
        log.append(encode_batch([NewRecord(b"k", b"%d" % n, 1000 + n, [("h", b"v")]) for n in numbers]))
    log.settle()


async def take(consumer: Consumer, count: int) -> list[ConsumerRecord]:
    return [await anext(consumer) for _ in range(count)]


async def test_records_arrive_with_all_their_fields() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 2)
        assert await consumer.assign([("t", 0)]) == {("t", 0): 0}
        [first, second] = await take(consumer, 2)
        assert first == ConsumerRecord("t", 0, 0, 1, 1000, b"k", b"0", first.headers)
        assert list(first.headers) == [("h", b"v")]
        assert (second.offset, second.ts_ns) == (1, 2)


async def test_start_in_the_middle_of_a_batch_begins_at_that_record() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 10)
        await consumer.assign({("t", 0): 4})
        assert [r.offset for r in await take(consumer, 6)] == [4, 5, 6, 7, 8, 9]


async def test_reader_at_the_end_wakes_with_the_next_append() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, max_wait_ms=10_000) as consumer:
        await consumer.assign([("t", 0)])
        waiting = asyncio.create_task(take(consumer, 1))
        await asyncio.sleep(0)
        fill(cluster, 1)
        assert [r.value for r in await waiting] == [b"0"]


@pytest.mark.parametrize(
    ("start", "position"),
    [
        ("RESET_TO_EARLIEST", 3),
        ("RESET_TO_LATEST", 10),
        (("RESET_TO_OFFSET", 0), 3),
        (("RESET_TO_OFFSET", 99), 10),
        (("EXACT_OFFSET", 5), 5),
        (7, 7),
        (10, 10),
        (StartAt(type="RESET_TO_OFFSET", value=4), 4),
    ],
)
async def test_start_positions(start: Any, position: int) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 10)
        cluster.topics["t"][0].log_start = 3
        await consumer.assign([("t", 0)], start)
        assert consumer.position("t", 0) == position


@pytest.mark.parametrize("start", [2, 11, -1, ("EXACT_OFFSET", 10), ("EXACT_OFFSET", 2)])
async def test_start_out_of_range_is_an_error_with_the_range(start: Any) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 10)
        cluster.topics["t"][0].log_start = 3
        with pytest.raises(SmqError) as caught:
            await consumer.assign([("t", 0)], start)
        assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert (caught.value.details.lo, caught.value.details.hi) == (3, 10)


async def test_seek_moves_back_and_forward_and_refuses_offsets_past_the_end() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 10)
        await consumer.assign([("t", 0)])
        await take(consumer, 5)
        assert await consumer.seek("t", 0, 1) == 1
        assert [r.offset for r in await take(consumer, 2)] == [1, 2]
        await consumer.seek("t", 0, 8)
        assert [r.offset for r in await take(consumer, 2)] == [8, 9]
        assert await consumer.seek("t", 0, 10) == 10
        assert await consumer.lag("t", 0) == 0
        with pytest.raises(SmqError):
            await consumer.seek("t", 0, 11)
        assert consumer.position("t", 0) == 10


async def test_position_and_lag_follow_the_returned_records() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 10)
        await consumer.assign([("t", 0)])
        assert await consumer.lag("t", 0) == 10
        await take(consumer, 4)
        assert (consumer.position("t", 0), await consumer.lag("t", 0)) == (4, 6)


async def test_several_partitions_are_read_completely_and_in_order() -> None:
    async with cluster_of(3, t=5) as cluster, consumer_of(cluster, fetch_max_bytes=300) as consumer:
        for p in range(5):
            fill(cluster, 20 + p, partition=p)
        await consumer.assign([("t", p) for p in range(5)])
        seen: dict[int, list[int]] = {p: [] for p in range(5)}
        for record in await take(consumer, sum(20 + p for p in range(5))):
            seen[record.partition].append(record.offset)
        assert seen == {p: list(range(20 + p)) for p in range(5)}
        # Partitions with the same leader shared a call.
        assert any(len(f.partitions) > 1 for node in cluster.nodes.values() for f in node.fetches)


async def test_getmany_groups_by_partition_and_is_empty_when_nothing_arrives() -> None:
    async with cluster_of(1, t=2) as cluster, consumer_of(cluster, max_wait_ms=10) as consumer:
        fill(cluster, 4, partition=1)
        await consumer.assign([("t", 0), ("t", 1)])
        found = await consumer.getmany(100, 1_000)
        rest = await consumer.getmany(100, 1)
        offsets = [r.offset for part in (found, rest) for r in part.get(("t", 1), [])]
        assert offsets == [0, 1, 2, 3]
        assert await consumer.getmany(100, 1) == {}


async def test_raw_batches_are_those_of_the_log() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 6)
        await consumer.assign({("t", 0): 1})
        batch = await consumer.getbatch(1_000)
        assert batch is not None
        assert (batch.base_offset, batch.last_offset) == (0, 2)
        assert [r.offset for r in decode_batch(batch.data)] == [0, 1, 2]
        assert consumer.position("t", 0) == 3


async def test_raw_batches_after_iteration_begin_at_the_position() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 6)
        await consumer.assign([("t", 0)])
        await take(consumer, 1)
        batch = await consumer.getbatch(1_000)
        assert batch is not None
        assert batch.base_offset == 0
        assert consumer.position("t", 0) == 3


async def test_a_batch_without_data_is_passed_over() -> None:
    """It was aborted, or says how a transaction ended."""

    async with cluster_of(2, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 9)
        cluster.hidden = {0, 6}
        await consumer.assign([("t", 0)])
        batch = await consumer.getbatch(1_000)
        assert batch is not None
        assert (batch.base_offset, len(batch.data) > 0) == (3, True)
        assert await consumer.getbatch(300) is None
        assert consumer.position("t", 0) == 9


async def test_fetch_range_reads_without_an_assignment() -> None:
    async with cluster_of(2, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 6)
        found = await consumer.fetch_range("t", 0, 3)
        assert [b.base_offset for b in found.batches] == [3]
        assert (found.log_start, found.hwm) == (0, 6)
        assert (await consumer.fetch_range("t", 0, 6)).batches == ()
        with pytest.raises(SmqError) as caught:
            await consumer.fetch_range("t", 0, 7)
        assert caught.value.details.hi == 6


async def test_reader_continues_at_another_replica_when_its_node_dies() -> None:
    async with cluster_of(3, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 4)
        await consumer.assign([("t", 0)])
        await take(consumer, 2)
        await cluster.nodes[1].stop()
        cluster.topics["t"][0].move(2)
        fill(cluster, 4)
        assert [r.offset for r in await take(consumer, 6)] == [2, 3, 4, 5, 6, 7]


async def test_damaged_replica_is_abandoned_for_another() -> None:
    async with cluster_of(2, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 2)

        def damaged(name: str, _request: object) -> None:
            if name == "Fetch":
                raise SmqError(ErrorCode.DATA_DAMAGED, "checksum")

        cluster.nodes[1].hook = damaged
        await consumer.assign([("t", 0)])
        assert [r.offset for r in await take(consumer, 2)] == [0, 1]
        assert cluster.nodes[2].fetches


async def test_only_the_named_replica_is_read() -> None:
    async with cluster_of(3, t=1) as cluster, consumer_of(cluster, from_replica=3) as consumer:
        fill(cluster, 2)
        await consumer.assign([("t", 0)])
        await take(consumer, 2)
        assert cluster.nodes[3].fetches
        assert not cluster.nodes[1].fetches
        with pytest.raises(SmqError, match="no such node"):
            await consumer_of(cluster, from_replica=9).start()


async def test_lost_records_are_an_error_with_the_range_until_a_seek() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        await consumer.assign([("t", 0)])
        fill(cluster, 9)
        cluster.topics["t"][0].log_start = 6
        consumer._planner.assigned["t", 0].move(2)  # as if the consumer had been away for 30 days
        for _ in range(2):
            with pytest.raises(SmqError) as caught:
                await anext(consumer)
            assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
            assert (caught.value.details.lo, caught.value.details.hi) == (6, 9)
        await consumer.seek("t", 0, 6)
        assert [r.offset for r in await take(consumer, 3)] == [6, 7, 8]


@pytest.mark.parametrize(("reset", "first"), [("earliest", 6), ("latest", 9)])
async def test_lost_records_are_skipped_if_the_user_asked_for_that(reset: Any, first: int) -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, auto_offset_reset=reset) as consumer:
        await consumer.assign([("t", 0)])
        fill(cluster, 9)
        cluster.topics["t"][0].log_start = 6
        consumer._planner.assigned["t", 0].move(2)
        waiting = asyncio.create_task(take(consumer, 1))
        while consumer.position("t", 0) == 2:  # noqa: ASYNC110 a position does not signal its moves
            await asyncio.sleep(0)
        fill(cluster, 1)
        assert [r.offset for r in await waiting] == [first]


async def test_group_resumes_at_exactly_the_next_record() -> None:
    async with cluster_of(2, t=1) as cluster:
        fill(cluster, 10)
        async with consumer_of(cluster, group="g") as consumer:
            await consumer.assign([("t", 0)])
            await take(consumer, 4)
            assert await consumer.committed() == {}
            await consumer.commit()
            assert (await consumer.committed())["t", 0].offset == 4
        async with consumer_of(cluster, group="g") as consumer:
            assert await consumer.assign([("t", 0)]) == {("t", 0): 4}
            assert (await anext(consumer)).offset == 4
            await consumer.commit({("t", 0): 9})
        async with consumer_of(cluster, group="other") as consumer:
            assert await consumer.assign([("t", 0)], "RESUME_OR_LATEST") == {("t", 0): 10}
        async with Admin(cluster.servers) as admin:
            assert (await admin.fetch_offsets("g"))["t", 0].offset == 9


async def test_group_below_the_log_start_is_an_error_or_reset() -> None:
    async with cluster_of(1, t=1) as cluster:
        fill(cluster, 10)
        cluster.commits["g", "t", 0] = (2, "")
        cluster.topics["t"][0].log_start = 6
        async with consumer_of(cluster, group="g") as consumer:
            with pytest.raises(SmqError) as caught:
                await consumer.assign([("t", 0)])
            assert caught.value.details.lo == 6
        async with consumer_of(cluster, group="g", auto_offset_reset="earliest") as consumer:
            assert await consumer.assign([("t", 0)]) == {("t", 0): 6}


async def test_callers_mistakes_are_named() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        with pytest.raises(SmqError, match=r"assign\(\)"):
            await anext(consumer)
        with pytest.raises(SmqError, match="not assigned"):
            consumer.position("t", 0)
        with pytest.raises(SmqError, match="no group"):
            await consumer.commit()
        with pytest.raises(SmqError, match="name the group"):
            await consumer.assign([("t", 0)], "RESUME_OR_LATEST")
        with pytest.raises(SmqError, match="no offset type: use one of earliest, latest, EXACT_OFFSET"):
            await consumer.assign([("t", 0)], "NEWEST")
        with pytest.raises(SmqError, match="needs a value"):
            await consumer.assign([("t", 0)], "EXACT_TS_NS")
        with pytest.raises(SmqError) as caught:
            await consumer.assign([("nope", 0)])
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC
        with pytest.raises(SmqError) as caught:
            await consumer.assign([("t", 5)])
        assert caught.value.code is ErrorCode.UNKNOWN_PARTITION


async def test_deleted_topic_ends_the_reading_with_an_error() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, max_wait_ms=5) as consumer:
        await consumer.assign([("t", 0)])
        del cluster.topics["t"]
        with pytest.raises(SmqError) as caught:
            await anext(consumer)
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC


async def test_lasting_failure_is_raised_and_retried() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster, stall_timeout_ms=100) as consumer:
        fill(cluster, 1)
        await consumer.assign([("t", 0)], "RESET_TO_LATEST")
        await cluster.nodes[1].stop()
        with pytest.raises(SmqError, match="no node answers"):
            await anext(consumer)
        await cluster.nodes[1].restart()
        fill(cluster, 1)
        for _ in range(50):  # further errors are raised, too, until the connection is back
            try:
                assert (await anext(consumer)).offset == 1
                break
            except SmqError:
                continue
        else:
            raise AssertionError("it never came back")


async def test_close_fails_a_waiting_iteration_and_never_ends_it_as_the_data_would() -> None:
    async with cluster_of(1, t=1) as cluster:
        consumer = consumer_of(cluster, max_wait_ms=10_000)
        await consumer.start()
        await consumer.assign([("t", 0)])

        async def read() -> int:
            return len([record async for record in consumer])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(ClientClosed):
            await reading


def test_consumer_reads_what_a_producer_sent_for_every_codec() -> None:
    async def scenario(codec: str) -> None:
        async with cluster_of(2, t=1) as cluster:
            async with Producer(cluster.servers, compression=codec) as producer:
                await producer.send("t", b"x" * 1000, key=b"k", headers=[("a", None)], timestamp_ms=5)
                await producer.send("t", None, key=None)
            async with consumer_of(cluster) as consumer:
                await consumer.assign([("t", 0)])
                first, second = await take(consumer, 2)
                assert (first.value, first.key, list(first.headers), first.timestamp_ms) == (
                    b"x" * 1000,
                    b"k",
                    [("a", None)],
                    5,
                )
                assert (second.value, second.key) == (None, None)

    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        run(scenario(codec))


def append_undecodable(cluster: FakeCluster) -> None:
    """The next batch of t/0: its checksum is right, its producer compressed it wrongly."""
    data = bytearray(encode_batch([NewRecord(b"k", b"v" * 500, 0)], codec="zstd"))
    data[HEADER_BYTES : HEADER_BYTES + 4] = bytes(4)
    struct.pack_into(">I", data, CRC_START - 4, crc32c(bytes(data[CRC_START:])))
    cluster.topics["t"][0].append(bytes(data))
    cluster.topics["t"][0].settle()


async def drain(consumer: Consumer, errors: int) -> tuple[dict[int, list[int]], list[SmqError]]:
    """The offsets by partition, and the errors, that getmany() gives until it has raised `errors` times."""
    seen: dict[int, list[int]] = {}
    raised: list[SmqError] = []
    while len(raised) < errors:
        try:
            for (_, partition), records in (await consumer.getmany(timeout_ms=1_000)).items():
                seen.setdefault(partition, []).extend(r.offset for r in records)
        except SmqError as e:
            raised.append(e)
    return seen, raised


async def buffered(consumer: Consumer, *partitions: int) -> None:
    """Returns once the consumer has batches, or an error, of each."""
    fetches = [consumer._planner.assigned["t", p] for p in partitions]
    while not all(fetch.batches or fetch.error for fetch in fetches):  # noqa: ASYNC110 nothing signals all of them
        await asyncio.sleep(0)


async def assign_with_lost_records(cluster: FakeCluster, consumer: Consumer, lost: int) -> None:
    """Three partitions of six records; those of `lost` at the consumer's position are gone."""
    for partition in range(3):
        fill(cluster, 6, partition=partition)
    await consumer.assign("t", "RESET_TO_LATEST")
    cluster.topics["t"][lost].log_start = 3
    for partition in range(3):
        await consumer.rewind({("t", partition): 0})
    await buffered(consumer, 0, 1, 2)


@pytest.mark.parametrize("ahead", [0, 1])
async def test_error_of_one_partition_costs_no_record_of_the_others(ahead: int) -> None:
    """Also none that iteration has decoded ahead."""

    async with cluster_of(1, t=3) as cluster, consumer_of(cluster) as consumer:
        await assign_with_lost_records(cluster, consumer, lost=1)
        for record in await take(consumer, ahead):
            assert (record.partition, record.offset) == (0, 0)
        seen, errors = await drain(consumer, 4)
        assert seen == {0: list(range(ahead, 6)), 2: list(range(6))}
        assert {e.code for e in errors} == {ErrorCode.OFFSET_OUT_OF_RANGE}
        assert [consumer.position("t", p) for p in range(3)] == [6, 0, 6]


async def test_error_comes_with_the_call_after_the_records_and_not_when_the_others_are_empty() -> None:
    async with cluster_of(1, t=3) as cluster, consumer_of(cluster) as consumer:
        await assign_with_lost_records(cluster, consumer, lost=1)
        assert list(await consumer.getmany()) == [("t", 0)]
        with pytest.raises(SmqError):
            await consumer.getmany()
        assert list(await consumer.getmany()) == [("t", 2), ("t", 0)]


async def test_batch_that_does_not_decode_is_an_error_until_a_seek_past_it() -> None:
    async with cluster_of(1, t=1) as cluster, consumer_of(cluster) as consumer:
        fill(cluster, 3)
        append_undecodable(cluster)
        fill(cluster, 3)
        await consumer.assign([("t", 0)])
        seen, errors = await drain(consumer, 2)
        assert seen == {0: [0, 1, 2]}
        for _ in range(2):
            with pytest.raises(SmqError) as caught:
                await anext(consumer)
            errors.append(caught.value)
        assert {(e.code, "offsets 3 to 3" in e.message) for e in errors} == {(ErrorCode.INVALID_BATCH, True)}
        assert consumer.position("t", 0) == 3
        await consumer.seek("t", 0, 4)
        assert [r.offset for r in await take(consumer, 3)] == [4, 5, 6]


async def test_lasting_error_of_one_partition_does_not_keep_iteration_from_the_others() -> None:
    async with cluster_of(1, t=3) as cluster, consumer_of(cluster) as consumer:
        await assign_with_lost_records(cluster, consumer, lost=0)
        seen: list[tuple[int, int]] = []
        errors = 0
        while len(seen) < 12:
            try:
                record = await anext(consumer)
                seen.append((record.partition, record.offset))
            except SmqError:
                errors += 1
                assert errors < 12
        assert sorted(seen) == [(p, o) for p in (1, 2) for o in range(6)]


@pytest.mark.parametrize("is_failing", [False, True])
async def test_poll_without_records_leaves_other_tasks_a_turn(is_failing: bool) -> None:
    """Without it `while True: await consumer.getmany()` would starve the fetches and the heartbeats."""

    async with cluster_of(1, t=3) as cluster, consumer_of(cluster, max_wait_ms=10_000) as consumer:
        if is_failing:
            await assign_with_lost_records(cluster, consumer, lost=0)
            await consumer.pause([("t", 1), ("t", 2)])
        else:
            await consumer.assign("t")
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        with pytest.raises(SmqError) if is_failing else contextlib.nullcontext():
            assert await consumer.getmany() == {}
        assert turn.is_set()
