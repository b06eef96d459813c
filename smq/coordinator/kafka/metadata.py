"""ApiVersions, UpdateFeatures, Metadata, DescribeCluster and FindCoordinator: what a client asks first.

Owns the description of the node and the cluster that clients get, when a topic is created on first use, and which node
a client takes for the coordinator of a group or transactional id: any node answers, from the replicated state alone.
"""

from typing import Final

from smq.coordinator.kafka.api_keys import SERVED, ApiKey
from smq.coordinator.kafka.authorization import MAY_CREATE, on_cluster, on_topic
from smq.coordinator.kafka.cluster_view import (
    INTERNAL_TOPICS,
    NO_TOPIC_ID,
    PREFIX,
    brokers,
    code_of_unknown_topic,
    confirmation_failure,
    controller,
    create_on_use,
    describe_partition,
    endpoint,
    is_group,
)
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import CODES, KafkaError, code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.turns import Turns
from smq.raft_state.coordinators import coordinator_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import TopicId
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import is_external
from smq.raft_state.topic_rules import is_topic_name

_FEATURE: Final = "transaction.version"
_FEATURE_LEVEL: Final = 2
_FEATURES_FROM_ZERO_VERSION: Final = 4  # clients of older ones refuse a feature that begins with version 0
# As Kafka 4 says, which refuses these, too: librdkafka before 2.11.1 compresses only if Produce goes down to them.
_LOWEST: Final[dict[int, int]] = {ApiKey.PRODUCE: 0}
_AUTO_CREATE_VERSION: Final = 4  # older requests have no such field, and mean yes
_ENDPOINTS_OF_BROKERS: Final = 1


def api_versions(code: KafkaError = KafkaError.NONE) -> Struct:
    """With the one feature that clients look for: the second protocol of transactions, which they use from version 2 of
    it on. Every cluster has it, so its epoch never changes."""
    return {
        "error_code": code,
        "api_keys": [
            {"api_key": int(key), "min_version": _LOWEST.get(key, row.versions.lo), "max_version": row.versions.hi}
            for key, row in SERVED.items()
        ],
        "throttle_time_ms": 0,
        "supported_features": [{"name": _FEATURE, "min_version": 0, "max_version": _FEATURE_LEVEL}],
        "finalized_features_epoch": 0,
        "finalized_features": [
            {"name": _FEATURE, "max_version_level": _FEATURE_LEVEL, "min_version_level": _FEATURE_LEVEL}
        ],
    }


async def answer_api_versions(_gateway: Gateway, version: int, _request: Struct) -> Struct:
    answer = api_versions()
    if version < _FEATURES_FROM_ZERO_VERSION:
        answer["supported_features"] = []
    return answer


_RESULTS_END_VERSION: Final = 2  # from it on, one code for the whole request


async def update_features(_gateway: Gateway, version: int, request: Struct) -> Struct:
    """The level that the feature has can be asked for again. No other can, so nothing is ever changed."""
    results = [
        {"feature": update["feature"]} | _feature_refusal(update["feature"], update["max_version_level"])
        for update in request["feature_updates"]
    ]
    answer: Struct = {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "error_message": None, "results": results}
    if version >= _RESULTS_END_VERSION:
        refused = next((result for result in results if result["error_code"] is not KafkaError.NONE), answer)
        answer |= {"error_code": refused["error_code"], "error_message": refused["error_message"], "results": []}
    return answer


def _feature_refusal(feature: str, level: int) -> Struct:
    if (feature, level) == (_FEATURE, _FEATURE_LEVEL):
        return {"error_code": KafkaError.NONE, "error_message": None}
    message = (
        f"{feature[:80]!r} stays as it is: the one feature of this cluster for Kafka's clients is {_FEATURE}, always at"
        f" level {_FEATURE_LEVEL}"
    )
    return {"error_code": KafkaError.INVALID_UPDATE_VERSION, "error_message": message}


async def metadata(gateway: Gateway, version: int, request: Struct) -> Struct:
    requested = request["topics"]
    is_all = requested is None or (version == 0 and not requested)
    if is_all:
        known, turns = gateway.state.topics, Turns()
        named = [known[name] for name in sorted(known) if not is_external(known[name].config)]
        topics = [await _topic(gateway, topic, turns) for topic in named]
    else:
        is_asked = version < _AUTO_CREATE_VERSION or request["allow_auto_topic_creation"]
        may_create = is_asked and gateway.settings.auto_create(gateway.state)
        failure = await confirmation_failure(gateway, lambda state: _are_known(state, requested))
        topics = (
            [
                await _named_topic(gateway, topic, may_create=may_create and topic.get(MAY_CREATE, True))
                for topic in requested
            ]
            if failure is None
            else [await _unconfirmed_topic(gateway, topic) for topic in requested]
        )
    for topic in topics:
        is_asked = request["include_topic_authorized_operations"] and topic["error_code"] is KafkaError.NONE
        topic["topic_authorized_operations"] = on_topic(is_asked=is_asked)
    return {
        "throttle_time_ms": 0,
        "brokers": brokers(gateway),
        "cluster_id": gateway.state.cluster_id,
        "controller_id": controller(gateway),
        "topics": topics,
        "cluster_authorized_operations": on_cluster(is_asked=request["include_cluster_authorized_operations"]),
        "error_code": KafkaError.NONE,
    }


def _are_known(state: ClusterState, requested: list[Struct]) -> bool:
    return all(
        t["name"] in state.topics if t["name"] is not None else t["topic_id"] in state.topic_names for t in requested
    )


async def _named_topic(gateway: Gateway, requested: Struct, *, may_create: bool) -> Struct:
    state, name, topic_id = gateway.state, requested["name"], requested["topic_id"]
    if name is None or (not name and topic_id != NO_TOPIC_ID):
        name = state.topic_names.get(TopicId(topic_id))
        if name is None:
            return _unknown(None, topic_id, KafkaError.UNKNOWN_TOPIC_ID)
    if name not in state.topics and may_create and name not in INTERNAL_TOPICS:
        try:
            await create_on_use(gateway, name, TIMEOUT_MS_DEFAULT)
        except SmqError as e:  # clients ask again after few codes only
            code = KafkaError.LEADER_NOT_AVAILABLE if e.code.is_retriable else code_of(e)
            return _unknown(name, NO_TOPIC_ID, code)
    found = state.topics.get(name)
    if found is not None and is_external(found.config):
        return _unknown(name, found.topic_id, CODES[ErrorCode.WRONG_STORAGE])
    return (
        await _topic(gateway, found, Turns())
        if found is not None
        else _unknown(name, NO_TOPIC_ID, code_of_unknown_topic(name))
    )


async def _unconfirmed_topic(gateway: Gateway, requested: Struct) -> Struct:
    """As far as this node knows it: without a quorum it knows of no topic that it does not exist. All clients ask again
    after LEADER_NOT_AVAILABLE; librdkafka gives up the records of a topic that stays unknown for 30 seconds."""
    state, name, topic_id = gateway.state, requested["name"], requested["topic_id"]
    known = name if name else state.topic_names.get(TopicId(topic_id))
    found = state.topics.get(known) if known is not None else None
    if found is not None and not is_external(found.config):
        return await _topic(gateway, found, Turns())
    if found is not None:
        return _unknown(known, found.topic_id, CODES[ErrorCode.WRONG_STORAGE])
    is_possible = not name or is_topic_name(name)
    return _unknown(
        name, topic_id, KafkaError.LEADER_NOT_AVAILABLE if is_possible else KafkaError.INVALID_TOPIC_EXCEPTION
    )


def _unknown(name: str | None, topic_id: bytes, code: KafkaError) -> Struct:
    return {
        "error_code": code,
        "name": name if name is not None else "",
        "topic_id": topic_id,
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": [],
    }


async def _topic(gateway: Gateway, topic: TopicState, turns: Turns) -> Struct:
    return {
        "error_code": KafkaError.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.name in INTERNAL_TOPICS,
        "partitions": [describe_partition(gateway, partition) async for partition in turns.over(topic.partitions)],
    }


async def describe_cluster(gateway: Gateway, _version: int, request: Struct) -> Struct:
    out: Struct = {
        "throttle_time_ms": 0,
        "error_code": KafkaError.NONE,
        "error_message": None,
        "cluster_id": gateway.state.cluster_id,
        "controller_id": controller(gateway),
        "brokers": [],
        "cluster_authorized_operations": on_cluster(is_asked=request["include_cluster_authorized_operations"]),
    }
    if request["endpoint_type"] != _ENDPOINTS_OF_BROKERS:
        out["error_code"] = KafkaError.UNSUPPORTED_ENDPOINT_TYPE
        out["error_message"] = "this cluster has brokers only: ask for endpoint type 1"
        return out
    for broker in brokers(gateway, with_fenced=request["include_fenced_brokers"]):
        is_fenced = gateway.state.nodes[broker["node_id"]].fenced
        out["brokers"].append(
            {
                "broker_id": broker["node_id"],
                "host": broker["host"],
                "port": broker["port"],
                "rack": broker["rack"],
                "is_fenced": is_fenced,
            }
        )
    return out


_MANY_KEYS_VERSION: Final = 4  # for several groups
_KEY_OF_GROUP: Final = 0
_KEY_OF_TRANSACTION: Final = 1


async def find_coordinator(gateway: Gateway, version: int, request: Struct) -> Struct:
    if version >= _MANY_KEYS_VERSION:
        found = [_coordinator(gateway, key, request["key_type"]) for key in request["coordinator_keys"]]
        return {"throttle_time_ms": 0, "coordinators": found}
    return {"throttle_time_ms": 0} | _coordinator(gateway, request["key"], request["key_type"])


def _coordinator(gateway: Gateway, key: str, key_type: int) -> Struct:
    answer: Struct = {"key": key, "error_code": KafkaError.NONE, "error_message": None}
    no_node = {"node_id": -1, "host": "", "port": -1}
    if key_type not in (_KEY_OF_GROUP, _KEY_OF_TRANSACTION):
        message = "only groups and transactional ids have coordinators: key types 0 and 1"
        return answer | no_node | {"error_code": KafkaError.INVALID_REQUEST, "error_message": message}
    if key_type == _KEY_OF_GROUP and not is_group(key):
        return answer | no_node | {"error_code": KafkaError.INVALID_GROUP_ID}
    slot = coordinator_of(gateway.state, PREFIX + key if key_type == _KEY_OF_GROUP else key)
    node = gateway.state.nodes.get(slot.node)
    address = endpoint(node, gateway.listener) if node is not None and not node.fenced else None
    if address is None:
        return answer | no_node | {"error_code": KafkaError.COORDINATOR_NOT_AVAILABLE}
    return answer | {"node_id": slot.node, "host": address[0], "port": address[1]}
