"""DeleteRecords: how long it waits for the Raft commit that deletes."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from smq.coordinator.kafka import log_offsets
from smq.coordinator.kafka.errors import KafkaError
from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset
from smq.raft_state.state import ClusterState, EpochStart
from tests.unit.coordinator.kafka.test_list_offsets import LateCalls, part

COMMIT_MS = 20


class Calls:
    """A node that commits a command after `COMMIT_MS`, if that long is left."""

    def __init__(self) -> None:
        found = part(EpochStart(Epoch(1), Offset(0)), hwm=9)
        self.state: ClusterState = LateCalls.state_of(found)
        self.state.topic_names[found.topic_id] = "t"

    async def find(self, look_up: Callable[[ClusterState], object], _timeout_ms: int) -> object:
        return look_up(self.state)

    async def partition_ranges(self, to_the_end: list[tuple[str, int]], _timeout_ms: int) -> list[Any]:
        assert to_the_end == [], "an offset is given: no end is needed"
        return []

    async def propose(self, command: AdvanceLogStart, timeout_ms: int) -> None:
        if timeout_ms < COMMIT_MS:
            raise SmqError(ErrorCode.TIMED_OUT, f"not within {timeout_ms} ms")
        found = self.state.partition(command.partition)
        assert found is not None
        found.log_start = command.offset


def delete(timeout_ms: int) -> tuple[KafkaError, int]:
    calls: Any = Calls()
    gateway: Any = SimpleNamespace(calls=calls, state=calls.state)
    requested = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 4}]}]
    answer = asyncio.run(log_offsets.delete_records(gateway, 2, {"topics": requested, "timeout_ms": timeout_ms}))
    found = answer["topics"][0]["partitions"][0]
    return found["error_code"], found["low_watermark"]


@pytest.mark.parametrize("timeout_ms", [0, -1, COMMIT_MS])
def test_without_a_time_out_records_are_deleted_all_the_same(timeout_ms: int) -> None:
    """A client that does not wait for the followers sends 0, and a Kafka leader then deletes immediately."""
    assert delete(timeout_ms) == (KafkaError.NONE, 4)


def test_a_time_out_that_is_too_short_is_kept() -> None:
    assert delete(COMMIT_MS - 1) == (KafkaError.REQUEST_TIMED_OUT, -1)
