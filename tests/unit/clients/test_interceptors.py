"""Interceptors of producers and consumers: what they see and change, each outcome once, and none of their errors."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from smq.clients import (
    Consumer,
    ConsumerInterceptor,
    ConsumerRecord,
    InvalidRequest,
    Producer,
    ProducerInterceptor,
    ProducerRecord,
    RecordMetadata,
    SmqError,
    SyncConsumer,
    SyncProducer,
    UnknownPartition,
)
from smq.clients.types import CommittedOffset, TopicPartition
from smq.raft_state.errors import ErrorCode
from smq.testing.fake.runner import cluster_in_thread, cluster_of
from smq.testing.loops import run


class Sends(ProducerInterceptor):
    """Marks each value, and keeps all that it learns."""

    def __init__(self, mark: bytes = b"+") -> None:
        self.mark = mark
        self.seen: list[ProducerRecord] = []
        self.outcomes: list[tuple[RecordMetadata, SmqError | None]] = []
        self.closed = 0

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        self.seen.append(record)
        return record._replace(value=(record.value or b"") + self.mark)

    def on_acknowledgement(self, metadata: RecordMetadata, error: SmqError | None) -> None:
        self.outcomes.append((metadata, error))

    def close(self) -> None:
        self.closed += 1


class Reads(ConsumerInterceptor):
    """Leaves out values with `without`, and keeps all that it learns."""

    def __init__(self, without: bytes | None = None) -> None:
        self.without = without
        self.seen: list[ConsumerRecord] = []
        self.commits: list[dict[TopicPartition, CommittedOffset]] = []
        self.closed = 0

    def on_consume(self, records: list[ConsumerRecord]) -> Sequence[ConsumerRecord]:
        self.seen += records
        if self.without is not None:
            return [r for r in records if self.without not in (r.value or b"")]
        return [r._replace(headers=[("read", b"1")]) for r in records]

    def on_commit(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        self.commits.append(dict(offsets))

    def close(self) -> None:
        self.closed += 1


class Broken(ProducerInterceptor, ConsumerInterceptor):
    """Raises wherever it is called."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        raise ValueError("on_send")

    def on_acknowledgement(self, metadata: RecordMetadata, error: SmqError | None) -> None:
        raise ValueError("on_acknowledgement")

    def on_consume(self, records: list[ConsumerRecord]) -> Sequence[ConsumerRecord]:
        raise ValueError("on_consume")

    def on_commit(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        raise ValueError("on_commit")

    def close(self) -> None:
        raise ValueError("close")


def at(offset: int, metadata: str) -> CommittedOffset:
    return CommittedOffset(offset=offset, metadata=metadata)


async def test_each_interceptor_gets_the_record_that_the_one_before_returned() -> None:
    first, second = Sends(b"1"), Sends(b"2")
    async with cluster_of(1, t=1) as cluster:
        async with Producer(cluster.servers, linger_ms=1, interceptors=[first, second]) as producer:
            place = await producer.send("t", b"v", key=b"k", headers=[("h", b"x")], timestamp_ms=7)
        assert cluster.stored_values("t")[0] == [b"v12"]
    assert first.seen == [ProducerRecord("t", b"v", b"k", [("h", b"x")], None, 7)]
    assert second.seen == [first.seen[0]._replace(value=b"v1")]
    assert first.outcomes == second.outcomes == [(place, None)]
    assert first.closed == second.closed == 1


async def test_an_interceptor_learns_the_outcome_before_the_sender_does() -> None:
    watching = Sends()
    async with (
        cluster_of(1, t=1) as cluster,
        Producer(cluster.servers, linger_ms=1, interceptors=[watching]) as producer,
    ):
        known: list[int] = []
        sent = producer.send("t", b"v")
        sent.add_done_callback(lambda _: known.append(len(watching.outcomes)))
        await sent
        await asyncio.sleep(0)
        assert known == [1]
        cancelled = producer.send("t", b"w")
        cancelled.cancel()
        await producer.flush()
        assert [m.offset for m, _ in watching.outcomes] == [0, 1], "also if its sender no longer waits"


async def test_send_many_is_intercepted_record_by_record_and_answered_by_runs() -> None:
    watching = Sends()
    async with (
        cluster_of(1, t=2) as cluster,
        Producer(cluster.servers, linger_ms=1, interceptors=[watching]) as producer,
    ):
        values = [b"%d" % i for i in range(100)]
        (only,) = await (await producer.send_many("t", values, partition=1, timestamp_ms=list(range(100))))
        assert (only.partition, only.base_offset, only.last_offset) == (1, 0, 99)
        assert cluster.stored_values("t")[1] == [v + b"+" for v in values]
        keyed = await (await producer.send_many("t", values, keys=values))
        assert sum(r.last_offset - r.base_offset + 1 for r in keyed) == 100
    assert [r.timestamp_ms for r in watching.seen[:100]] == list(range(100))
    assert [(m.partition, m.offset) for m, _ in watching.outcomes[:100]] == [(1, i) for i in range(100)]
    assert len(watching.outcomes) == 200


async def test_each_record_that_was_seen_has_one_outcome_whatever_ends_it() -> None:
    watching = Sends()
    async with cluster_of(1, t=1) as cluster:
        async with Producer(cluster.servers, linger_ms=1, interceptors=[watching]) as producer:
            with pytest.raises(SmqError):
                await producer.send("nowhere", b"v")
            with pytest.raises(SmqError):
                await producer.send("t", b"v", partition=7)
            await producer.send("t", b"v", partition=0)
        with pytest.raises(SmqError):
            producer.send("t", b"late")
    ends = [(m.topic, m.partition, m.offset, e and e.code) for m, e in watching.outcomes]
    assert ends == [
        ("nowhere", -1, -1, ErrorCode.UNKNOWN_TOPIC),
        ("t", 7, -1, ErrorCode.UNKNOWN_PARTITION),
        ("t", 0, 0, None),
    ]
    assert len(watching.seen) == 3, "what is refused before is not seen"


async def test_a_flush_waits_for_records_of_a_send_many_that_was_refused_halfway() -> None:
    class Elsewhere(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return record._replace(topic="late") if record.value == b"first" else record._replace(partition=7)

    async with (
        cluster_of(1, t=1) as cluster,
        Producer(cluster.servers, linger_ms=1, interceptors=[Elsewhere()]) as producer,
    ):
        cluster.create("late", 1)
        with pytest.raises(UnknownPartition):
            await producer.send_many("t", [b"first", b"refused"])
        await producer.flush()
        assert cluster.stored_values("late") == {0: [b"first"]}


async def test_an_interceptor_may_send_a_record_elsewhere() -> None:
    class Elsewhere(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return record._replace(topic="u", partition=1)

    async with (
        cluster_of(1, t=1, u=2) as cluster,
        Producer(cluster.servers, linger_ms=1, interceptors=[Elsewhere()]) as producer,
    ):
        assert (await producer.send("t", b"v"))[:3] == ("u", 1, 0)
        (moved,) = await (await producer.send_many("t", [b"w", b"x"]))
        assert (moved.topic, moved.base_offset, moved.last_offset) == ("u", 1, 2)
        assert cluster.stored_values("u")[1] == [b"v", b"w", b"x"]


@pytest.mark.parametrize("returned", [None, b"v", ("", b"v"), ("t", "v")])  # the last two: topic and value
def test_what_cannot_be_sent_is_the_interceptors_error(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(returned, tuple):
        topic, value = returned
        returned = ProducerRecord(topic, value, None, (), None, 0)

    class Wrong(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            found: ProducerRecord = returned
            return found

    async def scenario() -> None:
        after = Sends()
        async with (
            cluster_of(1, t=1) as cluster,
            Producer(cluster.servers, linger_ms=1, interceptors=[Wrong(), after]) as producer,
        ):
            await producer.send("t", b"v")
            assert cluster.stored_values("t")[0] == [b"v+"]

    run(scenario())
    assert "on_send of the interceptor Wrong failed" in caplog.text


async def test_what_iteration_and_polls_return_has_passed_the_interceptors() -> None:
    reads = Reads(without=b"3")
    async with (
        cluster_of(1, t=1) as cluster,
        Producer(cluster.servers, linger_ms=1) as producer,
        Consumer(cluster.servers, max_wait_ms=50, interceptors=[Reads(), reads]) as consumer,
    ):
        await (await producer.send_many("t", [b"%d" % i for i in range(10)]))
        await consumer.assign("t", end_offset="latest")
        found = [record async for record in consumer]
        assert [r.offset for r in found] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        assert all(list(r.headers) == [("read", b"1")] for r in found)
        assert consumer.position("t", 0) == 10
        await consumer.assign("t", end_offset="latest")
        polled = await consumer.getmany(timeout_ms=5_000)
        assert polled == {("t", 0): found}
    assert [r.offset for r in reads.seen] == [*range(10)] * 2
    assert reads.closed == 1


async def test_a_poll_ends_although_an_interceptor_leaves_everything_out() -> None:
    async with (
        cluster_of(1, t=1) as cluster,
        Producer(cluster.servers, linger_ms=1) as producer,
        Consumer(cluster.servers, max_wait_ms=50, interceptors=[Reads(without=b"v")]) as consumer,
    ):
        await producer.send("t", b"v")
        await consumer.assign("t")
        assert await consumer.getmany(timeout_ms=60_000) == {}
        assert consumer.position("t", 0) == 1
        await consumer.assign("t", end_offset="latest")
        assert [record async for record in consumer] == []


@pytest.mark.parametrize("returned", [None, [b"v"], "again", "reversed"])
def test_records_may_not_be_moved(returned: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Moves(ConsumerInterceptor):
        def on_consume(self, records: list[ConsumerRecord]) -> Sequence[ConsumerRecord]:
            found: Any = {"again": [*records, *records], "reversed": records[::-1]}.get(str(returned), returned)
            return found  # type: ignore[no-any-return] # wrong on purpose

    async def scenario() -> None:
        async with (
            cluster_of(1, t=1) as cluster,
            Producer(cluster.servers, linger_ms=1) as producer,
            Consumer(cluster.servers, max_wait_ms=50, interceptors=[Moves()]) as consumer,
        ):
            await (await producer.send_many("t", [b"a", b"b"]))
            await consumer.assign("t", end_offset="latest")
            assert [record.value async for record in consumer] == [b"a", b"b"]

    run(scenario())
    assert "on_consume of the interceptor Moves failed" in caplog.text


async def test_commits_that_succeed_are_seen() -> None:
    reads = Reads()
    async with cluster_of(1, t=1) as cluster, Consumer(cluster.servers, group="g", interceptors=[reads]) as consumer:
        await consumer.assign("t", "earliest")
        await consumer.commit()
        await consumer.commit({("t", 0): at(0, "mine")})
        with pytest.raises(SmqError):
            await consumer.commit({("t", -1): 0})
    assert reads.commits == [{("t", 0): at(0, "")}, {("t", 0): at(0, "mine")}]


def test_the_blocking_clients_have_them_too() -> None:
    sends, reads = Sends(), Reads(without=b"2")
    with cluster_in_thread(1, t=1) as cluster:
        with SyncProducer(cluster.servers, interceptors=[sends]) as producer:
            place = producer.send("t", b"1", partition=0).result()
            producer.send_many("t", [b"2", b"3"], partition=0)
            with pytest.raises(SmqError):
                producer.send("nowhere", b"v").result()
        with pytest.raises(SmqError):
            producer.send("t", b"late")
        with SyncConsumer(cluster.servers, group="g", interceptors=[reads]) as consumer:
            consumer.assign([("t", 0)], "earliest", end_offset="latest")
            assert [record.value for record in consumer] == [b"1+", b"3+"]
            consumer.commit()
        assert reads.commits == [{("t", 0): at(3, "")}]
    assert sends.outcomes[0] == (place, None)
    codes = [error and error.code for _, error in sends.outcomes]
    assert codes == [None, None, None, ErrorCode.UNKNOWN_TOPIC, ErrorCode.CLIENT_CLOSED]
    assert len(sends.seen) == len(sends.outcomes)
    assert (sends.closed, reads.closed) == (1, 1)


def test_an_error_of_an_interceptor_is_logged_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with cluster_in_thread(1, t=1) as cluster, caplog.at_level(logging.ERROR, "smq.clients.interceptors"):
        with SyncProducer(cluster.servers, interceptors=[Broken()]) as producer:
            assert producer.send("t", b"v", partition=0).result().offset == 0
        with SyncConsumer(cluster.servers, group="g", interceptors=[Broken()]) as consumer:
            consumer.assign([("t", 0)], "earliest", end_offset="latest")
            assert [record.value for record in consumer] == [b"v"]
            consumer.commit()
    for name in ("on_send", "on_acknowledgement", "on_consume", "on_commit", "close"):
        said = [r for r in caplog.records if r.getMessage().startswith(f"{name} of the interceptor Broken failed")]
        assert said
        assert all(r.exc_info is not None and str(r.exc_info[1]) == name for r in said)


@pytest.mark.parametrize("client", [Producer, Consumer, SyncProducer, SyncConsumer])
@pytest.mark.parametrize("wrong", [object(), [object()], [None], [Sends]])
def test_what_is_no_interceptor_is_refused_by_its_name(client: type, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="interceptors must be"):
        client("127.0.0.1:1", interceptors=wrong)
