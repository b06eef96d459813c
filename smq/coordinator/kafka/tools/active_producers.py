"""DescribeProducers: the idempotent producers that a partition's log knows.

Owns the answer of this node's replica, leader or follower: a tool chooses the node, and asks the leader by default.
"""

from smq.coordinator.kafka.cluster_view import confirmation_failure
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import CODES, KafkaError, KafkaRefusal, error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import KAFKA_DESCRIBED_PRODUCERS_MAX
from smq.coordinator.service.turns import Turns
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import ClusterState
from smq.raft_state.topic_rules import is_topic_name
from smq.replication.api import ActiveProducer

_NS_PER_MS = 1_000_000


async def describe_producers(gateway: Gateway, _version: int, request: Struct) -> Struct:
    wanted = [(topic["name"], index) for topic in request["topics"] for index in topic["partition_indexes"]]

    def are_known(state: ClusterState) -> bool:
        return all(state.partition_of(name, index) is not None for name, index in wanted)

    failure = await confirmation_failure(gateway, are_known)
    turns, left = Turns(), KAFKA_DESCRIBED_PRODUCERS_MAX
    topics = []
    for topic in request["topics"]:
        partitions = []
        for index in topic["partition_indexes"]:
            answer = await _describe(gateway, topic["name"], index, left, turns, failure)
            left -= len(answer["active_producers"])
            partitions.append(answer)
        topics.append({"name": topic["name"], "partitions": partitions})
    return {"throttle_time_ms": 0, "topics": topics}


async def _describe(
    gateway: Gateway, name: str, index: int, left: int, turns: Turns, failure: SmqError | None
) -> Struct:
    answer: Struct = {
        "partition_index": index,
        "error_code": KafkaError.NONE,
        "error_message": None,
        "active_producers": [],
    }
    try:
        found = _producers(gateway, name, index, failure)
        if len(found) > left:
            message = (
                f"the answer would name more than {KAFKA_DESCRIBED_PRODUCERS_MAX} producers: "
                "ask for fewer partitions at a time"
            )
            raise KafkaRefusal(KafkaError.POLICY_VIOLATION, message)
    except (SmqError, KafkaRefusal) as e:
        return answer | error_fields(e)
    answer["active_producers"] = [_producer(producer) async for producer in turns.over(found)]
    return answer


def _producers(gateway: Gateway, name: str, index: int, failure: SmqError | None) -> list[ActiveProducer]:
    if not is_topic_name(name):
        raise KafkaRefusal(KafkaError.INVALID_TOPIC_EXCEPTION, f"{name[:80]!r} is not a topic name")
    partition = gateway.state.partition_of(name, index)
    if partition is None:
        raise failure or KafkaRefusal(KafkaError.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r} has no partition {index}")
    if partition.is_external:
        raise KafkaRefusal(CODES[ErrorCode.WRONG_STORAGE], f"topic {name!r} keeps its records elsewhere")
    found = gateway.calls.node.producers(partition.pid)
    if found is None:
        nodes = ", ".join(map(str, partition.replicas))
        raise KafkaRefusal(KafkaError.NOT_LEADER_OR_FOLLOWER, f"the partition's replicas are on nodes {nodes}: ask one")
    return list(found)


def _producer(producer: ActiveProducer) -> Struct:
    """`last_timestamp` is when the leader appended its last batch or marker."""
    return {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
        "last_sequence": producer.last_seq,
        "last_timestamp": producer.ts_ns // _NS_PER_MS,
        "coordinator_epoch": -1,
        "current_txn_start_offset": producer.open_from,
    }
