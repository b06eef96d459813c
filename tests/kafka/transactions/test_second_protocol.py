"""Kafka's second protocol of transactions (KIP-890), request by request, and what older versions of each get."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import wait_for
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import add, end, fresh, init

NewTopic = Callable[..., str]
Connect = Callable[[str], RawKafka]
JOINING, BUMPING = 12, 5  # the versions of Produce and EndTxn


def data(producer: int, epoch: int, sequence: int = 0, value: bytes = b"v") -> bytes:
    return batch(value, producer_id=producer, producer_epoch=epoch, base_sequence=sequence, is_transactional=True)


def finish(raw: RawKafka, name: str, producer: int, epoch: int, *, commit: bool = True) -> tuple[int, int, int]:
    """EndTxn 5: the code, and with what the producer goes on."""
    body = raw.call(
        ApiKey.END_TXN, BUMPING, transactional_id=name, producer_id=producer, producer_epoch=epoch, committed=commit
    )
    return body["error_code"], body["producer_id"], body["producer_epoch"]


def write(
    raw: RawKafka, name: str, topic: str, producer: int, epoch: int, sequence: int = 0, *, version: int = JOINING
) -> dict[str, Any]:
    return raw.produce(topic, data(producer, epoch, sequence), version=version, transactional_id=name)


def committed(raw: RawKafka, topic: str) -> int:
    """The last stable offset."""
    return int(raw.fetch(topic, 0)["last_stable_offset"])


def wait_for_end(at_leader: RawKafka, topic: str) -> None:
    """Of a transaction with one record here. Until the leader knows the decision, it takes batches into the transaction
    that has it open, as Kafka's does until the marker is written."""
    wait_for("the marker", lambda: committed(at_leader, topic) == 2, PATIENCE_S)


# ------------------------------------------------------------------------------------------------- the feature
@pytest.mark.parametrize("version", range(SERVED[ApiKey.API_VERSIONS].versions.hi + 1))
def test_clients_are_told_that_the_cluster_has_the_second_protocol(bootstrap: str, version: int) -> None:
    raw = RawKafka(bootstrap.split(",")[0])
    body = raw.call(ApiKey.API_VERSIONS, version, client_software_name="t", client_software_version="1")
    raw.close()
    if version < 3:
        assert body["finalized_features"] == [], "these versions have no such field"
        return
    assert body["finalized_features_epoch"] == 0, "-1 is unknown, and clients then look no further"
    assert body["finalized_features"] == [
        {"name": "transaction.version", "max_version_level": 2, "min_version_level": 2}
    ]
    # As Kafka: clients of version 3 refuse a feature that begins with 0.
    known = [{"name": "transaction.version", "min_version": 0, "max_version": 2}]
    assert body["supported_features"] == (known if version > 3 else [])


def test_versions_are_those_of_kafka_43_for_clients() -> None:
    keys = (ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.END_TXN, ApiKey.TXN_OFFSET_COMMIT)
    assert [SERVED[key].versions.hi for key in keys] == [3, 4, 5, 5], "AddPartitionsToTxn 4 and 5 are for brokers"
    assert SERVED[ApiKey.INIT_PRODUCER_ID].versions.hi == 5, "6 is unstable in Kafka 4.3"


def test_what_brokers_ask_one_another_is_not_served(bootstrap: str) -> None:
    for version in (4, 5):
        raw = RawKafka(bootstrap.split(",")[0])
        raw.send(ApiKey.ADD_PARTITIONS_TO_TXN, version, transactions=[])
        assert raw.is_closed_by_node()
        raw.close()


# ----------------------------------------------------------------------------------------- one after another
@pytest.mark.parametrize("is_commit", [True, False])
def test_transactions_follow_one_another_without_adding_a_partition(
    owner: Connect, leader: Connect, new_topic: NewTopic, is_commit: bool
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    for epoch in range(3):
        for sequence in range(2):
            assert write(at_leader, name, topic, producer, epoch, sequence)["error_code"] == KafkaError.NONE
        assert finish(raw, name, producer, epoch, commit=is_commit) == (KafkaError.NONE, producer, epoch + 1)
    wait_for("the last marker", lambda: committed(at_leader, topic) == 9, PATIENCE_S)


def test_a_repeated_end_is_answered_as_the_first_and_ends_nothing_later(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    write(at_leader, name, topic, producer, 0)
    first = finish(raw, name, producer, 0)
    assert first == (KafkaError.NONE, producer, 1)
    assert finish(raw, name, producer, 0) == first
    assert finish(raw, name, producer, 0, commit=False)[0] == KafkaError.INVALID_TXN_STATE
    assert write(at_leader, name, topic, producer, 1)["error_code"] == KafkaError.NONE
    for is_commit in (True, False):
        assert finish(raw, name, producer, 0, commit=is_commit) == (KafkaError.PRODUCER_FENCED, -1, -1)
        for version, code in ((1, KafkaError.INVALID_PRODUCER_EPOCH), (4, KafkaError.PRODUCER_FENCED)):
            assert end(raw, name, producer, 0, commit=is_commit, version=version) == code
    (found,) = raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name])["transaction_states"]
    assert (found["transaction_state"], found["producer_epoch"]) == ("Ongoing", 1)
    assert committed(at_leader, topic) == 2, "the second transaction is open, after the first and its marker"
    assert finish(raw, name, producer, 1) == (KafkaError.NONE, producer, 2)


def test_a_late_batch_joins_no_later_transaction_and_begins_none(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    topic, other, name = new_topic(), new_topic(), fresh("tx")
    raw, at_leader, elsewhere = owner(name), leader(topic), leader(other)
    producer = init(raw, name)["producer_id"]
    write(at_leader, name, topic, producer, 0)
    finish(raw, name, producer, 0)
    wait_for_end(at_leader, topic)
    for late, place, sequence in ((at_leader, topic, 1), (elsewhere, other, 0)):
        assert write(late, name, place, producer, 0, sequence)["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH
    write(at_leader, name, topic, producer, 1)
    for late, place, sequence in ((at_leader, topic, 1), (elsewhere, other, 0)):
        assert write(late, name, place, producer, 0, sequence)["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH
    assert elsewhere.list_offset(other, -1)["offset"] == 0
    assert finish(raw, name, producer, 1) == (KafkaError.NONE, producer, 2)


def test_an_abort_without_a_transaction_fences_the_batch_that_is_on_its_way(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    assert finish(raw, name, producer, 0)[0] == KafkaError.INVALID_TXN_STATE
    assert finish(raw, name, producer, 0, commit=False) == (KafkaError.NONE, producer, 1)
    assert write(at_leader, name, topic, producer, 0)["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH
    assert write(at_leader, name, topic, producer, 1)["error_code"] == KafkaError.NONE


def test_batches_in_flight_keep_their_order_behind_the_one_that_joins(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    for epoch in range(3):  # from the second on, the first batch also waits for the marker of the one before
        for sequence in range(5):
            place = {"name": topic, "partition_data": [{"index": 0, "records": [data(producer, epoch, sequence)]}]}
            at_leader.send(
                ApiKey.PRODUCE, JOINING, transactional_id=name, acks=-1, timeout_ms=10_000, topic_data=[place]
            )
        answers = [at_leader.receive(ApiKey.PRODUCE, JOINING)[1] for _ in range(5)]
        found = [answer["responses"][0]["partition_responses"][0] for answer in answers]
        assert [(a["error_code"], a["base_offset"]) for a in found] == [(0, 6 * epoch + n) for n in range(5)]
        assert finish(raw, name, producer, epoch)[0] == KafkaError.NONE


# ------------------------------------------------------------------------------------------------------ offsets
def test_offsets_bring_their_group_into_the_transaction(
    owner: Connect, coordinator: Connect, new_topic: NewTopic
) -> None:
    topic, name, group = new_topic(), fresh("tx"), fresh("group")
    raw, of_group = owner(name), coordinator(group)
    producer = init(raw, name)["producer_id"]

    def stage(epoch: int, offset: int, version: int = 5) -> int:
        body = of_group.call(
            ApiKey.TXN_OFFSET_COMMIT,
            version,
            transactional_id=name,
            producer_id=producer,
            producer_epoch=epoch,
            group_id=group,
            topics=[{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": offset}]}],
        )
        code: int = body["topics"][0]["partitions"][0]["error_code"]
        return code

    def fetch() -> int:
        topics = [{"name": topic, "partition_indexes": [0]}]
        body = of_group.call(ApiKey.OFFSET_FETCH, 7, group_id=group, topics=topics, require_stable=False)
        offset: int = body["topics"][0]["partitions"][0]["committed_offset"]
        return offset

    assert [stage(0, 7, version) for version in (3, 4)] == [
        KafkaError.INVALID_TXN_STATE,
        KafkaError.TRANSACTION_ABORTABLE,
    ], "before version 5 the group must have been added"
    assert stage(0, 7) == KafkaError.NONE
    assert fetch() == -1
    assert finish(raw, name, producer, 0) == (KafkaError.NONE, producer, 1)
    assert fetch() == 7
    assert stage(0, 3) in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED), "it is late"
    assert stage(1, 9) == KafkaError.NONE
    assert finish(raw, name, producer, 1, commit=False) == (KafkaError.NONE, producer, 2)
    assert fetch() == 7


# ------------------------------------------------------------------------------------------------ both protocols
@pytest.mark.parametrize(
    ("version", "code"),
    [(10, KafkaError.INVALID_TXN_STATE), (11, KafkaError.TRANSACTION_ABORTABLE), (12, KafkaError.NONE)],
)
def test_a_batch_whose_partition_was_not_added_gets_what_its_version_knows(
    owner: Connect, leader: Connect, new_topic: NewTopic, version: int, code: KafkaError
) -> None:
    topic, name = new_topic(), fresh("tx")
    producer = init(owner(name), name)["producer_id"]
    assert write(leader(topic), name, topic, producer, 0, version=version)["error_code"] == code


def test_in_the_first_protocol_a_late_end_ends_the_next_transaction_as_in_kafka(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    """No server can tell the two requests apart (docs/decisions/one-entry-decides-a-transaction.md). The second
    protocol can, above."""
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    add(raw, name, producer, 0, topic)
    assert end(raw, name, producer, 0, commit=True) == KafkaError.NONE
    wait_for("the next one may begin", lambda: add(raw, name, producer, 0, topic) == KafkaError.NONE, PATIENCE_S)
    write(at_leader, name, topic, producer, 0, version=9)
    assert end(raw, name, producer, 0, commit=True) == KafkaError.NONE, "a copy of the first request"
    (found,) = raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name])["transaction_states"]
    assert found["transaction_state"] != "Ongoing"


def test_an_epoch_that_has_outlived_a_transaction_takes_nothing_that_was_not_added(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    """A client of the first protocol with a new version of Produce: its late batch looks like the next one's."""
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer = init(raw, name)["producer_id"]
    assert add(raw, name, producer, 0, topic) == KafkaError.NONE
    assert write(at_leader, name, topic, producer, 0)["error_code"] == KafkaError.NONE
    assert end(raw, name, producer, 0, commit=True, version=4) == KafkaError.NONE
    wait_for_end(at_leader, topic)
    assert write(at_leader, name, topic, producer, 0, 1)["error_code"] == KafkaError.TRANSACTION_ABORTABLE
    assert finish(raw, name, producer, 0, commit=False) == (KafkaError.NONE, producer, 1), "abortable it is"
    assert write(at_leader, name, topic, producer, 1)["error_code"] == KafkaError.NONE


def test_an_id_moves_to_a_newer_client_and_back(owner: Connect, leader: Connect, new_topic: NewTopic) -> None:
    topic, name = new_topic(), fresh("tx")
    raw, at_leader = owner(name), leader(topic)
    producer, epoch = init(raw, name)["producer_id"], 0
    for _ in range(2):  # two transactions in one epoch
        add(raw, name, producer, epoch, topic)
        assert end(raw, name, producer, epoch, commit=True) == KafkaError.NONE
        wait_for("the next one may begin", lambda: add(raw, name, producer, epoch, topic) == 0, PATIENCE_S)
    newer = init(raw, name)  # aborts the open one
    assert (newer["producer_id"], newer["producer_epoch"]) == (producer, 2)
    assert write(at_leader, name, topic, producer, 2)["error_code"] == KafkaError.NONE
    assert finish(raw, name, producer, 2) == (KafkaError.NONE, producer, 3)
    older = init(raw, name)
    assert (older["producer_id"], older["producer_epoch"]) == (producer, 4)
    assert finish(raw, name, producer, 2)[0] == KafkaError.PRODUCER_FENCED
    for sequence in range(2):
        wait_for("the markers are written", lambda: add(raw, name, producer, 4, topic) == 0, PATIENCE_S)
        assert write(at_leader, name, topic, producer, 4, sequence, version=9)["error_code"] == KafkaError.NONE
        assert end(raw, name, producer, 4, commit=True) == KafkaError.NONE


def test_a_producer_that_starts_while_another_one_ends_is_not_taken_for_a_fenced_one(
    owner: Connect, leader: Connect, new_topic: NewTopic
) -> None:
    topic, name = new_topic(), fresh("tx")
    ending, starting, at_leader = owner(name), owner(name), leader(topic)
    producer = init(ending, name)["producer_id"]
    codes: list[int] = []
    epoch = 0
    for _ in range(10):
        write(at_leader, name, topic, producer, epoch)
        other = threading.Thread(target=lambda: codes.append(init(starting, name)["error_code"]))
        other.start()
        finish(ending, name, producer, epoch)
        other.join(PATIENCE_S)
        epoch = init(ending, name)["producer_epoch"]
    assert codes == [KafkaError.NONE] * 10
