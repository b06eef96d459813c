"""The asyncio producer over real gRPC, against a cluster that can be made to fail on command."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from smq.clients import Producer, SmqError
from smq.clients.producing.publish_stream import PublishStream
from smq.raft_state.errors import ErrorCode, ErrorDetails
from smq.records import parse_header
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_of


def producer_of(cluster: FakeCluster, **options: Any) -> Producer:
    return Producer(cluster.servers, linger_ms=1, **options)


async def test_records_are_acknowledged_with_their_offsets() -> None:
    async with cluster_of(1, t=2) as cluster, producer_of(cluster) as producer:
        sent = [producer.send("t", b"%d" % i, partition=i % 2) for i in range(10)]
        results = [await s for s in sent]
        assert [(r.partition, r.offset) for r in results] == [(i % 2, i // 2) for i in range(10)]
        assert all(r.ts_ns == r.offset + 1 for r in results), "the cluster's clock moves by one per record"
        assert producer.stats.records_acked == 10
        assert cluster.stored_values("t")[1] == [b"1", b"3", b"5", b"7", b"9"]


async def test_a_run_of_records_is_acknowledged_with_its_first_append_time() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"x")
        (run_of_three,) = await (await producer.send_many("t", [b"x"] * 3))
        assert (run_of_three.base_offset, run_of_three.last_offset, run_of_three.ts_ns) == (1, 3, 2)


async def test_single_record_is_sent_without_flush() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        assert (await producer.send("t", None, key=b"k")).offset == 0


async def test_idle_producer_sends_without_lingering() -> None:
    async with cluster_of(1, t=1) as cluster, Producer(cluster.servers, linger_ms=60_000) as producer:
        assert [(await producer.send("t", b"v")).offset for _ in range(3)] == [0, 1, 2]


async def test_concurrent_publishers_share_a_message_per_round() -> None:
    async with cluster_of(1, t=1) as cluster, Producer(cluster.servers, linger_ms=60_000) as producer:

        async def publisher() -> list[int]:
            return [(await producer.send("t", b"v")).offset for _ in range(5)]

        offsets = await asyncio.gather(*(publisher() for _ in range(100)))
        assert sorted(offset for found in offsets for offset in found) == list(range(500))
        assert len(cluster.nodes[1].published) <= 10


async def test_send_many_returns_the_offsets_of_every_run() -> None:
    async with cluster_of(1, t=3) as cluster, producer_of(cluster, batch_bytes=500) as producer:
        values = [b"%04d" % i for i in range(1_000)]
        keys = [b"key-%d" % (i % 7) for i in range(1_000)]
        delivery = await producer.send_many("t", values, keys=keys)
        runs = await delivery
        assert sum(r.last_offset - r.base_offset + 1 for r in runs) == 1_000
        stored = cluster.stored_values("t")
        assert sorted(v for log in stored.values() for v in log if v) == values
        for partition, log in stored.items():
            assert log == sorted(log, key=lambda v: v or b"")
            ends = [(r.base_offset, r.last_offset + 1) for r in runs if r.partition == partition]
            assert [e[0] for e in ends[1:]] == [e[1] for e in ends[:-1]]


async def test_send_many_waits_for_space_and_delivers_everything() -> None:
    async with cluster_of(1, t=2) as cluster, producer_of(cluster, buffer_bytes=2_000, batch_bytes=500) as producer:
        delivery = await producer.send_many("t", [b"x" * 100] * 300)
        assert sum(r.last_offset - r.base_offset + 1 for r in await delivery) == 300


async def test_unknown_topic_fails_the_record_definitely() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        with pytest.raises(SmqError) as caught:
            await producer.send("nope", b"v")
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC
        with pytest.raises(SmqError, match="no topic 'nope'"):
            await producer.send_many("nope", [b"v"])
        assert (await producer.send("t", b"v")).offset == 0


async def test_a_name_that_is_no_text_fails_at_once_and_delays_no_other_record() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        with pytest.raises(SmqError, match=r"INVALID_REQUEST: topic '\\udcff' is no text in UTF-8"):
            producer.send("\udcff", b"v")
        with pytest.raises(SmqError, match="is no text in UTF-8"):
            await producer.send_many("\udcff", [b"v"])
        cluster.create("late", 1)
        assert (await producer.send("late", b"v")).offset == 0


async def test_a_record_that_cannot_be_encoded_fails_at_once_although_its_topic_is_not_known_yet() -> None:
    async with cluster_of(1) as cluster, producer_of(cluster) as producer:
        cluster.create("late", 1)
        wrong: Any = ["\udcff", "text"]
        for key in wrong:
            with pytest.raises(SmqError, match=r"INVALID_REQUEST: .*key must be bytes or None"):
                producer.send("late", b"v", key)
        with pytest.raises(SmqError, match=r"INVALID_REQUEST: .*headers are .*surrogates not allowed"):
            producer.send("late", b"v", headers=[("\udcff", b"")])
        assert (await producer.send("late", b"v")).offset == 0
        assert cluster.stored_values("late") == {0: [b"v"]}


async def test_topic_created_after_the_start_is_found() -> None:
    async with cluster_of(1) as cluster, producer_of(cluster) as producer:
        cluster.create("late", 2)
        assert (await producer.send("late", b"v", partition=1)).partition == 1


async def test_topic_unknown_to_a_lagging_node_is_found() -> None:
    async with cluster_of(1) as cluster, producer_of(cluster) as producer:
        cluster.create("t", 1)

        def lag(name: str, request: Any) -> None:
            if name == "DescribeCluster" and not request.linearizable:
                raise SmqError(ErrorCode.UNKNOWN_TOPIC, "not known yet")

        cluster.nodes[1].hook = lag
        assert (await producer.send("t", b"v")).offset == 0


async def test_new_leader_is_found_by_the_hint_and_order_is_kept() -> None:
    async with cluster_of(3, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"0")
        cluster.topics["t"][0].move(2)
        await asyncio.gather(*(producer.send("t", b"%d" % i) for i in range(1, 100)))
        assert cluster.stored_values("t")[0] == [b"%d" % i for i in range(100)]
        assert producer.stats.leader_changes == 1
        assert producer.stats.retries >= 1


async def test_append_lost_with_its_leader_is_resent_in_order() -> None:
    async with cluster_of(3, t=1) as cluster, producer_of(cluster, batch_bytes=200) as producer:
        await producer.send("t", b"0")
        log = cluster.topics["t"][0]
        log.is_held = True
        sent = [producer.send("t", b"%d" % i) for i in range(1, 60)]
        await log.reaches(30)
        log.move(3)
        log.is_held = False
        offsets = [(await s).offset for s in sent]
        assert offsets == list(range(1, 60))
        assert cluster.stored_values("t")[0] == [b"%d" % i for i in range(60)]


async def test_killed_leader_loses_nothing_and_stores_nothing_twice() -> None:
    async with cluster_of(3, t=3) as cluster, producer_of(cluster, batch_bytes=300) as producer:
        sent = []
        for i in range(300):
            sent.append(producer.send("t", b"%d" % i, partition=i % 3))
            if i == 150:
                await cluster.topics["t"][0].reaches(1)
                await cluster.nodes[1].stop()
                cluster.topics["t"][0].move(2)
            await asyncio.sleep(0)
        await asyncio.gather(*sent)
        for p in range(3):
            assert cluster.stored_values("t")[p] == [b"%d" % i for i in range(p, 300, 3)]
        assert producer.stats.streams_broken >= 1


async def test_answer_lost_after_the_commit_is_a_duplicate_with_the_first_offset() -> None:
    async with cluster_of(2, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"0")
        log, node = cluster.topics["t"][0], cluster.nodes[1]
        log.is_held = True
        sent = producer.send("t", b"1")
        await log.reaches(2)
        log.commit()  # stored for good; then the node dies before its answer
        await node.stop()
        log.is_held = False
        log.move(2)
        assert (await sent).offset == 1
        assert producer.stats.duplicates == 1
        assert log.values() == [b"0", b"1"]


async def test_hanging_node_is_abandoned_when_another_leads() -> None:
    async with cluster_of(2, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"0")
        stuck, arrived = asyncio.Event(), asyncio.Event()

        def hang(name: str, _request: object) -> Any:
            if name == "PublishRecord":
                arrived.set()
            return stuck.wait()

        cluster.nodes[1].hook = hang
        sent = producer.send("t", b"1")
        await arrived.wait()
        cluster.topics["t"][0].move(2)
        assert (await sent).offset == 1
        stuck.set()


async def test_overload_is_waited_out() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        refusals = iter(range(3))

        def busy(name: str, _request: object) -> None:
            if name == "PublishRecord" and next(refusals, None) is not None:
                raise SmqError(ErrorCode.OVERLOADED, "busy", ErrorDetails(retry_after_ms=5))

        cluster.nodes[1].hook = busy
        assert (await producer.send("t", b"v")).offset == 0
        assert producer.stats.retries == 3


async def test_too_large_record_fails_alone_and_the_partition_continues() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"before")
        large = producer.send("t", b"x" * (2 << 20))
        after = [producer.send("t", b"%d" % i) for i in range(5)]
        with pytest.raises(SmqError) as caught:
            await large
        assert caught.value.code is ErrorCode.BATCH_TOO_LARGE
        assert [(await a).offset for a in after] == [1, 2, 3, 4, 5]
        assert producer.stats.identity_resets == 1


async def test_fenced_producer_fails_everything_from_then_on() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:

        def fence(name: str, _request: object) -> None:
            if name == "PublishRecord":
                raise SmqError(ErrorCode.PRODUCER_FENCED, "taken over")

        cluster.nodes[1].hook = fence
        with pytest.raises(SmqError):
            await producer.send("t", b"v")
        with pytest.raises(SmqError) as caught:
            producer.send("t", b"v")
        assert caught.value.code is ErrorCode.PRODUCER_FENCED


async def test_delivery_timeout_without_a_leader_is_definite() -> None:
    async with cluster_of(2, t=1) as cluster:
        cluster.topics["t"][0].leader = 2
        await cluster.nodes[2].stop()
        async with producer_of(cluster, delivery_timeout_ms=300) as producer:
            with pytest.raises(SmqError) as caught:
                await producer.send("t", b"v")
        assert caught.value.code is ErrorCode.LEADER_UNAVAILABLE


async def test_full_buffer_raises_and_wait_room_waits() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster, buffer_bytes=1_000) as producer:
        sent = [producer.send("t", b"x" * 100) for _ in range(10)]
        with pytest.raises(SmqError) as caught:
            producer.send("t", b"x" * 100)
        assert caught.value.code is ErrorCode.OVERLOADED
        assert producer.is_full
        await producer.wait_room()
        sent.append(producer.send("t", b"last"))
        await asyncio.gather(*sent)


async def test_flush_waits_for_all_and_close_delivers_the_rest() -> None:
    async with cluster_of(1, t=1) as cluster:
        producer = Producer(cluster.servers, linger_ms=60_000)
        await producer.start()
        sent = [producer.send("t", b"%d" % i) for i in range(10)]
        await producer.flush()
        assert all(s.done() for s in sent)
        last = producer.send("t", b"last")
        await producer.close()
        assert (await last).offset == 10
        with pytest.raises(SmqError, match="closed"):
            producer.send("t", b"too late")


@pytest.mark.parametrize("call", [Producer.flush, Producer.close])
async def test_a_record_without_partitions_is_waited_for_although_its_future_is_cancelled(
    call: Callable[[Producer], Awaitable[None]],
) -> None:
    async with cluster_of(1) as cluster, producer_of(cluster) as producer:
        cluster.create("late", 1)  # the producer does not know it yet
        producer.send("late", b"v").cancel()  # as asyncio.wait_for does
        producer.send("nope", b"v").cancel()
        await call(producer)
        assert cluster.stored_values("late") == {0: [b"v"]}
        assert producer.stats.records_failed == 1


async def test_flushes_that_are_cancelled_leave_no_marks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed, held = asyncio.Event(), list[tuple[Any, ...]]()

    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        await producer.send("t", b"first")
        cluster.create("late", 1)
        refresh, submit = producer._cluster.refresh, PublishStream.submit

        async def refresh_later(*topics: Any, **options: Any) -> frozenset[str]:
            await resumed.wait()
            return await refresh(*topics, **options)

        monkeypatch.setattr(producer._cluster, "refresh", refresh_later)
        with monkeypatch.context() as patch:
            patch.setattr(PublishStream, "submit", lambda *args: held.append(args))
            sent = [producer.send("late", b"v"), producer.send("t", b"v")]
            waiting = asyncio.create_task(producer.flush())
            for _ in range(5):
                flush = asyncio.create_task(producer.flush())
                await asyncio.sleep(0)
                flush.cancel()
                await asyncio.gather(flush, return_exceptions=True)
        [record], [batch] = producer._accumulator.waiting(), producer._accumulator.mark_due()
        marks, tokens = len(record.marks), len(batch.tokens)
        last = asyncio.create_task(producer.flush())
        await asyncio.sleep(0)
        assert not waiting.done()
        resumed.set()
        for args in held:
            submit(*args)
        await waiting
        await last
        assert all(s.done() for s in sent)
        assert (marks, tokens - 1) == (2, 2), "of the flush that waits, and the last of the others"


async def test_close_does_not_hang_on_records_that_failed() -> None:
    async with cluster_of(1) as cluster, producer_of(cluster) as producer:
        sent = producer.send("nope", b"v")
        await producer.flush()
        assert sent.done()
        sent.exception()


async def test_cancelled_user_does_not_wait_for_an_unavailable_cluster() -> None:
    async with cluster_of(1, t=1) as cluster:
        log, sent = cluster.topics["t"][0], []
        log.is_held = True

        async def use() -> None:
            async with producer_of(cluster) as producer:
                sent.append(producer.send("t", b"in flight"))
                await log.reaches(1)
                await asyncio.Event().wait()

        using = asyncio.create_task(use())
        await log.reaches(1)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        error = sent[0].exception()
        assert isinstance(error, SmqError)
        assert error.code is ErrorCode.TIMED_OUT, "it was in flight: the outcome is unknown"


async def test_cancelled_future_affects_no_other_record() -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster) as producer:
        cancelled = producer.send("t", b"0")
        cancelled.cancel()
        assert (await producer.send("t", b"1")).offset == 1


@pytest.mark.parametrize(("acks", "producer_id"), [("all", 101), ("leader", 101), ("none", -1)])
async def test_acks_and_identity_go_with_every_batch(acks: Any, producer_id: int) -> None:
    async with cluster_of(1, t=1) as cluster, producer_of(cluster, acks=acks, compression="zstd") as producer:
        await producer.send("t", b"v")
        [request] = cluster.nodes[1].published
        assert request.acks == {"all": 0, "leader": 1, "none": 2}[acks]
        assert parse_header(request.batch).producer_id == producer_id


@pytest.mark.parametrize(
    "options",
    [
        {"acks": "some"},
        {"compression": "rar"},
        {"max_in_flight": 6},
        {"max_in_flight": 0},
        {"linger_ms": -1},
        {"bootstrap": "nowhere"},
        {"bootstrap": ""},
        {"bootstrap": ["host:99999"]},
    ],
)
def test_meaningless_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SmqError) as caught:
        Producer(options.pop("bootstrap", "127.0.0.1:1"), **options)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


async def test_unreachable_cluster_is_reported_within_the_connect_timeout() -> None:
    producer = Producer("127.0.0.1:1", connect_timeout_ms=200)
    with pytest.raises(SmqError, match=r"no node answers at 127\.0\.0\.1:1"):
        await producer.start()
    await producer.close()
