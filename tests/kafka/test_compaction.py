"""A compacted topic, read by every client: the last record of each key, at the offsets that they always had."""

import time
from collections.abc import Callable

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from smq.clients.pb import smq_pb2 as pb
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import FACES, READ_S, Item

COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
COMPACTED_S = 90
NOW_MS = time.time_ns() // 1_000_000
KEYS = 4


def versions(count: int) -> list[Item]:
    return [Item(b"key %d" % (n % KEYS), b"version %d" % n, NOW_MS + n, (("n", b"%d" % n),)) for n in range(count)]


def offsets_of(cluster: Cluster, topic: str) -> list[int]:
    node = next(iter(cluster.nodes.values())).raw
    answers = node.subscribe(topic=topic, offset_type=pb.RESET_TO_EARLIEST, stop_at_end=True)
    return [record.offset for answer in answers for record in answer.records]


def test_every_client_reads_the_last_record_of_each_key(cluster: Cluster, new_topic: Callable[..., str]) -> None:
    topics = {codec: new_topic(config=COMPACTED) for codec in ("none", "zstd", "snappy")}
    items = versions(40)
    for codec, topic in topics.items():
        for start in range(0, 40, 10):
            FACES[0].write(cluster, topic, items[start : start + 10], codec)
    later = Item(b"another key", b"later", NOW_MS + 100)
    for topic in topics.values():
        wait_for("the topic is compacted", lambda t=topic: offsets_of(cluster, t) == [36, 37, 38, 39], COMPACTED_S)  # type: ignore[misc]  # default binds the topic
        for reader in FACES:
            assert reader.read(cluster, topic, range(36, 40)) == items[-KEYS:], reader.name
        FACES[0].write(cluster, topic, [later], "none")
        for reader in FACES:
            assert reader.read(cluster, topic, range(36, 41))[-1] == later, f"{reader.name} has passed the gap"


def test_offsets_and_times_lead_to_the_next_record_that_is_left(
    cluster: Cluster, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(config=COMPACTED)
    FACES[0].write(cluster, topic, versions(20), "none")
    wait_for("the topic is compacted", lambda: offsets_of(cluster, topic) == [16, 17, 18, 19], COMPACTED_S)
    settings = {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(settings)
    try:
        assert consumer.get_watermark_offsets(TopicPartition(topic, 0), READ_S) == (0, 20)
        (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, NOW_MS + 3)], READ_S)
        assert found.offset == 16
        for offset in (OFFSET_BEGINNING, 0, 7, 16):
            consumer.assign([TopicPartition(topic, 0, offset)])
            message = consumer.poll(READ_S)
            assert message is not None
            assert (message.error(), message.offset(), message.value()) == (None, 16, b"version 16")
    finally:
        consumer.close()


def test_a_record_without_a_key_is_refused_and_the_others_of_its_batch_fail_for_its_sake(
    cluster: Cluster, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(config=COMPACTED)
    failed: dict[bytes | str | None, str] = {}

    def note(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        failed[message.value()] = error.name() if error is not None else ""

    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "linger.ms": 500})
    producer.produce(topic, b"no key", on_delivery=note)
    producer.produce(topic, b"none either", on_delivery=note)
    producer.produce(topic, b"value", b"key", on_delivery=note)
    assert producer.flush(READ_S) == 0
    bad = {b"no key": "INVALID_RECORD", b"none either": "INVALID_RECORD"}  # librdkafka looks at two and more
    assert failed == {**bad, b"value": "_INVALID_DIFFERENT_RECORD"}


def test_records_without_a_key_stay_where_compaction_is_switched_on_later(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    FACES[0].write(cluster, topic, [Item(None, b"no key", NOW_MS), *versions(8)], "none")
    node = cluster.nodes[1].raw
    node.call(node.admin.AlterTopic, pb.AlterTopicRequest(name=topic, set=COMPACTED, request_id=b"x" * 16))
    wait_for("the topic is compacted", lambda: offsets_of(cluster, topic) == [0, 5, 6, 7, 8], COMPACTED_S)


def test_tombstones_and_what_they_delete_go(cluster: Cluster, new_topic: Callable[..., str]) -> None:
    topic = new_topic(config={**COMPACTED, "delete.retention.ms": "100"})
    FACES[0].write(cluster, topic, [Item(b"gone", b"1", NOW_MS), Item(b"gone", None, NOW_MS)], "none")
    FACES[0].write(cluster, topic, [Item(b"here", b"1", NOW_MS)], "none")
    wait_for("the tombstone has gone, too", lambda: offsets_of(cluster, topic) == [2], COMPACTED_S)


def test_transactions_are_compacted_and_aborted_records_go(
    cluster: Cluster, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(config=COMPACTED)
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": f"writer of {topic}"})
    producer.init_transactions(READ_S)

    def transact(items: list[Item], *, commit: bool) -> None:
        producer.begin_transaction()
        for item in items:
            producer.produce(topic, item.value, item.key, 0, timestamp=item.timestamp_ms, headers=list(item.headers))
        producer.flush(READ_S)
        (producer.commit_transaction if commit else producer.abort_transaction)(READ_S)

    items = versions(10)
    transact(items[:4], commit=True)  # offsets 0 to 3, and the control batch at 4
    transact(items[4:8], commit=False)  # 5 to 8: newer versions of all four keys, which no client ever gets
    transact(items[8:10], commit=True)  # 10 and 11: keys 0 and 1
    transact([Item(b"aborted key", b"v", NOW_MS)], commit=False)  # 13

    def is_compacted() -> bool:
        """A pass may have begun before the last transaction ended: committed readers do not see what is left of it."""
        return read_all(bootstrap, topic, "read_uncommitted")[0] == [2, 3, 10, 11]

    wait_for("the topic is compacted", is_compacted, COMPACTED_S)
    left = [*items[2:4], *items[8:10]]
    for reader in FACES:
        assert reader.read(cluster, topic, [2, 3, 10, 11]) == left, reader.name
    for isolation in ("read_committed", "read_uncommitted"):
        assert read_all(bootstrap, topic, isolation) == ([2, 3, 10, 11], 15), "no aborted record is in the log"
    later = Item(b"another key", b"later", NOW_MS + 100)
    transact([later], commit=True)
    for reader in FACES:
        assert reader.read(cluster, topic, [2, 3, 10, 11, 15]) == [*left, later], f"{reader.name} has passed the gaps"


def read_all(bootstrap: str, topic: str, isolation: str) -> tuple[list[int], int]:
    """The offsets of all records, and the position after them."""
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": "none",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": isolation,
    }
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    offsets: list[int] = []
    try:
        while (message := consumer.poll(READ_S)) is not None:
            error = message.error()
            if error is not None:
                assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                break
            offsets.append(message.offset() or 0)
        assert message is not None, "the end was never reached"
        return offsets, message.offset() or 0
    finally:
        consumer.close()
