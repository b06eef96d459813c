"""DescribeGroups, ListGroups, DeleteGroups and OffsetDelete: groups as an administrator sees them.

Owns Kafka's names for a group's state. Each node answers for the groups that it coordinates, as clients expect it, and
after a barrier. Only groups that Kafka clients can name are shown.
"""

from typing import Final

from smq.coordinator.groups.protocols import CONSUMER, metadata_of, subscribed_topics
from smq.coordinator.groups.view import PHASES
from smq.coordinator.kafka.cluster import Gateway, find_known
from smq.coordinator.kafka.compiler import Struct
from smq.coordinator.kafka.errors import OUTCOME_CODES, KafkaError, group_code_of
from smq.coordinator.kafka.groups import PREFIX, is_group
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import DeleteGroup, DeleteOffsets
from smq.raft_state.coordinators import slot_of
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, PartitionId
from smq.raft_state.limits import COMMIT_ITEMS_MAX
from smq.raft_state.state import GroupPhase, GroupState

_NO_OPERATIONS: Final = -(2**31)
_NOT_FOUND_VERSION: Final = 6  # of DescribeGroups: says that there is no such group (KIP-1043)
_TYPE: Final = "classic"
_DELETE_ATTEMPTS: Final = 3  # each time the group has rebalanced meanwhile


def _state_of(gateway: Gateway, group: GroupState) -> str:
    is_rebalancing = bool(group.members) and gateway.groups.is_rebalancing(group.name)
    return PHASES[GroupPhase.PREPARING if is_rebalancing else group.phase]


def _refusal(gateway: Gateway, name: str) -> KafkaError:
    """NONE if this node coordinates the group."""
    return OUTCOME_CODES[gateway.groups.refusal(PREFIX + name)]


async def _barrier(gateway: Gateway) -> KafkaError:
    try:
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return group_code_of(e)
    return KafkaError.NONE


# ---------------------------------------------------------------------------------------------------- describing
async def describe_groups(gateway: Gateway, version: int, request: Struct) -> Struct:
    failure = await _barrier(gateway)
    return {
        "throttle_time_ms": 0,
        "groups": [_described(gateway, version, name, failure) for name in request["groups"]],
    }


def _described(gateway: Gateway, version: int, name: str, failure: KafkaError) -> Struct:
    answer: Struct = {
        "error_code": failure or (_refusal(gateway, name) if is_group(name) else KafkaError.NONE),
        "error_message": None,
        "group_id": name,
        "group_state": "",
        "protocol_type": "",
        "protocol_data": "",
        "members": [],
        "authorized_operations": _NO_OPERATIONS,
    }
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    group = gateway.state.groups.get(PREFIX + name)
    if group is None:
        answer["group_state"] = "Dead"
        if version >= _NOT_FOUND_VERSION:
            answer |= {"error_code": KafkaError.GROUP_ID_NOT_FOUND, "error_message": f"Group {name} not found."}
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
    """Of all groups those that this node coordinates: clients ask every node."""
    code = await _barrier(gateway)
    states = {state.lower() for state in request["states_filter"]}
    types = {kind.lower() for kind in request["types_filter"]}
    if code is not KafkaError.NONE or (types and _TYPE not in types):
        return {"throttle_time_ms": 0, "error_code": code, "groups": []}
    mine = gateway.groups.slots()
    found = []
    for name, group in sorted(gateway.state.groups.items()):
        if name.startswith(PREFIX) and slot_of(name) in mine:
            state = _state_of(gateway, group)
            if not states or state.lower() in states:
                found.append(
                    {
                        "group_id": name.removeprefix(PREFIX),
                        "protocol_type": group.protocol_type,
                        "group_state": state,
                        "group_type": _TYPE,
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
    code = _refusal(gateway, name)
    if code is not KafkaError.NONE:
        return code
    try:
        await gateway.calls.propose(DeleteGroup(request_id=NO_REQUEST, group=PREFIX + name), TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return group_code_of(e)
    return KafkaError.NONE


async def offset_delete(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """What a group has committed for partitions that none of its members subscribes to."""
    name, answer = request["group_id"], {"error_code": KafkaError.INVALID_GROUP_ID, "throttle_time_ms": 0, "topics": []}
    if not is_group(name):
        return answer
    answer["error_code"] = _refusal(gateway, name) or await _barrier(gateway)
    for _ in range(_DELETE_ATTEMPTS):
        group = gateway.state.groups.get(PREFIX + name)
        if group is None:
            answer["error_code"] = answer["error_code"] or KafkaError.GROUP_ID_NOT_FOUND
        if group is None or answer["error_code"] is not KafkaError.NONE:
            return answer
        subscribed = _subscribed(group)
        if subscribed is None:
            return answer | {"error_code": KafkaError.NON_EMPTY_GROUP}
        pids, answer["topics"] = _deletable(gateway, request["topics"], subscribed)
        try:
            command = DeleteOffsets(
                request_id=NO_REQUEST, group=group.name, generation=group.generation, partitions=tuple(pids)
            )
            await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)
        except SmqError as e:
            if e.code is ErrorCode.ILLEGAL_GENERATION:
                continue
            return answer | {"error_code": group_code_of(e), "topics": []}
        return answer
    return answer | {"error_code": KafkaError.REBALANCE_IN_PROGRESS, "topics": []}


def _subscribed(group: GroupState) -> frozenset[str] | None:
    """None where members are no consumers, or do not say what they subscribe to as consumers do."""
    topics: frozenset[str] = frozenset()
    for m in group.members.values():
        found = subscribed_topics(metadata_of(m.member, group.protocol)) if group.protocol_type == CONSUMER else None
        if found is None:
            return None
        topics |= found
    return topics


def _deletable(
    gateway: Gateway, asked: list[Struct], subscribed: frozenset[str]
) -> tuple[list[PartitionId], list[Struct]]:
    pids: list[PartitionId] = []
    topics = []
    for topic in asked:
        answers = []
        for partition in topic["partitions"]:
            index = partition["partition_index"]
            part = find_known(gateway.state, topic["name"], index)
            code = KafkaError.NONE
            if part is None:
                code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            elif topic["name"] in subscribed:
                code = KafkaError.GROUP_SUBSCRIBED_TO_TOPIC
            elif len(pids) < COMMIT_ITEMS_MAX:
                pids.append(part.pid)
            else:
                code = KafkaError.POLICY_VIOLATION
            answers.append({"partition_index": index, "error_code": code})
        topics.append({"name": topic["name"], "partitions": answers})
    return pids, topics
