"""The settings of the whole cluster: their keys, defaults, valid values and meanings.

Owns the table CLUSTER_CONFIG. The replicated state holds the keys that an administrator has set, under Kafka's names. A
new key is a new row of a new feature level. A key that changes the outcome of commands has this value or its default on
every node. The keys of IN_NODE_TOML only fill in what a request leaves open, before it becomes a command. For them a
node.toml can replace the default, as Kafka's server.properties does, and a value that is set for the cluster takes
precedence over both. Any module may import it.

The keys that Kafka's brokers have as defaults of topics are defaults of new topics here: a topic takes them when it is
created, and keeps them when they change. So no change of a default deletes what an older topic keeps.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from smq.raft_state.config_keys import ConfigKey, ConfigType, between, one_of
from smq.raft_state.limits import (
    CONSUMER_HEARTBEAT_MS_DEFAULT,
    CONSUMER_HEARTBEAT_MS_MAX,
    CONSUMER_HEARTBEAT_MS_MIN,
    CONSUMER_SESSION_MS_DEFAULT,
    CONSUMER_SESSION_MS_MAX,
    CONSUMER_SESSION_MS_MIN,
    GROUP_INITIAL_DELAY_MS_DEFAULT,
    GROUP_INITIAL_DELAY_MS_MAX,
    GROUP_MEMBERS_MAX,
    NODES_MAX,
    OFFSETS_RETENTION_MINUTES_DEFAULT,
    OFFSETS_RETENTION_MINUTES_MAX,
    PRODUCER_EXPIRATION_MS_DEFAULT,
    PRODUCER_EXPIRATION_MS_MAX,
    PRODUCER_EXPIRATION_MS_MIN,
    TOPIC_PARTITIONS_MAX,
    TRANSACTION_TIMEOUT_MS_MAX_DEFAULT,
    TRANSACTIONAL_ID_EXPIRATION_MS_DEFAULT,
)
from smq.raft_state.topic_config import TOPIC_CONFIG, is_external

NUM_PARTITIONS: Final = "num.partitions"
REPLICATION_FACTOR: Final = "default.replication.factor"
AUTO_CREATE: Final = "auto.create.topics.enable"
GROUP_INITIAL_DELAY_MS: Final = "group.initial.rebalance.delay.ms"
CONSUMER_SESSION_MS: Final = "group.consumer.session.timeout.ms"
CONSUMER_HEARTBEAT_MS: Final = "group.consumer.heartbeat.interval.ms"
GROUP_CONSUMERS_MAX: Final = "group.consumer.max.size"
OFFSETS_RETENTION_MINUTES: Final = "offsets.retention.minutes"
PRODUCER_EXPIRATION_MS: Final = "producer.id.expiration.ms"
IN_NODE_TOML: Final = (NUM_PARTITIONS, REPLICATION_FACTOR, AUTO_CREATE, GROUP_INITIAL_DELAY_MS)

TRANSACTION_TIMEOUT_MS_MAX: Final = "transaction.max.timeout.ms"
TRANSACTIONAL_ID_EXPIRATION_MS: Final = "transactional.id.expiration.ms"

INT32_MAX: Final = 2**31 - 1  # Kafka's type of these settings
REPLICAS_BY_NODES: Final = "-1"
REPLICAS_BY_NODES_MAX: Final = 3  # the loss of one node loses nothing, and each record is written three times at most

# What Kafka calls a broker's default of a topic's key, where the names differ.
_BROKER_NAMES: Final = {
    "cleanup.policy": "log.cleanup.policy",
    "delete.retention.ms": "log.cleaner.delete.retention.ms",
    "file.delete.delay.ms": "log.segment.delete.delay.ms",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "index.interval.bytes": "log.index.interval.bytes",
    "local.retention.bytes": "log.local.retention.bytes",
    "local.retention.ms": "log.local.retention.ms",
    "max.compaction.lag.ms": "log.cleaner.max.compaction.lag.ms",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "min.cleanable.dirty.ratio": "log.cleaner.min.cleanable.ratio",
    "min.compaction.lag.ms": "log.cleaner.min.compaction.lag.ms",
    "preallocate": "log.preallocate",
    "remote.storage.enable": "remote.log.storage.system.enable",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "retention.records": "log.retention.records",
    "segment.bytes": "log.segment.bytes",
    "segment.index.bytes": "log.index.size.max.bytes",
    "segment.jitter.ms": "log.roll.jitter.ms",
    "segment.ms": "log.roll.ms",
}


# Kafka's older keys of the same limit, in other units.
_OTHER_UNITS: Final = dict.fromkeys(("log.retention.hours", "log.retention.minutes"), "log.retention.ms (milliseconds)")

# Keys of topics of which Kafka's brokers have no default.
TOPIC_ONLY: Final = (
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
    "remote.log.copy.disable",
    "remote.log.delete.on.disable",
)


# Keys that Kafka 4.3 lets one change for all brokers (DynamicBrokerConfig), and that have no effect here.
_KAFKA_ALONE: Final = frozenset(
    {
        "background.threads",
        "config.providers",
        "follower.fetch.last.tiered.offset.enable",
        "follower.replication.throttled.rate",
        "leader.replication.throttled.rate",
        "log.cleaner.backoff.ms",
        "log.cleaner.dedupe.buffer.size",
        "log.cleaner.io.buffer.load.factor",
        "log.cleaner.io.buffer.size",
        "log.cleaner.io.max.bytes.per.second",
        "log.cleaner.threads",
        "max.connection.creation.rate",
        "max.connections",
        "max.connections.per.ip",
        "max.connections.per.ip.overrides",
        "metric.reporters",
        "num.io.threads",
        "num.network.threads",
        "num.recovery.threads.per.data.dir",
        "num.replica.fetchers",
        "remote.fetch.max.wait.ms",
        "remote.list.offsets.request.timeout.ms",
        "remote.log.index.file.cache.total.size.bytes",
        "remote.log.manager.copier.thread.pool.size",
        "remote.log.manager.copy.max.bytes.per.second",
        "remote.log.manager.expiration.thread.pool.size",
        "remote.log.manager.fetch.max.bytes.per.second",
        "remote.log.manager.follower.thread.pool.size",
        "remote.log.reader.threads",
        "replica.alter.log.dirs.io.max.bytes.per.second",
        "transaction.partition.verification.enable",
    }
)


def broker_name(topic_key: str) -> str:
    """What Kafka's brokers call their default of a topic's key."""
    return _BROKER_NAMES.get(topic_key, topic_key)


# The settings that are defaults of new topics, and the keys of topics that they stand for.
TOPIC_DEFAULTS: Final = {broker_name(key): key for key, row in TOPIC_CONFIG.items() if not row.is_read_only}

# Kafka's defaults of the topics' keys that have no effect here.
FIXED_DEFAULTS: Final = {
    broker_name(key): row for key, row in TOPIC_CONFIG.items() if row.is_fixed and key not in TOPIC_ONLY
}

CLUSTER_CONFIG: Final[dict[str, ConfigKey]] = {
    NUM_PARTITIONS: ConfigKey(
        default="1",
        values=f"a whole number from 1 to {TOPIC_PARTITIONS_MAX}",
        meaning="the partitions of a topic whose creator names no number",
        accepts=between(1, TOPIC_PARTITIONS_MAX),
        type=ConfigType.INT,
    ),
    REPLICATION_FACTOR: ConfigKey(
        default=REPLICAS_BY_NODES,
        values=f"a whole number from 1 to {NODES_MAX}, or -1 (one for each node, at most {REPLICAS_BY_NODES_MAX})",
        meaning="the replicas of a topic whose creator names no number",
        accepts=lambda value: value == REPLICAS_BY_NODES or between(1, NODES_MAX)(value),
        type=ConfigType.INT,
    ),
    AUTO_CREATE: ConfigKey(
        default="false",
        values="true or false",
        meaning="whether a Kafka client that names an unknown topic creates it",
        accepts=one_of("true", "false"),
        type=ConfigType.BOOLEAN,
    ),
    GROUP_INITIAL_DELAY_MS: ConfigKey(
        default=str(GROUP_INITIAL_DELAY_MS_DEFAULT),
        values=f"a whole number of milliseconds from 0 to {GROUP_INITIAL_DELAY_MS_MAX}",
        meaning="how long an empty group waits for more members before its first generation",
        accepts=between(0, GROUP_INITIAL_DELAY_MS_MAX),
        type=ConfigType.INT,
    ),
    CONSUMER_SESSION_MS: ConfigKey(
        default=str(CONSUMER_SESSION_MS_DEFAULT),
        values=f"a whole number of milliseconds from {CONSUMER_SESSION_MS_MIN} to {CONSUMER_SESSION_MS_MAX}",
        meaning="how long a member of a consumer group may be silent before it is removed",
        accepts=between(CONSUMER_SESSION_MS_MIN, CONSUMER_SESSION_MS_MAX),
        type=ConfigType.INT,
    ),
    CONSUMER_HEARTBEAT_MS: ConfigKey(
        default=str(CONSUMER_HEARTBEAT_MS_DEFAULT),
        values=f"a whole number of milliseconds from {CONSUMER_HEARTBEAT_MS_MIN} to {CONSUMER_HEARTBEAT_MS_MAX}",
        meaning="how often a member of a consumer group sends a heartbeat",
        accepts=between(CONSUMER_HEARTBEAT_MS_MIN, CONSUMER_HEARTBEAT_MS_MAX),
        type=ConfigType.INT,
    ),
    GROUP_CONSUMERS_MAX: ConfigKey(
        default=str(GROUP_MEMBERS_MAX),
        values=f"a whole number from 1 to {GROUP_MEMBERS_MAX}",
        meaning="the most members of a consumer group",
        accepts=between(1, GROUP_MEMBERS_MAX),
        type=ConfigType.INT,
    ),
    OFFSETS_RETENTION_MINUTES: ConfigKey(
        default=str(OFFSETS_RETENTION_MINUTES_DEFAULT),
        values=f"a whole number of minutes from 1 to {OFFSETS_RETENTION_MINUTES_MAX}, or 0 (for ever)",
        meaning="how long a group without members keeps its committed offsets",
        accepts=between(0, OFFSETS_RETENTION_MINUTES_MAX),
        type=ConfigType.INT,
    ),
    PRODUCER_EXPIRATION_MS: ConfigKey(
        default=str(PRODUCER_EXPIRATION_MS_DEFAULT),
        values=f"a whole number of milliseconds from {PRODUCER_EXPIRATION_MS_MIN} to {PRODUCER_EXPIRATION_MS_MAX}",
        meaning="how long a partition remembers an idempotent producer that writes nothing to it",
        accepts=between(PRODUCER_EXPIRATION_MS_MIN, PRODUCER_EXPIRATION_MS_MAX),
        type=ConfigType.INT,
    ),
    TRANSACTION_TIMEOUT_MS_MAX: ConfigKey(
        default=str(TRANSACTION_TIMEOUT_MS_MAX_DEFAULT),
        values=f"a whole number of milliseconds from 1 to {INT32_MAX}",
        meaning="the longest time that a producer may ask for before its open transaction is aborted",
        accepts=between(1, INT32_MAX),
        type=ConfigType.INT,
    ),
    TRANSACTIONAL_ID_EXPIRATION_MS: ConfigKey(
        default=str(TRANSACTIONAL_ID_EXPIRATION_MS_DEFAULT),
        values=f"a whole number of milliseconds from 1 to {INT32_MAX}",
        meaning="how long a transactional id is kept without a transaction",
        accepts=between(1, INT32_MAX),
        type=ConfigType.INT,
    ),
    **{
        name: replace(TOPIC_CONFIG[key], meaning=f"{key} of new topics, {TOPIC_CONFIG[key].meaning}")
        for name, key in TOPIC_DEFAULTS.items()
    },
}


def cluster_value(config: Mapping[str, str], key: str) -> str:
    """The cluster's value: the one that is set, otherwise the default."""
    return config.get(key, CLUSTER_CONFIG[key].default)


def with_defaults(config: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, str]:
    """What a new topic has that asks for this, by the cluster's settings: all of it, defaults included."""
    if is_external(asked):
        return dict(asked)  # the defaults concern records
    return {key: config[name] for name, key in TOPIC_DEFAULTS.items() if name in config} | dict(asked)


def offsets_retention_ms(config: Mapping[str, str]) -> int:
    """How long a group without members keeps its offsets; 0 is for ever."""
    return int(cluster_value(config, OFFSETS_RETENTION_MINUTES)) * 60_000


def producer_expiration_ms(config: Mapping[str, str]) -> int:
    """How long a partition remembers a producer that writes nothing to it."""
    return int(cluster_value(config, PRODUCER_EXPIRATION_MS))


def transaction_timeout_ms_max(config: Mapping[str, str]) -> int:
    """The longest time that a transaction may be open."""
    return int(cluster_value(config, TRANSACTION_TIMEOUT_MS_MAX))


def transactional_id_expiration_ms(config: Mapping[str, str]) -> int:
    """How long a transactional id is kept without a transaction."""
    return int(cluster_value(config, TRANSACTIONAL_ID_EXPIRATION_MS))


def unknown_key_hint(key: str, known: Collection[str]) -> str:
    """What to use in place of a key that is not among the known ones of the cluster, for a message."""
    if key in _KAFKA_ALONE:
        return "it is a key of Kafka's brokers that has no effect here, so leave it out"
    if key in FIXED_DEFAULTS:
        return f"it is a key of Kafka's brokers that has no effect here, as {FIXED_DEFAULTS[key].why}"
    if broker_name(key) in known:
        return f"of new topics it is {broker_name(key)}"
    if key in _OTHER_UNITS:
        return f"use {_OTHER_UNITS[key]}"
    return f"the settings are {', '.join(known)}"
