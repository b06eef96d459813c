"""ElectLeaders: moves leaderships back to the preferred replicas, on request.

Owns the pace and the outcomes. It elects nothing itself: the leaders hand over, on whichever node they are, without
giving up a record. An unclean election, which would give up acknowledged records, never happens.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.coordinator.kafka.cluster_view import live_leader
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import CODES, KafkaError, KafkaRefusal, code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import (
    KAFKA_ELECTION_POLL_MS,
    KAFKA_ELECTION_RETRY_MS,
    KAFKA_ELECTIONS_MAX,
    TIMEOUT_MS_MAX,
)
from smq.coordinator.service.turns import Turns
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.state import ClusterState, PartitionState

_PREFERRED, _UNCLEAN = 0, 1
_Key: TypeAlias = tuple[str, int]
_Outcome: TypeAlias = tuple[KafkaError, str | None]

_DONE: Final[_Outcome] = (KafkaError.NONE, None)
_NOT_NEEDED: Final[_Outcome] = (KafkaError.ELECTION_NOT_NEEDED, "the partition has the leader that it should have")
_NEVER_UNCLEAN: Final[_Outcome] = (
    KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
    "a replica that may lack acknowledged records never leads: start the nodes of the other replicas",
)
_LATE: Final[_Outcome] = (
    KafkaError.REQUEST_TIMED_OUT,
    "the leader did not hand over in time: a replica that is far behind must catch up first; try again",
)


async def elect_leaders(gateway: Gateway, _version: int, request: Struct) -> Struct:
    named = request["topic_partitions"]
    timeout_ms = min(max(request["timeout_ms"], 1), TIMEOUT_MS_MAX)
    deadline = time.monotonic() + timeout_ms / 1000
    keys = None if named is None else list(dict.fromkeys((t["topic"], p) for t in named for p in t["partitions"]))
    if request["election_type"] not in (_PREFERRED, _UNCLEAN):
        message = f"there is no election type {request['election_type']}: 0 elects the preferred replica"
        return _failed(keys or [], KafkaError.INVALID_REQUEST, message)
    try:
        await gateway.calls.barrier(timeout_ms)
    except SmqError as e:
        return _failed(keys or [], code_of(e), str(e))
    elections = _Elections(gateway, deadline)
    judge = elections.judge_preferred if request["election_type"] == _PREFERRED else elections.judge_unclean
    async for key in Turns().over(keys if keys is not None else _all_keys(gateway.state)):
        judge(key)
    await elections.run()
    outcomes = elections.outcomes
    if keys is None:  # as in Kafka: what needs no election is left out
        outcomes = {key: outcome for key, outcome in outcomes.items() if outcome is not _NOT_NEEDED}
    return _answer(outcomes)


def _all_keys(state: ClusterState) -> list[_Key]:
    topics = [topic for topic in state.topics.values() if not topic.partitions[0].is_external]
    return [(topic.name, partition.index) for topic in topics for partition in topic.partitions]


def _failed(keys: list[_Key], code: KafkaError, message: str) -> Struct:
    return _answer(dict.fromkeys(keys, (code, message))) | {"error_code": code}


def _answer(outcomes: dict[_Key, _Outcome]) -> Struct:
    by_topic: dict[str, list[Struct]] = {}
    for (topic, index), (code, message) in outcomes.items():
        result = {"partition_id": index, "error_code": code, "error_message": message}
        by_topic.setdefault(topic, []).append(result)
    results = [{"topic": topic, "partition_result": found} for topic, found in by_topic.items()]
    return {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "replica_election_results": results}


@dataclass(slots=True)
class _HandOver:
    """One that has been requested."""

    key: _Key
    requested_at: float


class _Elections:
    """Of one request. `outcomes` is complete after `run`."""

    def __init__(self, gateway: Gateway, deadline: float) -> None:
        self._gateway = gateway
        self._deadline = deadline
        self._due: deque[_Key] = deque()  # bounded by the cluster's partitions
        self._under_way: list[_HandOver] = []
        self.outcomes: dict[_Key, _Outcome] = {}

    def judge_unclean(self, key: _Key) -> None:
        try:
            has_leader = live_leader(self._gateway.state, self._partition(key)) is not None
        except KafkaRefusal as e:
            self.outcomes[key] = (e.code, str(e))
        else:
            self.outcomes[key] = _NOT_NEEDED if has_leader else _NEVER_UNCLEAN

    def judge_preferred(self, key: _Key) -> None:
        try:
            partition = self._partition(key)
        except KafkaRefusal as e:
            self.outcomes[key] = (e.code, str(e))
            return
        if self._is_led_as_preferred(partition):
            self.outcomes[key] = _NOT_NEEDED
        else:
            self._due.append(key)

    def _partition(self, key: _Key) -> PartitionState:
        topic, index = key
        partition = self._gateway.state.partition_of(topic, index)
        if partition is None:
            raise KafkaRefusal(KafkaError.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic[:80]!r} has no partition {index}")
        if partition.is_external:
            raise KafkaRefusal(CODES[ErrorCode.WRONG_STORAGE], f"topic {topic!r} keeps its records elsewhere")
        return partition

    def _is_led_as_preferred(self, partition: PartitionState) -> bool:
        leader = live_leader(self._gateway.state, partition)
        return leader is not None and leader.node == partition.replicas[0]

    async def run(self) -> None:
        """Returns once all have happened or failed, or the time is over."""
        while True:
            while self._due and len(self._under_way) < KAFKA_ELECTIONS_MAX:
                self._under_way.append(_HandOver(self._due.popleft(), float("-inf")))
            now = time.monotonic()
            self._under_way = [hand_over for hand_over in self._under_way if not self._is_over(hand_over, now)]
            if not self._under_way and not self._due:
                return
            if now >= self._deadline:
                left = [hand_over.key for hand_over in self._under_way] + list(self._due)
                self.outcomes |= dict.fromkeys(left, _LATE)
                return
            await asyncio.sleep(KAFKA_ELECTION_POLL_MS / 1000)

    def _is_over(self, hand_over: _HandOver, now: float) -> bool:
        """Whether it has its outcome. Requests it when due, for the first time or again."""
        try:
            partition = self._partition(hand_over.key)
        except KafkaRefusal as e:  # deleted meanwhile
            self.outcomes[hand_over.key] = (e.code, str(e))
            return True
        if self._is_led_as_preferred(partition):
            self.outcomes[hand_over.key] = _DONE
            return True
        if now - hand_over.requested_at >= KAFKA_ELECTION_RETRY_MS / 1000:
            hand_over.requested_at = now
            if not self._gateway.calls.node.request_preferred_leader(partition.pid):
                self.outcomes[hand_over.key] = _not_available(partition)
                return True
        return False


def _not_available(partition: PartitionState) -> _Outcome:
    message = f"node {partition.replicas[0]}, the preferred leader, is down, leaving, drained or full"
    return KafkaError.PREFERRED_LEADER_NOT_AVAILABLE, message
