"""What topics ask of their producers' batches, as Kafka clients meet it: codec, timestamps, limits of time."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    Message,
    TopicPartition,
)
from confluent_kafka import Producer as KafkaProducer

from smq.clients import SyncConsumer
from smq.records import CODECS, parse_header
from smq.testing.cluster import Cluster
from tests.kafka.client_adapters import READ_S

NewTopic = Callable[..., str]
COUNT = 300


def produce(bootstrap: str, topic: str, **options: Any) -> list[Message | KafkaError]:
    """Some records; what became of each."""
    answers: list[Message | KafkaError] = []
    timestamp = options.pop("timestamp", 0)
    producer = KafkaProducer({"bootstrap.servers": bootstrap, "enable.idempotence": True} | options)
    for number in range(COUNT):
        producer.produce(
            topic,
            b"value %d " % number * 20,
            key=b"%d" % number,
            partition=0,
            timestamp=timestamp,
            on_delivery=lambda error, message: answers.append(error if error is not None else message),
        )
    producer.flush(READ_S)
    assert len(answers) == COUNT
    return answers


def consume(bootstrap: str, topic: str) -> list[Message]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Message] = []
    try:
        until = time.monotonic() + READ_S
        while len(found) < COUNT and time.monotonic() < until:
            found += consumer.consume(COUNT - len(found), timeout=1)
        return found
    finally:
        consumer.close()


@pytest.mark.parametrize("target", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_stored_in_the_codec_of_the_topic(
    cluster: Cluster, new_topic: NewTopic, bootstrap: str, target: str
) -> None:
    topic = new_topic(config={"compression.type": target})
    produce(bootstrap, topic, **{"compression.type": "gzip" if target == "zstd" else "zstd"})
    with SyncConsumer(cluster.nodes[1].grpc) as consumer:
        batches = consumer.fetch_range(topic, 0, 0).batches
        assert batches
        assert {parse_header(b.data).codec for b in batches} == {CODECS["none" if target == "uncompressed" else target]}
    read = consume(bootstrap, topic)
    assert [(m.offset(), m.key(), m.value()) for m in read] == [
        (i, b"%d" % i, b"value %d " % i * 20) for i in range(COUNT)
    ]


def test_records_have_the_time_of_their_append_if_the_topic_says_so(new_topic: NewTopic, bootstrap: str) -> None:
    topic, before_ms = new_topic(config={"message.timestamp.type": "LogAppendTime"}), time.time_ns() // 1_000_000
    answers = produce(bootstrap, topic, timestamp=1_000)
    after_ms = time.time_ns() // 1_000_000
    for messages in (answers, consume(bootstrap, topic)):
        kinds, times = zip(*(m.timestamp() for m in messages if isinstance(m, Message)), strict=True)
        assert set(kinds) == {TIMESTAMP_LOG_APPEND_TIME}
        assert before_ms <= min(times) <= max(times) <= after_ms
    plain = new_topic()
    produce(bootstrap, plain, timestamp=1_000)
    assert {m.timestamp() for m in consume(bootstrap, plain)} == {(TIMESTAMP_CREATE_TIME, 1_000)}


@pytest.mark.parametrize(
    ("key", "shift_ms"),
    [("message.timestamp.before.max.ms", -7_200_000), ("message.timestamp.after.max.ms", 7_200_000)],
)
def test_records_beyond_a_limit_of_time_are_refused(
    new_topic: NewTopic, bootstrap: str, key: str, shift_ms: int
) -> None:
    topic, now_ms = new_topic(config={key: "3600000"}), time.time_ns() // 1_000_000
    refused = produce(bootstrap, topic, timestamp=now_ms + shift_ms)
    # librdkafka has one code for each record that the answer names, whatever the batch's own code.
    assert {e.code() for e in refused if isinstance(e, KafkaError)} == {KafkaError.INVALID_RECORD}
    assert all(isinstance(e, KafkaError) for e in refused)
    assert all(isinstance(m, Message) for m in produce(bootstrap, topic, timestamp=now_ms))
    assert len(consume(bootstrap, topic)) == COUNT


def test_a_batch_that_does_not_fit_in_the_codec_of_the_topic_is_refused(new_topic: NewTopic, bootstrap: str) -> None:
    topic = new_topic(config={"compression.type": "uncompressed", "max.message.bytes": "3000"})
    answers = produce(bootstrap, topic, **{"compression.type": "zstd"})
    assert {e.code() for e in answers if isinstance(e, KafkaError)} == {KafkaError.MSG_SIZE_TOO_LARGE}


def test_the_leaders_own_clock_is_the_measure(new_topic: NewTopic, bootstrap: str) -> None:
    """A topic with LogAppendTime has no limits of time."""
    topic = new_topic(config={"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": "0"})
    assert all(isinstance(m, Message) for m in produce(bootstrap, topic, timestamp=1_000))
