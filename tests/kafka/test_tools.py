"""The keys that administrators' tools call, through clients that others wrote: kafka-python and librdkafka."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import confluent_kafka
import kafka
import kafka.errors
import pytest
from kafka.admin import KafkaAdminClient

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.tools.raft_quorum import METADATA_TOPIC
from smq.testing.cluster import Cluster, live_cluster
from smq.testing.kafka_client import RawKafka, batch
from smq.testing.node_process import wait_for
from tests.kafka.client_adapters import bootstrap as addresses

NewTopic = Callable[..., str]
Leader = Callable[[str], RawKafka]
PATIENCE_S = 30.0


@pytest.fixture
def admin(bootstrap: str) -> Iterator[Any]:  # Any: kafka-python has no types
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap.split(","))) as client:
        yield client


# ------------------------------------------------------------------------------------------------ each version
REQUESTS: dict[ApiKey, dict[str, Any]] = {
    ApiKey.DESCRIBE_LOG_DIRS: {"topics": None},
    ApiKey.ELECT_LEADERS: {"election_type": 0, "topic_partitions": [], "timeout_ms": 1_000},
    ApiKey.LIST_PARTITION_REASSIGNMENTS: {"timeout_ms": 1_000, "topics": None},
    ApiKey.DESCRIBE_CLIENT_QUOTAS: {"components": [], "strict": False},
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: {"users": None},
    ApiKey.UPDATE_FEATURES: {
        "feature_updates": [{"feature": "transaction.version", "max_version_level": 2}],
        "timeout_ms": 1_000,
    },
    ApiKey.DESCRIBE_QUORUM: {"topics": [{"topic_name": METADATA_TOPIC, "partitions": [{"partition_index": 0}]}]},
    ApiKey.DESCRIBE_PRODUCERS: {"topics": []},
    ApiKey.LIST_CONFIG_RESOURCES: {"resource_types": []},
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: {"topics": [], "response_partition_limit": 10, "cursor": None},
}
EACH = [(key, v) for key in REQUESTS for v in range(SERVED[key].versions.lo, SERVED[key].versions.hi + 1)]


@pytest.mark.parametrize(("key", "version"), EACH, ids=[f"{key.name}-v{version}" for key, version in EACH])
def test_every_version_is_answered(cluster: Cluster, key: ApiKey, version: int) -> None:
    with closing(RawKafka(cluster.nodes[1].kafka)) as raw:
        assert raw.call(key, version, **REQUESTS[key]).get("error_code", 0) == 0


# --------------------------------------------------------------------------------------------- topics in pages
def test_topics_are_described_in_pages(admin: Any, new_topic: NewTopic) -> None:
    topics = sorted(new_topic(3) for _ in range(2))
    seen: list[tuple[str, int]] = []
    cursor = None
    while True:
        page = admin.describe_topic_partitions(topics, response_partition_limit=2, cursor=cursor)
        seen += [(t["name"], p["partition_index"]) for t in page["topics"] for p in t["partitions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [(topic, index) for topic in topics for index in range(3)]


def test_an_unknown_topic_is_described_as_such(admin: Any) -> None:
    (found,) = admin.describe_topic_partitions(["nowhere"])["topics"]
    assert found["error_code"] == kafka.errors.UnknownTopicOrPartitionError.errno


# ------------------------------------------------------------------------------------------------- directories
def test_each_node_describes_its_own_directory(
    cluster: Cluster, admin: Any, leader: Leader, new_topic: NewTopic
) -> None:
    topic = new_topic()
    sent = batch(b"x" * 50_000)
    leader(topic).produce(topic, sent)

    def held_everywhere() -> bool:
        found = {d["broker"]: d["log_dirs"] for d in admin.describe_log_dirs([topic])}
        assert set(found) == set(cluster.nodes)
        sizes = []
        for number, directories in found.items():
            (directory,) = directories
            assert directory["log_dir"] == str(cluster.nodes[number].data_dir)
            assert 0 < directory["usable_bytes"] <= directory["total_bytes"]
            sizes += [p["partition_size"] for t in directory["topics"] for p in t["partitions"] if t["name"] == topic]
        return len(sizes) == len(cluster.nodes) and all(len(sent) <= size < len(sent) + 1_000 for size in sizes)

    wait_for("the record on every node's disk", held_everywhere)


# --------------------------------------------------------------------------------------------------- producers
def test_idempotent_producers_are_described_at_every_replica(
    cluster: Cluster, admin: Any, bootstrap: str, new_topic: NewTopic
) -> None:
    topic = new_topic()
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for _ in range(3):
        producer.produce(topic, b"v")
    assert producer.flush(PATIENCE_S) == 0
    partition = kafka.TopicPartition(topic, 0)
    (found,) = admin.describe_producers([partition])[partition].active_producers
    assert (found.producer_epoch, found.last_sequence, found.current_transaction_start_offset) == (0, 2, -1)
    assert found.last_timestamp > 0

    def is_known_to(node: int) -> bool:
        return list(admin.describe_producers([partition], broker_id=node)[partition].active_producers) == [found]

    for node in cluster.nodes:
        wait_for(f"the same at node {node}", partial(is_known_to, node))


def test_a_node_without_a_replica_describes_no_producers(cluster: Cluster, admin: Any, new_topic: NewTopic) -> None:
    topic = new_topic(replication_factor=1)
    elsewhere = next(node for node in cluster.nodes if node != cluster.wait_leader(topic, 0))
    with pytest.raises(kafka.errors.NotLeaderForPartitionError):
        admin.describe_producers([kafka.TopicPartition(topic, 0)], broker_id=elsewhere)


# ------------------------------------------------------------------------------------------------------ quorum
def test_any_node_describes_the_quorum_as_its_leader_knows_it(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        with closing(KafkaAdminClient(bootstrap_servers=[node.kafka])) as admin:

            def described(admin: Any = admin) -> dict[str, Any] | None:
                (topic,) = admin.describe_metadata_quorum()["topics"]
                (partition,) = topic["partitions"]
                ends = [voter["log_end_offset"] for voter in partition["current_voters"]]
                return partition if min(ends) >= partition["high_watermark"] > 0 else None

            found = wait_for("all voters with all that is committed", described)
            assert found["leader_id"] == cluster.raft_leader()
            assert [voter["replica_id"] for voter in found["current_voters"]] == sorted(cluster.nodes)
            assert len({voter["replica_directory_id"] for voter in found["current_voters"]}) == len(cluster.nodes)
            assert found["observers"] == []


# ------------------------------------------------------------------------------------------------------- lists
def test_resources_with_a_configuration_are_listed(cluster: Cluster, admin: Any, new_topic: NewTopic) -> None:
    topic = new_topic()
    found = admin.list_config_resources()
    assert topic in found["topic"]
    assert found["broker"] == [str(node) for node in sorted(cluster.nodes)]
    assert set(admin.list_config_resources(["BROKER"])) == {"broker"}


def test_no_partition_is_being_reassigned(admin: Any, new_topic: NewTopic) -> None:
    assert admin.list_partition_reassignments() == {}
    assert admin.list_partition_reassignments({new_topic(): [0]}) == {}


# --------------------------------------------------------------------------------------------------- elections
PARTITIONS = 6
PREFERRED, UNCLEAN = 0, 1


def _preferred_and_leader(cluster: Cluster, topic: str) -> list[tuple[int, int]]:
    (described,) = cluster.nodes[1].raw.describe(topic, linearizable=True).topics
    return [(partition.replicas[0], partition.leader) for partition in described.partitions]


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that does not give leaderships back by itself."""
    with live_cluster(tmp_path_factory.mktemp("steady"), rebalance_interval_ms=3_600_000) as made:
        yield made


@pytest.fixture
def unbalanced(steady: Cluster) -> tuple[Cluster, str]:
    """That cluster, and a topic with some leaderships away from their preferred replicas."""
    steady.heal()
    topic = steady.make_topic(PARTITIONS)
    _, away = _preferred_and_leader(steady, topic)[0]
    steady.kill(away)
    for partition in range(PARTITIONS):
        steady.wait_leader(topic, partition, other_than=away)
    steady.restart(away)
    assert any(preferred != leader for preferred, leader in _preferred_and_leader(steady, topic))
    return steady, topic


def _elect(cluster: Cluster, kind: int, wanted: dict[str, list[int]], timeout_ms: int = 30_000) -> dict[int, int]:
    """The error code of each partition."""
    with closing(KafkaAdminClient(bootstrap_servers=addresses(cluster).split(","))) as admin:
        answer = admin.elect_leaders(kind, wanted, timeout_ms=timeout_ms, raise_errors=False)
    return {p.partition_id: p.error_code for topic in answer.replica_election_results for p in topic.partition_result}


def test_leaderships_go_back_to_the_preferred_replicas_on_request(unbalanced: tuple[Cluster, str]) -> None:
    cluster, topic = unbalanced
    before = _preferred_and_leader(cluster, topic)
    assert _elect(cluster, PREFERRED, {topic: list(range(PARTITIONS))}) == {
        n: KafkaError.ELECTION_NOT_NEEDED if preferred == leader else KafkaError.NONE
        for n, (preferred, leader) in enumerate(before)
    }
    assert all(preferred == leader for preferred, leader in _preferred_and_leader(cluster, topic))
    assert _elect(cluster, PREFERRED, {"nowhere": [0]}) == {0: KafkaError.UNKNOWN_TOPIC_OR_PARTITION}


def test_a_dead_preferred_replica_is_not_elected_and_never_an_unclean_one(unbalanced: tuple[Cluster, str]) -> None:
    cluster, topic = unbalanced
    partition, dead = next(
        (n, preferred)
        for n, (preferred, leader) in enumerate(_preferred_and_leader(cluster, topic))
        if preferred != leader
    )
    cluster.kill(dead)

    def refused(kind: int) -> int:
        requested = [{"topic": topic, "partitions": [partition]}]
        fields = {"election_type": kind, "topic_partitions": requested, "timeout_ms": 2_000}
        with closing(RawKafka(cluster.alive()[0].kafka)) as raw:
            body = raw.call(ApiKey.ELECT_LEADERS, 2, **fields)
        code: int = body["replica_election_results"][0]["partition_result"][0]["error_code"]
        return code

    wait_for("the death to be noticed", lambda: refused(PREFERRED) == KafkaError.PREFERRED_LEADER_NOT_AVAILABLE)
    wait_for("a leader that is not in doubt", lambda: refused(UNCLEAN) == KafkaError.ELECTION_NOT_NEEDED)
