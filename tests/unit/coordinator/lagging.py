"""A node to which a topic, created through another node a moment ago, is unknown until its first barrier.

Owns the replicated state and the barriers. The look-ups are the real node's.
"""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import (
    DiskId,
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    PartitionIndex,
    TopicId,
    TsNs,
)
from smq.raft_state.replies import Reply
from smq.raft_state.state import ClusterState, EpochStart, GroupPhase, GroupState, NodeState, PartitionState, TopicState
from smq.replication.api import (
    ActiveProducer,
    Cancel,
    DoneFn,
    Fetched,
    NodeApi,
    PartitionEnd,
    PartitionRange,
    Produced,
    ProduceRequest,
    TimeKind,
    TimeOffset,
)
from smq.replication.commands.coalescing import Barriers
from smq.replication.host import Host
from smq.replication.partition.by_name import Lookup, RangesRequest
from smq.replication.partition.exact_ends import Ends, ExactEnds
from smq.replication.partition.producing import Arrivals

ZERO = Offset(0)
TOPIC, TOPIC_ID = "t", TopicId(bytes(15) + b"t")
GROUP = "kafka-cg-g"


def state_with(*topics: tuple[str, TopicId]) -> ClusterState:
    """A state with these topics of one partition, and with one group."""
    state = ClusterState()
    state.nodes[NodeId(1)] = NodeState(
        node=NodeId(1),
        incarnation=Incarnation(1),
        disk=DiskId(bytes(16)),
        grpc_address="",
        http_address="",
        kafka_address="h:3",
        fenced=False,
    )
    for name, topic_id in topics:
        part = PartitionState(
            topic_id=topic_id,
            index=PartitionIndex(0),
            replicas=(NodeId(1),),
            leader=NodeId(1),
            leader_incarnation=Incarnation(1),
            epoch=Epoch(1),
            history=[EpochStart(Epoch(1), ZERO)],
            next_offset=ZERO,
            hwm=ZERO,
            log_start=ZERO,
            ts_ns=TsNs(0),
        )
        state.topics[name] = TopicState(
            name=name, topic_id=topic_id, replication_factor=1, config={}, created_ms=0, partitions=[part]
        )
        state.topic_names[topic_id] = name
    state.groups[GROUP] = GroupState(name=GROUP, phase=GroupPhase.EMPTY)
    return state


class LaggingNode:
    """Serves requests as a leader of an empty partition does. Counts barriers; `failure` is what they end with."""

    def __init__(self, *, failure: SmqError | None = None) -> None:
        self.node_id = NodeId(1)
        self.is_ready = True
        self.state = state_with()
        self.barriers = 0
        self.proposed: list[object] = []
        self.appended: list[bytes] = []  # the batches of all partitions
        self._failure = failure
        waits = cast(Barriers, SimpleNamespace(wait=self.barrier))
        self._lookup = Lookup(cast(Host, self), waits)
        self._arrivals = Arrivals(lambda: self.state, self._lookup)
        self.find = self._lookup.find

    @property
    def api(self) -> NodeApi:
        return cast(NodeApi, self)  # the part of it that look-ups use

    def deliver(self, answer: Callable[[], None]) -> None:
        answer()

    def barrier(self, _timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self.barriers += 1
        if self._failure is not None:
            done(self._failure)
            return
        self.state = state_with((TOPIC, TOPIC_ID))
        done(LogIndex(1))

    def status(self) -> Any:
        return SimpleNamespace(raft_leader=None)

    def producers(self, _partition: PartitionId) -> list[ActiveProducer]:
        return []

    def queued_bytes(self) -> int:
        return 0

    def propose(self, command: object, _timeout_ms: int, done: DoneFn[Reply]) -> None:
        self.proposed.append(command)
        done(cast(Reply, None))

    def produce(self, request: ProduceRequest) -> None:
        def use(_part: PartitionState) -> None:
            self.appended.append(bytes(request.batch))
            request.done(Produced(ZERO, ZERO, TsNs(1), Epoch(1), duplicate=False))

        self._arrivals.with_partition(request.topic, request.partition, request.timeout_ms, request.done, use)

    def fetch(
        self,
        topic: str | TopicId,
        partition: int,
        _offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: DoneFn[Fetched],
        is_committed: bool = False,
    ) -> Cancel:
        def use(_part: PartitionState) -> None:
            done(Fetched([], ZERO, ZERO, ZERO, ZERO))

        self._lookup.with_partition(topic, partition, max_wait_ms, done, use)
        return lambda: None

    def partition_ranges(
        self,
        partitions: Sequence[tuple[str, int]],
        timeout_ms: int,
        done: DoneFn[list[PartitionRange | SmqError]],
        *,
        at_leader: bool = False,
    ) -> None:
        ends = cast(ExactEnds, SimpleNamespace(ask=self._ends))  # the leader's answers
        request = RangesRequest(cast(Host, self), self._lookup, ends, partitions, timeout_ms, done, at_leader)
        request.start()

    @property
    def clock(self) -> Any:
        return SimpleNamespace(monotonic_ns=lambda: 0)

    def _ends(self, pids: Iterable[PartitionId], _ms: int, done: Callable[[Ends], None], *, at_leader: bool) -> None:
        done({pid: PartitionEnd(Epoch(1), self.node_id, ZERO, ZERO, ZERO, ZERO) for pid in pids})

    def offset_for_time(
        self, topic: str, partition: int, _kind: TimeKind, _value: int, timeout_ms: int, done: DoneFn[TimeOffset]
    ) -> None:
        def look_up() -> TimeOffset:
            self._lookup.applied_partition(topic, partition)
            return TimeOffset(ZERO, TsNs(-1), -1)

        self._lookup.after_barrier(timeout_ms, done, look_up)

    def fetch_offsets(self, _group: str, _pids: object, timeout_ms: int, done: DoneFn[dict[Any, Any]]) -> None:
        self._lookup.after_barrier(timeout_ms, done, dict)


NO_QUORUM = SmqError(ErrorCode.NO_QUORUM, "m")
