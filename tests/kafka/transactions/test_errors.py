"""Wrong requests around transactions, in both protocols: Kafka's own code, nothing hangs, nothing is half visible."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import wait_for
from tests.kafka.reading import PATIENCE_S
from tests.kafka.transactions.raw import JOINING, Tx, add, committed, data, end, finish, fresh, init, write
from tests.kafka.transactions.test_clients import await_read, read

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


def test_what_was_never_begun_cannot_be_ended(tx: Tx, owner: Connect, version: int) -> None:
    unknown = fresh("unknown")
    assert commit(tx.raw, tx.name, tx.id, 0, version) == KafkaError.INVALID_TXN_STATE
    for is_commit in (True, False):
        code = commit(owner(unknown), unknown, tx.id, 0, version, commit=is_commit)
        assert code == KafkaError.INVALID_PRODUCER_ID_MAPPING
        code = commit(tx.raw, tx.name, tx.id + 1_000, 0, version, commit=is_commit)
        assert code == KafkaError.INVALID_PRODUCER_ID_MAPPING


def test_an_ended_transaction_is_not_ended_the_other_way(tx: Tx, bootstrap: str, version: int) -> None:
    assert tx.add(0) == KafkaError.NONE
    assert tx.write(0, version=version) == KafkaError.NONE
    assert commit(tx.raw, tx.name, tx.id, 0, version) == KafkaError.NONE
    assert commit(tx.raw, tx.name, tx.id, 0, version, commit=False) == KafkaError.INVALID_TXN_STATE
    await_read(bootstrap, tx.topic, [b"v"])


class Batch(NamedTuple):
    """A batch as it differs from the next one of a producer in epoch 1, whose transaction is open."""

    epoch: int = 1
    sequence: int = 1
    is_transactional: bool = True
    is_named: bool = True  # the request names the transactional id
    producer: Literal["own", "unknown", "idempotent", "another"] = "own"
    place: Literal["in it", "outside"] = "in it"  # a partition that the transaction has, or one that was not added
    is_after_the_end: bool = False


CODES_SINCE_11 = {9: KafkaError.INVALID_TXN_STATE, 11: KafkaError.TRANSACTION_ABORTABLE}
NO_PRODUCER = KafkaError.INVALID_PRODUCER_ID_MAPPING
# What Kafka 4.3 answers by the version of Produce: one code for all, or one for each that has this case. (After the end
# Kafka takes a batch of version 12, because a client of that version has another epoch by then.)
WRONG: dict[str, tuple[Batch, KafkaError | dict[int, KafkaError]]] = {
    "of an epoch that was never given": (Batch(epoch=2, sequence=0), KafkaError.INVALID_PRODUCER_EPOCH),
    "of such an epoch, and out of order": (Batch(epoch=2, sequence=7), KafkaError.INVALID_PRODUCER_EPOCH),
    "of such an epoch, elsewhere": (Batch(epoch=2, sequence=0, place="outside"), KafkaError.INVALID_PRODUCER_EPOCH),
    "of an older epoch": (Batch(epoch=0), KafkaError.INVALID_PRODUCER_EPOCH),
    "of an older epoch, elsewhere": (Batch(epoch=0, place="outside"), KafkaError.INVALID_PRODUCER_EPOCH),
    "of an unknown producer": (Batch(producer="unknown"), NO_PRODUCER),
    "of a producer without transactions": (Batch(producer="idempotent"), NO_PRODUCER),
    "of another transactional id's producer": (Batch(producer="another", sequence=0), NO_PRODUCER),
    "of a partition that was not added": (Batch(sequence=0, place="outside"), CODES_SINCE_11),
    "after the end": (Batch(is_after_the_end=True), CODES_SINCE_11 | {12: KafkaError.TRANSACTION_ABORTABLE}),
    "after the end, and out of order": (Batch(sequence=7, is_after_the_end=True), CODES_SINCE_11),
    "out of order": (Batch(sequence=7), KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
    "without its transactional id": (Batch(is_named=False), KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    "plain in a transaction": (Batch(is_transactional=False, is_named=False), KafkaError.INVALID_TXN_STATE),
    "plain of a newer epoch": (
        Batch(epoch=2, sequence=0, is_transactional=False, is_named=False),
        KafkaError.INVALID_TXN_STATE,
    ),
    "plain of an older epoch": (
        Batch(epoch=0, is_transactional=False, is_named=False),
        KafkaError.INVALID_PRODUCER_EPOCH,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_batch_that_is_no_part_of_a_transaction_is_not_stored(
    owner: Connect, leader: Connect, new_topic: NewTopic, case: str
) -> None:
    """It costs the transaction that is open nothing, nor its readers."""
    wrong, wanted = WRONG[case]
    codes = wanted if isinstance(wanted, dict) else dict.fromkeys((9, 11, 12), wanted)
    topics = {"in it": new_topic(), "outside": new_topic()}
    leaders = {place: leader(topic) for place, topic in topics.items()}
    for version, code in codes.items():
        name = fresh("tx")
        raw = owner(name)
        producer = init(raw, name)["producer_id"]
        assert init(raw, name)["producer_epoch"] == 1
        assert add(raw, name, producer, 1, topics["in it"]) == KafkaError.NONE
        stored = write(leaders["in it"], name, topics["in it"], producer, 1, version=version)
        assert stored["error_code"] == KafkaError.NONE
        if wrong.is_after_the_end:
            commit_and_wait(raw, name, producer, leaders["in it"], topics["in it"], stored["base_offset"])
        ends = {place: leaders[place].list_offset(topic, -1)["offset"] for place, topic in topics.items()}
        ids = {"own": producer, "unknown": producer + 1_000, "idempotent": idempotent_producer(raw)}
        ids["another"] = another_producer(owner) if wrong.producer == "another" else -1
        data = batch(
            b"wrong",
            producer_id=ids[wrong.producer],
            producer_epoch=wrong.epoch,
            base_sequence=wrong.sequence,
            is_transactional=wrong.is_transactional,
        )
        answer = leaders[wrong.place].produce(
            topics[wrong.place], data, version=version, transactional_id=name if wrong.is_named else None
        )
        assert (version, KafkaError(answer["error_code"])) == (version, code)
        assert ends == {place: leaders[place].list_offset(topic, -1)["offset"] for place, topic in topics.items()}
        if not wrong.is_after_the_end:
            commit_and_wait(raw, name, producer, leaders["in it"], topics["in it"], stored["base_offset"])


def commit_and_wait(raw: RawKafka, name: str, producer: int, at_leader: RawKafka, topic: str, offset: int) -> None:
    """The transaction has one record, at this offset, and readers pass it and the marker after it."""
    assert end(raw, name, producer, 1, commit=True) == KafkaError.NONE
    wait_for("the marker is committed", lambda: committed(at_leader, topic) == offset + 2, PATIENCE_S)


def another_producer(owner: Connect) -> int:
    """Of a transactional id of its own, in epoch 1."""
    name = fresh("another")
    raw = owner(name)
    init(raw, name)
    return int(init(raw, name)["producer_id"])


def idempotent_producer(raw: RawKafka) -> int:
    body = raw.call(
        ApiKey.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1
    )
    return int(body["producer_id"])


@pytest.mark.parametrize("epoch", [0, 2], ids=["older", "never given"])
def test_a_request_of_another_epoch_changes_nothing(tx: Tx, coordinator: Connect, epoch: int) -> None:
    group = fresh("group")
    of_group = coordinator(group)
    assert init(tx.raw, tx.name)["producer_epoch"] == 1
    assert tx.add(1) == KafkaError.NONE
    assert tx.write(1) == KafkaError.NONE
    who = {"transactional_id": tx.name, "producer_id": tx.id, "producer_epoch": epoch}
    offsets = [{"name": tx.topic, "partitions": [{"partition_index": 0, "committed_offset": 7}]}]

    def stage(version: int) -> int:
        body = of_group.call(ApiKey.TXN_OFFSET_COMMIT, version, group_id=group, topics=offsets, **who)
        return int(body["topics"][0]["partitions"][0]["error_code"])

    def add_offsets(version: int) -> int:
        return int(tx.raw.call(ApiKey.ADD_OFFSETS_TO_TXN, version, group_id=group, **who)["error_code"])

    for version, code in ((1, KafkaError.INVALID_PRODUCER_EPOCH), (3, KafkaError.PRODUCER_FENCED)):
        assert tx.add(epoch, version) == code
        assert add_offsets(version) == code
        for is_commit in (True, False):
            assert tx.end(epoch, commit=is_commit, version=version) == code
    for is_commit in (True, False):
        assert tx.finish(epoch, commit=is_commit)[0] == KafkaError.PRODUCER_FENCED
    assert [stage(version) for version in (3, 5)] == [KafkaError.INVALID_PRODUCER_EPOCH] * 2
    for version, code in ((3, KafkaError.INVALID_PRODUCER_EPOCH), (4, KafkaError.PRODUCER_FENCED)):
        refused = init(tx.raw, tx.name, version, producer_id=tx.id, producer_epoch=epoch)
        assert refused["error_code"] == code
    assert tx.committed() == 0, "it is still open"
    commit_and_wait(tx.raw, tx.name, tx.id, tx.leader, tx.topic, 0)


def test_a_transactional_producer_may_write_plainly_where_it_has_no_transaction(
    tx: Tx, leader: Connect, new_topic: NewTopic, bootstrap: str
) -> None:
    """As an idempotent one, in Kafka too."""
    other = new_topic()
    assert tx.add(0) == KafkaError.NONE
    plain = batch(b"p", producer_id=tx.id, producer_epoch=0, base_sequence=0)
    assert leader(other).produce(other, plain)["error_code"] == KafkaError.NONE
    await_read(bootstrap, other, [b"p"])


def test_an_unknown_partition_costs_the_transaction_nothing(tx: Tx, bootstrap: str, version: int) -> None:
    assert tx.add(0) == KafkaError.NONE
    nowhere = replace(tx, topic=fresh("nowhere"))
    assert nowhere.write(0, version=version) == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    place = {"name": tx.topic, "partition_data": [{"index": 7, "records": [data(tx.id, 0)]}]}
    fields = {"transactional_id": tx.name, "acks": -1, "timeout_ms": 10_000, "topic_data": [place]}
    (there,) = tx.leader.call(ApiKey.PRODUCE, version, **fields)["responses"][0]["partition_responses"]
    assert there["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert tx.write(0, version=version) == KafkaError.NONE
    assert commit(tx.raw, tx.name, tx.id, 0, version) == KafkaError.NONE
    await_read(bootstrap, tx.topic, [b"v"])


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_time_out_that_is_not_allowed_starts_no_producer(owner: Connect, timeout_ms: int) -> None:
    name = fresh("tx")
    raw = owner(name)
    refused = init(raw, name, transaction_timeout_ms=timeout_ms)
    assert refused["error_code"] == KafkaError.INVALID_TRANSACTION_TIMEOUT
    assert init(raw, name, transaction_timeout_ms=900_000)["producer_epoch"] == 0, "it is the first of its id"


def test_an_empty_transactional_id_is_an_invalid_request_at_every_node(
    cluster: Cluster, coordinator: Connect, new_topic: NewTopic
) -> None:
    topic, group = new_topic(), fresh("group")
    who = {"transactional_id": "", "producer_id": 1, "producer_epoch": 0}
    codes = []
    for node in cluster.nodes.values():
        raw = RawKafka(node.kafka)
        codes += [init(raw, "")["error_code"], add(raw, "", 1, 0, topic)]
        codes += [end(raw, "", 1, 0, commit=True), finish(raw, "", 1, 0, commit=False)[0]]
        codes.append(raw.call(ApiKey.ADD_OFFSETS_TO_TXN, 4, group_id=group, **who)["error_code"])
        (described,) = raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[""])["transaction_states"]
        codes.append(described["error_code"])
        raw.close()
    offsets = [{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 7}]}]
    for version in (3, 5):
        body = coordinator(group).call(ApiKey.TXN_OFFSET_COMMIT, version, group_id=group, topics=offsets, **who)
        codes.append(body["topics"][0]["partitions"][0]["error_code"])
    assert set(map(KafkaError, codes)) == {KafkaError.INVALID_REQUEST}


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_producer_that_names_itself_under_an_id_that_is_not_known_begins_again(owner: Connect, version: int) -> None:
    """As clients do whose id has been forgotten."""
    name = fresh("forgotten")
    raw = owner(name)
    gone = idempotent_producer(raw)
    begun = init(raw, name, version, producer_id=gone, producer_epoch=3)
    assert (begun["error_code"], begun["producer_epoch"]) == (KafkaError.NONE, 0)
    assert begun["producer_id"] > gone
    assert init(raw, name, version, producer_id=begun["producer_id"], producer_epoch=0)["producer_epoch"] == 1


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
