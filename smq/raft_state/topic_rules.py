"""What a valid new topic is, and a valid growth of one: name, size, replicas, configuration, limits.

Owns the checks. A command passes them before it changes anything, and a server makes the same checks to validate a
request without running it. It must never change the state. Handlers and the server import it.
"""

import re
from collections.abc import Sequence
from typing import Final

from smq.raft_state.cluster_config import with_defaults
from smq.raft_state.commands import AddPartitions, CreateTopic
from smq.raft_state.errors import ErrorCode
from smq.raft_state.ids import NodeId
from smq.raft_state.limits import START_OFFSET_MAX, TOPIC_ID_BYTES, TOPIC_NAME_CHARS_MAX
from smq.raft_state.refusal import Refused, find_topic, quoted
from smq.raft_state.state import ClusterState, TopicState
from smq.raft_state.topic_config import EXTERNAL, STORAGE, check_together, checked_config, differing, is_external

_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_CHARS_MAX}}}")


def is_topic_name(name: str) -> bool:
    """Kafka's rule: clients and file names rely on it."""
    return name not in (".", "..") and _NAME.fullmatch(name) is not None


def check_creation(state: ClusterState, command: CreateTopic) -> dict[str, str]:
    """The configuration of the new topic. Refused if it cannot be created; the name is judged first."""
    _check_name(state, command)
    if command.partition_count < 1:
        raise Refused(
            ErrorCode.INVALID_PARTITION_COUNT, f"partition_count must be at least 1, not {command.partition_count}"
        )
    asked = checked_config(command.config, command.replication_factor, state.feature_level)
    config = differing(with_defaults(state.config, asked))
    check_together(config)
    _check_assignments(state, command.assignments, command.partition_count, command.replication_factor)
    _check_replication_factor(state, command, config)
    if not 0 <= command.start_offset <= START_OFFSET_MAX:
        raise Refused(
            ErrorCode.INVALID_OFFSET, f"start_offset must be from 0 to {START_OFFSET_MAX}, not {command.start_offset}"
        )
    _check_limits(state, topics=1, partitions=command.partition_count)
    return config


def check_growth(state: ClusterState, command: AddPartitions) -> TopicState:
    """The topic that grows. Refused if it cannot."""
    topic = find_topic(state, command.name)
    count_before = len(topic.partitions)
    if command.partition_count < count_before:
        raise Refused(
            ErrorCode.INVALID_PARTITION_COUNT,
            f"topic {quoted(topic.name)} has {count_before} partitions: the number cannot be reduced to"
            f" {command.partition_count}",
        )
    added = command.partition_count - count_before
    _check_assignments(state, command.assignments, added, topic.replication_factor)
    _check_limits(state, topics=0, partitions=added)
    return topic


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


def _check_assignments(
    state: ClusterState, assignments: Sequence[tuple[NodeId, ...]], partitions: int, replicas: int
) -> None:
    """Without any, the cluster places the replicas. Otherwise each of the new partitions needs its own."""
    if assignments and len(assignments) != partitions:
        raise _bad_assignment(f"{len(assignments)} of the {partitions} new partitions have one: give one to each")
    for nodes in assignments:
        shown = list(nodes[: len(state.nodes) + 1])
        if len(set(nodes)) < len(nodes):
            raise _bad_assignment(f"{shown} names a node twice")
        if len(nodes) != replicas or not nodes:
            raise _bad_assignment(f"{shown} names {len(nodes)} nodes: each partition has {max(replicas, 1)} replicas")
        if any(node not in state.nodes for node in nodes):
            raise _bad_assignment(f"{shown} names a node that has not registered: the nodes are {sorted(state.nodes)}")


def _bad_assignment(reason: str) -> Refused:
    return Refused(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"the replica assignment is not valid: {reason}")


def _check_limits(state: ClusterState, *, topics: int, partitions: int) -> None:
    if len(state.topics) + topics > state.topics_max:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"there are {len(state.topics)} topics, and a cluster has at most {state.topics_max}: delete unused ones",
        )
    count = sum(len(topic.partitions) for topic in state.topics.values())
    if count + partitions > state.partitions_max:
        raise Refused(
            ErrorCode.LIMIT_EXCEEDED,
            f"there are {count} partitions, and a cluster has at most {state.partitions_max}: {partitions} more are too"
            " many",
        )
