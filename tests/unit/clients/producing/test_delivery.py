"""The blocking producer's send(): what it costs, and the Delivery that it returns."""

import queue
import threading
from collections.abc import Iterator

import pytest

from smq.clients import Delivery, SmqError, SyncProducer, UnknownTopic
from smq.records import NewRecord
from smq.testing.fake.cluster import FakeCluster
from smq.testing.fake.runner import cluster_in_thread

RECORDS = 2_000
PATIENCE_S = 60.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with cluster_in_thread(1, t=1) as found:
        yield found


def _hold(cluster: FakeCluster, is_held: bool) -> None:
    async def work() -> None:
        log = cluster.topics["t"][0]
        log.is_held = is_held
        log.settle()

    cluster.call(work())


def test_many_sends_wake_the_loop_once_and_make_no_future_each(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up and a future per record made 100,000 sends take ten seconds."""
    with SyncProducer(cluster.servers) as producer:
        producer.send("t", b"first").result(PATIENCE_S)
        loop = producer._runner.loop
        wake, make, counts = loop.call_soon_threadsafe, loop.create_future, {"wake-ups": 0, "futures": 0}

        def counted_wake(*arguments: object, **named: object) -> object:
            counts["wake-ups"] += 1
            return wake(*arguments, **named)  # type: ignore[arg-type] # as they came

        def counted_make() -> object:
            counts["futures"] += 1
            return make()

        is_released = threading.Event()
        wake(is_released.wait)  # the loop is busy, so nothing is taken meanwhile
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted_wake)
        monkeypatch.setattr(loop, "create_future", counted_make)
        sent = [producer.send("t", b"%d" % n) for n in range(RECORDS)]
        assert counts == {"wake-ups": 1, "futures": 0}
        is_released.set()
        producer.flush()
        assert counts["futures"] < RECORDS / 10
        monkeypatch.undo()
        assert [d.result(PATIENCE_S).offset for d in sent] == list(range(1, RECORDS + 1))


def test_a_delivery_waits_as_long_as_it_is_asked_to_and_calls_back_once(cluster: FakeCluster) -> None:
    _hold(cluster, True)
    with SyncProducer(cluster.servers) as producer:
        delivery, seen = producer.send("t", b"v"), queue.SimpleQueue[Delivery]()
        delivery.add_done_callback(seen.put)
        with pytest.raises(TimeoutError, match="it may still be"):
            delivery.result(0.05)
        assert not delivery.done()
        _hold(cluster, False)
        assert delivery.result(PATIENCE_S).offset == 0
        assert seen.get(timeout=PATIENCE_S) is delivery
        assert (delivery.done(), delivery.exception(), seen.qsize()) == (True, None, 0)
        delivery.add_done_callback(seen.put)
        assert seen.get_nowait() is delivery, "one that is settled calls back immediately"


def test_a_delivery_that_failed_raises_each_time_and_returns_its_error(cluster: FakeCluster) -> None:
    with SyncProducer(cluster.servers, delivery_timeout_ms=2_000) as producer:
        cluster.append("t", 0, [NewRecord(None, b"other", 1)])
        failed = producer.send("nope", b"v")
        for _ in range(2):
            with pytest.raises(SmqError):
                failed.result(PATIENCE_S)
        assert isinstance(failed.exception(), UnknownTopic)
        assert producer.send("t", b"v").result(PATIENCE_S).offset == 1, "and it costs no other record anything"
        assert producer.stats.records_failed == 1
