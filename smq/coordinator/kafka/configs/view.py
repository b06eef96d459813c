"""How settings look to Kafka's admin clients: of topics, of nodes, of the whole cluster, and of groups.

Owns the rows of DescribeConfigs: values, types, sources and synonyms. Most keys of a node say what smq does anyway;
tools read them. It must never change anything: `admin` does. Only handlers import it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import (
    GROUP_SESSION_MS_MAX,
    GROUP_SESSION_MS_MIN,
    KAFKA_CONNECTIONS_MAX,
    KAFKA_CONNECTIONS_PER_ADDRESS_MAX,
    KAFKA_IDLE_S_MAX,
)
from smq.coordinator.service.settings import Source, replicas_meant
from smq.raft_state.cluster_config import CLUSTER_CONFIG, REPLICATION_FACTOR
from smq.raft_state.config_keys import ConfigKey, ConfigType, known_at
from smq.raft_state.limits import GROUP_MEMBERS_MAX, METADATA_BYTES_MAX
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, TOPIC_CONFIG, shown_value

_SOURCE_TOPIC: Final = 1

# What Kafka calls a broker's default of a topic's key, if smq has the key. Where the names agree, it is missing here.
_BROKER_KEYS: Final = {
    "cleanup.policy": "log.cleanup.policy",
    "flush.messages": "log.flush.interval.messages",
    "flush.ms": "log.flush.interval.ms",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.type": "log.message.timestamp.type",
    "preallocate": "log.preallocate",
    "remote.storage.enable": "remote.log.storage.system.enable",
    "retention.bytes": "log.retention.bytes",
    "retention.ms": "log.retention.ms",
    "retention.records": "log.retention.records",
    MAX_MESSAGE_BYTES: "message.max.bytes",
}


@dataclass(frozen=True, slots=True)
class _NodeKey:
    """A key of a node that cannot be set. `value` is None if the node has none."""

    type: ConfigType
    value: Callable[[Gateway], object]
    meaning: str


def _rack(gateway: Gateway) -> str | None:
    me = gateway.state.nodes.get(gateway.calls.node.node_id)
    return (me.rack if me is not None else "") or None


_NODE_KEYS: Final[dict[str, _NodeKey]] = {
    "auto.leader.rebalance.enable": _NodeKey(
        ConfigType.BOOLEAN, lambda _: "true", "leaderships return to the preferred replicas"
    ),
    "broker.id": _NodeKey(ConfigType.INT, lambda gateway: gateway.calls.node.node_id, "the node's number"),
    "broker.rack": _NodeKey(ConfigType.STRING, _rack, "the node's location: rack in its node.toml"),
    "connections.max.idle.ms": _NodeKey(
        ConfigType.LONG, lambda _: KAFKA_IDLE_S_MAX * 1_000, "a connection without requests ends after this time"
    ),
    "delete.topic.enable": _NodeKey(ConfigType.BOOLEAN, lambda _: "true", "topics can be deleted"),
    "group.max.session.timeout.ms": _NodeKey(
        ConfigType.INT, lambda _: GROUP_SESSION_MS_MAX, "the longest session of a group's member"
    ),
    "group.max.size": _NodeKey(ConfigType.INT, lambda _: GROUP_MEMBERS_MAX, "the members of one group"),
    "group.min.session.timeout.ms": _NodeKey(
        ConfigType.INT, lambda _: GROUP_SESSION_MS_MIN, "the shortest session of a group's member"
    ),
    "max.connections": _NodeKey(ConfigType.INT, lambda _: KAFKA_CONNECTIONS_MAX, "the connections of Kafka clients"),
    "max.connections.per.ip": _NodeKey(
        ConfigType.INT, lambda _: KAFKA_CONNECTIONS_PER_ADDRESS_MAX, "the connections from one address"
    ),
    "node.id": _NodeKey(ConfigType.INT, lambda gateway: gateway.calls.node.node_id, "the node's number"),
    "offset.metadata.max.bytes": _NodeKey(
        ConfigType.INT, lambda _: METADATA_BYTES_MAX, "the metadata of a committed offset"
    ),
    "process.roles": _NodeKey(ConfigType.LIST, lambda _: "broker,controller", "every node serves all requests"),
    "socket.request.max.bytes": _NodeKey(
        ConfigType.INT, lambda gateway: gateway.request_bytes_max, "request_bytes_max in the node's node.toml"
    ),
}


def _entry(
    key: str, values: Sequence[tuple[str, str | None, int]], type_: int, meaning: str, *, read_only: bool
) -> Struct:
    """`values` are (name, value, source), the one in effect first."""
    return {
        "name": key,
        "value": values[0][1],
        "read_only": read_only,
        "config_source": values[0][2],
        "is_sensitive": False,
        "synonyms": [{"name": name, "value": value, "source": source} for name, value, source in values],
        "config_type": type_,
        "documentation": meaning,
    }


# ------------------------------------------------------------------------------------------------------ topics
def topic_entries(config: Mapping[str, str], replicas: int, level: int) -> list[Struct]:
    """All keys of a topic with so many replicas at a feature level, for DescribeConfigs and CreateTopics."""
    return [_topic_entry(key, row, config, replicas) for key, row in known_at(TOPIC_CONFIG, level).items()]


def _topic_entry(key: str, row: ConfigKey, config: Mapping[str, str], replicas: int) -> Struct:
    values: list[tuple[str, str | None, int]] = [(key, config[key], _SOURCE_TOPIC)] if key in config else []
    values.append((_BROKER_KEYS.get(key, key), shown_value({}, key, replicas), Source.DEFAULT))
    return _entry(key, values, row.type, _documentation(row), read_only=row.is_read_only)


def _documentation(row: ConfigKey) -> str:
    return f"{row.meaning}: {row.values}"


# ----------------------------------------------------------------------------------------- nodes, cluster
def node_entries(gateway: Gateway) -> list[Struct]:
    """All keys of this node: those of the cluster with their sources, then what cannot be set."""
    state = gateway.state
    entries = []
    for key, row in known_at(CLUSTER_CONFIG, state.feature_level).items():
        layers = gateway.settings.layers(state, key)
        values = [(key, _meant(gateway, key, value), int(source)) for value, source in layers]
        entries.append(_entry(key, values, row.type, _documentation(row), read_only=False))
    replicas = gateway.settings.replication_factor(state)
    for key, row in known_at(TOPIC_CONFIG, state.feature_level).items():
        if not row.is_fixed_at_creation:
            name = _BROKER_KEYS.get(key, key)
            values = [(name, shown_value({}, key, replicas), int(Source.DEFAULT))]
            entries.append(_entry(name, values, row.type, f"of topics: {row.meaning}", read_only=True))
    for key, node_key in _NODE_KEYS.items():
        found = node_key.value(gateway)
        value = (key, None if found is None else str(found), int(Source.NODE_TOML))
        entries.append(_entry(key, [value], node_key.type, node_key.meaning, read_only=True))
    return sorted(entries, key=lambda entry: str(entry["name"]))


def cluster_entries(gateway: Gateway) -> list[Struct]:
    """The settings that are set for the whole cluster, as Kafka shows the dynamic defaults of its brokers."""
    return [
        _entry(
            key,
            [(key, _meant(gateway, key, value), int(Source.CLUSTER))],
            CLUSTER_CONFIG[key].type,
            _documentation(CLUSTER_CONFIG[key]),
            read_only=False,
        )
        for key, value in sorted(gateway.state.config.items())
    ]


def _meant(gateway: Gateway, key: str, value: str) -> str:
    return replicas_meant(gateway.state, value) if key == REPLICATION_FACTOR else value
