"""How settings look to Kafka's admin clients: of topics, of nodes, of the whole cluster, and of groups.

Owns the rows of DescribeConfigs: values, types, sources and synonyms. Most keys of a node say what smq does anyway;
tools read them. It must never change anything: `config_admin` does. Only handlers import it.
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
from smq.raft_state.cluster_config import CLUSTER_CONFIG, FIXED_DEFAULTS, REPLICATION_FACTOR, broker_name
from smq.raft_state.config_keys import ConfigKey, ConfigType, known_at
from smq.raft_state.limits import GROUP_MEMBERS_MAX, METADATA_BYTES_MAX
from smq.raft_state.topic_config import TOPIC_CONFIG, shown_value

_SOURCE_TOPIC: Final = 1


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
    "log.dir": _NodeKey(ConfigType.STRING, lambda gateway: gateway.data_dir, "the node's data directory"),
    "log.dirs": _NodeKey(ConfigType.STRING, lambda gateway: gateway.data_dir, "the node's data directory"),
    "delete.topic.enable": _NodeKey(ConfigType.BOOLEAN, lambda _: "true", "topics can be deleted"),
    "fetch.max.bytes": _NodeKey(
        ConfigType.INT, lambda gateway: gateway.response_bytes_max, "the records of a response"
    ),
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
def topic_entries(topic: Mapping[str, str], replicas: int, cluster: Mapping[str, str], level: int) -> list[Struct]:
    """All keys of a topic with this configuration and number of replicas at a feature level, for DescribeConfigs and
    CreateTopics. `cluster` are the settings of the cluster."""
    return [_topic_entry(key, row, topic, replicas, cluster) for key, row in known_at(TOPIC_CONFIG, level).items()]


def _topic_entry(
    key: str, row: ConfigKey, topic: Mapping[str, str], replicas: int, cluster: Mapping[str, str]
) -> Struct:
    """A default of the cluster stands below a value of the topic, which may come from it. It concerns no other topic
    that exists."""
    name = broker_name(key)
    values: list[tuple[str, str | None, int]] = []
    if key in topic:
        values.append((key, topic[key], _SOURCE_TOPIC))
        if name in cluster:
            values.append((name, cluster[name], Source.CLUSTER))
    values.append((name, shown_value({}, key, replicas), Source.DEFAULT))
    return _entry(key, values, row.type, row.documentation, read_only=row.is_read_only)


# ----------------------------------------------------------------------------------------- nodes, cluster
def node_entries(gateway: Gateway) -> list[Struct]:
    """All keys of this node: those of the cluster with their sources, then what cannot be set."""
    state = gateway.state
    entries = []
    for key, row in known_at(CLUSTER_CONFIG, state.feature_level).items():
        layers = gateway.settings.layers(state, key)
        values = [(key, _meant(gateway, key, value), int(source)) for value, source in layers]
        entries.append(_entry(key, values, row.type, row.documentation, read_only=False))
    replicas = gateway.settings.replication_factor(state)
    for key, row in known_at(TOPIC_CONFIG, state.feature_level).items():
        if (name := broker_name(key)) in FIXED_DEFAULTS:
            values = [(name, shown_value({}, key, replicas), int(Source.DEFAULT))]
            entries.append(_entry(name, values, row.type, f"of topics: {row.documentation}", read_only=True))
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
            CLUSTER_CONFIG[key].documentation,
            read_only=False,
        )
        for key, value in sorted(gateway.state.config.items())
    ]


def _meant(gateway: Gateway, key: str, value: str) -> str:
    return replicas_meant(gateway.state, value) if key == REPLICATION_FACTOR else value
