"""DescribeGroups, ListGroups and DeleteGroups: groups as an administrator sees them.

Owns the answers. Each node answers for the groups that it coordinates, as clients expect, and after a barrier. It shows
only groups that Kafka clients can name.
"""

from functools import partial
from typing import Final

from smq.coordinator.groups.protocols import metadata_of
from smq.coordinator.kafka.authorization import on_group
from smq.coordinator.kafka.cluster_view import PREFIX, barrier_failure, coordinator_refusal, is_group
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, group_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import GROUP_ANSWER_MS
from smq.coordinator.service.group_lag import PHASES, state_of
from smq.raft_state.coordinators import slot_of
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import NO_REQUEST
from smq.raft_state.state import GroupKind, GroupPhase, GroupState

_NOT_FOUND_VERSION: Final = 6  # of DescribeGroups: an unknown group is an error (KIP-1043)
_TYPES: Final = {GroupKind.CLASSIC: "classic", GroupKind.CONSUMER: "consumer"}


def _state_of(gateway: Gateway, group: GroupState) -> str:
    is_rebalancing = bool(group.members) and gateway.groups.is_rebalancing(group.name)
    return PHASES[GroupPhase.PREPARING] if is_rebalancing else state_of(group)


# ---------------------------------------------------------------------------------------------------- describing
async def describe_groups(gateway: Gateway, version: int, request: Struct) -> Struct:
    failure = await barrier_failure(gateway)
    return {
        "throttle_time_ms": 0,
        "groups": [_described(gateway, version, name, request, failure) for name in request["groups"]],
    }


def _described(gateway: Gateway, version: int, name: str, request: Struct, failure: KafkaError) -> Struct:
    answer: Struct = {
        "error_code": failure or (coordinator_refusal(gateway, PREFIX + name) if is_group(name) else KafkaError.NONE),
        "error_message": None,
        "group_id": name,
        "group_state": "",
        "protocol_type": "",
        "protocol_data": "",
        "members": [],
        "authorized_operations": on_group(is_asked=request["include_authorized_operations"]),
    }
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    group = gateway.state.groups.get(PREFIX + name)
    if group is None or (group.kind is GroupKind.CONSUMER and group.members):
        answer["group_state"] = "Dead"
        if version >= _NOT_FOUND_VERSION:
            message = f"Group {name} not found." if group is None else f"Group {name} is not a classic group."
            answer |= {"error_code": KafkaError.GROUP_ID_NOT_FOUND, "error_message": message}
        return answer
    state = _state_of(gateway, group)
    is_stable = state == PHASES[GroupPhase.STABLE]
    return answer | {
        "group_state": state,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol if is_stable else "",
        "members": [
            {
                "member_id": member_id,
                "group_instance_id": m.member.instance_id or None,
                "client_id": m.member.client_id,
                "client_host": m.member.client_host,
                "member_metadata": metadata_of(m.member, group.protocol) if is_stable else b"",
                "member_assignment": m.assignment if is_stable else b"",
            }
            for member_id, m in group.members.items()
        ],
    }


async def list_groups(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Lists the groups that this node coordinates: clients ask every node."""
    code = await barrier_failure(gateway)
    states = {state.lower() for state in request["states_filter"]}
    types = {kind.lower() for kind in request["types_filter"]}
    if code is not KafkaError.NONE:
        return {"throttle_time_ms": 0, "error_code": code, "groups": []}
    mine = gateway.groups.slots()
    found = []
    for name, group in sorted(gateway.state.groups.items()):
        if name.startswith(PREFIX) and slot_of(name) in mine:
            state = _state_of(gateway, group)
            kind = _TYPES[group.kind]
            if (not states or state.lower() in states) and (not types or kind in types):
                found.append(
                    {
                        "group_id": name.removeprefix(PREFIX),
                        "protocol_type": group.protocol_type,
                        "group_state": state,
                        "group_type": kind,
                    }
                )
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "groups": found}


# ------------------------------------------------------------------------------------------------------ deleting
async def delete_groups(gateway: Gateway, _version: int, request: Struct) -> Struct:
    results = [{"group_id": name, "error_code": await _delete(gateway, name)} for name in request["groups_names"]]
    return {"throttle_time_ms": 0, "results": results}


async def _delete(gateway: Gateway, name: str) -> KafkaError:
    if not is_group(name):
        return KafkaError.INVALID_GROUP_ID
    begin = partial(gateway.groups.delete_group, PREFIX + name, NO_REQUEST, GROUP_ANSWER_MS)
    try:
        await gateway.calls.change(begin, GROUP_ANSWER_MS)
    except SmqError as e:
        return group_code_of(e)
    return KafkaError.NONE
