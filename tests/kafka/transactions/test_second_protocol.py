"""Kafka's second protocol of transactions (KIP-890), request by request, and what older versions of each get."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.kafka_client import RawKafka
from smq.testing.node_process import wait_for
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import JOINING, Tx, data, fresh, init

NewTopic = Callable[..., str]
Connect = Callable[[str], RawKafka]


def wait_for_end(tx: Tx) -> None:
    """Of a transaction with one record here. Until the leader knows the decision, it takes batches into the transaction
    that has it open, as Kafka's does until the marker is written."""
    wait_for("the marker", lambda: tx.committed() == 2, PATIENCE_S)


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
def test_transactions_follow_one_another_without_adding_a_partition(tx: Tx, is_commit: bool) -> None:
    for epoch in range(3):
        for sequence in range(2):
            assert tx.write(epoch, sequence) == KafkaError.NONE
        assert tx.finish(epoch, commit=is_commit) == (KafkaError.NONE, tx.id, epoch + 1)
    wait_for("the last marker", lambda: tx.committed() == 9, PATIENCE_S)


def test_a_repeated_end_is_answered_as_the_first_and_ends_nothing_later(tx: Tx) -> None:
    tx.write(0)
    first = tx.finish(0)
    assert first == (KafkaError.NONE, tx.id, 1)
    assert tx.finish(0) == first
    assert tx.finish(0, commit=False)[0] == KafkaError.INVALID_TXN_STATE
    assert tx.write(1) == KafkaError.NONE
    for is_commit in (True, False):
        assert tx.finish(0, commit=is_commit) == (KafkaError.PRODUCER_FENCED, -1, -1)
        for version, code in ((1, KafkaError.INVALID_PRODUCER_EPOCH), (4, KafkaError.PRODUCER_FENCED)):
            assert tx.end(0, commit=is_commit, version=version) == code
    (found,) = tx.raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[tx.name])["transaction_states"]
    assert (found["transaction_state"], found["producer_epoch"]) == ("Ongoing", 1)
    assert tx.committed() == 2, "the second transaction is open, after the first and its marker"
    assert tx.finish(1) == (KafkaError.NONE, tx.id, 2)


def test_a_late_batch_joins_no_later_transaction_and_begins_none(tx: Tx, leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    elsewhere = replace(tx, topic=topic, leader=leader(topic))
    tx.write(0)
    tx.finish(0)
    wait_for_end(tx)
    for _ in range(2):
        for late, sequence in ((tx, 1), (elsewhere, 0)):
            assert late.write(0, sequence) == KafkaError.INVALID_PRODUCER_EPOCH
        tx.write(1)
    assert elsewhere.leader.list_offset(topic, -1)["offset"] == 0
    assert tx.finish(1) == (KafkaError.NONE, tx.id, 2)


def test_an_abort_without_a_transaction_fences_the_batch_that_is_on_its_way(tx: Tx) -> None:
    assert tx.finish(0)[0] == KafkaError.INVALID_TXN_STATE
    assert tx.finish(0, commit=False) == (KafkaError.NONE, tx.id, 1)
    assert tx.write(0) == KafkaError.INVALID_PRODUCER_EPOCH
    assert tx.write(1) == KafkaError.NONE


def test_batches_in_flight_keep_their_order_behind_the_one_that_joins(tx: Tx) -> None:
    for epoch in range(3):  # from the second on, the first batch also waits for the marker of the one before
        for sequence in range(5):
            place = {"name": tx.topic, "partition_data": [{"index": 0, "records": [data(tx.id, epoch, sequence)]}]}
            tx.leader.send(
                ApiKey.PRODUCE, JOINING, transactional_id=tx.name, acks=-1, timeout_ms=10_000, topic_data=[place]
            )
        answers = [tx.leader.receive(ApiKey.PRODUCE, JOINING)[1] for _ in range(5)]
        found = [answer["responses"][0]["partition_responses"][0] for answer in answers]
        assert [(a["error_code"], a["base_offset"]) for a in found] == [(0, 6 * epoch + n) for n in range(5)]
        assert tx.finish(epoch)[0] == KafkaError.NONE


# ------------------------------------------------------------------------------------------------------ offsets
def test_offsets_bring_their_group_into_the_transaction(tx: Tx, coordinator: Connect) -> None:
    group = fresh("group")
    of_group = coordinator(group)

    def stage(epoch: int, offset: int, version: int = 5) -> int:
        body = of_group.call(
            ApiKey.TXN_OFFSET_COMMIT,
            version,
            transactional_id=tx.name,
            producer_id=tx.id,
            producer_epoch=epoch,
            group_id=group,
            topics=[{"name": tx.topic, "partitions": [{"partition_index": 0, "committed_offset": offset}]}],
        )
        code: int = body["topics"][0]["partitions"][0]["error_code"]
        return code

    def fetch() -> int:
        topics = [{"name": tx.topic, "partition_indexes": [0]}]
        body = of_group.call(ApiKey.OFFSET_FETCH, 7, group_id=group, topics=topics, require_stable=False)
        offset: int = body["topics"][0]["partitions"][0]["committed_offset"]
        return offset

    assert [stage(0, 7, version) for version in (3, 4)] == [
        KafkaError.INVALID_TXN_STATE,
        KafkaError.TRANSACTION_ABORTABLE,
    ], "before version 5 the group must have been added"
    assert stage(0, 7) == KafkaError.NONE
    assert fetch() == -1
    assert tx.finish(0) == (KafkaError.NONE, tx.id, 1)
    assert fetch() == 7
    assert stage(0, 3) in (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED), "it is late"
    assert stage(1, 9) == KafkaError.NONE
    assert tx.finish(1, commit=False) == (KafkaError.NONE, tx.id, 2)
    assert fetch() == 7


# ------------------------------------------------------------------------------------------------ both protocols
@pytest.mark.parametrize(
    ("version", "code"),
    [(10, KafkaError.INVALID_TXN_STATE), (11, KafkaError.TRANSACTION_ABORTABLE), (12, KafkaError.NONE)],
)
def test_a_batch_whose_partition_was_not_added_gets_what_its_version_knows(
    tx: Tx, version: int, code: KafkaError
) -> None:
    assert tx.write(0, version=version) == code


def test_in_the_first_protocol_a_late_end_ends_the_next_transaction_as_in_kafka(tx: Tx) -> None:
    """No server can tell the two requests apart (docs/decisions/one-entry-decides-a-transaction.md). The second
    protocol can, above."""
    tx.add(0)
    assert tx.end(0, commit=True) == KafkaError.NONE
    wait_for("the next one may begin", lambda: tx.add(0) == KafkaError.NONE, PATIENCE_S)
    tx.write(0, version=9)
    assert tx.end(0, commit=True) == KafkaError.NONE, "a copy of the first request"
    (found,) = tx.raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[tx.name])["transaction_states"]
    assert found["transaction_state"] != "Ongoing"


def test_an_epoch_that_has_outlived_a_transaction_takes_nothing_that_was_not_added(tx: Tx) -> None:
    """A client of the first protocol with a new version of Produce: its late batch looks like the next one's."""
    assert tx.add(0) == KafkaError.NONE
    assert tx.write(0) == KafkaError.NONE
    assert tx.end(0, commit=True, version=4) == KafkaError.NONE
    wait_for_end(tx)
    assert tx.write(0, 1) == KafkaError.TRANSACTION_ABORTABLE
    assert tx.finish(0, commit=False) == (KafkaError.NONE, tx.id, 1), "abortable it is"
    assert tx.write(1) == KafkaError.NONE


def test_an_id_moves_to_a_newer_client_and_back(tx: Tx) -> None:
    for _ in range(2):  # two transactions in one epoch
        tx.add(0)
        assert tx.end(0, commit=True) == KafkaError.NONE
        wait_for("the next one may begin", lambda: tx.add(0) == 0, PATIENCE_S)
    newer = init(tx.raw, tx.name)  # aborts the open one
    assert (newer["producer_id"], newer["producer_epoch"]) == (tx.id, 2)
    assert tx.write(2) == KafkaError.NONE
    assert tx.finish(2) == (KafkaError.NONE, tx.id, 3)
    older = init(tx.raw, tx.name)
    assert (older["producer_id"], older["producer_epoch"]) == (tx.id, 4)
    assert tx.finish(2)[0] == KafkaError.PRODUCER_FENCED
    for sequence in range(2):
        wait_for("the markers are written", lambda: tx.add(4) == 0, PATIENCE_S)
        assert tx.write(4, sequence, version=9) == KafkaError.NONE
        assert tx.end(4, commit=True) == KafkaError.NONE


def test_a_producer_that_starts_while_another_one_ends_is_not_taken_for_a_fenced_one(tx: Tx, owner: Connect) -> None:
    starting = owner(tx.name)
    codes: list[int] = []
    epoch = 0
    for _ in range(10):
        tx.write(epoch)
        other = threading.Thread(target=lambda: codes.append(init(starting, tx.name)["error_code"]))
        other.start()
        tx.finish(epoch)
        other.join(PATIENCE_S)
        epoch = init(tx.raw, tx.name)["producer_epoch"]
    assert codes == [KafkaError.NONE] * 10
