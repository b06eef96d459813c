"""DescribeTopicPartitions: topics and their partitions in pages. ListPartitionReassignments: replicas do not move.

Owns the order of the pages and where one ends. The client continues from a cursor; topics that are created or deleted
in between show in the pages after it.
"""

from collections.abc import Callable, Iterator
from typing import Final

from smq.coordinator.kafka.authorization import on_topic
from smq.coordinator.kafka.cluster_view import (
    INTERNAL_TOPICS,
    NO_TOPIC_ID,
    code_of_unknown_topic,
    confirmation_failure,
    describe_partition,
)
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import CODES, KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import KAFKA_DESCRIBED_PARTITIONS_MAX
from smq.coordinator.service.turns import Turns
from smq.raft_state.errors import ErrorCode
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import is_external

# Java's admin client fails on a null here. There are none such: a replica without the newest records never leads.
_NO_ELR: Final[Struct] = {"eligible_leader_replicas": [], "last_known_elr": []}


async def describe_topic_partitions(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Without topics in the request, all of them."""
    cursor = request["cursor"]
    named = {topic["name"] for topic in request["topics"]}
    if cursor is not None and cursor["partition_index"] < 0:
        return _refused(named, KafkaError.INVALID_REQUEST)
    failure = await confirmation_failure(gateway, _are_known(named)) if named else None
    limit = max(1, min(request["response_partition_limit"], KAFKA_DESCRIBED_PARTITIONS_MAX))
    names = _names_from(gateway.state, named, cursor)
    return await _page(gateway, names, cursor, limit, is_all=not named, is_confirmed=failure is None)


def _are_known(names: set[str]) -> Callable[[ClusterState], bool]:
    return lambda state: all(name in state.topics for name in names)


def _refused(named: set[str], code: KafkaError) -> Struct:
    topics = [_without_partitions(name, NO_TOPIC_ID, code) for name in sorted(named)]
    return {"throttle_time_ms": 0, "topics": topics, "next_cursor": None}


def _names_from(state: ClusterState, named: set[str], cursor: Struct | None) -> Iterator[str]:
    """In the order of the pages, from the cursor on."""
    first = cursor["topic_name"] if cursor is not None else ""
    return (name for name in sorted(named or state.topics) if name >= first)


async def _page(
    gateway: Gateway, names: Iterator[str], cursor: Struct | None, limit: int, *, is_all: bool, is_confirmed: bool
) -> Struct:
    state, topics = gateway.state, list[Struct]()
    turns, left = Turns(), limit
    next_cursor = None
    for name in names:
        topic = state.topics.get(name)
        if is_all and (topic is None or is_external(topic.config)):
            continue
        if left == 0:
            next_cursor = {"topic_name": name, "partition_index": 0}
            break
        if topic is None or is_external(topic.config):
            topics.append(_unknown(name, topic, is_confirmed=is_confirmed))
            continue
        first = cursor["partition_index"] if cursor is not None and cursor["topic_name"] == name else 0
        shown = topic.partitions[first : first + left]
        partitions = [describe_partition(gateway, partition) | _NO_ELR async for partition in turns.over(shown)]
        # The request cannot ask for the operations: each topic has them, and the client takes what it wants.
        whole: Struct = {"partitions": partitions, "topic_authorized_operations": on_topic(is_asked=True)}
        topics.append(_without_partitions(name, topic.topic_id, KafkaError.NONE) | whole)
        left -= len(shown)
        if first + len(shown) < len(topic.partitions):
            next_cursor = {"topic_name": name, "partition_index": first + len(shown)}
            break
    return {"throttle_time_ms": 0, "topics": topics, "next_cursor": next_cursor}


def _unknown(name: str, topic: TopicState | None, *, is_confirmed: bool) -> Struct:
    """Without a quorum a node knows of no topic that it does not exist: the tool asks again."""
    if topic is not None:
        return _without_partitions(name, topic.topic_id, CODES[ErrorCode.WRONG_STORAGE])
    code = code_of_unknown_topic(name)
    if code is KafkaError.UNKNOWN_TOPIC_OR_PARTITION and not is_confirmed:
        code = KafkaError.LEADER_NOT_AVAILABLE
    return _without_partitions(name, NO_TOPIC_ID, code)


def _without_partitions(name: str, topic_id: bytes, code: KafkaError) -> Struct:
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic_id,
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": [],
    }


async def list_partition_reassignments(_gateway: Gateway, _version: int, _request: Struct) -> Struct:
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "error_message": None, "topics": []}
