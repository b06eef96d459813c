"""The configuration of topics and nodes, as Kafka's admin clients see and change it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource

from smq.clients import SyncAdmin
from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_admin import BROKER, GROUP, TOPIC
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.cluster_config import CLUSTER_CONFIG, TOPIC_DEFAULTS, TOPIC_ONLY, broker_name
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, TOPIC_CONFIG
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka, batch
from tests.kafka.client_adapters import READ_S

Connect = Callable[[str], RawKafka]
NewTopic = Callable[..., str]
SET, DELETE, APPEND, SUBTRACT = range(4)


def _described(raw: RawKafka, name: str, *, kind: int = TOPIC, version: int = 4, **fields: object) -> Struct:
    requested = {"resource_type": kind, "resource_name": name, "configuration_keys": None} | fields
    body = raw.call(
        ApiKey.DESCRIBE_CONFIGS, version, resources=[requested], include_synonyms=True, include_documentation=True
    )
    answer: Struct = body["results"][0]
    return answer


def _values(answer: Struct) -> dict[str, str | None]:
    assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
    return {config["name"]: config["value"] for config in answer["configs"]}


def _altered(raw: RawKafka, name: str, *operations: tuple[str, int, str | None], **fields: object) -> int:
    configs = [{"name": key, "config_operation": operation, "value": value} for key, operation, value in operations]
    requested = {"resource_type": TOPIC, "resource_name": name, "configs": configs} | fields
    body = raw.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[requested], validate_only=False)
    code: int = body["responses"][0]["error_code"]
    return code


@pytest.mark.parametrize("version", range(SERVED[ApiKey.DESCRIBE_CONFIGS].versions.lo, 5))
def test_every_version_describes_every_key_of_a_topic(leader: Connect, new_topic: NewTopic, version: int) -> None:
    topic = new_topic(config={MAX_MESSAGE_BYTES: "5000"})
    answer = _described(leader(topic), topic, version=version)
    values = {key: row.default for key, row in TOPIC_CONFIG.items()}
    assert _values(answer) == values | {MAX_MESSAGE_BYTES: "5000", "min.insync.replicas": "2"}
    (found,) = [config for config in answer["configs"] if config["name"] == MAX_MESSAGE_BYTES]
    assert found["config_source"] == 1
    assert [(s["name"], s["value"], s["source"]) for s in found["synonyms"]] == [
        (MAX_MESSAGE_BYTES, "5000", 1),
        ("message.max.bytes", TOPIC_CONFIG[MAX_MESSAGE_BYTES].default, 5),
    ]


def test_only_the_requested_keys_are_returned(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    answer = _described(leader(topic), topic, configuration_keys=[MAX_MESSAGE_BYTES, "no.such.key"])
    assert list(_values(answer)) == [MAX_MESSAGE_BYTES]


def test_an_altered_limit_applies_to_producers_immediately(leader: Connect, new_topic: NewTopic) -> None:
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
    cluster: Cluster, leader: Connect, new_topic: NewTopic, version: int
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
    assert alter(("min.insync.replicas", "3"), validate_only=True) == KafkaError.INVALID_CONFIG
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
        (
            [("min.compaction.lag.ms", SET, "10"), ("max.compaction.lag.ms", SET, "9"), (MAX_MESSAGE_BYTES, SET, "9")],
            KafkaError.INVALID_CONFIG,
        ),
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
        "contradiction",
    ],
)
def test_an_alteration_that_cannot_be_made_changes_nothing(
    leader: Connect, new_topic: NewTopic, operations: list[tuple[str, int, str | None]], code: KafkaError
) -> None:
    topic = new_topic(config={MAX_MESSAGE_BYTES: "5000"})
    raw = leader(topic)
    assert _altered(raw, topic, *operations) == code
    assert _values(_described(raw, topic))[MAX_MESSAGE_BYTES] == "5000"


def test_resources_that_do_not_exist_are_refused(cluster: Cluster, leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    setting = (MAX_MESSAGE_BYTES, SET, "1")
    assert _described(raw, "nowhere")["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert _altered(raw, "nowhere", setting) == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    bad = {"resource_type": TOPIC, "resource_name": "nowhere", "configs": [{"name": "no.such.key", "value": "x"}]}
    for is_dry in (True, False):
        answer = raw.call(ApiKey.ALTER_CONFIGS, 2, resources=[bad], validate_only=is_dry)["responses"][0]
        assert answer["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION, "its settings cannot be judged"
    assert _altered(raw, "nowhere", ("no.such.key", SET, "x")) == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert _described(raw, "no/where")["error_code"] == KafkaError.INVALID_TOPIC_EXCEPTION
    assert _altered(raw, "no/where", setting) == KafkaError.INVALID_TOPIC_EXCEPTION
    assert _described(raw, "x", kind=77)["error_code"] == KafkaError.INVALID_REQUEST
    assert _altered(raw, "x", setting, resource_type=77) == KafkaError.INVALID_REQUEST
    assert _described(raw, "99", kind=BROKER)["error_code"] == KafkaError.INVALID_REQUEST
    assert _altered(raw, "1", setting, resource_type=BROKER) == KafkaError.INVALID_REQUEST
    assert _altered(raw, "", setting, resource_type=BROKER) == KafkaError.INVALID_CONFIG
    assert _altered(raw, "99", ("x", DELETE, None), resource_type=BROKER) == KafkaError.INVALID_REQUEST
    mixed = (("x", DELETE, None), setting)
    assert _altered(raw, "1", *mixed, resource_type=BROKER) == KafkaError.INVALID_REQUEST
    assert _described(raw, "", kind=GROUP)["error_code"] == KafkaError.INVALID_REQUEST


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("flush.messages", "1000", "0"),
        ("flush.ms", "1000", "-1"),
        ("leader.replication.throttled.replicas", "0:1,1:2", "0"),
        ("min.insync.replicas", "2", "3"),
        ("preallocate", "true", "perhaps"),
        ("remote.storage.enable", "false", "true"),
        ("segment.bytes", "52428800", "much"),
        ("segment.ms", "600000", "0"),
        ("unclean.leader.election.enable", "false", "true"),
    ],
)
def test_a_setting_that_changes_nothing_is_accepted_and_described_with_the_reason(
    cluster: Cluster, leader: Connect, new_topic: NewTopic, key: str, value: str, other: str
) -> None:
    topic = new_topic()
    raw = leader(topic)
    assert _altered(raw, topic, (key, SET, value)) == KafkaError.NONE
    assert _altered(raw, topic, (key, SET, other)) == KafkaError.INVALID_CONFIG
    for given, code in ((other, KafkaError.INVALID_CONFIG), (value, KafkaError.NONE)):
        answer = raw.create_topic(f"{topic}-{key}", configs={key: given})
        assert answer["error_code"] == code, answer["error_message"]
    (found,) = [config for config in _described(raw, topic)["configs"] if config["name"] == key]
    assert (found["read_only"], found["config_source"]) == (True, 5)
    assert f"without effect: {TOPIC_CONFIG[key].why}" in found["documentation"]
    assert cluster.nodes[1].raw.describe(topic, linearizable=True).topics[0].config == {}


def test_lists_are_appended_to_and_subtracted_from(leader: Connect, new_topic: NewTopic) -> None:
    topic, key = new_topic(), "follower.replication.throttled.replicas"
    raw = leader(topic)
    assert _altered(raw, topic, (key, APPEND, "0:1")) == KafkaError.NONE
    assert _altered(raw, topic, (key, SUBTRACT, "0:1,0:2")) == KafkaError.NONE
    assert _altered(raw, topic, (key, APPEND, "everything")) == KafkaError.INVALID_CONFIG
    assert _altered(raw, topic, (key, APPEND, None)) == KafkaError.INVALID_REQUEST


def test_the_key_of_smqs_own_says_so(leader: Connect, new_topic: NewTopic) -> None:
    topic = new_topic()
    (found,) = _described(leader(topic), topic, configuration_keys=["storage"])["configs"]
    assert (found["value"], found["config_type"], found["read_only"]) == ("log", 2, True)
    assert [(s["name"], s["value"], s["source"]) for s in found["synonyms"]] == [("storage", "log", 5)]
    assert "smq's own" in found["documentation"]


# What a node says of itself and of topics, beside the cluster's settings. Tools fail on a key that is missing.
FIXED_OF_NODE_2 = {
    "auto.leader.rebalance.enable": "true",
    "broker.id": "2",
    "broker.rack": None,
    "connections.max.idle.ms": "600000",
    "delete.topic.enable": "true",
    "fetch.max.bytes": "8388608",
    "group.max.session.timeout.ms": "1800000",
    "group.max.size": "1000",
    "group.min.session.timeout.ms": "1000",
    "max.connections": "10000",
    "max.connections.per.ip": "2000",
    "min.insync.replicas": "2",
    "node.id": "2",
    "offset.metadata.max.bytes": "4096",
    "process.roles": "broker,controller",
    "socket.request.max.bytes": "105906176",
    "unclean.leader.election.enable": "false",
} | {
    broker_name(key): row.default
    for key, row in TOPIC_CONFIG.items()
    if row.is_fixed and key not in (*TOPIC_ONLY, "min.insync.replicas", "unclean.leader.election.enable")
}


def test_a_node_describes_what_tools_ask_for(connect: Connect, cluster: Cluster) -> None:
    raw = connect(cluster.nodes[2].kafka)
    answer = _described(raw, "2", kind=BROKER)
    values = _values(answer)
    assert (values["auto.create.topics.enable"], values["group.initial.rebalance.delay.ms"]) == ("true", "0")
    assert (values["num.partitions"], values["default.replication.factor"]) == ("1", "3")
    assert values["offsets.retention.minutes"] == "129600"
    defaults = {name: TOPIC_CONFIG[key].default for name, key in TOPIC_DEFAULTS.items()}
    assert defaults.items() <= values.items()
    assert (values["log.retention.ms"], values["message.max.bytes"]) == ("-1", "1048588")
    found = {config["name"]: config for config in answer["configs"]}
    of_node = {"log.dir": str(cluster.nodes[2].data_dir), "log.dirs": str(cluster.nodes[2].data_dir)}
    assert {key: values[key] for key in found if found[key]["read_only"]} == FIXED_OF_NODE_2 | of_node
    assert (found["num.partitions"]["read_only"], found["num.partitions"]["config_source"]) == (False, 5)
    assert found["auto.create.topics.enable"]["config_source"] == 4


def test_the_command_line_gives_a_node_its_own_defaults(connect: Connect, tmp_path: Path) -> None:
    own = {"num.partitions": "4", "auto.create.topics.enable": "false", "group.initial.rebalance.delay.ms": "1234"}
    made = Cluster(tmp_path, 1)
    try:
        options = [option for key, value in own.items() for option in ("--set", f"{key}={value}")]
        raw = connect(made.start("--racks", "a", *options).nodes[1].kafka)
        answer = _described(raw, "1", kind=BROKER)
        assert (own | {"broker.rack": "a", "default.replication.factor": "1"}).items() <= _values(answer).items()
        sources = {config["name"]: config["config_source"] for config in answer["configs"]}
        assert [sources[key] for key in own] == [4, 4, 4]
        created = raw.create_topic("t")
        assert created["num_partitions"] == 4, created["error_message"]
    finally:
        made.stop()


def test_a_group_has_no_configuration(leader: Connect, new_topic: NewTopic) -> None:
    raw = leader(new_topic())
    assert _values(_described(raw, "g", kind=GROUP)) == {}
    change = ("consumer.session.timeout.ms", SET, "45000")
    assert _altered(raw, "g", change, resource_type=GROUP) == KafkaError.INVALID_CONFIG


@pytest.mark.parametrize("name", ["1", "2", ""])
def test_what_is_not_set_at_brokers_can_be_removed(leader: Connect, new_topic: NewTopic, name: str) -> None:
    """As kafka-reassign-partitions --verify does, at whichever node."""
    change = ("leader.replication.throttled.rate", DELETE, None)
    assert _altered(leader(new_topic()), name, change, resource_type=BROKER) == KafkaError.NONE


@pytest.fixture
def settings(connect: Connect, cluster: Cluster) -> Iterator[Callable[..., int]]:
    """Changes settings of the whole cluster, which are reset afterwards; the error code."""
    raw = connect(cluster.nodes[1].kafka)

    def change(*operations: tuple[str, int, str | None]) -> int:
        return _altered(raw, "", *operations, resource_type=BROKER)

    yield change
    assert change(*((key, DELETE, None) for key in CLUSTER_CONFIG)) == KafkaError.NONE


def test_settings_of_the_cluster_take_effect_at_every_node(
    connect: Connect, cluster: Cluster, settings: Callable[..., int], new_topic: NewTopic
) -> None:
    prefix = new_topic()
    changes = {"num.partitions": "4", "default.replication.factor": "2", "group.initial.rebalance.delay.ms": "7"}
    assert settings(*((key, SET, value) for key, value in changes.items())) == KafkaError.NONE
    for number, node in cluster.nodes.items():
        raw = connect(node.kafka)
        assert _values(_described(raw, "", kind=BROKER)) == changes
        answer = _described(raw, str(number), kind=BROKER)
        assert changes.items() <= _values(answer).items()
        (found,) = [config for config in answer["configs"] if config["name"] == "group.initial.rebalance.delay.ms"]
        assert [(s["value"], s["source"]) for s in found["synonyms"]] == [("7", 3), ("0", 4), ("3000", 5)]
        created = raw.create_topic(f"{prefix}-{number}")
        assert (created["num_partitions"], created["replication_factor"]) == (4, 2), created["error_message"]
    assert settings(("num.partitions", DELETE, None)) == KafkaError.NONE
    raw = connect(cluster.nodes[3].kafka)
    assert "num.partitions" not in _values(_described(raw, "", kind=BROKER))
    assert _values(_described(raw, "3", kind=BROKER))["num.partitions"] == "1"


def test_defaults_without_effect_are_taken_as_at_topics_and_a_promise_is_not_given_up(
    connect: Connect, cluster: Cluster, settings: Callable[..., int]
) -> None:
    of_kafka = ("log.segment.bytes", SET, "1048576"), ("log.roll.ms", DELETE, None)
    assert settings(*of_kafka, ("num.partitions", SET, "4")) == KafkaError.NONE
    assert settings(*of_kafka) == KafkaError.NONE
    for refused in ("unclean.leader.election.enable", "true"), ("log.segment.bytes", "x"), ("num.io.threads", "8"):
        assert settings((refused[0], SET, refused[1])) == KafkaError.INVALID_CONFIG
    raw = connect(cluster.nodes[1].kafka)
    assert _values(_described(raw, "", kind=BROKER)) == {"num.partitions": "4"}


def test_defaults_of_new_topics_are_described_with_their_source(
    connect: Connect, cluster: Cluster, settings: Callable[..., int], new_topic: NewTopic
) -> None:
    older = new_topic()
    assert settings(("log.retention.ms", SET, "86400000"), ("compression.type", SET, "lz4")) == KafkaError.NONE
    newer = new_topic(config={"compression.type": "zstd"})
    raw = connect(cluster.nodes[3].kafka)

    def layers(topic: str, key: str) -> list[tuple[str, str, int]]:
        (found,) = _described(raw, topic, configuration_keys=[key])["configs"]
        return [(s["name"], s["value"], s["source"]) for s in found["synonyms"]]

    default = ("log.retention.ms", "-1", 5)
    assert layers(newer, "retention.ms") == [
        ("retention.ms", "86400000", 1),
        ("log.retention.ms", "86400000", 3),
        default,
    ]
    assert layers(newer, "compression.type")[0] == ("compression.type", "zstd", 1)
    assert layers(older, "retention.ms") == [default]
    (found,) = _described(raw, "3", kind=BROKER, configuration_keys=["log.retention.ms"])["configs"]
    assert (found["value"], found["config_source"], found["read_only"]) == ("86400000", 3, False)
    for is_dry in (True, False):
        made = raw.create_topic(f"{newer}-made", is_dry=is_dry)
        assert ("retention.ms", "86400000") in {(c["name"], c["value"]) for c in made["configs"]}


def test_topics_are_created_by_naming_them_only_while_the_cluster_allows_it(
    connect: Connect, cluster: Cluster, settings: Callable[..., int], new_topic: NewTopic
) -> None:
    prefix = new_topic()
    assert settings(("auto.create.topics.enable", SET, "false"), ("num.partitions", SET, "3")) == KafkaError.NONE
    for number, node in cluster.nodes.items():
        raw = connect(node.kafka)
        _described(raw, "", kind=BROKER)  # waits until this node has the change
        (found,) = _named(raw, f"{prefix}-{number}")["topics"]
        assert found["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    assert settings(("auto.create.topics.enable", SET, "true")) == KafkaError.NONE
    raw = connect(cluster.nodes[1].kafka)
    assert len(_named(raw, f"{prefix}-made")["topics"][0]["partitions"]) == 3


def _named(raw: RawKafka, topic: str) -> Struct:
    return raw.call(ApiKey.METADATA, 9, topics=[{"name": topic}], allow_auto_topic_creation=True)


@pytest.mark.parametrize(
    ("operations", "code"),
    [
        ([("num.partitions", SET, "0")], KafkaError.INVALID_CONFIG),
        ([("auto.create.topics.enable", SET, "maybe")], KafkaError.INVALID_CONFIG),
        ([("no.such.key", SET, "1")], KafkaError.INVALID_CONFIG),
        ([("log.retention.ms", SET, "-2")], KafkaError.INVALID_CONFIG),
        ([("num.partitions", APPEND, "1")], KafkaError.INVALID_CONFIG),
        ([("num.partitions", SET, "2"), ("num.partitions", SET, "3")], KafkaError.INVALID_REQUEST),
        ([("num.partitions", SET, "2"), ("no.such.key", SET, "1")], KafkaError.INVALID_CONFIG),
    ],
)
def test_a_change_of_the_cluster_that_cannot_be_made_changes_nothing(
    connect: Connect,
    cluster: Cluster,
    settings: Callable[..., int],
    operations: list[tuple[str, int, str | None]],
    code: KafkaError,
) -> None:
    assert settings(*operations) == code
    raw = connect(cluster.nodes[1].kafka)
    assert _values(_described(raw, "", kind=BROKER)) == {}


def test_what_smqs_own_admin_sets_is_what_kafka_clients_see(
    connect: Connect, cluster: Cluster, settings: Callable[..., int]
) -> None:
    assert settings() == KafkaError.NONE
    with SyncAdmin(cluster.nodes[1].grpc) as admin:
        admin.alter_cluster_config(set={"num.partitions": "6"})
        assert {s.key: s.value for s in admin.cluster_config() if s.is_set} == {"num.partitions": "6"}
    raw = connect(cluster.nodes[2].kafka)
    assert _values(_described(raw, "", kind=BROKER)) == {"num.partitions": "6"}


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
