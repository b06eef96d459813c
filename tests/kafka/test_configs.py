"""The configuration of topics and nodes, as Kafka's admin clients see and change it."""

from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_admin import BROKER, TOPIC
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, TOPIC_CONFIG
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from tests.kafka.client_adapters import READ_S

Leader = Callable[[str], RawKafka]
NewTopic = Callable[..., str]
SET, DELETE, APPEND, SUBTRACT = range(4)


def _described(raw: RawKafka, name: str, *, kind: int = TOPIC, version: int = 4, **fields: object) -> Struct:
    requested = {"resource_type": kind, "resource_name": name, "configuration_keys": None} | fields
    body = raw.call(
        ApiKey.DESCRIBE_CONFIGS, version, resources=[requested], include_synonyms=True, include_documentation=True
    )
    answer: Struct = body["results"][0]
    return answer


def _values(answer: Struct) -> dict[str, str]:
    assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
    return {config["name"]: config["value"] for config in answer["configs"]}


def _altered(raw: RawKafka, name: str, *operations: tuple[str, int, str | None], **fields: object) -> int:
    configs = [{"name": key, "config_operation": operation, "value": value} for key, operation, value in operations]
    requested = {"resource_type": TOPIC, "resource_name": name, "configs": configs} | fields
    body = raw.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[requested], validate_only=False)
    code: int = body["responses"][0]["error_code"]
    return code


@pytest.mark.parametrize("version", range(SERVED[ApiKey.DESCRIBE_CONFIGS].versions.lo, 5))
def test_every_version_describes_every_key_of_a_topic(leader: Leader, new_topic: NewTopic, version: int) -> None:
    topic = new_topic(config={MAX_MESSAGE_BYTES: "5000"})
    answer = _described(leader(topic), topic, version=version)
    assert _values(answer) == {key: row.default for key, row in TOPIC_CONFIG.items()} | {MAX_MESSAGE_BYTES: "5000"}
    (found,) = [config for config in answer["configs"] if config["name"] == MAX_MESSAGE_BYTES]
    assert found["config_source"] == 1
    assert [(s["value"], s["source"]) for s in found["synonyms"]] == [
        ("5000", 1),
        (TOPIC_CONFIG[MAX_MESSAGE_BYTES].default, 5),
    ]


def test_only_the_requested_keys_are_returned(leader: Leader, new_topic: NewTopic) -> None:
    topic = new_topic()
    answer = _described(leader(topic), topic, configuration_keys=[MAX_MESSAGE_BYTES, "no.such.key"])
    assert list(_values(answer)) == [MAX_MESSAGE_BYTES]


def test_an_altered_limit_applies_to_producers_immediately(leader: Leader, new_topic: NewTopic) -> None:
    topic = new_topic()
    raw = leader(topic)
    large = batch(b"x" * 3_000)
    assert raw.produce(topic, large)["error_code"] == KafkaError.NONE
    assert _altered(raw, topic, (MAX_MESSAGE_BYTES, SET, "2000")) == KafkaError.NONE
    assert raw.produce(topic, large)["error_code"] == KafkaError.MESSAGE_TOO_LARGE
    assert _altered(raw, topic, (MAX_MESSAGE_BYTES, DELETE, None)) == KafkaError.NONE
    assert raw.produce(topic, large)["error_code"] == KafkaError.NONE


@pytest.mark.parametrize("version", range(3))
def test_the_old_way_of_altering_puts_back_what_it_does_not_name(
    cluster: Cluster, leader: Leader, new_topic: NewTopic, version: int
) -> None:
    topic = new_topic(config={MAX_MESSAGE_BYTES: "5000"})
    raw = leader(topic)

    def alter(*configs: tuple[str, str | None], validate_only: bool = False) -> int:
        requested = {
            "resource_type": TOPIC,
            "resource_name": topic,
            "configs": [{"name": key, "value": value} for key, value in configs],
        }
        body = raw.call(ApiKey.ALTER_CONFIGS, version, resources=[requested], validate_only=validate_only)
        code: int = body["responses"][0]["error_code"]
        return code

    assert alter(("storage", "log"), validate_only=True) == KafkaError.NONE
    assert _values(_described(raw, topic))[MAX_MESSAGE_BYTES] == "5000"
    assert alter((MAX_MESSAGE_BYTES, None)) == KafkaError.INVALID_REQUEST
    assert alter(("storage", "log")) == KafkaError.NONE
    assert cluster.nodes[1].raw.describe(topic, linearizable=True).topics[0].config == {}


@pytest.mark.parametrize(
    ("operations", "code"),
    [
        ([("no.such.key", SET, "1")], KafkaError.INVALID_CONFIG),
        ([("no.such.key", DELETE, None)], KafkaError.INVALID_CONFIG),
        ([("k" * 30_000, SET, "v" * 30_000)], KafkaError.INVALID_CONFIG),
        ([(MAX_MESSAGE_BYTES, SET, "many")], KafkaError.INVALID_CONFIG),
        ([(MAX_MESSAGE_BYTES, SET, None)], KafkaError.INVALID_REQUEST),
        ([(MAX_MESSAGE_BYTES, APPEND, "1")], KafkaError.INVALID_CONFIG),
        ([(MAX_MESSAGE_BYTES, SUBTRACT, "1")], KafkaError.INVALID_CONFIG),
        ([(MAX_MESSAGE_BYTES, 9, "1")], KafkaError.INVALID_REQUEST),
        ([(MAX_MESSAGE_BYTES, SET, "1"), (MAX_MESSAGE_BYTES, SET, "2")], KafkaError.INVALID_REQUEST),
        ([(MAX_MESSAGE_BYTES, SET, "9"), ("no.such.key", SET, "1")], KafkaError.INVALID_CONFIG),
    ],
    ids=[
        "unknown",
        "unknown deleted",
        "long",
        "value",
        "null",
        "append",
        "subtract",
        "operation",
        "twice",
        "one of two",
    ],
)
def test_an_alteration_that_cannot_be_made_changes_nothing(
    leader: Leader, new_topic: NewTopic, operations: list[tuple[str, int, str | None]], code: KafkaError
) -> None:
    topic = new_topic(config={MAX_MESSAGE_BYTES: "5000"})
    raw = leader(topic)
    assert _altered(raw, topic, *operations) == code
    assert _values(_described(raw, topic))[MAX_MESSAGE_BYTES] == "5000"


def test_resources_that_do_not_exist_are_refused(cluster: Cluster, leader: Leader, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    setting = (MAX_MESSAGE_BYTES, SET, "1")
    assert _described(raw, "nowhere")["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert _altered(raw, "nowhere", setting) == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert _described(raw, "no/where")["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION
    assert _altered(raw, "no/where", setting) == KafkaError.INVALID_TOPIC_EXCEPTION
    assert _described(raw, "x", kind=77)["error_code"] == KafkaError.INVALID_REQUEST
    assert _altered(raw, "x", setting, resource_type=77) == KafkaError.INVALID_REQUEST
    assert _described(raw, "99", kind=BROKER)["error_code"] == KafkaError.INVALID_REQUEST
    assert _altered(raw, "1", setting, resource_type=BROKER) == KafkaError.INVALID_REQUEST


def test_a_node_reports_its_own_settings_and_refuses_to_change_them(cluster: Cluster) -> None:
    raw = RawKafka(cluster.nodes[2].kafka)
    answer = _described(raw, "2", kind=BROKER)
    assert _values(answer)["auto.create.topics.enable"] == "true"
    assert all(config["read_only"] for config in answer["configs"])
    assert _values(_described(raw, "", kind=BROKER)) == _values(answer)
    raw.close()


def test_the_admin_client_reads_its_own_changes(cluster: Cluster, new_topic: NewTopic, bootstrap: str) -> None:
    topic = new_topic()
    admin = AdminClient({"bootstrap.servers": bootstrap})
    entry = ConfigEntry(MAX_MESSAGE_BYTES, "7000", incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([change]).values():
        future.result(READ_S)
    for future in admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values():
        assert future.result(READ_S)[MAX_MESSAGE_BYTES].value == "7000"
    for future in admin.describe_configs([ConfigResource(ConfigResource.Type.BROKER, "3")]).values():
        assert future.result(READ_S)["num.partitions"].value == "1"
    assert cluster.nodes[1].raw.describe(topic, linearizable=True).topics[0].config == {MAX_MESSAGE_BYTES: "7000"}
