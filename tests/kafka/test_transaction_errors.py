"""Wrong requests around transactions, in both protocols: Kafka's own code, nothing hangs, nothing is half visible."""

from collections.abc import Callable

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import wait_for
from tests.kafka.raw_transactions import add, end, fresh, init
from tests.kafka.reading import PATIENCE_S
from tests.kafka.test_second_protocol import JOINING, data, finish, write
from tests.kafka.test_transactions import await_read, read

NewTopic = Callable[..., str]
Connect = Callable[[str], RawKafka]
FIRST, SECOND = 9, JOINING  # by the version of Produce


@pytest.fixture(params=[FIRST, SECOND], ids=["first protocol", "second protocol"])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def commit(raw: RawKafka, name: str, producer: int, epoch: int, version: int, *, commit: bool = True) -> int:
    if version == SECOND:
        return finish(raw, name, producer, epoch, commit=commit)[0]
    return end(raw, name, producer, epoch, commit=commit)


def test_what_was_never_begun_cannot_be_ended(owner: Connect, version: int) -> None:
    name, unknown = fresh("tx"), fresh("unknown")
    raw = owner(name)
    producer = init(raw, name)["producer_id"]
    assert commit(raw, name, producer, 0, version) == KafkaError.INVALID_TXN_STATE
    for is_commit in (True, False):
        code = commit(owner(unknown), unknown, producer, 0, version, commit=is_commit)
        assert code == KafkaError.INVALID_PRODUCER_ID_MAPPING
        code = commit(raw, name, producer + 1_000, 0, version, commit=is_commit)
        assert code == KafkaError.INVALID_PRODUCER_ID_MAPPING


def test_an_ended_transaction_is_not_ended_the_other_way(
    owner: Connect, leader: Connect, new_topic: NewTopic, bootstrap: str, version: int
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw = owner(name)
    producer = init(raw, name)["producer_id"]
    assert add(raw, name, producer, 0, topic) == KafkaError.NONE
    assert write(leader(topic), name, topic, producer, 0, version=version)["error_code"] == KafkaError.NONE
    assert commit(raw, name, producer, 0, version) == KafkaError.NONE
    assert commit(raw, name, producer, 0, version, commit=False) == KafkaError.INVALID_TXN_STATE
    await_read(bootstrap, topic, [b"v"])


def test_a_batch_outside_a_transaction_of_an_epoch_or_of_a_producer_is_not_stored(
    owner: Connect, leader: Connect, new_topic: NewTopic, version: int
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]

    def code(of: int, epoch: int) -> int:
        return int(write(at_leader, name, topic, of, epoch, version=version)["error_code"])

    assert code(producer + 1_000, 0) == KafkaError.INVALID_PRODUCER_ID_MAPPING
    if version == FIRST:
        assert code(producer, 0) == KafkaError.INVALID_TXN_STATE, "no transaction is open"
    assert init(raw, name)["producer_epoch"] == 1
    assert add(raw, name, producer, 1, topic) == KafkaError.NONE
    assert code(producer, 0) == KafkaError.INVALID_PRODUCER_EPOCH
    # An epoch that no producer has been given yet. The leader's state may be behind, so it says what it knows.
    never = KafkaError.INVALID_TXN_STATE if version == FIRST else KafkaError.INVALID_PRODUCER_EPOCH
    assert code(producer, 2) == never
    assert at_leader.list_offset(topic, -1)["offset"] == 0
    assert code(producer, 1) == KafkaError.NONE
    assert commit(raw, name, producer, 1, version) == KafkaError.NONE


def test_an_unknown_partition_costs_the_transaction_nothing(
    owner: Connect, leader: Connect, new_topic: NewTopic, bootstrap: str, version: int
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    assert add(raw, name, producer, 0, topic) == KafkaError.NONE
    unknown = write(at_leader, name, fresh("nowhere"), producer, 0, version=version)
    assert unknown["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    place = {"name": topic, "partition_data": [{"index": 7, "records": [data(producer, 0)]}]}
    body = at_leader.call(
        ApiKey.PRODUCE, version, transactional_id=name, acks=-1, timeout_ms=10_000, topic_data=[place]
    )
    (there,) = body["responses"][0]["partition_responses"]
    assert there["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert write(at_leader, name, topic, producer, 0, version=version)["error_code"] == KafkaError.NONE
    assert commit(raw, name, producer, 0, version) == KafkaError.NONE
    await_read(bootstrap, topic, [b"v"])


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_time_out_that_is_not_allowed_starts_no_producer(owner: Connect, timeout_ms: int) -> None:
    name = fresh("tx")
    raw = owner(name)
    refused = init(raw, name, transaction_timeout_ms=timeout_ms)
    assert refused["error_code"] == KafkaError.INVALID_TRANSACTION_TIMEOUT
    assert init(raw, name, transaction_timeout_ms=900_000)["producer_epoch"] == 0, "it is the first of its id"


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_transaction_ends_without_a_topic_that_was_deleted_under_it(
    cluster: Cluster,
    owner: Connect,
    leader: Connect,
    new_topic: NewTopic,
    bootstrap: str,
    version: int,
    is_commit: bool,
) -> None:
    """What is left of it is decided as a whole, the next one begins, and a new topic of the name has none of it."""
    kept, gone, name = new_topic(), new_topic(), fresh("tx")
    raw = owner(name)
    producer = init(raw, name)["producer_id"]
    for topic in (kept, gone):
        assert add(raw, name, producer, 0, topic) == KafkaError.NONE
        assert write(leader(topic), name, topic, producer, 0, version=version)["error_code"] == KafkaError.NONE
    at_leader = leader(gone)
    node = cluster.nodes[1].raw
    node.call(node.admin.DeleteTopic, pb.DeleteTopicRequest(name=gone))
    wait_for(
        "the leader has applied the deletion",
        lambda: (
            write(at_leader, name, gone, producer, 0, 1, version=version)["error_code"]
            == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        ),
        PATIENCE_S,
    )
    node.create_topic(gone, 1)
    cluster.wait_leader(gone, 0)
    assert commit(raw, name, producer, 0, version, commit=is_commit) == KafkaError.NONE
    await_read(bootstrap, kept, [b"v"] * is_commit)

    next_epoch = init(raw, name)["producer_epoch"]
    for topic in (kept, gone):
        assert add(raw, name, producer, next_epoch, topic) == KafkaError.NONE
        answer = write(leader(topic), name, topic, producer, next_epoch, version=version)
        assert answer["error_code"] == KafkaError.NONE
    assert commit(raw, name, producer, next_epoch, version) == KafkaError.NONE
    await_read(bootstrap, kept, [b"v"] * (1 + is_commit))
    await_read(bootstrap, gone, [b"v"])
    assert read(bootstrap, gone, isolation="read_uncommitted") == [b"v"]
