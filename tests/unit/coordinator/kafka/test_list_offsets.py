"""ListOffsets if the look-up itself brings a newer state: offset and epoch come from the same state."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from smq.coordinator.groups.coordinator import GroupCoordinator
from smq.coordinator.kafka import log_offsets
from smq.coordinator.kafka.errors import KafkaError
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import MIB
from smq.coordinator.service.byte_budget import InflightBytes
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.settings import Settings
from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Incarnation, LogIndex, NodeId, Offset, PartitionIndex, TopicId, TsNs
from smq.raft_state.state import ClusterState, EpochStart, PartitionState, TopicState
from smq.replication.api import NodeApi, PartitionRange, TimeOffset


def part(*history: EpochStart, hwm: int) -> PartitionState:
    return PartitionState(
        topic_id=TopicId(bytes(16)),
        index=PartitionIndex(0),
        replicas=(NodeId(1), NodeId(2), NodeId(3)),
        leader=NodeId(1),
        leader_incarnation=Incarnation(1),
        epoch=history[-1].epoch,
        history=list(history),
        next_offset=Offset(hwm),
        hwm=Offset(hwm),
        log_start=Offset(0),
        ts_ns=TsNs(0),
    )


OLD = part(EpochStart(Epoch(1), Offset(0)), hwm=5)
NEW = part(EpochStart(Epoch(1), Offset(0)), EpochStart(Epoch(2), Offset(5)), hwm=9)


class LateCalls(NodeCalls):
    """A node that was cut off: the barrier before the request, or the one of the look-up, installs a snapshot."""

    def __init__(self, *, behind: int) -> None:
        self._node = SimpleNamespace(state=self.state_of(OLD))
        super().__init__(cast(NodeApi, self._node))
        self.barriers = 0
        self.behind = behind  # barriers that still end in the old state

    @staticmethod
    def state_of(found: PartitionState) -> ClusterState:
        topic = TopicState(
            name="t", topic_id=found.topic_id, replication_factor=3, config={}, created_ms=0, partitions=[found]
        )
        return ClusterState(topics={"t": topic})

    async def barrier(self, timeout_ms: int) -> LogIndex:
        self.barriers += 1
        if self.barriers > self.behind:
            self._node.state = self.state_of(NEW)
        return LogIndex(self.barriers)

    async def partition_ranges(
        self, partitions: Sequence[tuple[str, int]], timeout_ms: int, *, at_leader: bool = False
    ) -> list[PartitionRange | SmqError]:
        assert (list(partitions), at_leader) == ([("t", 0)], True)
        await self.barrier(timeout_ms)
        found = self._node.state.topics["t"].partitions[0]
        return [
            PartitionRange(
                topic="t",
                partition=found.index,
                pid=found.pid,
                log_start=found.log_start,
                lso=found.hwm,
                hwm=found.hwm,
                next_offset=found.next_offset,
                leader=found.leader,
                epoch=found.epoch,
                replicas=found.replicas,
            )
        ]

    async def offset_for_time(self, *_asked: Any) -> TimeOffset:
        await self.barrier(0)
        return TimeOffset(Offset(7), TsNs(100), 100)


def ask(calls: LateCalls, epoch: int) -> dict[str, Any]:
    gateway = Gateway(
        calls=calls,
        groups=cast(GroupCoordinator, None),
        settings=Settings({}),
        request_bytes_max=MIB,
        response_bytes_max=MIB,
        data_dir="/data",
        inflight=InflightBytes(),
    )
    requested = {"partition_index": 0, "timestamp": 100, "current_leader_epoch": epoch}
    request = {"isolation_level": 0, "timeout_ms": 100, "topics": [{"name": "t", "partitions": [requested]}]}
    answer = asyncio.run(log_offsets.list_offsets(gateway, 5, request))
    found: dict[str, Any] = answer["topics"][0]["partitions"][0]
    return found


def test_the_epoch_is_that_of_the_state_that_holds_the_offset() -> None:
    for behind in (0, 1):
        assert ask(LateCalls(behind=behind), -1)["leader_epoch"] == 2


def test_a_client_is_fenced_by_the_state_after_the_barrier() -> None:
    assert ask(LateCalls(behind=0), 2)["error_code"] == KafkaError.NONE
    assert ask(LateCalls(behind=0), 1)["error_code"] == KafkaError.FENCED_LEADER_EPOCH
