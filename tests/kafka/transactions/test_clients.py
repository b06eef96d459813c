"""Transactions of real clients: all or nothing for committed readers, fencing, time-outs, and the deaths of nodes."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any

import aiokafka.errors
import confluent_kafka
import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from smq.clients import SyncConsumer
from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import CLI, ClusterError, wait_for
from tests.kafka.reading import PATIENCE_S, messages
from tests.kafka.transactions.raw import add, end, fresh, init

NewTopic = Callable[..., str]
Leader = Callable[[str], RawKafka]


def transactional(bootstrap: str, name: str, **config: Any) -> confluent_kafka.Producer:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": name, **config})
    producer.init_transactions(PATIENCE_S)
    return producer


def read(bootstrap: str, topic: str, *, partitions: int = 1, isolation: str = "read_committed") -> list[bytes]:
    """All values up to the end, partition by partition."""
    found = messages(bootstrap, topic, partitions=partitions, isolation=isolation)
    return [message.value() or b"" for per_partition in found for message in per_partition]


def await_read(bootstrap: str, topic: str, expected: list[bytes], *, partitions: int = 1) -> None:
    """The markers are written soon after the decision."""
    found: list[bytes] = []

    def is_there() -> bool:
        nonlocal found
        found = read(bootstrap, topic, partitions=partitions)
        return found == expected

    try:
        wait_for("committed readers get it", is_there, PATIENCE_S)
    except ClusterError:
        assert found == expected
        raise


# ---------------------------------------------------------------------------------------------- librdkafka
def test_committed_readers_get_committed_transactions_only(bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic(2)
    producer = transactional(bootstrap, fresh("tx"))
    for n, is_commit in enumerate((True, False, True, False, True)):
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(topic, b"%d" % n, partition=partition)
        (producer.commit_transaction if is_commit else producer.abort_transaction)(PATIENCE_S)
    await_read(bootstrap, topic, [b"0", b"2", b"4"] * 2, partitions=2)
    raw = read(bootstrap, topic, partitions=2, isolation="read_uncommitted")
    half = len(raw) // 2
    assert raw[:half] == raw[half:] == sorted(raw[:half]), "an aborted batch may never have left, but none is misplaced"


def test_an_open_transaction_holds_committed_readers_back(leader: Leader, bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = transactional(bootstrap, fresh("tx"))
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    plain = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    plain.produce(topic, b"after", partition=0)
    assert plain.flush(PATIENCE_S) == 0
    raw = leader(topic)
    wait_for("the records are committed", lambda: raw.list_offset(topic, -1)["offset"] == 2, PATIENCE_S)
    held = _fetch_committed(raw, topic, 0)
    assert (held["last_stable_offset"], held["high_watermark"], not held["records"]) == (0, 2, True)
    assert read(bootstrap, topic) == []
    assert read(bootstrap, topic, isolation="read_uncommitted") == [b"open", b"after"]
    producer.commit_transaction(PATIENCE_S)
    await_read(bootstrap, topic, [b"open", b"after"])


def _fetch_committed(raw: RawKafka, topic: str, offset: int) -> dict[str, Any]:
    body = raw.call(
        ApiKey.FETCH,
        11,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=1,
        topics=[
            {"topic": topic, "partitions": [{"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}]}
        ],
        forgotten_topics_data=[],
        rack_id="",
    )
    answer: dict[str, Any] = body["responses"][0]["partitions"][0]
    return answer


def test_a_new_producer_fences_the_one_before_and_aborts_what_it_left_open(bootstrap: str, new_topic: NewTopic) -> None:
    topic, name = new_topic(), fresh("tx")
    zombie = transactional(bootstrap, name)
    zombie.begin_transaction()
    zombie.produce(topic, b"zombie", partition=0)
    assert zombie.flush(PATIENCE_S) == 0
    producer = transactional(bootstrap, name)
    producer.begin_transaction()
    producer.produce(topic, b"new", partition=0)
    producer.commit_transaction(PATIENCE_S)
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        zombie.commit_transaction(PATIENCE_S)
    assert raised.value.args[0].fatal()
    await_read(bootstrap, topic, [b"new"])


def test_offsets_are_committed_with_the_records_or_not_at_all(bootstrap: str, new_topic: NewTopic) -> None:
    source, target, group = new_topic(), new_topic(), fresh("group")
    plain = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for n in range(6):
        plain.produce(source, b"%d" % n, partition=0)
    assert plain.flush(PATIENCE_S) == 0
    config = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
    }
    consumer = confluent_kafka.Consumer(config)
    consumer.subscribe([source])
    producer = transactional(bootstrap, fresh("tx"))

    def copy(count: int, *, is_commit: bool) -> None:
        producer.begin_transaction()
        messages: list[confluent_kafka.Message] = []
        until = time.monotonic() + PATIENCE_S
        while len(messages) < count:
            assert time.monotonic() < until
            messages += [m for m in consumer.consume(count - len(messages), 1.0) if m.error() is None]
        for message in messages:
            producer.produce(target, b"copy of %s" % message.value(), partition=0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_S
        )
        (producer.commit_transaction if is_commit else producer.abort_transaction)(PATIENCE_S)

    def committed() -> int:
        offset: int = consumer.committed([confluent_kafka.TopicPartition(source, 0)], PATIENCE_S)[0].offset
        return offset

    copy(2, is_commit=True)
    assert committed() == 2
    copy(2, is_commit=False)
    assert committed() == 2
    consumer.seek(confluent_kafka.TopicPartition(source, 0, 2))
    copy(4, is_commit=True)
    assert committed() == 6
    consumer.close()
    await_read(bootstrap, target, [b"copy of %d" % n for n in range(6)])


def test_a_time_out_aborts_and_fences(bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = transactional(bootstrap, fresh("tx"), **{"transaction.timeout.ms": 2_000, "message.timeout.ms": 2_000})
    producer.begin_transaction()
    producer.produce(topic, b"slow", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    plain = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    plain.produce(topic, b"after", partition=0)
    assert plain.flush(PATIENCE_S) == 0
    await_read(bootstrap, topic, [b"after"])
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(PATIENCE_S)


@pytest.mark.parametrize("victim", ["leader", "coordinator"])
def test_transactions_go_on_through_the_death_of_a_node(fault_cluster: Cluster, victim: str) -> None:
    topic, name = fault_cluster.make_topic(3), fresh("tx")
    addresses = ",".join(node.kafka for node in fault_cluster.nodes.values())
    producer = transactional(addresses, name)
    expected: list[list[bytes]] = [[], [], []]
    number = fault_cluster.wait_leader(topic, 0)
    if victim == "coordinator":
        raw = RawKafka(fault_cluster.nodes[1].kafka)
        (found,) = raw.call(ApiKey.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=[name])["coordinators"]
        raw.close()
        number = found["node_id"]
    for n in range(30):
        producer.begin_transaction()
        for partition in range(3):
            producer.produce(topic, b"%d" % n, partition=partition)
        if n == 10:
            producer.flush(PATIENCE_S)
            fault_cluster.kill(number)
        if n % 3 == 2:
            producer.abort_transaction(PATIENCE_S)
            continue
        producer.commit_transaction(PATIENCE_S)
        for values in expected:
            values.append(b"%d" % n)
    await_read(addresses, topic, [v for values in expected for v in values], partitions=3)
    assert len(expected[0]) >= 15


# ------------------------------------------------------------------------------------------------ aiokafka
def test_aiokafka_commits_aborts_and_is_fenced(bootstrap: str, new_topic: NewTopic) -> None:
    topic, name = new_topic(), fresh("tx")

    async def body() -> list[bytes | None]:
        first = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name)
        await first.start()
        async with first.transaction():
            await first.send_and_wait(topic, b"committed", partition=0)
        await first.begin_transaction()
        await first.send_and_wait(topic, b"aborted", partition=0)
        await first.abort_transaction()
        await first.begin_transaction()
        await first.send_and_wait(topic, b"zombie", partition=0)
        second = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name)
        await second.start()
        with pytest.raises(aiokafka.errors.ProducerFenced):
            await first.commit_transaction()
        async with second.transaction():
            await second.send_and_wait(topic, b"second", partition=0)
        await first.stop()
        await second.stop()
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
        await consumer.start()
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), 0)
        values: list[bytes | None] = []
        while len(values) < 2:
            values.append((await asyncio.wait_for(consumer.getone(), PATIENCE_S)).value)
        await consumer.stop()
        return values

    assert asyncio.run(body()) == [b"committed", b"second"]


def test_kafka_python_commits(bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = kafka.KafkaProducer(bootstrap_servers=bootstrap.split(","), transactional_id=fresh("tx"))
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(topic, b"v", partition=0)
    producer.commit_transaction()
    producer.close()
    await_read(bootstrap, topic, [b"v"])


# ------------------------------------------------------------------------------------------- wrong requests
def test_wrong_requests_get_kafkas_own_codes(owner: Any, leader: Leader, new_topic: NewTopic) -> None:
    topic, name = new_topic(), fresh("tx")
    raw = owner(name)
    assert init(raw, name, transaction_timeout_ms=900_001)["error_code"] == KafkaError.INVALID_TRANSACTION_TIMEOUT
    first = init(raw, name)
    producer = first["producer_id"]
    assert first["producer_epoch"] == 0
    assert end(raw, name, producer, 0, commit=True) == KafkaError.INVALID_TXN_STATE
    data = batch(b"v", producer_id=producer, producer_epoch=0, base_sequence=0, is_transactional=True)
    at_leader = leader(topic)
    answer = at_leader.produce(topic, data, transactional_id=name)
    assert answer["error_code"] == KafkaError.INVALID_TXN_STATE, "the partition was not added"
    assert add(raw, name, producer, 0, "no-such-topic") == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert add(raw, name, producer + 1_000, 0, topic) == KafkaError.INVALID_PRODUCER_ID_MAPPING
    other = fresh("other")
    assert add(owner(other), other, producer, 0, topic) == KafkaError.INVALID_PRODUCER_ID_MAPPING
    assert add(raw, name, producer, 0, topic) == KafkaError.NONE
    assert at_leader.produce(topic, data, transactional_id=name)["base_offset"] == 0
    plain = batch(b"v", producer_id=producer, producer_epoch=0, base_sequence=1)
    assert at_leader.produce(topic, plain)["error_code"] == KafkaError.INVALID_TXN_STATE
    assert (
        at_leader.produce(topic, data, acks=1, transactional_id=name)["error_code"] == KafkaError.INVALID_REQUIRED_ACKS
    )
    second = init(raw, name)
    assert (second["producer_id"], second["producer_epoch"]) == (producer, 2), "one for the abort, one for the producer"
    for version, code in ((1, KafkaError.INVALID_PRODUCER_EPOCH), (2, KafkaError.PRODUCER_FENCED)):
        assert add(raw, name, producer, 0, topic, version) == code
        assert end(raw, name, producer, 0, commit=True, version=version) == code
    late = batch(b"w", producer_id=producer, producer_epoch=0, base_sequence=1, is_transactional=True)
    assert at_leader.produce(topic, late, transactional_id=name)["error_code"] == KafkaError.INVALID_PRODUCER_EPOCH


def test_offsets_of_an_open_transaction_are_unstable_for_those_who_ask(
    owner: Any, coordinator: Callable[[str], RawKafka], new_topic: NewTopic
) -> None:
    topic, name, group = new_topic(), fresh("tx"), fresh("group")
    raw, of_group = owner(name), coordinator(group)
    producer = init(raw, name)["producer_id"]
    fields = {"transactional_id": name, "producer_id": producer, "producer_epoch": 0, "group_id": group}
    offsets = [{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 7}]}]

    def stage() -> int:
        body = of_group.call(ApiKey.TXN_OFFSET_COMMIT, 3, topics=offsets, **fields)
        code: int = body["topics"][0]["partitions"][0]["error_code"]
        return code

    def fetch(*, stable: bool) -> tuple[int, int]:
        topics = [{"name": topic, "partition_indexes": [0]}]
        body = of_group.call(ApiKey.OFFSET_FETCH, 7, group_id=group, topics=topics, require_stable=stable)
        found = body["topics"][0]["partitions"][0]
        return found["error_code"], found["committed_offset"]

    assert stage() == KafkaError.INVALID_TXN_STATE, "the group was not added"
    assert raw.call(ApiKey.ADD_OFFSETS_TO_TXN, 3, **fields)["error_code"] == KafkaError.NONE
    assert stage() == KafkaError.NONE
    assert fetch(stable=True) == (KafkaError.UNSTABLE_OFFSET_COMMIT, -1)
    assert fetch(stable=False) == (KafkaError.NONE, -1)
    assert end(raw, name, producer, 0, commit=True) == KafkaError.NONE
    assert end(raw, name, producer, 0, commit=True) == KafkaError.NONE, "the client may repeat it"
    assert end(raw, name, producer, 0, commit=False) == KafkaError.INVALID_TXN_STATE
    assert fetch(stable=True) == (KafkaError.NONE, 7)


@pytest.mark.parametrize("version", range(1, SERVED[ApiKey.FIND_COORDINATOR].versions.hi + 1))
def test_a_transactional_id_has_a_coordinator(leader: Leader, new_topic: NewTopic, version: int) -> None:
    raw = leader(new_topic())

    def ask(kind: int) -> int:
        body = raw.call(ApiKey.FIND_COORDINATOR, version, key="x", key_type=kind, coordinator_keys=["x"])
        answer = body["coordinators"][0] if version >= 4 else body
        code: int = answer["error_code"]
        return code

    assert [ask(kind) for kind in (0, 1, 2)] == [KafkaError.NONE, KafkaError.NONE, KafkaError.INVALID_REQUEST]


# ----------------------------------------------------------------------------------------------------- tools
def test_tools_see_an_open_transaction(owner: Any, leader: Leader, bootstrap: str, new_topic: NewTopic) -> None:
    topic, name = new_topic(), fresh("tx")
    producer = transactional(bootstrap, name)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    raw = owner(name)
    (found,) = raw.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[name])["transaction_states"]
    assert (found["error_code"], found["transaction_state"]) == (KafkaError.NONE, "Ongoing")
    assert found["topics"] == [{"topic": topic, "partitions": [0]}]
    body = raw.call(
        ApiKey.LIST_TRANSACTIONS, 1, state_filters=["Ongoing", "Odd"], producer_id_filters=[], duration_filter=-1
    )
    assert body["unknown_state_filters"] == ["Odd"]
    assert {"transactional_id": name, "producer_id": found["producer_id"], "transaction_state": "Ongoing"} in body[
        "transaction_states"
    ]
    at_leader = leader(topic)
    ends = [at_leader.list_offset(topic, -1, isolation_level=level)["offset"] for level in (0, 1)]
    assert ends == [1, 0], "a committed reader's latest is before the open transaction"
    wanted = [{"name": topic, "partition_indexes": [0]}]
    described = at_leader.call(ApiKey.DESCRIBE_PRODUCERS, 0, topics=wanted)["topics"][0]["partitions"][0]
    (active,) = described["active_producers"]
    assert (active["producer_id"], active["current_txn_start_offset"]) == (found["producer_id"], 0)
    producer.abort_transaction(PATIENCE_S)
    (found,) = owner("none").call(ApiKey.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["none"])["transaction_states"]
    assert found["error_code"] == KafkaError.TRANSACTIONAL_ID_NOT_FOUND


def test_transactions_are_listed_by_a_pattern(owner: Any, cluster: Cluster) -> None:
    """RE2's, which has to match the whole id."""
    names = {color: fresh(color) for color in ("blue", "red")}
    for name in names.values():
        init(owner(name), name)

    def listed(pattern: str | None) -> tuple[set[int], set[str]]:
        codes, found = set(), set()
        for node in cluster.nodes.values():
            raw = RawKafka(node.kafka)
            fields = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}
            body = raw.call(ApiKey.LIST_TRANSACTIONS, 2, transactional_id_pattern=pattern, **fields)
            raw.close()
            codes.add(body["error_code"])
            found |= {state["transactional_id"] for state in body["transaction_states"]} & set(names.values())
        return codes, found

    for pattern, colors in {
        "blue-[[:xdigit:]]{8}": {"blue"},
        "(blue|red)-.*": {"blue", "red"},
        "blue": set(),
        "": {"blue", "red"},
        None: {"blue", "red"},
    }.items():
        assert listed(pattern) == ({KafkaError.NONE}, {names[color] for color in colors}), pattern
    for pattern in ("(", r"(blue)\1", "(?=blue)"):
        assert listed(pattern) == ({KafkaError.INVALID_REGULAR_EXPRESSION}, set()), pattern


# ------------------------------------------------------------------------------------------- smq's own readers
def test_smqs_own_readers_get_committed_records_only(cluster: Cluster, bootstrap: str, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = transactional(bootstrap, fresh("tx"))
    for n, is_commit in enumerate((True, False, True, False)):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(topic, b"%d" % n, partition=0)
        assert producer.flush(PATIENCE_S) == 0
        (producer.commit_transaction if is_commit else producer.abort_transaction)(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    expected = [b"0"] * 3 + [b"2"] * 3
    addresses = [node.grpc for node in cluster.nodes.values()]
    await_read(bootstrap, topic, expected)
    with SyncConsumer(addresses) as consumer:
        consumer.assign([(topic, 0)], "RESET_TO_EARLIEST")
        found: list[bytes | None] = []
        until = time.monotonic() + PATIENCE_S
        while consumer.position(topic, 0) < 16 and time.monotonic() < until:
            for records in consumer.getmany(timeout_ms=200).values():
                found += [record.value for record in records]
        assert (found, consumer.position(topic, 0)) == (expected, 16), "four times three records and a marker"
    script = [*CLI, "consume", topic, "--offset-type", "RESET_TO_EARLIEST", "--json"]
    bootstrap_option = [part for address in addresses for part in ("--bootstrap", address)]
    done = subprocess.run([*script, *bootstrap_option[:2]], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6
    producer.abort_transaction(PATIENCE_S)
