"""Every client that can write and read the log, behind two functions each: what one writes, all must read alike."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiokafka
import confluent_kafka
import kafka

from smq.records import NewRecord, decode_batch, encode_batch, parse_header
from smq.testing.cluster import Cluster

READ_S = 20.0
Header = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Item:
    """One record as it was meant."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Face:
    """`write(cluster, topic, items, codec)` and `read(cluster, topic, offsets)`, both of partition 0. The
    offsets are those that the records must have."""

    name: str
    write: Callable[[Cluster, str, Sequence[Item], str], None]
    read: Callable[[Cluster, str, Sequence[int]], list[Item]]


def bootstrap(cluster: Cluster) -> str:
    return ",".join(node.kafka for node in cluster.alive())


# ------------------------------------------------------------------------------------------- confluent-kafka
def confluent_write(servers: str, topic: str, items: Sequence[Item], codec: str) -> None:
    errors: list[Any] = []
    settings = {"bootstrap.servers": servers, "compression.type": codec, "enable.idempotence": True}
    producer = confluent_kafka.Producer(settings)
    for item in items:
        producer.produce(
            topic,
            item.value,
            item.key,
            partition=0,
            timestamp=item.timestamp_ms,
            headers=list(item.headers),
            on_delivery=lambda error, _: errors.append(error) if error else None,
        )
    assert producer.flush(READ_S) == 0
    assert not errors


def headers_of(message: Any) -> tuple[Header, ...]:
    return tuple((name, bytes(value)) for name, value in message.headers() or ())


def confluent_read(servers: str, topic: str, offsets: Sequence[int]) -> list[Item]:
    settings = {"bootstrap.servers": servers, "group.id": "reader", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, confluent_kafka.OFFSET_BEGINNING)])
    found: list[Item] = []
    deadline = time.monotonic() + READ_S
    while len(found) < len(offsets) and time.monotonic() < deadline:
        for message in consumer.consume(len(offsets), 0.5):
            assert message.error() is None, message.error()
            assert message.offset() == offsets[len(found)]
            headers = headers_of(message)
            found.append(Item(message.key(), message.value(), message.timestamp()[1], headers))
    consumer.close()
    return found


# ---------------------------------------------------------------------------------------------- kafka-python
def python_write(servers: str, topic: str, items: Sequence[Item], codec: str) -> None:
    producer = kafka.KafkaProducer(
        bootstrap_servers=servers, compression_type=None if codec == "none" else codec, acks="all"
    )
    sent = [
        producer.send(
            topic,
            key=item.key,
            value=item.value,
            partition=0,
            timestamp_ms=item.timestamp_ms,
            headers=list(item.headers),
        )
        for item in items
    ]
    for future in sent:
        future.get(READ_S)
    producer.close()


def python_read(servers: str, topic: str, offsets: Sequence[int]) -> list[Item]:
    consumer = kafka.KafkaConsumer(bootstrap_servers=servers, enable_auto_commit=False)
    place = kafka.TopicPartition(topic, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    found: list[Item] = []
    deadline = time.monotonic() + READ_S
    while len(found) < len(offsets) and time.monotonic() < deadline:
        for records in consumer.poll(500).values():
            for r in records:
                assert r.offset == offsets[len(found)]
                headers = tuple((name, bytes(value)) for name, value in r.headers)
                found.append(Item(r.key, r.value, r.timestamp, headers))
    consumer.close()
    return found


# -------------------------------------------------------------------------------------------------- aiokafka
def aiokafka_write(servers: str, topic: str, items: Sequence[Item], codec: str) -> None:
    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=servers, compression_type=None if codec == "none" else codec, enable_idempotence=True
        )
        await producer.start()
        sent = [
            await producer.send(
                topic,
                key=item.key,
                value=item.value,
                partition=0,
                timestamp_ms=item.timestamp_ms,
                headers=list(item.headers),
            )
            for item in items
        ]
        await asyncio.gather(*sent)
        await producer.stop()

    asyncio.run(run())


def aiokafka_read(servers: str, topic: str, offsets: Sequence[int]) -> list[Item]:
    async def run() -> list[Item]:
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=servers)
        await consumer.start()
        place = aiokafka.TopicPartition(topic, 0)
        consumer.assign([place])
        await consumer.seek_to_beginning(place)
        found: list[Item] = []
        deadline = time.monotonic() + READ_S
        while len(found) < len(offsets) and time.monotonic() < deadline:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for r in records:
                    assert r.offset == offsets[len(found)]
                    headers = tuple((name, bytes(value)) for name, value in r.headers)
                    found.append(Item(r.key, r.value, r.timestamp, headers))
        await consumer.stop()
        return found

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------------ gRPC
def _grpc_write(cluster: Cluster, topic: str, items: Sequence[Item], codec: str) -> None:
    records = [NewRecord(key=i.key, value=i.value, timestamp_ms=i.timestamp_ms, headers=i.headers) for i in items]
    cluster.publish_batch(topic, 0, encode_batch(records, codec=codec))


def _grpc_read(cluster: Cluster, topic: str, offsets: Sequence[int]) -> list[Item]:
    leader = cluster.nodes[cluster.wait_leader(topic, 0)]
    found: list[Item] = []
    at = 0
    while len(found) < len(offsets):
        fetched = leader.raw.fetch(topic, 0, at, max_wait_ms=5_000)
        if not fetched.batches:
            break
        for stored in fetched.batches:
            at = stored.last_offset + 1
            has_records = stored.data and parse_header(stored.data).count  # what is not for this reader has no data
            for r in decode_batch(stored.data) if has_records else ():
                assert r.offset == offsets[len(found)]
                headers = tuple((name, value or b"") for name, value in r.headers)
                found.append(Item(r.key, r.value, r.timestamp_ms, headers))
    return found


def _kafka_face(
    name: str,
    write: Callable[[str, str, Sequence[Item], str], None],
    read: Callable[[str, str, Sequence[int]], list[Item]],
) -> Face:
    return Face(
        name,
        lambda cluster, topic, items, codec: write(bootstrap(cluster), topic, items, codec),
        lambda cluster, topic, offsets: read(bootstrap(cluster), topic, offsets),
    )


FACES = [
    _kafka_face("confluent", confluent_write, confluent_read),
    _kafka_face("kafka-python", python_write, python_read),
    _kafka_face("aiokafka", aiokafka_write, aiokafka_read),
    Face("grpc", _grpc_write, _grpc_read),
]
