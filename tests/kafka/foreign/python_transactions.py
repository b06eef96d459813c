"""Transactions of the Python clients, for `python_driver`: `transact`, `committed` and `copy` as driver.py has them.

Owns no judgement: what is right is for the tests to say.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiokafka
import confluent_kafka
import kafka
from aiokafka.errors import KafkaError as AioKafkaError
from kafka.consumer.group import ConsumerGroupMetadata
from kafka.errors import KafkaError

from tests.kafka.foreign.driver import COPY_S

STEP_S = 30.0
POLL_S = 0.5
COPIED_AT_ONCE = 10
ABORTED_EACH = 5
Values = list[bytes | None]


# ------------------------------------------------------------------------------------------- confluent-kafka
def _confluent_producer(servers: str, name: str) -> confluent_kafka.Producer:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "transactional.id": name})
    producer.init_transactions(STEP_S)
    return producer


def _confluent_consumer(servers: str, group: str, **settings: Any) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            **settings,
        }
    )


def confluent_transact(servers: str, topic: str) -> str:
    producer, consumer = _confluent_producer(servers, f"tx-{topic}"), _confluent_consumer(servers, f"group-{topic}")
    for n in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % n, partition=0)
        place = confluent_kafka.TopicPartition(topic, 0, n)
        producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), STEP_S)
        assert producer.flush(STEP_S) == 0
        (producer.abort_transaction if n == 1 else producer.commit_transaction)(STEP_S)
    producer.begin_transaction()
    producer.produce(topic, b"zombie", partition=0)
    assert producer.flush(STEP_S) == 0
    _confluent_producer(servers, f"tx-{topic}")
    try:
        producer.commit_transaction(STEP_S)
    except confluent_kafka.KafkaException as e:
        return str(e.args[0].name())
    finally:
        consumer.close()
    return "none"


def confluent_committed(servers: str, topic: str, count: int) -> Values:
    consumer = _confluent_consumer(servers, "reader")
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)])
    found = [message.value() for message in consumer.consume(count, STEP_S)]
    consumer.close()
    return found


def confluent_copy(servers: str, request: dict[str, Any]) -> dict[str, int]:
    counts: Counter[str] = Counter(aborted=0, failed=0)
    until = time.monotonic() + COPY_S
    while time.monotonic() < until:
        consumer = _confluent_consumer(servers, request["group"], **{"session.timeout.ms": 6_000})
        try:
            producer = _confluent_producer(servers, f"copy-{request['target']}")
            consumer.subscribe([request["topic"]])
            while not _confluent_copy_some(producer, consumer, request, counts):
                pass
            return {name: counts[name] for name in ("aborted", "failed")}
        except confluent_kafka.KafkaException as e:
            sys.stderr.write(f"begins again: {e}\n")
            counts["failed"] += 1
        finally:
            consumer.close()
    raise TimeoutError(f"not within {COPY_S} s")


def _confluent_copy_some(
    producer: confluent_kafka.Producer,
    consumer: confluent_kafka.Consumer,
    request: dict[str, Any],
    counts: Counter[str],
) -> bool:
    """One transaction at most; True if there is nothing more to copy."""
    messages = [m for m in consumer.consume(COPIED_AT_ONCE, POLL_S) if m.error() is None]
    places = consumer.assignment()
    if not messages:
        if len(places) < request["partitions"]:
            return False
        return all(place.offset >= request["count"] for place in consumer.committed(places, STEP_S))
    producer.begin_transaction()
    for message in messages:
        producer.produce(request["target"], b"copy of %s" % message.value(), partition=message.partition() or 0)
    ends = {message.partition() or 0: (message.offset() or 0) + 1 for message in messages}
    offsets = [confluent_kafka.TopicPartition(request["topic"], place, end) for place, end in ends.items()]
    producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), STEP_S)
    counts["begun"] += 1
    if counts["begun"] % ABORTED_EACH:
        producer.commit_transaction(STEP_S)
        return False
    producer.abort_transaction(STEP_S)
    counts["aborted"] += 1
    for place in consumer.committed(places, STEP_S):
        place.offset = max(place.offset, 0)
        consumer.seek(place)
    return False


# ---------------------------------------------------------------------------------------------- kafka-python
def _python_producer(servers: str, name: str) -> Any:
    producer = kafka.KafkaProducer(bootstrap_servers=servers, transactional_id=name)
    producer.init_transactions()
    return producer


def python_transact(servers: str, topic: str) -> str:
    producer, place = _python_producer(servers, f"tx-{topic}"), kafka.TopicPartition(topic, 0)
    for n in range(3):
        producer.begin_transaction()
        producer.send(topic, b"%d" % n, partition=0).get(STEP_S)
        offsets = {place: kafka.OffsetAndMetadata(n, "", -1)}
        producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata(f"group-{topic}", -1, "", None))
        (producer.abort_transaction if n == 1 else producer.commit_transaction)()
    producer.begin_transaction()
    producer.send(topic, b"zombie", partition=0).get(STEP_S)
    successor = _python_producer(servers, f"tx-{topic}")
    try:
        producer.commit_transaction()
    except KafkaError as e:
        return type(e).__name__
    finally:
        successor.close(timeout=1)
        producer.close(timeout=1)
    return "none"


def python_committed(servers: str, topic: str, count: int) -> Values:
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=servers, enable_auto_commit=False, isolation_level="read_committed"
    )
    place = kafka.TopicPartition(topic, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    found: Values = []
    until = time.monotonic() + STEP_S
    while len(found) < count and time.monotonic() < until:
        for records in consumer.poll(500, max_records=count - len(found)).values():
            found += [record.value for record in records]
    consumer.close()
    return found


# -------------------------------------------------------------------------------------------------- aiokafka
async def _aiokafka_transact(servers: str, topic: str) -> str:
    name, place = f"tx-{topic}", aiokafka.TopicPartition(topic, 0)
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, transactional_id=name)
    successor = aiokafka.AIOKafkaProducer(bootstrap_servers=servers, transactional_id=name)
    await producer.start()
    try:
        for n in range(3):
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"%d" % n, partition=0)
            await producer.send_offsets_to_transaction({place: n}, f"group-{topic}")
            await (producer.abort_transaction() if n == 1 else producer.commit_transaction())
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"zombie", partition=0)
        await successor.start()
        try:
            await producer.commit_transaction()
        except AioKafkaError as e:
            return type(e).__name__
        return "none"
    finally:
        await successor.stop()
        await producer.stop()


async def _aiokafka_committed(servers: str, topic: str, count: int) -> Values:
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=servers, isolation_level="read_committed")
    await consumer.start()
    try:
        place = aiokafka.TopicPartition(topic, 0)
        consumer.assign([place])
        await consumer.seek_to_beginning(place)
        async with asyncio.timeout(STEP_S):
            return [(await consumer.getone()).value for _ in range(count)]
    finally:
        await consumer.stop()


# servers, topic -> the failure; servers, topic, count -> values
TRANSACT: dict[str, Callable[[str, str], str]] = {
    "confluent-kafka": confluent_transact,
    "kafka-python": python_transact,
    "aiokafka": lambda servers, topic: asyncio.run(_aiokafka_transact(servers, topic)),
}
COMMITTED: dict[str, Callable[[str, str, int], Sequence[bytes | None]]] = {
    "confluent-kafka": confluent_committed,
    "kafka-python": python_committed,
    "aiokafka": lambda servers, topic, count: asyncio.run(_aiokafka_committed(servers, topic, count)),
}
