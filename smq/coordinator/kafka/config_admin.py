"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs: the settings of topics, and a view of a node's own.

Owns how the rows of `raft_state.topic_config` look to Kafka's admin clients. Each resource is a command of its own, for
all of its keys or none. A node reads its settings from node.toml when it starts. Clients can see those that Kafka has a
name for, and cannot change them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from smq.coordinator.kafka.cluster import PARTITIONS_DEFAULT, check_setting, default_replication_factor
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.lookup import find_topic
from smq.raft_state.commands import AlterTopicConfig
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST
from smq.raft_state.names import is_topic_name
from smq.raft_state.topic_config import MAX_MESSAGE_BYTES, TOPIC_CONFIG, config_value

TOPIC: Final = 2
BROKER: Final = 4
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)

# Kafka's ConfigSource and ConfigType.
_SOURCE_TOPIC: Final = 1
_SOURCE_NODE: Final = 4
_SOURCE_DEFAULT: Final = 5
_TYPE_BOOLEAN: Final = 1
_TYPE_STRING: Final = 2
_TYPE_LONG: Final = 5

_Changes: TypeAlias = tuple[dict[str, str], list[str]]  # the keys to set, and those that go back to their defaults
_ChangesOf: TypeAlias = Callable[[Iterable[Struct]], _Changes]


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
    """A topic's are read after a barrier: a change through another node shows here."""
    if kind == TOPIC:
        _check_topic_name(name)
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
        return described((await find_topic(gateway.calls, name, TIMEOUT_MS_DEFAULT)).config)
    if kind == BROKER:
        me = str(gateway.calls.node.node_id)
        if name not in ("", me):
            message = f"this is node {me}: ask node {name} itself, which alone knows its settings"
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
        return _described_node(gateway)
    raise _unsupported(kind)


def _check_topic_name(name: str) -> None:
    if not is_topic_name(name):
        raise KafkaRefusal(KafkaError.INVALID_TOPIC_EXCEPTION, f"{name[:80]!r} is not a topic name")


def _unsupported(kind: int) -> KafkaRefusal:
    message = f"resource type {kind} has no configuration: only topics ({TOPIC}) and nodes ({BROKER}) have one"
    return KafkaRefusal(KafkaError.INVALID_REQUEST, message)


def described(config: Mapping[str, str]) -> list[Struct]:
    """All keys of a topic, for DescribeConfigs and CreateTopics."""
    return [_described_key(key, config) for key in TOPIC_CONFIG]


def _described_key(key: str, config: Mapping[str, str]) -> Struct:
    row = TOPIC_CONFIG[key]
    own = [{"name": key, "value": config[key], "source": _SOURCE_TOPIC}] if key in config else []
    return {
        "name": key,
        "value": config_value(config, key),
        "read_only": False,
        "config_source": _SOURCE_TOPIC if own else _SOURCE_DEFAULT,
        "is_sensitive": False,
        "synonyms": [*own, {"name": key, "value": row.default, "source": _SOURCE_DEFAULT}],
        "config_type": _type_of(row.default),
        "documentation": f"{row.meaning}: {row.values}",
    }


def _type_of(value: str) -> int:
    if value in ("true", "false"):
        return _TYPE_BOOLEAN
    return _TYPE_LONG if value.removeprefix("-").isdigit() else _TYPE_STRING


def _described_node(gateway: Gateway) -> list[Struct]:
    settings = {
        "auto.create.topics.enable": (str(gateway.auto_create).lower(), "clients may create topics by naming them"),
        "default.replication.factor": (str(default_replication_factor(gateway.state)), "of topics that name none"),
        "message.max.bytes": (TOPIC_CONFIG[MAX_MESSAGE_BYTES].default, "of topics without a max.message.bytes"),
        "num.partitions": (str(PARTITIONS_DEFAULT), "of topics that name no number"),
    }
    return [
        {
            "name": key,
            "value": value,
            "read_only": True,
            "config_source": _SOURCE_NODE,
            "is_sensitive": False,
            "synonyms": [{"name": key, "value": value, "source": _SOURCE_NODE}],
            "config_type": _type_of(value),
            "documentation": meaning,
        }
        for key, (value, meaning) in settings.items()
    ]


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
    if requested["resource_type"] == BROKER:
        message = "a node's settings are in its node.toml: change them there, and restart the node"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    if requested["resource_type"] != TOPIC:
        raise _unsupported(requested["resource_type"])
    _check_topic_name(requested["resource_name"])
    if any(count > 1 for count in Counter(c["name"] for c in requested["configs"]).values()):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "the request gives a configuration key twice")
    set_, unset = changes_of(requested["configs"])
    name = (await find_topic(gateway.calls, requested["resource_name"], TIMEOUT_MS_DEFAULT)).name
    if not is_dry:
        command = AlterTopicConfig(
            request_id=NO_REQUEST, name=name, set_=tuple(sorted(set_.items())), unset=tuple(sorted(unset))
        )
        await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)


def _replacement(configs: Iterable[Struct]) -> _Changes:
    set_ = {config["name"]: _checked(config) for config in configs}
    return set_, [key for key in TOPIC_CONFIG if key not in set_]


def _increment(configs: Iterable[Struct]) -> _Changes:
    set_: dict[str, str] = {}
    unset = []
    for config in configs:
        key, operation = config["name"], config["config_operation"]
        if operation == _SET:
            set_[key] = _checked(config)
        elif operation == _DELETE:
            check_setting(key)
            unset.append(key)
        elif operation in (_APPEND, _SUBTRACT):
            check_setting(key)
            raise KafkaRefusal(KafkaError.INVALID_CONFIG, f"{key} is not a list: it can only be set or deleted")
        else:
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, f"unknown operation {operation}: 0 sets, 1 deletes")
    return set_, unset


def _checked(config: Struct) -> str:
    if config["value"] is None:
        message = f"{config['name'][:80]} has no value: delete the key (IncrementalAlterConfigs) for its default"
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    value: str = config["value"]
    check_setting(config["name"], value)
    return value
