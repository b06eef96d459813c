"""TxnOffsetCommit: offsets that are committed with a transaction.

Owns the way from the request to the command, at the group's coordinator, which knows the group's members. The group has
been added to the transaction at the transactional id's coordinator, which may be another node: this one looks again
after a barrier before it says that it has not. From version 5 on the command itself adds it.
"""

from typing import Final

from smq.coordinator.groups.member_requests import Identity
from smq.coordinator.kafka.cluster_view import PREFIX, confirmation_failure, coordinator_refusal, is_group
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.committed_offsets import commit_of, is_metadata_too_large
from smq.coordinator.kafka.errors import KafkaError, staging_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.kafka.transactions.producer_requests import producer_of
from smq.coordinator.limits import COMMIT_ITEMS_MAX, GROUP_ANSWER_MS
from smq.coordinator.service.request_checks import check_count
from smq.coordinator.service.transactions import includes, is_current
from smq.raft_state.commands import OffsetCommit
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Generation
from smq.raft_state.state import ClusterState

_JOINING_VERSION: Final = 5  # from here on the group becomes part of the transaction by this (KIP-890)


async def txn_offset_commit(gateway: Gateway, version: int, request: Struct) -> Struct:
    """Stages all partitions that exist by one command. Each of the others gets an error of its own."""
    refusal = await _refusal(gateway, version, request)
    items: list[OffsetCommit] = []
    staged: list[Struct] = []  # the answers for `items`
    topics = []
    for topic in request["topics"]:
        answers: list[Struct] = []
        topics.append({"name": topic["name"], "partitions": answers})
        for requested in topic["partitions"]:
            part = gateway.state.partition_of(topic["name"], requested["partition_index"])
            code = refusal
            if is_metadata_too_large(requested):
                code = code or KafkaError.OFFSET_METADATA_TOO_LARGE
            if part is None:
                code = code or KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            answer: Struct = {"partition_index": requested["partition_index"], "error_code": code}
            answers.append(answer)
            if part is not None and code is KafkaError.NONE:
                staged.append(answer)
                items.append(commit_of(part, requested))
    code = await _stage(gateway, version, request, items)
    for answer in staged:
        answer["error_code"] = code
    return {"throttle_time_ms": 0, "topics": topics}


async def _refusal(gateway: Gateway, version: int, request: Struct) -> KafkaError:
    if not is_group(request["group_id"]):
        return KafkaError.INVALID_GROUP_ID
    code = coordinator_refusal(gateway, PREFIX + request["group_id"])
    if code is KafkaError.NONE and not request["transactional_id"]:
        code = KafkaError.INVALID_REQUEST
    if code is not KafkaError.NONE:
        return code

    def is_known(state: ClusterState) -> bool:
        producer, group = producer_of(request), PREFIX + request["group_id"]
        is_part = is_current(state, producer) if version >= _JOINING_VERSION else includes(state, producer, group)
        return is_part and all(
            state.partition_of(topic["name"], p["partition_index"]) is not None
            for topic in request["topics"]
            for p in topic["partitions"]
        )

    failure = await confirmation_failure(gateway, is_known)
    return KafkaError.NONE if failure is None else staging_code_of(failure, version)


async def _stage(gateway: Gateway, version: int, request: Struct, items: list[OffsetCommit]) -> KafkaError:
    if not items:
        return KafkaError.NONE
    who = Identity(member_id=request["member_id"], instance_id=request["group_instance_id"] or "")
    try:
        check_count("offsets", items, COMMIT_ITEMS_MAX)
        await gateway.transactions.stage(
            producer_of(request),
            PREFIX + request["group_id"],
            tuple(items),
            GROUP_ANSWER_MS,
            who=who,
            generation=Generation(request["generation_id"]),
            is_joining=version >= _JOINING_VERSION,
        )
    except SmqError as e:
        return staging_code_of(e, version)
    return KafkaError.NONE
