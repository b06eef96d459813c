"""OffsetForLeaderEpoch: one barrier answers for every partition of a request, also for those that do not exist."""

import asyncio

from smq.coordinator.kafka import log_offsets
from smq.coordinator.kafka.errors import KafkaError
from tests.unit.coordinator.kafka.test_lagging_node import gateway_of
from tests.unit.coordinator.lagging import NO_QUORUM, LaggingNode


def ask(node: LaggingNode, count: int) -> list[KafkaError]:
    """The codes for `count` partitions of a topic that does not exist."""
    asked = [{"partition": i, "current_leader_epoch": -1, "leader_epoch": 0} for i in range(count)]
    request = {"topics": [{"topic": "gone", "partitions": asked}]}
    answer = asyncio.run(log_offsets.offset_for_leader_epoch(gateway_of(node), 3, request))
    return [p["error_code"] for p in answer["topics"][0]["partitions"]]


def test_unknown_partitions_cost_one_barrier_together() -> None:
    """A request may name 100,000: with a barrier for each it would hold up its connection for minutes or more."""
    node = LaggingNode()
    assert ask(node, 100) == [KafkaError.UNKNOWN_TOPIC_OR_PARTITION] * 100
    assert node.barriers == 1


def test_without_a_quorum_no_partition_is_called_unknown() -> None:
    node = LaggingNode(failure=NO_QUORUM)
    assert ask(node, 3) == [KafkaError.REQUEST_TIMED_OUT] * 3
    assert node.barriers == 1
