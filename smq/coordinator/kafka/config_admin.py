"""The settings of topics, of the cluster, and of a node: DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, and
ListConfigResources.

Owns the checks and the commands of alterations; `config_view` has what clients see. Each resource is a command of its
own, for all of its keys or none. The resource BROKER without a name is the whole cluster, as Kafka's dynamic defaults
of all brokers. A node reads its own settings from node.toml when it starts. Clients can see them, and cannot change
them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeAlias

from smq.coordinator.kafka.cluster_view import refusals_as_errors
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_view import cluster_entries, node_entries, topic_entries
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.name_lookup import find_topic
from smq.raft_state.cluster_config import (
    CLUSTER_CONFIG,
    FIXED_DEFAULTS,
    NUM_PARTITIONS,
    cluster_value,
    unknown_key_hint,
)
from smq.raft_state.command_codec import check_keys
from smq.raft_state.commands import AlterClusterConfig, AlterTopicConfig
from smq.raft_state.config_keys import ConfigKey, ConfigType, known_at
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import TOPIC_CONFIG, check_together, checked_config, config_value, is_external
from smq.raft_state.topic_rules import is_topic_name

TOPIC: Final = 2
BROKER: Final = 4
GROUP: Final = 32  # what Kafka lets a group of KIP-848 set for itself, the cluster sets for all of them here
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)
_BROKER_LOGGER, _CLIENT_METRICS = 8, 16
_RESOURCE_TYPES: Final = (TOPIC, BROKER, _BROKER_LOGGER, _CLIENT_METRICS, GROUP)
_TYPES_VERSION: Final = 1  # version 0 asks for client metrics only

_Table: TypeAlias = Mapping[str, ConfigKey]
_Changes: TypeAlias = tuple[dict[str, str], list[str]]  # the keys to set, and those that go back to their defaults
_Current: TypeAlias = Callable[[str], str]  # the value of a key now
_ChangesOf: TypeAlias = Callable[[Iterable[Struct], _Table, _Current], _Changes]


# -------------------------------------------------------------------------------------------- DescribeConfigs
async def describe_configs(gateway: Gateway, _version: int, request: Struct) -> Struct:
    results = [await _describe(gateway, requested, request) for requested in request["resources"]]
    return {"throttle_time_ms": 0, "results": results}


async def _describe(gateway: Gateway, requested: Struct, request: Struct) -> Struct:
    answer = _answer_to(requested) | {"configs": []}
    try:
        entries = await _entries(gateway, requested["resource_type"], requested["resource_name"])
    except (SmqError, KafkaRefusal) as e:
        return answer | error_fields(e)
    wanted = requested["configuration_keys"]
    for entry in entries:
        if wanted is not None and entry["name"] not in wanted:
            continue  # an unknown key is left out, as Kafka does
        if not request["include_synonyms"]:
            entry["synonyms"] = []
        if not request["include_documentation"]:
            entry["documentation"] = None
        answer["configs"].append(entry)
    return answer


def _answer_to(requested: Struct) -> Struct:
    return {
        "error_code": KafkaError.NONE,
        "error_message": None,
        "resource_type": requested["resource_type"],
        "resource_name": requested["resource_name"],
    }


async def _entries(gateway: Gateway, kind: int, name: str) -> list[Struct]:
    """After a barrier: a change through another node shows here."""
    if kind not in (TOPIC, BROKER, GROUP):
        raise _unsupported(kind)
    if kind == TOPIC:
        _check_topic_name(name)
    elif kind == GROUP:
        _check_group_name(name)
        return []
    else:
        _check_node_name(gateway, name)
    await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
    if kind == TOPIC:
        topic = await find_topic(gateway.calls, name, TIMEOUT_MS_DEFAULT)
        state = gateway.state
        return topic_entries(topic.config, topic.replication_factor, state.config, state.feature_level)
    return node_entries(gateway) if name else cluster_entries(gateway)


def _check_topic_name(name: str) -> None:
    if not is_topic_name(name):
        raise KafkaRefusal(KafkaError.INVALID_TOPIC_EXCEPTION, f"{name[:80]!r} is not a topic name")


def _check_group_name(name: str) -> None:
    if not name:
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "name the group whose configuration is wanted")


def _check_node_name(gateway: Gateway, name: str) -> None:
    me = str(gateway.calls.node.node_id)
    if name not in ("", me):
        message = f"this is node {me}: ask node {name[:80]} itself, which alone knows its settings"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)


def _check_node_id(gateway: Gateway, name: str) -> None:
    nodes = [str(node) for node in sorted(gateway.state.nodes)]
    if name not in nodes:
        message = f"there is no node {name[:80]!r}: the nodes are {', '.join(nodes)}"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)


def _unsupported(kind: int) -> KafkaRefusal:
    message = (
        f"resource type {kind} has no configuration: only topics ({TOPIC}), nodes and the cluster ({BROKER}) and"
        f" groups ({GROUP}) have one"
    )
    return KafkaRefusal(KafkaError.INVALID_REQUEST, message)


# ------------------------------------------------------------------------------------------------- alteration
async def alter_configs(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Keys that the request does not name go back to their defaults."""
    return await _alter_each(gateway, request, _replacement)


async def incremental_alter_configs(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Keys that the request does not name stay as they are."""
    return await _alter_each(gateway, request, _increment)


async def _alter_each(gateway: Gateway, request: Struct, changes_of: _ChangesOf) -> Struct:
    counts = Counter(_resource(requested) for requested in request["resources"])
    responses = []
    for requested in request["resources"]:
        answer = _answer_to(requested)
        try:
            if counts[_resource(requested)] > 1:
                raise KafkaRefusal(KafkaError.INVALID_REQUEST, "the request names this resource twice")
            await _alter(gateway, requested, changes_of, is_dry=request["validate_only"])
        except (SmqError, KafkaRefusal) as e:
            answer |= error_fields(e)
        responses.append(answer)
    return {"throttle_time_ms": 0, "responses": responses}


def _resource(requested: Struct) -> tuple[int, str]:
    return requested["resource_type"], requested["resource_name"]


async def _alter(gateway: Gateway, requested: Struct, changes_of: _ChangesOf, *, is_dry: bool) -> None:
    kind, name = requested["resource_type"], requested["resource_name"]
    if any(count > 1 for count in Counter(c["name"] for c in requested["configs"]).values()):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "the request gives a configuration key twice")
    if kind == TOPIC:
        _check_topic_name(name)
        topic = await find_topic(gateway.calls, name, TIMEOUT_MS_DEFAULT)  # if unknown, that is the reason, as in Kafka
        keys = _keys(gateway, requested, TOPIC_CONFIG)
        changes = changes_of(requested["configs"], keys, partial(config_value, topic.config))
        await _alter_topic(gateway, topic, changes, is_dry=is_dry)
    elif kind == BROKER and not name:
        keys = _keys(gateway, requested, CLUSTER_CONFIG) | FIXED_DEFAULTS
        set_, unset = changes_of(requested["configs"], keys, partial(cluster_value, gateway.state.config))
        set_ = {key: value for key, value in set_.items() if key not in FIXED_DEFAULTS}
        unset = [key for key in unset if key not in FIXED_DEFAULTS]
        if not is_dry and (set_ or unset):
            command = AlterClusterConfig(set_=_sorted(set_), unset=tuple(sorted(unset)))
            await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)
    elif kind == BROKER:
        _check_node_id(gateway, name)
        if all(config.get("config_operation", _SET) == _DELETE for config in requested["configs"]):
            return  # nothing is set there, as Kafka's tools ask for to end a throttle
        message = (
            "a node's own settings are in its node.toml: change them there and restart the node. Or set the key for the"
            ' whole cluster: the resource is then BROKER "" (--entity-default), or use `smq config set`'
        )
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    elif kind == GROUP:
        _check_group_name(name)
        if requested["configs"]:
            message = (
                "groups have no configuration of their own: each member brings its session.timeout.ms when it joins,"
                " and group.consumer.* are settings of the whole cluster"
            )
            raise KafkaRefusal(KafkaError.INVALID_CONFIG, message)
    else:
        raise _unsupported(kind)


def _keys(gateway: Gateway, requested: Struct, table: _Table) -> dict[str, ConfigKey]:
    """Those of the cluster's feature level; FEATURE_NOT_ENABLED if the request names one of a later level."""
    level = gateway.state.feature_level
    with refusals_as_errors():
        check_keys(table, [config["name"] for config in requested["configs"]], level)
    return known_at(table, level)


async def _alter_topic(gateway: Gateway, topic: TopicState, changes: _Changes, *, is_dry: bool) -> None:
    set_, unset = changes
    gateway.settings.check_topic(set_)
    if is_dry:
        with refusals_as_errors():
            checked = checked_config(set_.items(), topic.replication_factor, gateway.state.feature_level)
            check_together({**{key: value for key, value in topic.config.items() if key not in unset}, **checked})
        return
    command = AlterTopicConfig(request_id=NO_REQUEST, name=topic.name, set_=_sorted(set_), unset=tuple(sorted(unset)))
    await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)


def _sorted(changes: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(changes.items()))


def _replacement(configs: Iterable[Struct], table: _Table, _current: _Current) -> _Changes:
    set_ = {config["name"]: _checked(config, table) for config in configs}
    return set_, [key for key, row in table.items() if key not in set_ and not row.is_read_only]


def _increment(configs: Iterable[Struct], table: _Table, current: _Current) -> _Changes:
    set_: dict[str, str] = {}
    unset = []
    for config in configs:
        key, operation = config["name"], config["config_operation"]
        if operation == _SET:
            set_[key] = _checked(config, table)
        elif operation == _DELETE and key not in table and NUM_PARTITIONS in table:
            continue  # Kafka's brokers have keys that the cluster lacks: such a one is never set
        elif operation == _DELETE:
            _row_of(key, table)
            unset.append(key)
        elif operation in (_APPEND, _SUBTRACT):
            set_[key] = _checked({"name": key, "value": _changed_list(config, table, current)}, table)
        else:
            message = f"unknown operation {operation}: 0 sets, 1 deletes, 2 appends to a list and 3 subtracts from it"
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    return set_, unset


def _changed_list(config: Struct, table: _Table, current: _Current) -> str | None:
    """As in Kafka: what a list has is not appended again, and what it lacks need not be subtracted."""
    key, value = config["name"], config["value"]
    if _row_of(key, table).type is not ConfigType.LIST:
        raise KafkaRefusal(KafkaError.INVALID_CONFIG, f"{key} is not a list: it can only be set or deleted")
    if value is None:
        return None
    before, given = ([item for item in text.split(",") if item] for text in (current(key), value))
    if config["config_operation"] == _APPEND:
        return ",".join(dict.fromkeys((*before, *given)))
    return ",".join(item for item in before if item not in given)


def _checked(config: Struct, table: _Table) -> str:
    """The value. Refused before Raft, since a request may hold megabytes of keys and values."""
    key, value = config["name"], config["value"]
    if value is None:
        message = f"{key[:80]} has no value: delete the key (IncrementalAlterConfigs) for its default"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    row = _row_of(key, table)
    if not row.accepts(value):
        raise KafkaRefusal(KafkaError.INVALID_CONFIG, row.refusal(key, repr(value[:80])))
    text: str = value
    return text


def _row_of(key: str, table: _Table) -> ConfigKey:
    if key not in table:
        is_of_cluster = NUM_PARTITIONS in table
        hint = unknown_key_hint(key, table) if is_of_cluster else f"known are {', '.join(table)}"
        message = f"there is no configuration {key[:80]!r} here: {hint}"
        raise KafkaRefusal(KafkaError.INVALID_CONFIG, message)
    return table[key]


# ------------------------------------------------------------------------------------------- ListConfigResources
async def list_config_resources(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Loggers, client metrics and groups have no configuration of their own."""
    types = request["resource_types"] if version >= _TYPES_VERSION else [_CLIENT_METRICS]
    if any(kind not in _RESOURCE_TYPES for kind in types):
        return {"throttle_time_ms": 0, "error_code": KafkaError.UNSUPPORTED_VERSION, "config_resources": []}
    found = [
        {"resource_name": name, "resource_type": kind}
        for kind in sorted(set(types or _RESOURCE_TYPES))
        for name in _resource_names(gateway.state, kind)
    ]
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "config_resources": found}


def _resource_names(state: ClusterState, kind: int) -> list[str]:
    if kind == TOPIC:
        return sorted(name for name, topic in state.topics.items() if not is_external(topic.config))
    return [str(node) for node in sorted(state.nodes)] if kind == BROKER else []
