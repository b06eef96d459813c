"""DescribeQuorum: Raft's voters, as Raft's leader knows them.

Owns how Raft looks to Kafka's tools: one partition of the topic __cluster_metadata. Any node answers, with what the
leader knows.
"""

from typing import Final

from smq.coordinator.kafka.cluster_view import endpoint
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import KAFKA_QUORUM_MS
from smq.raft_state.errors import SmqError
from smq.replication.ports import Quorum, QuorumReplica

METADATA_TOPIC: Final = "__cluster_metadata"
_LISTENER: Final = "KAFKA"  # in capitals, otherwise Java's admin client fails
_NO_DIRECTORY: Final = bytes(16)


async def describe_quorum(gateway: Gateway, _version: int, request: Struct) -> Struct:
    asked = [(topic["topic_name"], p["partition_index"]) for topic in request["topics"] for p in topic["partitions"]]
    if asked != [(METADATA_TOPIC, 0)]:
        return _answer([_not_raft(topic) for topic in request["topics"]])
    try:
        quorum = await gateway.calls.describe_quorum(KAFKA_QUORUM_MS)
    except SmqError as e:
        return _answer([]) | error_fields(e)
    described = {
        "partition_index": 0,
        "error_code": KafkaError.NONE,
        "leader_id": quorum.leader,
        "leader_epoch": quorum.term,
        "high_watermark": quorum.committed_end,
        "current_voters": [_replica(replica) for replica in quorum.voters],
        "observers": [_replica(replica) for replica in quorum.observers],
    }
    topic = {"topic_name": METADATA_TOPIC, "partitions": [described]}
    return _answer([topic]) | {"nodes": _nodes(gateway, quorum)}


def _answer(topics: list[Struct]) -> Struct:
    return {"error_code": KafkaError.NONE, "error_message": None, "topics": topics, "nodes": []}


def _not_raft(topic: Struct) -> Struct:
    refused = {
        "error_code": KafkaError.UNKNOWN_TOPIC_OR_PARTITION,
        "error_message": f"Raft is partition 0 of {METADATA_TOPIC}: ask for that one alone",
        "leader_id": -1,
        "leader_epoch": -1,
        "high_watermark": -1,
        "current_voters": [],
        "observers": [],
    }
    partitions = [refused | {"partition_index": p["partition_index"]} for p in topic["partitions"]]
    return {"topic_name": topic["topic_name"], "partitions": partitions}


def _replica(replica: QuorumReplica) -> Struct:
    return {
        "replica_id": replica.node,
        "replica_directory_id": replica.disk or _NO_DIRECTORY,
        "log_end_offset": replica.end,
        "last_fetch_timestamp": replica.heard_ms,
        "last_caught_up_timestamp": replica.caught_up_ms,
    }


def _nodes(gateway: Gateway, quorum: Quorum) -> list[Struct]:
    """Where Kafka clients reach them: Raft itself has ports of its own."""
    out = []
    for number in sorted({replica.node for replica in (*quorum.voters, *quorum.observers)}):
        node = gateway.state.nodes.get(number)
        address = endpoint(node, gateway.listener) if node is not None else None
        listeners = [{"name": _LISTENER, "host": address[0], "port": address[1]}] if address is not None else []
        out.append({"node_id": number, "listeners": listeners})
    return out
