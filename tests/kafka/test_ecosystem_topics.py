"""Topics as MirrorMaker 2 and Faust create them, and as MirrorMaker 2 keeps them equal to their source.

From their sources: MirrorMaker 2 copies a topic's settings but those of its default filter (Kafka 4:
`MirrorSourceConnector`, `MirrorUtils`); with `use.defaults.from=source` these are all that its source shows, otherwise
only what differs. Faust sends what a table asks for (`Transport._topic_config` of its aiokafka driver).
"""

from collections.abc import Callable

import pytest

from smq.coordinator.kafka.api_keys import ApiKey
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_admin import TOPIC
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.topic_config import TOPIC_CONFIG
from smq.testing.cluster import Cluster
from smq.testing.kafka_client import RawKafka

NewTopic = Callable[..., str]
SET, DELETE = 0, 1
INT64_MAX = str(2**63 - 1)

# Every setting of a topic of Kafka 4 without settings of its own, but those that MirrorMaker 2 filters.
OF_KAFKA = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": INT64_MAX,
    "flush.ms": INT64_MAX,
    "index.interval.bytes": "4096",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": INT64_MAX,
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": INT64_MAX,
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "preallocate": "false",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
}
# name, version of CreateTopics, partitions, settings
CREATED: dict[str, tuple[int, int, dict[str, str]]] = {
    "mm2-offset-syncs.b.internal": (7, 1, {"cleanup.policy": "compact"}),
    "b.checkpoints.internal": (7, 1, {"cleanup.policy": "compact"}),
    "heartbeats": (7, 1, {"cleanup.policy": "compact"}),
    "a.orders": (7, 3, {"cleanup.policy": "compact, delete", "retention.ms": "86400000", "segment.ms": "3600000"}),
    "a.all-of-the-source": (7, 3, OF_KAFKA),
    "app-__assignor-__leader": (2, 1, {}),
    "app-table-changelog": (2, 8, {"cleanup.policy": "compact"}),
    "app-windowed-changelog": (2, 8, {"cleanup.policy": "compact,delete", "retention.ms": "3600000"}),
    "app-repartitioned": (2, 8, {"cleanup.policy": "delete", "retention.ms": "604800000"}),
}


@pytest.fixture
def raw(cluster: Cluster) -> RawKafka:
    return RawKafka(cluster.nodes[1].kafka)


def described(raw: RawKafka, topic: str) -> dict[str, str]:
    requested = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}
    answer: Struct = raw.call(ApiKey.DESCRIBE_CONFIGS, 4, resources=[requested])["results"][0]
    assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
    return {config["name"]: config["value"] for config in answer["configs"]}


def acting(config: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in config.items() if not TOPIC_CONFIG[key].is_fixed}


@pytest.mark.parametrize("name", CREATED)
def test_a_topic_is_created_with_what_its_creator_sends(raw: RawKafka, new_topic: NewTopic, name: str) -> None:
    version, partitions, config = CREATED[name]
    topic = f"{new_topic()}.{name}"
    answer = raw.create_topic(topic, version=version, configs=config, num_partitions=partitions, replication_factor=3)
    assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
    shown = described(raw, topic)
    assert acting(config).items() <= shown.items()
    assert config.keys() <= shown.keys()


def test_a_copy_follows_the_settings_of_its_source(raw: RawKafka, new_topic: NewTopic) -> None:
    """MirrorMaker 2 sets what differs there from the defaults, and takes back all the rest, each time it looks."""
    topic = new_topic()
    for own in ({"retention.ms": "1000", "segment.bytes": "1048576"}, {"cleanup.policy": "compact"}, {}):
        operations = [
            {"name": key, "config_operation": SET if key in own else DELETE, "value": own.get(key)} for key in OF_KAFKA
        ]
        resource = {"resource_type": TOPIC, "resource_name": topic, "configs": operations}
        (answer,) = raw.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)[
            "responses"
        ]
        assert answer["error_code"] == KafkaError.NONE, answer["error_message"]
        defaults = {key: row.default for key, row in TOPIC_CONFIG.items() if not row.is_fixed}
        assert acting(described(raw, topic)) == defaults | acting(own)
