"""Real clients against a real cluster: all clients write and read one log."""

import time
from collections.abc import Callable

import confluent_kafka
import kafka
import kafka.admin
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from smq.records import CODECS
from smq.testing.cluster import Cluster
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import FACES, READ_S, Face, Item

NOW_MS = time.time_ns() // 1_000_000
ITEMS = [
    Item(b"k", b"plain", NOW_MS - 50_000, (("h", b"1"), ("h", b"2"), ("empty", b""))),
    Item(None, b"no key", NOW_MS - 40_000),
    Item(b"tombstone", None, NOW_MS - 30_000),
    Item(b"", b"", NOW_MS - 30_000, (("ü", b"\x00\xff"),)),
    *(Item(b"%d" % i, b"many" * 50, NOW_MS - 20_000 + i) for i in range(30)),
]


@pytest.mark.parametrize("writer", FACES, ids=lambda face: face.name)
def test_what_one_client_writes_in_every_codec_all_others_read(
    cluster: Cluster, new_topic: Callable[..., str], writer: Face
) -> None:
    topic = new_topic()
    for codec in CODECS:
        writer.write(cluster, topic, ITEMS, codec)
    for reader in FACES:
        assert reader.read(cluster, topic, range(len(ITEMS) * len(CODECS))) == ITEMS * len(CODECS), reader.name


def test_topics_are_created_grown_and_deleted_by_the_admin_client(cluster: Cluster, bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic("made", 2, 3, config={"max.message.bytes": "5000"})]).values():
        future.result(READ_S)
    for future in admin.create_topics([NewTopic("made", 2, 3)]).values():
        with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_ALREADY_EXISTS"):
            future.result(READ_S)
    for future in admin.create_partitions([NewPartitions("made", 4)]).values():
        future.result(READ_S)
    found = cluster.nodes[1].raw.describe("made", linearizable=True).topics[0]
    assert [len(p.replicas) for p in found.partitions] == [3, 3, 3, 3]
    assert found.config == {"max.message.bytes": "5000"}
    # Any node answers, with what it has applied by then.
    wait_for("all know of the growth", lambda: len(admin.list_topics(timeout=READ_S).topics["made"].partitions) == 4)
    for future in admin.delete_topics(["made"]).values():
        future.result(READ_S)
    wait_for("all know of the end", lambda: "made" not in admin.list_topics(timeout=READ_S).topics)


def test_a_topic_comes_into_being_when_it_is_first_written(cluster: Cluster, bootstrap: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    producer.produce("on-first-use", b"v")
    assert producer.flush(READ_S) == 0
    leader = cluster.nodes[cluster.wait_leader("on-first-use", 0)].raw
    assert leader.read_all("on-first-use", 0) == {0: b"v"}


def test_seeking_by_time_finds_the_record(cluster: Cluster, new_topic: Callable[..., str], bootstrap: str) -> None:
    topic = new_topic()
    FACES[0].write(cluster, topic, ITEMS, "zstd")
    place = kafka.TopicPartition(topic, 0)
    consumer = kafka.KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    for offset in (0, 1, 2, 7, len(ITEMS) - 1):
        found = consumer.offsets_for_times({place: ITEMS[offset].timestamp_ms})[place]
        assert (found.offset, found.timestamp) == (offset, ITEMS[offset].timestamp_ms)
    assert consumer.offsets_for_times({place: NOW_MS + 60_000}) == {place: None}
    assert consumer.beginning_offsets([place]) == {place: 0}
    assert consumer.end_offsets([place]) == {place: len(ITEMS)}
    consumer.close()


def test_records_are_deleted_up_to_an_offset(cluster: Cluster, new_topic: Callable[..., str], bootstrap: str) -> None:
    topic = new_topic()
    FACES[0].write(cluster, topic, ITEMS, "none")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([confluent_kafka.TopicPartition(topic, 0, 5)]).values():
        assert future.result(READ_S).low_watermark == 5
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "g"})
    assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), READ_S) == (5, len(ITEMS))
    consumer.close()


def test_commits_of_a_group_are_one_set_for_kafka_and_grpc(
    cluster: Cluster, new_topic: Callable[..., str], bootstrap: str
) -> None:
    topic = new_topic(2)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "shared"})
    consumer.commit(offsets=[confluent_kafka.TopicPartition(topic, 1, 42, "note")], asynchronous=False)
    assert cluster.nodes[2].raw.committed("kafka-cg-shared", topic, 1) == 42
    cluster.nodes[3].raw.commit("kafka-cg-shared", topic, 0, 7)
    places = [confluent_kafka.TopicPartition(topic, p) for p in range(2)]
    assert [p.offset for p in consumer.committed(places, READ_S)] == [7, 42]
    consumer.close()
