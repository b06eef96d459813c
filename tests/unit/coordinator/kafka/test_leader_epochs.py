"""OffsetForLeaderEpoch: one barrier answers for every partition of a request, also for those that do not exist."""

import asyncio
from types import SimpleNamespace
from typing import Any

from smq.coordinator.kafka import log_offsets
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import ClusterState


class Calls:
    """A node whose quorum is lost after `barriers_left` barriers."""

    def __init__(self, *, barriers_left: int) -> None:
        self.barriers = 0
        self._left = barriers_left

    async def barrier(self, _timeout_ms: int) -> int:
        self.barriers += 1
        if self.barriers > self._left:
            raise SmqError(ErrorCode.NO_QUORUM, "no Raft leader is known and heard")
        return self.barriers


def ask(calls: Calls, count: int) -> list[KafkaError]:
    """The codes for `count` partitions of a topic that does not exist."""
    state = ClusterState()
    calls_of_node: Any = calls
    calls_of_node.node = SimpleNamespace(state=state)
    gateway: Any = SimpleNamespace(calls=calls_of_node, state=state)
    asked = [{"partition": i, "current_leader_epoch": -1, "leader_epoch": 0} for i in range(count)]
    request = {"topics": [{"topic": "gone", "partitions": asked}]}
    answer = asyncio.run(log_offsets.offset_for_leader_epoch(gateway, 3, request))
    return [p["error_code"] for p in answer["topics"][0]["partitions"]]


def test_unknown_partitions_cost_one_barrier_together() -> None:
    """A request may name 100,000: with a barrier for each it would hold up its connection for minutes or more."""
    calls = Calls(barriers_left=1)
    assert ask(calls, 100) == [KafkaError.UNKNOWN_TOPIC_OR_PARTITION] * 100
    assert calls.barriers == 1


def test_without_a_quorum_no_partition_is_called_unknown() -> None:
    calls = Calls(barriers_left=0)
    assert ask(calls, 3) == [KafkaError.REQUEST_TIMED_OUT] * 3
    assert calls.barriers == 1
