"""ListConfigResources, ListPartitionReassignments and DescribeClientQuotas: lists of which some are always empty.

Owns which kinds of resources have a configuration. Replicas do not move, and there are no quotas.
"""

from typing import Final

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.config_admin import BROKER, TOPIC
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_config import is_external

_BROKER_LOGGER, _CLIENT_METRICS, _GROUP = 8, 16, 32
_RESOURCE_TYPES: Final = (TOPIC, BROKER, _BROKER_LOGGER, _CLIENT_METRICS, _GROUP)
_TYPES_VERSION: Final = 1  # version 0 asks for client metrics only

_EXACT, _DEFAULT, _ANY = 0, 1, 2
_USER, _CLIENT_ID, _IP = "user", "client-id", "ip"


async def list_config_resources(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Loggers, client metrics and groups have no configuration of their own."""
    types = request["resource_types"] if version >= _TYPES_VERSION else [_CLIENT_METRICS]
    if any(kind not in _RESOURCE_TYPES for kind in types):
        return {"throttle_time_ms": 0, "error_code": KafkaError.UNSUPPORTED_VERSION, "config_resources": []}
    found = [
        {"resource_name": name, "resource_type": kind}
        for kind in sorted(set(types or _RESOURCE_TYPES))
        for name in _names(gateway.state, kind)
    ]
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "config_resources": found}


def _names(state: ClusterState, kind: int) -> list[str]:
    if kind == TOPIC:
        return sorted(name for name, topic in state.topics.items() if not is_external(topic.config))
    return [str(node) for node in sorted(state.nodes)] if kind == BROKER else []


async def list_partition_reassignments(_gateway: Gateway, _version: int, _request: Struct) -> Struct:
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "error_message": None, "topics": []}


async def describe_client_quotas(_gateway: Gateway, _version: int, request: Struct) -> Struct:
    answer: Struct = {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "error_message": None, "entries": []}
    try:
        _check_filter(request["components"])
    except KafkaRefusal as e:
        return answer | error_fields(e) | {"entries": None}
    return answer


def _check_filter(components: list[Struct]) -> None:
    types = {component["entity_type"] for component in components}
    if "" in types or len(types) < len(components):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "the filter needs a type in each component, each type once")
    for component in components:
        kind = component["entity_type"]
        if kind not in (_USER, _CLIENT_ID, _IP):
            message = f"there is no entity type {kind[:80]!r}: use {_USER!r}, {_CLIENT_ID!r} or {_IP!r}"
            raise KafkaRefusal(KafkaError.UNSUPPORTED_VERSION, message)
        has_match = component["match"] is not None
        if component["match_type"] not in (_EXACT, _DEFAULT, _ANY) or has_match != (component["match_type"] == _EXACT):
            message = "match type 0 needs a name to match; 1 (the default entity) and 2 (any) take none"
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    if _IP in types and len(types) > 1:
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, f"a filter by {_IP!r} takes no other type")
