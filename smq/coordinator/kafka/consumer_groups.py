"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: the groups of KIP-848, between Kafka's fields and the coordinator.

Owns what a heartbeat must say by itself, as Kafka checks it, and the answers. A heartbeat begins in its turn and then
waits outside it, as JoinGroup does: a new member is answered with its first partitions. `connection` and `handlers`
import it.
"""

from collections.abc import Awaitable
from typing import Final

from smq.coordinator.groups.assignors import ASSIGNORS
from smq.coordinator.groups.member_requests import LEAVING, Beat, Beaten
from smq.coordinator.kafka.authorization import on_group
from smq.coordinator.kafka.cluster_view import PREFIX, barrier_failure, coordinator_refusal, is_group
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import OUTCOME_CODES, KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.group_membership import Client
from smq.coordinator.service.group_lag import state_of
from smq.coordinator.service.group_members import shown_name
from smq.raft_state.cluster_config import CONSUMER_HEARTBEAT_MS, cluster_value
from smq.raft_state.commands import Partitions
from smq.raft_state.handlers.consumers import gathered
from smq.raft_state.ids import TopicId
from smq.raft_state.state import AWAY_EPOCH, ClusterState, GroupKind, GroupState, MemberState

_PATTERN_VERSION: Final = 1  # from here on members choose their ids, and may subscribe to a pattern


# ------------------------------------------------------------------------------------------------------ heartbeats
def heartbeat(gateway: Gateway, version: int, request: Struct, client: Client) -> Awaitable[Struct]:
    """Begins immediately. The awaitable is the answer once what the heartbeat says has taken effect."""
    fault = _fault(version, request)
    if fault:
        return _refused(request, fault)
    topics, owned, everything = request["subscribed_topic_names"], request["topic_partitions"], lambda _: True
    beat = Beat(
        group=PREFIX + request["group_id"],
        member_id=request["member_id"],
        epoch=request["member_epoch"],
        instance_id=request["instance_id"] or "",
        rack=request["rack_id"],
        rebalance_timeout_ms=request["rebalance_timeout_ms"],
        topics=tuple(topics) if topics is not None else None,
        pattern=request["subscribed_topic_regex"] if version >= _PATTERN_VERSION else None,
        assignor=request["server_assignor"],
        owned=_partitions(owned) if owned is not None else None,
        client_id=shown_name(client.client_id),
        client_host=shown_name(client.host),
        may_see=request.get("may_see", everything),
    )
    return _answered(gateway, request, gateway.memberships.beat(beat))


def _partitions(topics: list[Struct]) -> Partitions:
    return gathered({(TopicId(bytes(t["topic_id"])), index) for t in topics for index in t["partitions"]})


def _fault(version: int, request: Struct) -> str:
    """What is wrong with a heartbeat by itself; "" if nothing is."""
    epoch, names = request["member_epoch"], request["subscribed_topic_names"]
    pattern = request["subscribed_topic_regex"] if version >= _PATTERN_VERSION else None
    faults = {
        "GroupId can't be empty.": not is_group(request["group_id"]),
        "InstanceId can't be empty.": request["instance_id"] == "",
        "RackId can't be empty.": request["rack_id"] == "",
        "MemberEpoch is invalid.": epoch < AWAY_EPOCH,
        "MemberId can't be empty.": not request["member_id"] and (epoch != 0 or version >= _PATTERN_VERSION),
        "InstanceId can't be null.": epoch == AWAY_EPOCH and request["instance_id"] is None,
        "RebalanceTimeoutMs must be provided in first request.": epoch == 0 and request["rebalance_timeout_ms"] < 1,
        "TopicPartitions must be empty when (re-)joining.": epoch == 0 and request["topic_partitions"] != [],
        "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.": (
            epoch == 0 and names is None and pattern is None
        ),
    }
    return next((text for text, is_wrong in faults.items() if is_wrong), "")


async def _refused(request: Struct, message: str) -> Struct:
    return _answer(request, KafkaError.INVALID_REQUEST, message)


async def _answered(gateway: Gateway, request: Struct, answer: Awaitable[Beaten]) -> Struct:
    beaten = await answer
    code = OUTCOME_CODES[beaten.outcome]
    if code is KafkaError.UNSUPPORTED_ASSIGNOR:
        return _answer(request, code, f"the assignors are {', '.join(ASSIGNORS)}")
    if code is not KafkaError.NONE:
        return _answer(request, code, f"{beaten.outcome.value}")
    assignment = None
    if beaten.assignment is not None and beaten.epoch not in (LEAVING, AWAY_EPOCH):
        lists = [{"topic_id": topic_id, "partitions": list(indexes)} for topic_id, indexes in beaten.assignment]
        assignment = {"topic_partitions": lists}
    return _answer(request, code, None) | {
        "member_id": beaten.member_id,
        "member_epoch": beaten.epoch,
        "heartbeat_interval_ms": int(cluster_value(gateway.state.config, CONSUMER_HEARTBEAT_MS)),
        "assignment": assignment,
    }


def _answer(request: Struct, code: KafkaError, message: str | None) -> Struct:
    return {
        "throttle_time_ms": 0,
        "error_code": code,
        "error_message": message,
        "member_id": request["member_id"],
        "member_epoch": request["member_epoch"],
        "heartbeat_interval_ms": 0,
        "assignment": None,
    }


# ------------------------------------------------------------------------------------------------------ describing
async def describe(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """After a barrier. A group of the classic protocol is none of these."""
    failure = await barrier_failure(gateway)
    is_asked = request["include_authorized_operations"]
    return {
        "throttle_time_ms": 0,
        "groups": [_described(gateway, name, failure, is_asked=is_asked) for name in request["group_ids"]],
    }


def _described(gateway: Gateway, name: str, failure: KafkaError, *, is_asked: bool) -> Struct:
    refusal = coordinator_refusal(gateway, PREFIX + name) if is_group(name) else KafkaError.INVALID_GROUP_ID
    answer: Struct = {
        "error_code": failure or refusal,
        "error_message": None,
        "group_id": name,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "authorized_operations": on_group(is_asked=is_asked),
    }
    if answer["error_code"] is not KafkaError.NONE:
        return answer
    group = gateway.state.groups.get(PREFIX + name)
    if group is None or group.kind is not GroupKind.CONSUMER:
        message = f"Group {name} not found." if group is None else f"Group {name} is not a consumer group."
        return answer | {"error_code": KafkaError.GROUP_ID_NOT_FOUND, "error_message": message}
    return answer | {
        "group_state": state_of(group),
        "group_epoch": group.generation,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.protocol or next(iter(ASSIGNORS)),
        "members": [_member(gateway.state, group, m) for m in group.members.values()],
    }


def _member(state: ClusterState, group: GroupState, m: MemberState) -> Struct:
    return {
        "member_id": m.member.member_id,
        "instance_id": m.member.instance_id or None,
        "rack_id": m.subscription.rack or None,
        "member_epoch": m.epoch,
        "client_id": m.member.client_id,
        "client_host": m.member.client_host,
        "subscribed_topic_names": list(m.subscription.topics),
        "subscribed_topic_regex": m.subscription.pattern or None,
        "assignment": _named(state, m.assigned),
        "target_assignment": _named(state, m.target),
    }


def _named(state: ClusterState, partitions: Partitions) -> Struct:
    return {
        "topic_partitions": [
            {"topic_id": topic_id, "topic_name": state.topic_names.get(topic_id, ""), "partitions": list(indexes)}
            for topic_id, indexes in partitions
        ]
    }
