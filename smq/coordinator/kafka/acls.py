"""DescribeAcls, CreateAcls and DeleteAcls: the rules about users, as Kafka's tools see them.

Owns Kafka's filters. A request is one command, but each bad rule of it is refused alone. Only `handlers` imports it.
"""

from itertools import groupby
from typing import Final

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields, topic_error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.authorizer import host_fault
from smq.raft_state.commands import Acl, AlterAcls
from smq.raft_state.errors import SmqError
from smq.raft_state.handlers.acls import ANY, Pattern, acl_fault

_OF_ANY: Final = 1  # in a filter: every resource, pattern, operation or permission
_MATCH: Final = 2  # in a filter: every pattern that the name fits
_DONE: Final[Struct] = {"error_code": KafkaError.NONE, "error_message": None}


async def describe_acls(gateway: Gateway, _version: int, request: Struct) -> Struct:
    answer: Struct = {"throttle_time_ms": 0, "resources": [], **_DONE}
    try:
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return answer | topic_error_fields(e)
    found = [acl for acl in gateway.state.acls if _fits(acl, request)]
    for (resource, pattern, name), rules in groupby(found, key=lambda acl: acl[:3]):
        named = {"resource_type": resource, "pattern_type": pattern, "resource_name": name}
        answer["resources"].append(named | {"acls": [_described(acl) for acl in rules]})
    return answer


async def create_acls(gateway: Gateway, _version: int, request: Struct) -> Struct:
    results, added = [], []
    for given in request["creations"]:
        acl = Acl(
            given["resource_type"],
            given["resource_pattern_type"],
            given["resource_name"],
            given["principal"],
            given["host"],
            given["operation"],
            given["permission_type"],
        )
        fault = acl_fault(acl) or host_fault(acl.host)
        if fault is None:
            added.append(acl)
        refused = KafkaRefusal(KafkaError.INVALID_REQUEST, fault or "")
        results.append(dict(_DONE) if fault is None else error_fields(refused))
    if added and (failure := await _change(gateway, AlterAcls(add=tuple(added)))) is not None:
        results = [failure if result == _DONE else result for result in results]
    return {"throttle_time_ms": 0, "results": results}


async def delete_acls(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """The rules that a filter finds after a barrier. One that is made meanwhile stays."""
    try:
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
        found = [[acl for acl in gateway.state.acls if _fits(acl, asked)] for asked in request["filters"]]
        removed = tuple({acl: None for matching in found for acl in matching})
        failure = await _change(gateway, AlterAcls(remove=removed)) if removed else None
    except SmqError as e:
        failure, found = topic_error_fields(e), [[] for _ in request["filters"]]
    results = [
        (failure or _DONE) | {"matching_acls": [] if failure else [_DONE | _resource(a) | _described(a) for a in acls]}
        for acls in found
    ]
    return {"throttle_time_ms": 0, "filter_results": results}


async def _change(gateway: Gateway, command: AlterAcls) -> Struct | None:
    """The error, if it has failed."""
    try:
        await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return topic_error_fields(e)
    return None


def _fits(acl: Acl, asked: Struct) -> bool:
    name, pattern = asked["resource_name_filter"], asked["pattern_type_filter"]
    if pattern == _MATCH and name is not None:
        is_named = acl.name in (name, ANY) if acl.pattern == Pattern.LITERAL else name.startswith(acl.name)
    else:
        is_named = name in (None, acl.name) and pattern in (_OF_ANY, _MATCH, acl.pattern)
    return (
        is_named
        and asked["resource_type_filter"] in (_OF_ANY, acl.resource)
        and asked["principal_filter"] in (None, acl.principal)
        and asked["host_filter"] in (None, acl.host)
        and asked["operation"] in (_OF_ANY, acl.operation)
        and asked["permission_type"] in (_OF_ANY, acl.permission)
    )


def _resource(acl: Acl) -> Struct:
    return {"resource_type": acl.resource, "pattern_type": acl.pattern, "resource_name": acl.name}


def _described(acl: Acl) -> Struct:
    return {
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation,
        "permission_type": acl.permission,
    }
