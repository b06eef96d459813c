"""Topics as Kafka's admin clients create them: assigned replicas, topics that exist, internal names; and what a client
may do."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from confluent_kafka.cimpl import NewTopic as ConfluentTopic

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.cluster_view import INTERNAL_TOPICS
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka
from tests.kafka.client_adapters import READ_S

Leader = Callable[[str], RawKafka]
NewTopic = Callable[..., str]
NOT_ASKED = -(2**31)
TOPIC_BITS = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
GROUP_BITS = sum(1 << bit for bit in (3, 6, 8, 10, 11))
CLUSTER_BITS = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


@pytest.fixture
def raw(cluster: Cluster, leader: Leader, new_topic: NewTopic) -> RawKafka:
    return leader(new_topic())


def _grow(raw: RawKafka, name: str, count: int, assignments: list[list[int]] | None, *, is_dry: bool = False) -> Struct:
    rows = [{"broker_ids": nodes} for nodes in assignments] if assignments is not None else None
    requested = {"name": name, "count": count, "assignments": rows}
    body = raw.call(ApiKey.CREATE_PARTITIONS, 3, topics=[requested], timeout_ms=20_000, validate_only=is_dry)
    (answer,) = body["results"]
    found: Struct = answer
    return found


def _replicas(cluster: Cluster, topic: str) -> list[list[int]]:
    (found,) = cluster.nodes[1].raw.describe(topic, linearizable=True).topics
    return [list(partition.replicas) for partition in found.partitions]


# --------------------------------------------------------------------------------------------- assignments
def test_replicas_are_placed_as_the_request_says(cluster: Cluster, raw: RawKafka) -> None:
    answer = raw.create_topic("placed", assignments={1: [3, 1], 0: [2, 3]})
    assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
    assert (answer["num_partitions"], answer["replication_factor"]) == (2, 2)
    assert _replicas(cluster, "placed") == [[2, 3], [3, 1]]
    (found,) = cluster.nodes[1].raw.describe("placed", linearizable=True).topics
    assert [partition.leader for partition in found.partitions] == [2, 3]
    assert _grow(raw, "placed", 4, [[1, 2], [3, 2]])["error_code"] == KafkaError.NONE
    assert _replicas(cluster, "placed") == [[2, 3], [3, 1], [1, 2], [3, 2]]
    assert _grow(raw, "placed", 5, None)["error_code"] == KafkaError.NONE
    assert len(_replicas(cluster, "placed")[4]) == 2


@pytest.mark.parametrize(
    "assignments",
    [
        {0: [1, 1]},
        {0: [1, 9]},
        {0: []},
        {0: [1, 2], 1: [3]},
        {0: [1, 2], 2: [3, 1]},
        {1: [1, 2]},
        {0: [1, 2, 3, 1, 2, 3] * 100},
        {0: [-1]},
    ],
    ids=["twice", "unknown", "none", "lengths", "gap", "not from 0", "long", "negative"],
)
def test_an_assignment_that_cannot_be_made_is_refused(raw: RawKafka, assignments: dict[int, list[int]]) -> None:
    for is_dry in (True, False):
        answer = raw.create_topic("unplaced", assignments=assignments, is_dry=is_dry)
        assert answer["error_code"] == KafkaError.INVALID_REPLICA_ASSIGNMENT


def test_an_assignment_excludes_numbers(raw: RawKafka) -> None:
    for number in ("num_partitions", "replication_factor"):
        numbers: dict[str, Any] = {number: 1}
        answer = raw.create_topic("unplaced", assignments={0: [1]}, **numbers)
        assert answer["error_code"] == KafkaError.INVALID_REQUEST


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("assignments", [[[1, 2, 3]], [[1, 2, 3], [1, 2]], [[1, 2, 9], [1, 2, 3]], [[1, 1, 2]] * 2])
def test_new_partitions_need_valid_assignments(
    cluster: Cluster, leader: Leader, new_topic: NewTopic, assignments: list[list[int]], is_dry: bool
) -> None:
    topic = new_topic()
    answer = _grow(leader(topic), topic, 3, assignments, is_dry=is_dry)
    assert answer["error_code"] == KafkaError.INVALID_REPLICA_ASSIGNMENT
    assert len(_replicas(cluster, topic)) == 1


def test_librdkafkas_admin_client_assigns_replicas(cluster: Cluster, bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([ConfluentTopic("assigned", 2, replica_assignment=[[3, 2], [1, 3]])])
    made["assigned"].result(READ_S)
    assert _replicas(cluster, "assigned") == [[3, 2], [1, 3]]
    grown = admin.create_partitions([NewPartitions("assigned", 3, replica_assignment=[[2, 1]])])
    grown["assigned"].result(READ_S)
    assert _replicas(cluster, "assigned") == [[3, 2], [1, 3], [2, 1]]


# -------------------------------------------------------------------------------------- topics that exist
@pytest.mark.parametrize("validate_only", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"configs": {"cleanup.policy": "compact"}},
        {"configs": {"no.such.key": "1"}},
        {"num_partitions": 0},
        {"num_partitions": 10_001},
        {"replication_factor": 99},
        {"assignments": {7: [9]}},
    ],
    ids=["value", "key", "partitions", "too many", "replicas", "assignment"],
)
def test_a_topic_that_exists_is_reported_before_its_settings_are_judged(
    cluster: Cluster, new_topic: NewTopic, fields: dict[str, Any], validate_only: bool
) -> None:
    topic = new_topic()
    for node in cluster.nodes.values():
        with closing(RawKafka(node.kafka)) as raw:
            answer = raw.create_topic(topic, is_dry=validate_only, **fields)
        assert answer["error_code"] == KafkaError.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize("name", INTERNAL_TOPICS)
def test_kafkas_internal_topics_are_not_created_by_naming_them(cluster: Cluster, raw: RawKafka, name: str) -> None:
    for version in (1, 12):
        body = raw.call(ApiKey.METADATA, version, topics=[{"name": name}], allow_auto_topic_creation=True)
        (found,) = body["topics"]
        assert (found["error_code"], found["is_internal"]) == (KafkaError.UNKNOWN_TOPIC_OR_PARTITION, True)
    assert name not in [topic.name for topic in cluster.nodes[1].raw.describe(linearizable=True).topics]


# ------------------------------------------------------------------------------------- authorized operations
@pytest.mark.parametrize("version", range(8, 14))
def test_metadata_says_what_a_client_may_do(raw: RawKafka, new_topic: NewTopic, version: int) -> None:
    topic = new_topic()
    for is_asked in (True, False):
        fields: dict[str, object] = {"include_topic_authorized_operations": is_asked}
        if version <= 10:
            fields["include_cluster_authorized_operations"] = is_asked
        requested = [{"name": topic}, {"name": "uncreated"}]
        body = raw.call(ApiKey.METADATA, version, topics=requested, allow_auto_topic_creation=False, **fields)
        found = {t["name"]: t["topic_authorized_operations"] for t in body["topics"]}
        assert found == {topic: TOPIC_BITS if is_asked else NOT_ASKED, "uncreated": NOT_ASKED}
        if version <= 10:
            assert body["cluster_authorized_operations"] == (CLUSTER_BITS if is_asked else NOT_ASKED)


def test_clusters_and_groups_say_what_a_client_may_do(raw: RawKafka) -> None:
    for is_asked in (True, False):
        cluster = raw.call(ApiKey.DESCRIBE_CLUSTER, 2, include_cluster_authorized_operations=is_asked, endpoint_type=1)
        assert cluster["cluster_authorized_operations"] == (CLUSTER_BITS if is_asked else NOT_ASKED)
        body = raw.call(ApiKey.DESCRIBE_GROUPS, 5, groups=["none"], include_authorized_operations=is_asked)
        assert body["groups"][0]["authorized_operations"] == (GROUP_BITS if is_asked else NOT_ASKED)


@pytest.mark.parametrize("version", range(1, 4))
def test_there_are_no_acls_to_describe(raw: RawKafka, version: int) -> None:
    body = raw.call(ApiKey.DESCRIBE_ACLS, version, resource_type_filter=1, operation=1, permission_type=1)
    assert (body["error_code"], body["resources"]) == (KafkaError.NONE, [])
