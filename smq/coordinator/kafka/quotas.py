"""DescribeClientQuotas and AlterClientQuotas: what clients may use, as Kafka's tools see it.

Owns Kafka's filters and its names of entities, where no name is the default. A request is one command, but each bad
entry of it is refused alone. Only `handlers` imports it.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields, topic_error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.coordinator.service.quotas import quota_of
from smq.raft_state.commands import AlterQuotas, Quota
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.handlers.quotas import CLIENT_ID, DEFAULT, IP, THOUSAND, USER, quota_fault

_EXACT, _DEFAULT, _ANY = 0, 1, 2
_KINDS: Final = (USER, CLIENT_ID, IP)
_DONE: Final[Struct] = {"error_code": KafkaError.NONE, "error_message": None}


async def describe_client_quotas(gateway: Gateway, _version: int, request: Struct) -> Struct:
    answer: Struct = {"throttle_time_ms": 0, "entries": [], **_DONE}
    try:
        _check_filter(request["components"])
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
    except KafkaRefusal as e:
        return answer | error_fields(e) | {"entries": None}
    except SmqError as e:
        return answer | topic_error_fields(e) | {"entries": None}
    for entity, quotas in groupby(gateway.state.quotas, key=lambda quota: quota.entity):
        if _fits(dict(entity), request):
            named = [{"entity_type": kind, "entity_name": name or None} for kind, name in entity]
            values = [{"key": quota.key, "value": quota.thousandths / THOUSAND} for quota in quotas]
            answer["entries"].append({"entity": named, "values": values})
    return answer


def _fits(entity: dict[str, str], request: Struct) -> bool:
    if request["strict"] and len(entity) > len(request["components"]):
        return False
    return all(_has(entity, component) for component in request["components"])


def _has(entity: dict[str, str], component: Struct) -> bool:
    name, wanted = entity.get(component["entity_type"]), component["match_type"]
    return name is not None and (wanted == _ANY or name == (component["match"] if wanted == _EXACT else DEFAULT))


def _check_filter(components: list[Struct]) -> None:
    kinds = [component["entity_type"] for component in components]
    _check_kinds(kinds)
    for component in components:
        has_match = component["match"] is not None
        if component["match_type"] not in (_EXACT, _DEFAULT, _ANY) or has_match != (component["match_type"] == _EXACT):
            message = "match type 0 needs a name to match; 1 (the default entity) and 2 (any) take none"
            raise KafkaRefusal(KafkaError.INVALID_REQUEST, message)
    if IP in kinds and len(kinds) > 1:
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, f"a filter by {IP!r} takes no other type")


def _check_kinds(kinds: list[str]) -> None:
    if "" in kinds or len(set(kinds)) < len(kinds):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "each type is named once, and has a name")
    for kind in kinds:
        if kind not in _KINDS:
            message = f"there is no entity type {kind[:80]!r}: use {USER!r}, {CLIENT_ID!r} or {IP!r}"
            raise KafkaRefusal(KafkaError.UNSUPPORTED_VERSION, message)


async def alter_client_quotas(gateway: Gateway, _version: int, request: Struct) -> Struct:
    entries, quotas = list[Struct](), list[Quota]()
    for entry in request["entries"]:
        fields: Struct = _DONE
        try:
            quotas += list(_checked(entry))  # all of the entry, or none
        except KafkaRefusal as e:
            fields = error_fields(e)
        except SmqError as e:
            fields = topic_error_fields(e)
        entries.append({"entity": entry["entity"], **fields})
    if quotas and not request["validate_only"]:
        try:
            await gateway.calls.propose(AlterQuotas(quotas=tuple(quotas)), TIMEOUT_MS_DEFAULT)
        except SmqError as e:
            failure = topic_error_fields(e)
            entries = [entry if entry["error_code"] else entry | failure for entry in entries]
    return {"throttle_time_ms": 0, "entries": entries}


def _checked(entry: Struct) -> Iterable[Quota]:
    _check_kinds([part["entity_type"] for part in entry["entity"]])
    if any(part["entity_name"] == "" for part in entry["entity"]):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "an entity has a name, or none for the default")
    if len({op["key"] for op in entry["ops"]}) < len(entry["ops"]):
        raise KafkaRefusal(KafkaError.INVALID_REQUEST, "the request changes a quota of this entity twice")
    entity = {part["entity_type"]: part["entity_name"] or DEFAULT for part in entry["entity"]}
    for op in entry["ops"]:
        quota = quota_of(entity, op["key"], 0.0 if op["remove"] else op["value"])
        fault = quota_fault(quota)
        if fault is None and not quota.thousandths and not op["remove"]:
            fault = f"{quota.key} is above 0"
        if fault is not None:
            raise SmqError(ErrorCode.INVALID_REQUEST, fault)
        yield quota
