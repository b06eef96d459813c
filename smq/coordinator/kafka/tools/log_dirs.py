"""DescribeLogDirs: what this node's data directory holds of which partition, and how much space is left.

Owns the answer about this node alone: clients ask each node about its own directory.
"""

from collections.abc import Iterator
from operator import itemgetter

from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.service.turns import Turns
from smq.raft_state.ids import split_partition_id
from smq.replication.api import ReplicaStatus


async def describe_log_dirs(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Partitions that this node does not hold are left out, as in Kafka."""
    by_topic: dict[str, list[Struct]] = {}
    async for status in Turns().over(_replicas(gateway, request["topics"])):
        topic_id, index = split_partition_id(status.pid)
        topic = gateway.state.topic_names.get(topic_id)
        if topic is not None:  # otherwise it has been deleted in this moment
            by_topic.setdefault(topic, []).append(_partition(index, status))
    storage = gateway.calls.node.status().storage
    directory = {
        "error_code": KafkaError.NONE,
        "log_dir": gateway.data_dir,
        "topics": [_topic(name, by_topic[name]) for name in sorted(by_topic)],
        "total_bytes": storage.total_bytes,
        "usable_bytes": storage.free_bytes,
        "is_cordoned": False,
    }
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "results": [directory]}


def _replicas(gateway: Gateway, topics: list[Struct] | None) -> Iterator[ReplicaStatus]:
    """None is all."""
    node = gateway.calls.node
    if topics is None:
        yield from node.replica_statuses()
        return
    named = {(topic["topic"], index): None for topic in topics for index in topic["partitions"]}
    for name, index in named:
        partition = gateway.state.partition_of(name, index)
        status = node.replica_status(partition.pid) if partition is not None else None
        if status is not None:
            yield status


def _topic(name: str, partitions: list[Struct]) -> Struct:
    return {"name": name, "partitions": sorted(partitions, key=itemgetter("partition_index"))}


def _partition(index: int, status: ReplicaStatus) -> Struct:
    return {
        "partition_index": index,
        "partition_size": status.size_bytes,
        "offset_lag": max(status.hwm - status.appended_end, 0),
        "is_future_key": False,
    }
