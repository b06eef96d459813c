"""Every key of Kafka 4.3's topic configuration is known, and refused only if a promise depends on its value.

The table is `LogConfig` of kafka-storage 4.3.0, but for its internal key: type, then values at both ends of what it
takes.
"""

from dataclasses import replace

import pytest

from smq.raft_state.commands import AlterTopicConfig
from smq.raft_state.config_keys import INT32_MAX, INT64_MAX, ConfigType
from smq.raft_state.errors import ErrorCode
from smq.raft_state.topic_config import TOPIC_CONFIG, is_compacted, retention
from tests.unit.raft_state.support import Driver, cluster, topic

INT, LONG = (str(INT32_MAX),), (str(INT64_MAX),)
BOOLEAN = ("true", "false", "True", "FALSE")
THROTTLED = ("", "*", "0:1", "0:1,12:3")
POLICIES = ("delete", "compact", "compact,delete", "delete,compact", "compact, delete", " delete , compact ")
KAFKA: dict[str, tuple[ConfigType, tuple[str, ...]]] = {
    "cleanup.policy": (ConfigType.LIST, POLICIES),
    "compression.gzip.level": (ConfigType.INT, ("-1", "1", "9")),
    "compression.lz4.level": (ConfigType.INT, ("1", "17")),
    "compression.type": (ConfigType.STRING, ("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")),
    "compression.zstd.level": (ConfigType.INT, ("-131072", "22")),
    "delete.retention.ms": (ConfigType.LONG, ("0", *LONG)),
    "file.delete.delay.ms": (ConfigType.LONG, ("0", *LONG)),
    "flush.messages": (ConfigType.LONG, ("1", *LONG)),
    "flush.ms": (ConfigType.LONG, ("0", *LONG)),
    "follower.replication.throttled.replicas": (ConfigType.LIST, THROTTLED),
    "index.interval.bytes": (ConfigType.INT, ("0", *INT)),
    "leader.replication.throttled.replicas": (ConfigType.LIST, THROTTLED),
    "local.retention.bytes": (ConfigType.LONG, ("-2", "-1", "0", *LONG)),
    "local.retention.ms": (ConfigType.LONG, ("-2", "-1", "0", *LONG)),
    "max.compaction.lag.ms": (ConfigType.LONG, ("1", *LONG)),
    "max.message.bytes": (ConfigType.INT, ("1", "1048588")),
    "message.timestamp.after.max.ms": (ConfigType.LONG, ("0", *LONG)),
    "message.timestamp.before.max.ms": (ConfigType.LONG, ("0", *LONG)),
    "message.timestamp.type": (ConfigType.STRING, ("LogAppendTime", "CreateTime")),
    "min.cleanable.dirty.ratio": (ConfigType.DOUBLE, ("0", "0.0", "0.01", "1", "1.0")),
    "min.compaction.lag.ms": (ConfigType.LONG, ("0", *LONG)),
    "min.insync.replicas": (ConfigType.INT, ("1", "2")),
    "preallocate": (ConfigType.BOOLEAN, BOOLEAN),
    "remote.log.copy.disable": (ConfigType.BOOLEAN, BOOLEAN),
    "remote.log.delete.on.disable": (ConfigType.BOOLEAN, BOOLEAN),
    "remote.storage.enable": (ConfigType.BOOLEAN, ("false", "False")),
    "retention.bytes": (ConfigType.LONG, ("-1", "0", *LONG)),
    "retention.ms": (ConfigType.LONG, ("-1", "0", *LONG)),
    "segment.bytes": (ConfigType.INT, ("1048576", *INT)),
    "segment.index.bytes": (ConfigType.INT, ("4", *INT)),
    "segment.jitter.ms": (ConfigType.LONG, ("0", *LONG)),
    "segment.ms": (ConfigType.LONG, ("1", *LONG)),
    "unclean.leader.election.enable": (ConfigType.BOOLEAN, ("false", "False")),
}


OWN = {"mirrored", "retention.records", "storage"}


@pytest.fixture
def driver() -> Driver:
    made = cluster()
    made.ok(topic(1))
    return made


@pytest.mark.parametrize("key", KAFKA)
def test_a_key_of_kafka_takes_what_kafka_takes(driver: Driver, key: str) -> None:
    type_, values = KAFKA[key]
    assert TOPIC_CONFIG[key].type is type_
    for number, value in enumerate(values, 2):
        driver.ok(AlterTopicConfig(name="t1", set_=((key, value),)))
        driver.ok(replace(topic(number), config=((key, value),)))


def test_the_keys_are_those_of_kafka_and_three_of_our_own() -> None:
    assert set(TOPIC_CONFIG) == {*KAFKA, *OWN}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_means_what_it_names_however_it_is_spaced(policy: str) -> None:
    config = {"cleanup.policy": policy, "retention.ms": "1"}
    assert (retention(config) is not None, is_compacted(config)) == ("delete" in policy, "compact" in policy)


@pytest.mark.parametrize("key", [key for key in KAFKA if TOPIC_CONFIG[key].is_fixed])
def test_a_key_without_effect_is_not_stored_and_says_why(driver: Driver, key: str) -> None:
    for value in KAFKA[key][1]:
        driver.ok(AlterTopicConfig(name="t1", set_=((key, value),)))
    assert driver.machine.state.topics["t1"].config == {}
    assert "without effect" in TOPIC_CONFIG[key].documentation


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("unclean.leader.election.enable", "true", "never given up"),
        ("min.insync.replicas", "3", "the majority of 3 replicas"),
        ("remote.storage.enable", "true", "use retention.ms"),
        ("cleanup.policy", "compact;delete", "must be"),
        ("cleanup.policy", "compact,compact", "must be"),
        ("segment.bytes", "-1", "from 1 to"),
        ("segment.bytes", str(INT32_MAX + 1), "from 1 to"),
        ("local.retention.ms", "-3", "-2, -1, or a whole number"),
        ("preallocate", "perhaps", "true or false"),
        ("leader.replication.throttled.replicas", "1", 'pairs "partition:node"'),
        ("leader.replication.throttled.replicas", "\u0661:2", 'pairs "partition:node"'),
        ("message.format.version", "3.0", "unknown topic configuration 'message.format.version': the keys are"),
        ("retenton.ms", "1", "unknown topic configuration 'retenton.ms': did you mean retention.ms?"),
    ],
)
def test_a_value_that_breaks_a_promise_or_means_nothing_is_refused_with_the_reason(
    driver: Driver, key: str, value: str, reason: str
) -> None:
    reply = driver.refused(AlterTopicConfig(name="t1", set_=((key, value),)), ErrorCode.INVALID_CONFIG)
    assert reason in reply.message
