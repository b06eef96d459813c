"""The producer's transactions, against a real node: what readers get, and what a producer may do when."""

import asyncio

import pytest

from smq.clients import (
    Admin,
    Consumer,
    InvalidRequest,
    InvalidTransactionState,
    Producer,
    ProducerFenced,
    RecordFilter,
    SyncConsumer,
    SyncProducer,
    UnknownPartition,
    UnknownTopic,
)
from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.config.addresses import format_address
from smq.testing.served import Served


def servers(served: Served) -> str:
    return format_address(served.server.grpc_address)


def producer_of(served: Served, timeout_ms: int = 60_000) -> Producer:
    return Producer(servers(served), transactional_id="id", linger_ms=1, transaction_timeout_ms=timeout_ms)


async def values(served: Served, topic: str = "t") -> list[bytes | None]:
    """All that a consumer gets, to the present end, which may come soon after a commit."""
    async with Consumer(servers(served)) as consumer:
        await consumer.assign(topic, end_offset="latest")
        return [record.value async for record in consumer]


async def await_values(served: Served, *expected: bytes) -> None:
    """The end of a transaction is written soon after the decision."""
    found: list[bytes | None] = []
    async with asyncio.timeout(30):
        while found != list(expected):
            found = sorted(await values(served), key=lambda v: v or b"")


async def test_readers_get_what_is_committed(served: Served) -> None:
    await served.create("t", partitions=3)
    async with producer_of(served) as producer:
        for n in range(6):
            producer.begin()
            sent = [producer.send("t", b"%d-%d" % (n, p), partition=p) for p in range(3)]
            await asyncio.gather(*sent)
            await (producer.abort() if n % 3 == 1 else producer.commit())
        async with producer.transaction():
            await producer.send_many("t", [b"7-%d" % p for p in range(3)])
        async with producer.transaction():
            pass  # nothing is asked of the cluster
    await await_values(served, *(b"%d-%d" % (n, p) for n in (0, 2, 3, 5, 7) for p in range(3)))


async def test_a_reader_of_uncommitted_records_gets_those_of_open_and_aborted_transactions(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer, Admin(servers(served)) as admin:
        producer.begin()
        await producer.send("t", b"aborted")
        await producer.abort()
        producer.begin()
        await producer.send("t", b"open")  # at 2: a control batch lies between
        async with Consumer(servers(served), isolation="read_uncommitted", group="g") as consumer:
            await consumer.assign("t", "earliest", end_offset="latest")
            assert [(r.offset, r.value) async for r in consumer] == [(0, b"aborted"), (2, b"open")]
            found = [r.value async for r in consumer.search("t", 0, RecordFilter())]
            assert found == [b"aborted", b"open"]
            fetched = await consumer.fetch_range("t", 0, 0)
            assert [bool(b.data) for b in fetched.batches] == [True, False, True], "no control batch has data"
            assert await consumer.seek("t", 0, "latest") == 3
            await consumer.commit()
        assert await values(served) == []
        ends = {
            isolation: (await admin.list_offsets({("t", 0): "latest"}, isolation=isolation))["t", 0].offset
            for isolation in ("read_committed", "read_uncommitted")
        }
        assert ends == {"read_committed": 2, "read_uncommitted": 3}
        async with Consumer(servers(served), group="g") as consumer:
            assert await consumer.assign("t") == {("t", 0): 3}, "it waits there for the end of the transaction"
            await producer.commit()
            await admin.delete_offsets("g", [("t", 0)])
    await await_values(served, b"open")


async def test_the_blocking_consumer_and_the_admin_client_name_the_isolations(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"open")

        def blocking() -> list[bytes | None]:
            with SyncConsumer(servers(served), isolation="read_uncommitted") as consumer:
                consumer.assign("t", end_offset="latest")
                return [record.value for record in consumer]

        assert await asyncio.to_thread(blocking) == [b"open"]
    with pytest.raises(InvalidRequest, match="isolation must be one of read_committed, read_uncommitted"):
        Consumer(servers(served), isolation="serializable")  # type: ignore[arg-type]  # a caller's mistake
    async with Admin(servers(served)) as admin:
        with pytest.raises(InvalidRequest, match="isolation"):
            await admin.list_offsets({("t", 0): "latest"}, isolation="dirty")  # type: ignore[arg-type]  # likewise


async def test_a_block_that_raises_aborts_and_the_producer_goes_on(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        left = []

        async def fails() -> None:
            async with producer.transaction():
                await producer.send("t", b"stored and aborted")
                left.append(producer.send("t", b"not stored yet"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fails()
        with pytest.raises(InvalidTransactionState, match="was aborted"):
            await left[0]
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_an_abort_before_anything_has_left_the_producer_is_an_abort(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        for value in (b"1", b"2"):
            producer.begin()
            left = producer.send("t", b"aborted")
            await producer.abort()
            assert isinstance(left.exception(), InvalidTransactionState)
            async with producer.transaction():
                producer.send("t", value)
    await await_values(served, b"1", b"2")


async def test_a_record_that_fails_takes_its_transaction_with_it(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"stored")
        lost = producer.send("nowhere", b"lost")
        with pytest.raises(UnknownTopic):
            await producer.commit()
        with pytest.raises(UnknownTopic):
            await lost
        with pytest.raises(UnknownTopic):
            await producer.commit()
        with pytest.raises(InvalidTransactionState, match="has failed: abort it"):
            await producer.send_offsets("g", {("t", 0): 1})
        with pytest.raises(InvalidTransactionState, match="has failed"):
            producer.send("t", b"v")
        await producer.abort()
        async with producer.transaction():
            await producer.send("t", b"next")
    await await_values(served, b"next")


async def test_a_record_that_fails_takes_its_transaction_with_it_although_its_future_is_cancelled(
    served: Served,
) -> None:
    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"stored")
        producer.send("nowhere", b"lost").cancel()
        with pytest.raises(UnknownTopic):
            await producer.commit()
        await producer.abort()


async def test_a_record_that_has_just_failed_takes_its_transaction_with_it(served: Served) -> None:
    async with producer_of(served) as producer:
        producer.begin()
        lost = producer.send("t", b"lost", partition=7)
        producer._accumulator.set_partition_count("t", 1)  # as the answer of a node does
        with pytest.raises(UnknownPartition):
            await producer.commit()
        with pytest.raises(UnknownPartition):
            await lost
        await producer.abort()


async def test_another_producer_of_the_id_fences_this_one(served: Served) -> None:
    await served.create()
    async with producer_of(served) as zombie:
        zombie.begin()
        await zombie.send("t", b"zombie")
        async with producer_of(served) as producer:
            with pytest.raises(ProducerFenced):
                await zombie.commit()
            with pytest.raises(ProducerFenced):
                await zombie.abort()
            async with producer.transaction():
                await producer.send("t", b"new")
    await await_values(served, b"new")


async def test_a_transaction_that_has_timed_out_is_aborted_and_the_producer_goes_on(served: Served) -> None:
    await served.create()
    async with producer_of(served, timeout_ms=1) as producer:
        producer.begin()
        await producer.send("t", b"slow")
        state = "Ongoing"
        async with asyncio.timeout(60):
            while state == "Ongoing":
                listed = await served.admin.ListTransactions(pb.ListTransactionsRequest())
                state = listed.transactions[0].state
        with pytest.raises(ProducerFenced):
            await producer.commit()
        await producer.abort()
    async with producer_of(served) as producer, producer.transaction():
        await producer.send("t", b"on")
    await await_values(served, b"on")


async def test_offsets_are_committed_with_the_records(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer, Admin(servers(served)) as admin:
        producer.begin()
        await producer.send_offsets("g", {("t", 0): 3})
        await producer.abort()
        assert await admin.fetch_offsets("g") == {}
        async with producer.transaction():
            await producer.send("t", b"v")
            await producer.send_offsets("g", {("t", 0): 5})
            assert await admin.fetch_offsets("g") == {}
        assert {tp: c.offset for tp, c in (await admin.fetch_offsets("g")).items()} == {("t", 0): 5}


async def test_close_aborts_what_is_open(served: Served) -> None:
    await served.create()
    async with producer_of(served) as producer:
        producer.begin()
        await producer.send("t", b"open")
    async with Producer(servers(served)) as plain:
        await plain.send("t", b"plain")
    await await_values(served, b"plain")


async def test_wrong_calls_say_what_to_do(served: Served) -> None:
    await served.create()
    async with Producer(servers(served)) as plain:
        with pytest.raises(InvalidRequest, match="give it a transactional_id"):
            plain.begin()
    async with producer_of(served) as producer:
        with pytest.raises(InvalidTransactionState, match="begin one first"):
            producer.send("t", b"v")
        for refused in (producer.commit(), producer.abort(), producer.send_offsets("g", {})):
            with pytest.raises(InvalidTransactionState, match="begin one first"):
                await refused
        producer.begin()
        with pytest.raises(InvalidTransactionState, match="commit or abort it"):
            producer.begin()
    with pytest.raises(InvalidRequest, match="needs acks='all'"):
        Producer("h:1", transactional_id="x", acks="leader")
    with pytest.raises(InvalidRequest, match="transactional_id"):
        Producer("h:1", transactional_id="")


async def test_the_blocking_producer_has_transactions_too(served: Served) -> None:
    await served.create()

    def blocking() -> None:
        with SyncProducer(servers(served), transactional_id="id", linger_ms=1) as producer:
            with producer.transaction():
                producer.send("t", b"1")
                producer.send_offsets("g", {("t", 0): 1})
            with pytest.raises(UnknownPartition), producer.transaction():
                producer.send("t", b"refused", partition=7)
            producer.begin()
            producer.send("t", b"2")
            producer.commit()
            producer.begin()
            producer.abort()
            outside = producer.send("t", b"outside")
            with pytest.raises(InvalidTransactionState):
                outside.result(30)

    await asyncio.to_thread(blocking)
    await await_values(served, b"1", b"2")
