"""What one node says to one request: offsets, epochs, waiting, idempotence, and input that is wrong."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.records import (
    CONTROL_MASK,
    CRC_START,
    MAGIC,
    TRANSACTIONAL_MASK,
    NewRecord,
    encode_batch,
    restamped,
    validate_produced,
)
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch

Connect = Callable[[str], RawKafka]
NewTopic = Callable[..., str]
LONG_MS = 60_000  # beyond the patience of the clients here: only an answer that does not wait for it comes in time


def _records(answer: Struct) -> bytes:
    return bytes(answer["records"])


# ------------------------------------------------------------------------------------------------- versions
def test_api_versions_lists_what_is_served(leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    for version in range(5):
        body = raw.call(ApiKey.API_VERSIONS, version, client_software_name="x", client_software_version="1")
        listed = {k["api_key"]: (k["min_version"], k["max_version"]) for k in body["api_keys"]}
        served = {key: (row.versions.lo, row.versions.hi) for key, row in SERVED.items()}
        assert listed == served | {ApiKey.PRODUCE: (0, served[ApiKey.PRODUCE][1])}, "older librdkafka compresses then"


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    raw.send_frame(struct.pack(">hhih", ApiKey.API_VERSIONS, 99, 5, -1) + b"\0\3x\2y\0")
    correlation, body = raw.receive(ApiKey.API_VERSIONS, 0)
    assert correlation == 5
    assert body["error_code"] == KafkaError.UNSUPPORTED_VERSION
    assert {k["api_key"] for k in body["api_keys"]} == set(SERVED)
    assert raw.call(ApiKey.API_VERSIONS, 0)["error_code"] == KafkaError.NONE


@pytest.mark.parametrize("version", range(SERVED[ApiKey.PRODUCE].versions.lo, SERVED[ApiKey.PRODUCE].versions.hi + 1))
def test_every_version_of_produce_and_fetch_moves_the_same_bytes(
    cluster: Cluster, leader: Connect, new_topic: NewTopic, version: int
) -> None:
    topic = new_topic()
    raw = leader(topic)
    topic_id = cluster.nodes[1].raw.describe(topic).topics[0].topic_id
    sent = batch(b"a", b"b")
    assert raw.produce(topic, sent, version=version, topic_id=topic_id)["base_offset"] == 0
    assert _records(raw.fetch(topic, 0))[16:] == sent[16:]


@pytest.mark.parametrize("version", range(SERVED[ApiKey.FETCH].versions.lo, SERVED[ApiKey.FETCH].versions.hi + 1))
def test_every_version_of_fetch_answers(cluster: Cluster, leader: Connect, new_topic: NewTopic, version: int) -> None:
    topic = new_topic()
    raw = leader(topic)
    raw.produce(topic, batch(b"a"))
    requested = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
    topic_id = cluster.nodes[1].raw.describe(topic).topics[0].topic_id
    body = raw.call(
        ApiKey.FETCH,
        version,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        topics=[{"topic": topic, "topic_id": topic_id, "partitions": [requested]}],
        forgotten_topics_data=[],
    )
    answer = body["responses"][0]["partitions"][0]
    assert answer["high_watermark"] == 1
    assert validate_produced(answer["records"]).base_offset == 0


# ---------------------------------------------------------------------------------------------------- fetch
def test_a_fetch_waits_for_records_and_not_longer(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    waiting, producing = leader(topic), leader(topic)
    found = []
    thread = threading.Thread(target=lambda: found.append(waiting.fetch(topic, 0, max_wait_ms=LONG_MS)))
    thread.start()
    producing.produce(topic, batch(b"late"))
    thread.join()
    assert validate_produced(_records(found[0])).count == 1
    assert _records(waiting.fetch(topic, 1, max_wait_ms=50)) == b""
    requested = [{"topic": topic, "partitions": [{"partition": 0, "fetch_offset": 1, "partition_max_bytes": 9}]}]
    fields = {"replica_id": -1, "max_wait_ms": 50, "min_bytes": 1, "topics": requested, "forgotten_topics_data": []}
    assert waiting.call(ApiKey.FETCH, 12, **fields)["throttle_time_ms"] == 0, "a client that waits is not slowed down"


def test_a_fetch_of_many_partitions_waits_for_min_bytes(
    connect: Connect, cluster: Cluster, new_topic: NewTopic
) -> None:
    topic = new_topic(2, replication_factor=3)
    leader = cluster.wait_leader(topic, 0)
    raw, small = connect(cluster.nodes[leader].kafka), batch(b"x")
    raw.produce(topic, small)
    requested = [{"partition": p, "fetch_offset": 0, "partition_max_bytes": 1 << 20} for p in (1, 0)]
    sent = raw.send(
        ApiKey.FETCH,
        12,
        replica_id=-1,
        max_wait_ms=LONG_MS,
        min_bytes=len(small) + 1,
        topics=[{"topic": topic, "partitions": requested}],
        forgotten_topics_data=[],
    )
    other = connect(cluster.nodes[leader].kafka)
    other.produce(topic, small)
    got, body = raw.receive(ApiKey.FETCH, 12)
    assert got == sent
    assert [len(p["records"]) for p in body["responses"][0]["partitions"]] == [0, 2 * len(small)]


def test_a_follower_serves_what_is_committed(
    connect: Connect, cluster: Cluster, leader: Connect, new_topic: NewTopic
) -> None:
    topic = new_topic()
    leader(topic).produce(topic, batch(b"everywhere"))
    for node in cluster.nodes.values():
        raw = connect(node.kafka)
        answer = raw.fetch(topic, 0, max_wait_ms=10_000)
        assert answer["error_code"] == KafkaError.NONE
        assert validate_produced(_records(answer)).count == 1


def test_offsets_and_epochs_that_do_not_exist_are_distinguished(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    raw.produce(topic, batch(b"a"))
    assert raw.fetch(topic, 2)["error_code"] == KafkaError.OFFSET_OUT_OF_RANGE
    assert raw.fetch(topic, -5)["error_code"] == KafkaError.OFFSET_OUT_OF_RANGE
    assert raw.fetch(topic, 0, current_leader_epoch=99)["error_code"] == KafkaError.UNKNOWN_LEADER_EPOCH
    assert raw.fetch("nowhere", 0)["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_fetch_session_tells_what_is_new_on_any_connection(
    leader: Connect, connect: Connect, cluster: Cluster, new_topic: NewTopic
) -> None:
    topic = new_topic()
    fields = {"replica_id": -1, "min_bytes": 1, "max_bytes": 1 << 20, "forgotten_topics_data": []}
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    asked = [{"topic": topic, "partitions": [part]}]
    first = leader(topic).call(ApiKey.FETCH, 12, session_epoch=0, max_wait_ms=0, topics=asked, **fields)
    assert [found["topic"] for found in first["responses"]] == [topic]
    raw, session = leader(topic), {"session_id": first["session_id"], "topics": []} | fields
    unchanged = raw.call(ApiKey.FETCH, 12, session_epoch=1, max_wait_ms=0, **session)
    assert (unchanged["session_id"], unchanged["responses"]) == (first["session_id"], [])
    sent = raw.send(ApiKey.FETCH, 12, session_epoch=2, max_wait_ms=30_000, **session)
    leader(topic).produce(topic, batch(b"new"))
    got, later = raw.receive(ApiKey.FETCH, 12)
    assert got == sent
    ((found,),) = [topic["partitions"] for topic in later["responses"]]
    assert validate_produced(_records(found)).count == 1
    (other, _) = [node for number, node in cluster.nodes.items() if number != cluster.wait_leader(topic, 0)]
    lost = connect(other.kafka).call(ApiKey.FETCH, 12, session_epoch=3, max_wait_ms=0, **session)
    assert lost["error_code"] == KafkaError.FETCH_SESSION_ID_NOT_FOUND


# -------------------------------------------------------------------------------------------------- offsets
def test_list_offsets_finds_ends_times_and_the_latest_record(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    assert raw.list_offset(topic, -3)["offset"] == -1
    raw.produce(topic, batch(b"a", b"b", b"c", first_ms=10_000))
    raw.produce(topic, batch(b"older", first_ms=5_000))
    assert raw.list_offset(topic, -1)["offset"] == 4
    assert raw.list_offset(topic, -2)["offset"] == 0
    assert raw.list_offset(topic, -4)["offset"] == 0, "all there is, is local"
    for tier in (-5, -6, -99):
        answer = raw.list_offset(topic, tier)
        assert (answer["error_code"], answer["offset"]) == (0, -1), "there are no other tiers"
    found = raw.list_offset(topic, 10_001)
    assert (found["error_code"], found["offset"], found["timestamp"]) == (0, 1, 11_000)
    assert raw.list_offset(topic, 12_001)["offset"] == -1
    latest = raw.list_offset(topic, -3)
    assert (latest["offset"], latest["timestamp"]) == (2, 12_000)


def test_list_offsets_fences_by_epoch_and_answers_for_each_partition_alone(
    leader: Connect, new_topic: NewTopic
) -> None:
    topic = new_topic()
    raw = leader(topic)
    raw.produce(topic, batch(b"a"))
    for timestamp in (-1, -2, -3, 5):
        requested = [
            {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": 1_000_000},
            {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1},
            {"partition_index": 9, "timestamp": timestamp},
        ]
        body = raw.call(ApiKey.LIST_OFFSETS, 7, replica_id=-1, topics=[{"name": topic, "partitions": requested}])
        codes = [answer["error_code"] for answer in body["topics"][0]["partitions"]]
        assert codes == [KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.NONE, KafkaError.UNKNOWN_TOPIC_OR_PARTITION]


def test_a_write_through_one_node_is_visible_at_every_node_from_then_on(
    connect: Connect, cluster: Cluster, leader: Connect, new_topic: NewTopic
) -> None:
    """Ends and starts are linearizable at every node, which asks the leader. Kafka's clients ask it themselves."""
    topic = new_topic()
    writing = leader(topic)
    nodes = list(cluster.nodes.values())
    others = [connect(node.kafka) for node in nodes]
    for n in range(1, 20):
        writing.produce(topic, batch(b"v"))
        assert [node.raw.range_info(topic, 0).hwm for node in nodes] == [n] * len(nodes)
        answers = [raw.list_offset(topic, -1) for raw in others]
        assert [a["offset"] for a in answers if a["error_code"] == KafkaError.NONE] == [n]
        assert [a["error_code"] for a in answers].count(KafkaError.NOT_LEADER_OR_FOLLOWER) == len(others) - 1
        requested = [{"name": topic, "partitions": [{"partition_index": 0, "offset": (n, -1)[n % 2]}]}]
        others[n % 3].call(ApiKey.DELETE_RECORDS, 2, topics=requested, timeout_ms=5_000)
        assert [node.raw.range_info(topic, 0).log_start for node in nodes] == [n] * len(nodes)
        assert writing.list_offset(topic, -2)["offset"] == n


def test_the_end_of_an_epoch_is_reported(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    raw.produce(topic, batch(b"a"))

    def ask(epoch: int) -> tuple[int, int, int]:
        requested = [{"topic": topic, "partitions": [{"partition": 0, "leader_epoch": epoch}]}]
        body = raw.call(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, topics=requested)
        answer = body["topics"][0]["partitions"][0]
        return answer["error_code"], answer["leader_epoch"], answer["end_offset"]

    epoch = raw.list_offset(topic, -1)["leader_epoch"]
    assert ask(epoch) == (0, epoch, 1)
    assert ask(epoch + 1) == (0, -1, -1)


# ---------------------------------------------------------------------------------------------- idempotence
def _init(raw: RawKafka, **fields: object) -> tuple[int, int]:
    body = raw.call(ApiKey.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=1, **fields)
    assert body["error_code"] == KafkaError.NONE
    return body["producer_id"], body["producer_epoch"]


def test_a_repeated_batch_is_stored_once_and_a_gap_is_refused(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    producer_id, epoch = _init(raw)

    def stamped(sequence: int, at_epoch: int = epoch) -> bytes:
        return restamped(batch(b"v"), producer_id=producer_id, producer_epoch=at_epoch, base_sequence=sequence)

    assert raw.produce(topic, stamped(0))["base_offset"] == 0
    assert raw.produce(topic, stamped(1))["base_offset"] == 1
    assert raw.produce(topic, stamped(0))["base_offset"] == 0
    assert raw.produce(topic, stamped(3))["error_code"] == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert _init(raw, producer_id=producer_id, producer_epoch=epoch) == (producer_id, epoch + 1)
    assert raw.produce(topic, stamped(0, epoch + 1))["base_offset"] == 2
    assert raw.produce(topic, stamped(2))["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH
    assert raw.list_offset(topic, -1)["offset"] == 3


def test_an_epoch_that_was_never_given_out_begins_at_sequence_0(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    producer_id, epoch = _init(raw)

    def stamped(at_epoch: int, sequence: int) -> bytes:
        return restamped(batch(b"v"), producer_id=producer_id, producer_epoch=at_epoch, base_sequence=sequence)

    assert raw.produce(topic, stamped(epoch, 0))["base_offset"] == 0
    assert raw.produce(topic, stamped(epoch + 7, 1))["error_code"] == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert raw.produce(topic, stamped(epoch + 7, 0))["base_offset"] == 1
    assert raw.produce(topic, stamped(epoch, 1))["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH
    assert raw.produce(topic, stamped(-1, 0))["error_code"] == KafkaError.INVALID_RECORD
    body = raw.call(
        ApiKey.INIT_PRODUCER_ID,
        4,
        transactional_id=None,
        transaction_timeout_ms=1,
        producer_id=producer_id,
        producer_epoch=epoch + 9,
    )
    assert body["error_code"] == KafkaError.PRODUCER_FENCED


@pytest.mark.parametrize(
    ("config", "code", "bad"),
    [
        ({"cleanup.policy": "compact"}, KafkaError.INVALID_RECORD, [1, 3]),
        ({"message.timestamp.before.max.ms": "60000"}, KafkaError.INVALID_TIMESTAMP, [2, 3]),
    ],
)
def test_a_refused_batch_says_which_of_its_records_are_bad(
    leader: Connect, new_topic: NewTopic, config: dict[str, str], code: KafkaError, bad: list[int]
) -> None:
    topic = new_topic(config=config)
    raw, now_ms = leader(topic), time.time_ns() // 1_000_000
    records = [NewRecord(None if n % 2 else b"k", b"v", 1_000 if n // 2 else now_ms) for n in range(4)]
    answer = raw.produce(topic, encode_batch(records))
    assert (answer["error_code"], [error["batch_index"] for error in answer["record_errors"]]) == (code, bad)
    assert all(error["batch_index_error_message"] for error in answer["record_errors"])
    assert f"record {bad[0]} of the batch" in answer["error_message"]
    assert raw.produce(topic, encode_batch(records[:1]))["record_errors"] == []


# ---------------------------------------------------------------------------------------------------- leaders
def test_another_node_names_the_leader(connect: Connect, cluster: Cluster, new_topic: NewTopic) -> None:
    topic = new_topic()
    number = cluster.wait_leader(topic, 0)
    other = next(node for node in cluster.nodes.values() if node.id != number)
    raw = connect(other.kafka)
    data = [{"name": topic, "partition_data": [{"index": 0, "records": [batch(b"v")]}]}]
    body = raw.call(ApiKey.PRODUCE, 10, acks=-1, timeout_ms=5_000, topic_data=data)
    answer = body["responses"][0]["partition_responses"][0]
    assert answer["error_code"] == KafkaError.NOT_LEADER_OR_FOLLOWER
    assert answer["current_leader"]["leader_id"] == number
    assert [(e["node_id"], f"{e['host']}:{e['port']}") for e in body["node_endpoints"]] == [
        (number, cluster.nodes[number].kafka)
    ]


# -------------------------------------------------------------------------------------------------- bad input
def _broken(position: int) -> bytes:
    data = bytearray(batch(b"v"))
    data[position] ^= 0xFF
    return bytes(data)


def _flagged(flag: int) -> bytes:
    data = bytearray(batch(b"v"))
    data[CRC_START + 1] |= flag
    return restamped(data, producer_id=-1, producer_epoch=-1, base_sequence=-1)  # with a new CRC


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (None, KafkaError.INVALID_RECORD),
        (b"", KafkaError.INVALID_RECORD),
        (b"short", KafkaError.CORRUPT_MESSAGE),
        (_broken(16), KafkaError.INVALID_RECORD),  # the magic
        (_broken(17), KafkaError.CORRUPT_MESSAGE),  # the CRC
        (_broken(-1), KafkaError.CORRUPT_MESSAGE),
        (_broken(11), KafkaError.CORRUPT_MESSAGE),  # the length
        (batch(b"v")[:-1], KafkaError.CORRUPT_MESSAGE),
        (batch(b"v") + batch(b"w"), KafkaError.CORRUPT_MESSAGE),
        (batch(b"x" * (1 << 20) + b"and more"), KafkaError.MESSAGE_TOO_LARGE),
        (_flagged(TRANSACTIONAL_MASK), KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (_flagged(CONTROL_MASK), KafkaError.INVALID_RECORD),
    ],
    ids=["null", "empty", "short", "magic", "crc", "record", "length", "cut", "two", "too large", "txn", "control"],
)
def test_a_batch_that_is_none_is_refused_and_nothing_else(
    leader: Connect, new_topic: NewTopic, records: bytes | None, code: KafkaError
) -> None:
    assert batch(b"v")[16] == MAGIC
    topic = new_topic()
    raw = leader(topic)
    assert raw.produce(topic, records)["error_code"] == code
    assert raw.produce(topic, batch(b"good"))["base_offset"] == 0


def test_acks_and_partitions_that_do_not_exist_are_refused(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    assert raw.produce(topic, batch(b"v"), acks=7)["error_code"] == KafkaError.INVALID_REQUIRED_ACKS
    assert raw.produce("nowhere", batch(b"v"))["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    unknown = raw.produce(topic, batch(b"v"), version=13, topic_id=b"\7" * 16)
    assert unknown["error_code"] == KafkaError.UNKNOWN_TOPIC_ID


def test_a_topic_that_may_not_be_created_by_naming_it_is_not(leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    for _ in range(2):
        body = raw.call(ApiKey.METADATA, 9, topics=[{"name": "uncreated"}], allow_auto_topic_creation=False)
        assert body["topics"][0]["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_all_clients_that_create_a_topic_by_naming_it_at_the_same_time_succeed(
    connect: Connect, cluster: Cluster
) -> None:
    connections = [connect(node.kafka) for node in cluster.nodes.values() for _ in range(4)]
    sent = [
        raw.send(ApiKey.METADATA, 9, topics=[{"name": "raced"}], allow_auto_topic_creation=True) for raw in connections
    ]
    found = [raw.receive(ApiKey.METADATA, 9) for raw in connections]
    assert [correlation for correlation, _ in found] == sent
    codes = {body["topics"][0]["error_code"] for _, body in found}
    assert codes == {KafkaError.NONE}


def test_without_acknowledgement_there_is_no_answer(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    data = [{"name": topic, "partition_data": [{"index": 0, "records": [batch(b"v")]}]}]
    raw.send(ApiKey.PRODUCE, 9, acks=0, timeout_ms=1_000, topic_data=data)
    assert validate_produced(_records(raw.fetch(topic, 0, max_wait_ms=10_000))).count == 1
    data[0]["partition_data"] = [{"index": 0, "records": [b"nonsense"]}]
    raw.send(ApiKey.PRODUCE, 9, acks=0, timeout_ms=1_000, topic_data=data)
    assert raw.is_closed_by_node()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ü", "x" * 250, "x" * 30_000], ids=lambda name: name[:4])
def test_an_illegal_topic_name_is_refused(leader: Connect, new_topic: NewTopic, name: str) -> None:
    raw = leader(new_topic())
    assert raw.create_topic(name)["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION
    for may_create in (True, False):
        body = raw.call(ApiKey.METADATA, 9, topics=[{"name": name}], allow_auto_topic_creation=may_create)
        assert body["topics"][0]["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION


@pytest.mark.parametrize(
    ("group", "metadata", "code"),
    [
        ("", "", KafkaError.INVALID_GROUP_ID),
        ("g" * 30_000, "", KafkaError.INVALID_GROUP_ID),
        ("g", "m" * 5_000, KafkaError.OFFSET_METADATA_TOO_LARGE),
    ],
    ids=["no group", "long group", "long metadata"],
)
def test_a_commit_that_makes_no_sense_is_refused(
    leader: Connect, new_topic: NewTopic, group: str, metadata: str, code: KafkaError
) -> None:
    topic = new_topic()
    answer = leader(topic).commit(group, topic, 1, committed_metadata=metadata)
    assert answer["error_code"] == code


@pytest.mark.parametrize("version", range(1, 11))
def test_every_version_of_offset_fetch_returns_the_commit(
    cluster: Cluster, coordinator: Connect, new_topic: NewTopic, version: int
) -> None:
    topic = new_topic()
    raw = coordinator("v")
    topic_id = cluster.nodes[1].raw.describe(topic).topics[0].topic_id
    ids = {"name": topic, "topic_id": topic_id}
    part: dict[str, Any] = {"committed_metadata": "m", "committed_leader_epoch": 3, "topic_id": topic_id}
    assert raw.commit("v", topic, 5, version=version, **part)["error_code"] == KafkaError.NONE
    requested = {"group_id": "v", "topics": [ids | {"partition_indexes": [0, 1]}]}
    body = raw.call(ApiKey.OFFSET_FETCH, version, **requested, groups=[requested])
    found = (body["groups"][0] if version >= 8 else body)["topics"][0]["partitions"]
    assert [(p["committed_offset"], p["metadata"], p["error_code"]) for p in found] == [(5, "m", 0), (-1, "", 0)]
    epochs = [p.get("committed_leader_epoch", -1) for p in found]
    assert epochs == [3 if version >= 6 else -1, -1]  # OffsetCommit has it from version 6 on, OffsetFetch from 5


@pytest.mark.parametrize("offset", [-1, -2, -1_001])
def test_negative_offset_is_kept_for_kafka_clients_and_is_no_position_for_readers(
    cluster: Cluster, coordinator: Connect, leader: Connect, new_topic: NewTopic, offset: int
) -> None:
    """KafkaJS commits -1 and -2 to reset a group. Clients take a negative offset as none: their setting decides."""
    topic = new_topic()
    leader(topic)
    raw, name = coordinator("reset"), "kafka-cg-reset"
    for committed in (0, offset):
        assert raw.commit("reset", topic, committed, committed_metadata="m")["error_code"] == KafkaError.NONE
    requested = {"group_id": "reset", "topics": [{"name": topic, "partition_indexes": [0]}]}
    body = raw.call(ApiKey.OFFSET_FETCH, 7, **requested)
    found = body["topics"][0]["partitions"][0]
    assert (found["committed_offset"], found["metadata"], found["error_code"]) == (offset, "m", 0)
    node = cluster.nodes[1].raw
    assert node.committed(name, topic, 0) is None
    for kind in ("RESUME_OR_EARLIEST", "RESUME_OR_LATEST"):
        requested_start = pb.ListOffsetsPartition(
            topic=topic, partition=0, offset_type=pb.OffsetType.Value(kind), group=name
        )
        (listed,) = node.call(node.broker.ListOffsets, pb.ListOffsetsRequest(partitions=[requested_start])).offsets
        assert not listed.HasField("error")
        assert listed.offset == 0
    described = node.call(node.admin.DescribeGroup, pb.DescribeGroupRequest(group=name))
    (at,) = [o for o in described.offsets if o.topic == topic]
    assert (at.HasField("offset"), at.lag) == (False, 0)


def test_group_without_members_and_offsets_is_still_empty_and_not_dead(
    cluster: Cluster, coordinator: Connect, new_topic: NewTopic
) -> None:
    topic, raw = new_topic(), coordinator("bare")
    raw.commit("bare", topic, 5)
    topics = [{"name": topic, "partitions": [{"partition_index": 0}]}]
    assert raw.call(ApiKey.OFFSET_DELETE, 0, group_id="bare", topics=topics)["error_code"] == 0
    (described,) = raw.call(ApiKey.DESCRIBE_GROUPS, 5, groups=["bare"])["groups"]
    assert (described["group_state"], described["error_code"]) == ("Empty", 0)


def test_a_node_that_does_not_coordinate_the_group_takes_no_commit_of_it(cluster: Cluster, new_topic: NewTopic) -> None:
    """Not even without a member: late, after a partition, it would overwrite commits taken meanwhile by other nodes."""
    topic, codes = new_topic(), []
    for node in cluster.nodes.values():
        with closing(RawKafka(node.kafka)) as raw:
            codes.append(raw.commit("v", topic, 5)["error_code"])
    assert sorted(codes) == [KafkaError.NONE, *[KafkaError.NOT_COORDINATOR] * (len(cluster.nodes) - 1)]


def test_records_are_not_deleted_beyond_the_end(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    raw.produce(topic, batch(b"a", b"b"))

    def delete(offset: int) -> tuple[int, int]:
        requested = [{"name": topic, "partitions": [{"partition_index": 0, "offset": offset}]}]
        body = raw.call(ApiKey.DELETE_RECORDS, 2, topics=requested, timeout_ms=5_000)
        answer = body["topics"][0]["partitions"][0]
        return answer["error_code"], answer["low_watermark"]

    assert delete(3) == (KafkaError.OFFSET_OUT_OF_RANGE, -1)
    assert delete(-7) == (KafkaError.OFFSET_OUT_OF_RANGE, -1)
    assert delete(-1) == (KafkaError.NONE, 2)
    assert raw.fetch(topic, 0)["error_code"] == KafkaError.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", -1),
        struct.pack(">ihhih", (101 << 20) + 1, ApiKey.METADATA, 1, 1, -1),
        struct.pack(">i", 2) + b"\0\3",
        struct.pack(">ihhih", 10, 999, 0, 1, -1),
        struct.pack(">ihhih", 10, ApiKey.PRODUCE, 2, 1, -1),
        struct.pack(">ihhih", 10, ApiKey.FETCH, 99, 1, -1),
        struct.pack(">ihhihi", 14, ApiKey.METADATA, 1, 1, -1, 2**31 - 1),
        struct.pack(">ihhih", 10, ApiKey.METADATA, 1, 1, 30_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["negative", "oversized", "no header", "unknown key", "old", "new", "nested length", "client id", "http"],
)
def test_bytes_that_are_no_request_close_their_connection_alone(
    leader: Connect, new_topic: NewTopic, data: bytes
) -> None:
    topic = new_topic()
    bystander, raw = leader(topic), leader(topic)
    raw.socket.sendall(data)
    assert raw.is_closed_by_node()
    assert bystander.produce(topic, batch(b"v"))["base_offset"] == 0


def test_pipelined_requests_are_answered_in_their_order(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    data = [{"name": topic, "partition_data": [{"index": 0, "records": [batch(b"v")]}]}]
    sent = [
        raw.send(ApiKey.PRODUCE, 9, acks=-1, timeout_ms=5_000, topic_data=data)
        if i % 3
        else raw.send(ApiKey.METADATA, 9, topics=None)
        for i in range(600)  # more than may be in flight
    ]
    got = []
    offsets = []
    for i in range(600):
        correlation, body = raw.receive(ApiKey.PRODUCE if i % 3 else ApiKey.METADATA, 9)
        got.append(correlation)
        if i % 3:
            offsets.append(body["responses"][0]["partition_responses"][0]["base_offset"])
    assert got == sent
    assert offsets == list(range(400))


def test_a_request_in_single_bytes_is_a_request(leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 0, 77, -1):
        raw.socket.sendall(bytes((byte,)))
    assert raw.receive(ApiKey.API_VERSIONS, 0)[0] == 77


def test_a_client_that_reads_nothing_stops_no_other_client(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    deaf, bystander = leader(topic), leader(topic)
    for _ in range(8):
        bystander.produce(topic, batch(b"x" * 900_000))
    requested = [{"topic": topic, "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 23}]}]
    deadline = time.monotonic() + 5
    deaf.socket.settimeout(0.5)
    try:
        for _ in range(1_000):
            deaf.send(
                ApiKey.FETCH, 12, replica_id=-1, max_wait_ms=0, min_bytes=1, topics=requested, forgotten_topics_data=[]
            )
            if time.monotonic() > deadline:
                break
    except TimeoutError:
        pass  # the node does not read it any more
    assert bystander.produce(topic, batch(b"v"))["base_offset"] == 8
