"""Handlers of topics: CreateTopic, DeleteTopic, AddPartitions, AlterTopicConfig.

Owns the life of topics. Leaves what a valid topic is to `topic_rules`, placement to `placement` and the groups' offsets
to `groups`. Only `command_table` imports it.
"""

from smq.raft_state.cluster_config import with_defaults
from smq.raft_state.commands import AddPartitions, AlterTopicConfig, CreateTopic, DeleteTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.handlers.groups import forget_topic
from smq.raft_state.handlers.placement import new_partitions, place
from smq.raft_state.handlers.transactions import forget_transactions
from smq.raft_state.ids import NodeId, Offset
from smq.raft_state.refusal import Refused, find_topic
from smq.raft_state.replies import Applied, Done, TopicCreated
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import (
    STORAGE,
    check_key,
    check_together,
    checked_config,
    differing,
    is_external,
    is_mirrored,
)
from smq.raft_state.topic_rules import check_creation, check_growth


def create_topic(state: ClusterState, command: CreateTopic) -> Applied:
    """A topic with all its partitions, empty, each with a leader in epoch 0."""
    config = check_creation(state, command)
    topic = TopicState(
        name=command.name,
        topic_id=command.topic_id,
        replication_factor=command.replication_factor,
        config=config,
        created_ms=command.created_ms,
        partitions=[],
    )
    _grow(state, topic, command.partition_count, command.assignments, command.start_offset)
    state.topics[command.name] = topic
    state.topic_names[command.topic_id] = command.name
    return Applied(
        reply=TopicCreated(topic_id=command.topic_id), touched=tuple(partition.pid for partition in topic.partitions)
    )


def delete_topic(state: ClusterState, command: DeleteTopic) -> Applied:
    """Removes the topic, its partitions, and the offsets that groups have committed for them. An open
    transaction goes on without them."""
    topic = find_topic(state, command.name)
    del state.topics[topic.name]
    del state.topic_names[topic.topic_id]
    forget_topic(state, topic.topic_id)
    forget_transactions(state, topic.topic_id)
    for partition in topic.partitions:
        state.assigned_before.pop(partition.pid, None)
    return Applied(reply=Done(), touched=tuple(partition.pid for partition in topic.partitions))


def add_partitions(state: ClusterState, command: AddPartitions) -> Applied:
    """Raises the number of partitions. New partitions start at offset 0, wherever the first ones started."""
    topic = check_growth(state, command)
    count_before = len(topic.partitions)
    _grow(state, topic, command.partition_count - count_before, command.assignments, Offset(0))
    return Applied(reply=Done(), touched=tuple(partition.pid for partition in topic.partitions[count_before:]))


def alter_topic_config(state: ClusterState, command: AlterTopicConfig) -> Applied:
    """Sets some keys and resets others to the defaults of new topics, all or none."""
    topic = find_topic(state, command.name)
    changes = checked_config(command.set_, topic.replication_factor, state.feature_level)
    for key in command.unset:
        check_key(key, state.feature_level)
        if key in changes:
            raise Refused(ErrorCode.INVALID_CONFIG, f"{key} is both set and unset")
    kept = {key: value for key, value in topic.config.items() if key not in command.unset}
    fresh = with_defaults(state.config, {key: value for key, value in kept.items() if key == STORAGE})
    reset = {key: fresh[key] for key in command.unset if key in fresh}
    config = differing({**kept, **reset, **changes})
    check_together(config)
    if is_external(config) != is_external(topic.config):
        raise Refused(ErrorCode.INVALID_CONFIG, f"{STORAGE} cannot be changed after a topic is created")
    was_mirrored, topic.config = is_mirrored(topic.config), config
    if not was_mirrored or is_mirrored(config):
        return Applied(reply=Done())
    for partition in topic.partitions:
        partition.is_opening = True
    return Applied(reply=Done(), touched=tuple(partition.pid for partition in topic.partitions))


def _grow(
    state: ClusterState, topic: TopicState, count: int, assignments: tuple[tuple[NodeId, ...], ...], start: Offset
) -> None:
    """Adds `count` partitions to a topic, which may not be in the state yet."""
    before = len(topic.partitions)
    placed = list(assignments) or place(state, topic.partitions, count, topic.replication_factor)
    topic.partitions += new_partitions(state, topic.topic_id, before, placed, start)
