"""Handlers of topics: CreateTopic, DeleteTopic, AddPartitions, AlterTopicConfig.

Owns what a valid topic is: its name, its size, its configuration. Leaves placement to `placement` and the groups'
offsets to `groups`. Only `registry` imports it.
"""

from smq.raft_state.commands import AddPartitions, AlterTopicConfig, CreateTopic, DeleteTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import forget_topic
from smq.raft_state.handlers.placement import new_partitions, place
from smq.raft_state.ids import Offset
from smq.raft_state.limits import START_OFFSET_MAX, TOPIC_ID_BYTES
from smq.raft_state.names import is_topic_name
from smq.raft_state.refusal import Refused, find_topic, quoted
from smq.raft_state.replies import Applied, Done, TopicCreated
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import EXTERNAL, STORAGE, check_key, checked_config, differing, is_external


def create_topic(state: ClusterState, command: CreateTopic) -> Applied:
    """A topic with all its partitions, empty, each with a leader in epoch 0."""
    _check_name(state, command)
    if command.partition_count < 1:
        raise Refused(
            ErrorCode.INVALID_PARTITION_COUNT, f"partition_count must be at least 1, not {command.partition_count}"
        )
    config = differing(checked_config(command.config))
    _check_replication_factor(state, command, config)
    if not 0 <= command.start_offset <= START_OFFSET_MAX:
        raise Refused(
            ErrorCode.INVALID_OFFSET, f"start_offset must be from 0 to {START_OFFSET_MAX}, not {command.start_offset}"
        )
    _check_limits(state, topics=1, partitions=command.partition_count)
    topic = TopicState(
        name=command.name,
        topic_id=command.topic_id,
        replication_factor=command.replication_factor,
        config=config,
        created_ms=command.created_ms,
        partitions=[],
    )
    _grow(state, topic, command.partition_count, command.start_offset)
    state.topics[command.name] = topic
    state.topic_names[command.topic_id] = command.name
    return Applied(
        reply=TopicCreated(topic_id=command.topic_id), touched=tuple(partition.pid for partition in topic.partitions)
    )


def delete_topic(state: ClusterState, command: DeleteTopic) -> Applied:
    """Removes the topic, its partitions, and the offsets that groups have committed for them."""
    topic = find_topic(state, command.name)
    del state.topics[topic.name]
    del state.topic_names[topic.topic_id]
    forget_topic(state, topic.topic_id)
    for partition in topic.partitions:
        state.assigned_before.pop(partition.pid, None)
    return Applied(reply=Done(), touched=tuple(partition.pid for partition in topic.partitions))


def add_partitions(state: ClusterState, command: AddPartitions) -> Applied:
    """Raises the number of partitions. New partitions start at offset 0, wherever the first ones started."""
    topic = find_topic(state, command.name)
    count_before = len(topic.partitions)
    if command.partition_count < count_before:
        raise Refused(
            ErrorCode.INVALID_PARTITION_COUNT,
            f"topic {quoted(topic.name)} has {count_before} partitions: the number cannot be reduced to"
            f" {command.partition_count}",
        )
    _check_limits(state, topics=0, partitions=command.partition_count - count_before)
    _grow(state, topic, command.partition_count - count_before, Offset(0))
    return Applied(reply=Done(), touched=tuple(partition.pid for partition in topic.partitions[count_before:]))


def alter_topic_config(state: ClusterState, command: AlterTopicConfig) -> Applied:
    """Sets some keys and resets others to their defaults, all or none."""
    topic = find_topic(state, command.name)
    changes = checked_config(command.set_)
    for key in command.unset:
        check_key(key)
        if key in changes:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is both set and unset")
    kept = {key: value for key, value in topic.config.items() if key not in command.unset}
    config = differing({**kept, **changes})
    if is_external(config) != is_external(topic.config):
        raise Refused(ErrorCode.INVALID_CONFIG, f"{STORAGE} cannot be changed after a topic is created")
    topic.config = config
    return Applied(reply=Done())


def _check_name(state: ClusterState, command: CreateTopic) -> None:
    if not is_topic_name(command.name):
        raise Refused(ErrorCode.INVALID_TOPIC_NAME, f"{quoted(command.name)} is not a topic name")
    if command.name in state.topics:
        raise Refused(ErrorCode.TOPIC_EXISTS, f"topic {quoted(command.name)} exists")
    if len(command.topic_id) != TOPIC_ID_BYTES:
        raise Refused(
            ErrorCode.INVALID_REQUEST, f"topic_id must have {TOPIC_ID_BYTES} bytes, not {len(command.topic_id)}"
        )
    if command.topic_id in state.topic_names:
        raise Refused(ErrorCode.INVALID_REQUEST, f"topic_id {command.topic_id.hex()} belongs to another topic")


def _check_replication_factor(state: ClusterState, command: CreateTopic, config: dict[str, str]) -> None:
    if is_external(config):
        if command.replication_factor != 0:
            raise Refused(
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"a topic with {STORAGE}={EXTERNAL} has no records to replicate: its replication_factor is 0,"
                f" not {command.replication_factor}",
            )
    elif not 1 <= command.replication_factor <= len(state.nodes):
        raise Refused(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"replication_factor must be from 1 to the {len(state.nodes)} nodes there are,"
            f" not {command.replication_factor}",
        )


def _check_limits(state: ClusterState, *, topics: int, partitions: int) -> None:
    if len(state.topics) + topics > state.topics_max:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED, f"there are {len(state.topics)} topics, which is the limit (topics_max)"
        )
    count = sum(len(topic.partitions) for topic in state.topics.values())
    if count + partitions > state.partitions_max:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"there are {count} partitions; {partitions} more would exceed the limit (partitions_max)"
            f" of {state.partitions_max}",
        )


def _grow(state: ClusterState, topic: TopicState, count: int, start: Offset) -> None:
    """Adds `count` partitions to a topic, which may not be in the state yet."""
    before = len(topic.partitions)
    placed = place(state, topic.partitions, count, topic.replication_factor)
    topic.partitions += new_partitions(state, topic.topic_id, before, placed, start)
