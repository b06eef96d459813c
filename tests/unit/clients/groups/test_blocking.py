"""The blocking consumer as a member: its callbacks run in the thread that polls, and may use it."""

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from smq.clients import SmqError, SyncConsumer, SyncProducer
from smq.clients.types import TopicPartition
from smq.raft_state.errors import ErrorCode
from smq.testing.broker import Broker, running_broker
from tests.pages import claimed

PATIENCE_S = 30


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running_broker(tmp_path_factory.mktemp("broker")) as made:
        yield made


@pytest.fixture
def topic(broker: Broker) -> str:
    """A topic of two partitions with ten records each."""
    name = broker.create_topic(partitions=2)
    with SyncProducer(broker.grpc) as producer:
        for partition in range(2):
            producer.send_many(name, [b"%d" % n for n in range(10)], partition=partition)
    return name


def consumer_of(broker: Broker, topic: str, **options: Any) -> SyncConsumer:
    settings = {"group": f"g-{topic}", "heartbeat_interval_ms": 50, "session_timeout_ms": 3_000, "max_wait_ms": 50}
    return SyncConsumer(broker.grpc, **{**settings, **options})


def test_callbacks_run_in_the_thread_that_polls_and_may_use_the_consumer(broker: Broker, topic: str) -> None:
    threads: list[threading.Thread] = []
    committed: list[dict[TopicPartition, int]] = []

    def on_assigned(partitions: list[TopicPartition]) -> None:
        threads.append(threading.current_thread())
        for tp in partitions:
            consumer.seek(*tp, 7)

    def on_revoked(partitions: list[TopicPartition]) -> None:
        threads.append(threading.current_thread())
        consumer.commit()
        committed.append({tp: at.offset for tp, at in consumer.committed(partitions).items()})

    with consumer_of(broker, topic) as consumer:
        consumer.subscribe(topic, on_assigned=on_assigned, on_revoked=on_revoked)
        assert consumer.subscription() == [topic]
        seen = [(r.partition, r.offset) for r in islice(consumer, 6)]
        assert sorted(seen) == [(p, o) for p in range(2) for o in range(7, 10)]
    assert committed == [{(topic, 0): 10, (topic, 1): 10}]
    assert set(threads) == {threading.current_thread()}


def test_position_of_a_loop_is_committed_and_not_what_was_read_ahead(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic, auto_commit_interval_ms=3_600_000) as consumer:
        consumer.subscribe(topic)
        first = next(iter(consumer))
    with consumer_of(broker, topic) as consumer:
        at = consumer.committed([(topic, 0), (topic, 1)])
        assert at[topic, first.partition].offset == 1
        consumer.subscribe(topic)
        rest = [(r.partition, r.offset) for r in islice(consumer, 19)]
    assert sorted([(first.partition, 0), *rest]) == [(p, o) for p in range(2) for o in range(10)]


def test_loop_over_records_read_ahead_takes_part_in_a_rebalance(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as slow:
        revoked: list[list[TopicPartition]] = []
        slow.subscribe(topic, on_revoked=revoked.append)
        records = iter(slow)
        next(records)
        with consumer_of(broker, topic) as other:
            other.subscribe(topic)
            joined = threading.Thread(target=lambda: next(iter(other)), daemon=True)
            joined.start()
            for _ in range(20):  # fewer than were read ahead and are left, if the loop did not notice
                if revoked:
                    break
                next(records)
                joined.join(0.1)
            assert revoked == [[(topic, 0), (topic, 1)]]
            joined.join(PATIENCE_S)
            assert len(slow.assignment()) == len(other.assignment()) == 1


def test_error_in_a_callback_is_raised_by_the_poll_and_the_consumer_goes_on(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as consumer:

        def fail(_partitions: list[TopicPartition]) -> None:
            raise ZeroDivisionError

        consumer.subscribe(topic, on_assigned=fail)
        with pytest.raises(ZeroDivisionError):
            next(iter(consumer))
        assert next(iter(consumer)).offset == 0


def test_poll_in_a_callback_is_refused(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as consumer:
        consumer.subscribe(topic, on_assigned=lambda _: consumer.getmany())
        with pytest.raises(SmqError) as caught:
            next(iter(consumer))
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        assert next(iter(consumer)).offset == 0


def test_close_in_another_thread_ends_a_loop_that_waits(broker: Broker) -> None:
    empty = broker.create_topic()
    consumer = consumer_of(broker, empty)
    consumer.subscribe(empty)
    closing = threading.Timer(0.5, consumer.close)
    closing.start()
    with pytest.raises(SmqError) as caught:
        next(iter(consumer))
    assert caught.value.code is ErrorCode.CLIENT_CLOSED
    closing.join()


def test_the_block_of_the_clients_page_reads_and_commits(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = claimed("docs/clients.md", __file__)
    broker.create_topic("events")
    with SyncProducer(broker.grpc) as producer:
        producer.send_many("events", [b"one", b"two"])
    exec(compile(block.replace("127.0.0.1:7401", broker.grpc), "docs/clients.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    partitions = str([("events", 0)])
    assert printed == [f"assigned {partitions}", "0 0 b'one'", "0 1 b'two'", f"revoked {partitions}"]
    with SyncConsumer(broker.grpc, group="workers") as consumer:
        assert consumer.committed([("events", 0)])["events", 0].offset == 2


def test_next_member_waits_for_the_transaction_that_has_staged_its_start(broker: Broker, topic: str) -> None:
    with SyncProducer(broker.grpc, transactional_id=f"s-{topic}") as producer:
        with consumer_of(broker, topic) as former:
            former.subscribe(topic)
            next(iter(former))
            producer.begin()
            producer.send_offsets(former.membership(), {(topic, 0): 10, (topic, 1): 6})
        with consumer_of(broker, topic, stall_timeout_ms=1_000) as following:
            following.subscribe(topic)
            assert following.getmany(timeout_ms=3_000) == {}, "it waits for longer than a stall, without an error"
            producer.commit()
            assert [(r.partition, r.offset) for r in islice(following, 4)] == [(1, o) for o in range(6, 10)]


def test_offsets_of_a_member_are_staged_in_its_generation_only(broker: Broker, topic: str) -> None:
    with consumer_of(broker, topic) as consumer, SyncProducer(broker.grpc, transactional_id=f"t-{topic}") as producer:
        consumer.subscribe(topic)
        next(iter(consumer))
        with producer.transaction():
            producer.send_offsets(consumer.membership(), {(topic, 0): 4})
        assert consumer.committed([(topic, 0)])[topic, 0].offset == 4
        late = consumer.membership()
        consumer.unsubscribe()
        producer.begin()
        with pytest.raises(SmqError) as caught:
            producer.send_offsets(late, {(topic, 0): 9})
        assert caught.value.code is ErrorCode.UNKNOWN_MEMBER
        producer.abort()
