"""A closed client says so: it never answers as if there were nothing."""

import faulthandler
import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

from smq.clients import (
    Admin,
    ClientClosed,
    Consumer,
    Forked,
    OffsetAssigner,
    Producer,
    SmqError,
    SyncAdmin,
    SyncConsumer,
    SyncProducer,
    Unreachable,
)
from smq.raft_state.errors import ErrorCode
from smq.records import NewRecord
from smq.testing.fake.runner import cluster_in_thread, cluster_of


async def test_every_call_of_a_closed_asyncio_client_raises() -> None:
    async with cluster_of(1, t=1) as cluster:
        async with Producer(cluster.servers) as producer, Consumer(cluster.servers, group="g") as consumer:
            await producer.send("t", b"v")
            await consumer.assign("t")
        async with Admin(cluster.servers) as admin, OffsetAssigner(cluster.servers) as assigner:
            pass
        calls: list[Callable[[], Any]] = [
            lambda: consumer.getmany(timeout_ms=10),
            lambda: consumer.getbatch(10),
            lambda: anext(consumer),
            lambda: consumer.seek("t", 0, 0),
            lambda: consumer.assign("t"),
            lambda: consumer.commit(),
            lambda: consumer.committed(),
            lambda: consumer.fetch_range("t", 0, 0),
            lambda: consumer.start(),
            lambda: producer.send_many("t", [b"v"]),
            lambda: producer.flush(),
            lambda: admin.list_topics(),
            lambda: admin.node_status(cluster.nodes[1].address),
            lambda: admin.create_topic("u"),
            lambda: admin.start(),
            lambda: assigner.assign("t", 0),
        ]
        for call in calls:
            with pytest.raises(ClientClosed):
                await call()
        with pytest.raises(ClientClosed):
            producer.send("t", b"v")
        await consumer.close()  # a second close is no mistake
        await producer.close()


def test_every_call_of_a_closed_blocking_client_raises() -> None:
    with cluster_in_thread(1, t=1) as cluster:
        with SyncConsumer(cluster.servers) as consumer, SyncProducer(cluster.servers) as producer:
            producer.send_many("t", [b"0", b"1"])
            consumer.assign("t")
            records = iter(consumer)
            assert next(records).offset == 0
        with SyncAdmin(cluster.servers) as admin:
            pass
        calls: list[Callable[[], Any]] = [
            lambda: next(records),  # although it had read the second one ahead
            lambda: next(iter(consumer)),
            lambda: consumer.getmany(),
            lambda: consumer.position("t", 0),
            lambda: consumer.assignment(),
            lambda: producer.send("t", b"v"),
            lambda: producer.send_many("t", [b"v"]),
            lambda: producer.flush(),
            lambda: admin.list_topics(),
        ]
        for call in calls:
            with pytest.raises(ClientClosed):
                call()


# ------------------------------------------------------------------------------------------------------- forks
def _outcome(call: Callable[[], object]) -> str:
    try:
        return f"succeeded: {call()}"
    except SmqError as e:
        return e.code.name


def _in_fork(calls: list[Callable[[], object]]) -> list[str]:
    """The outcomes of the calls in a forked child, which has half a minute for all."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def child() -> None:
        gc.disable()  # it might end gRPC's objects of earlier tests, for locks that threads of the parent held
        faulthandler.dump_traceback_later(25, exit=True)  # says where it hangs
        for call in calls:
            writing.send(_outcome(call))
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    found: list[str] = []
    try:
        for _ in calls:
            assert reading.poll(30), f"the child hangs; so far {found}"
            found.append(reading.recv())
    finally:
        process.kill()
        process.join()
    return found


def _lists_topics(address: str) -> Callable[[], object]:
    def work() -> object:
        with SyncAdmin(address, connect_timeout_ms=5_000) as admin:
            return [t.name for t in admin.list_topics()]

    return work


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_in_a_forked_child_everything_of_the_parents_raises_at_once() -> None:
    """gRPC's thread is not in the child: these calls used to wait for ever."""
    with cluster_in_thread(1, t=1) as cluster:
        address = cluster.servers
        with SyncProducer(address) as producer, SyncConsumer(address) as consumer, SyncAdmin(address) as admin:
            cluster.topics["t"][0].is_held = True
            waiting = producer.send("t", b"v")
            consumer.assign("t")
            calls = [
                lambda: waiting.result(1),
                lambda: producer.send("t", b"v").result(1),
                lambda: producer.flush(),
                lambda: consumer.getmany(),
                lambda: next(iter(consumer)),
                lambda: admin.list_topics(),
                _lists_topics(address),
            ]
            assert _in_fork(calls) == [ErrorCode.FORKED.name] * len(calls)
            cluster.topics["t"][0].is_held = False
            cluster.append("t", 0, [NewRecord(b"k", b"lets the held one go", 1)])
            assert waiting.result(20).offset in {0, 1}, "either of the two may have come first"
            assert admin.list_topics(), "the parent's clients go on"


def _names_of_topics(address: str) -> object:
    return _lists_topics(address)()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_pool_of_forked_children_gets_the_error_too() -> None:
    """The error must survive pickling: a pool waits for ever for what it cannot read."""
    with cluster_in_thread(1, t=1) as cluster, SyncAdmin(cluster.servers) as admin:
        assert admin.list_topics()
        with multiprocessing.get_context("fork").Pool(1, initializer=gc.disable) as pool:
            asked = pool.apply_async(_names_of_topics, (cluster.servers,))
            with pytest.raises(Forked, match="by multiprocessing's spawn method"):
                asked.get(30)


async def test_a_client_that_reaches_nobody_fails_within_its_timeout_and_says_that_nothing_was_sent() -> None:
    for client in (Admin("127.0.0.1:1", connect_timeout_ms=200), Producer("127.0.0.1:1", connect_timeout_ms=200)):
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1") as caught:
            await client.start()
        assert caught.value.code.is_definite
        assert "nothing was sent" in str(caught.value)
        await client.close()
