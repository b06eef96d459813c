"""The node as the services above see it: NodeApi over the core.

Owns the looking-up of topics and partitions and the linearizable reads of the replicated state; everything else
it passes on. Answers are never made from inside the call that asked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from smq.raft_state.commands import (
    Assignment,
    CommitOffsets,
    ExternalAdvance,
    OffsetCommit,
    OffsetsAssigned,
    Reply,
)
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import (
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
    PartitionIndex,
    RequestId,
    TopicId,
)
from smq.raft_state.limits import REQUEST_ID_BYTES
from smq.raft_state.state import PartitionState
from smq.raft_state.topic_config import max_message_bytes
from smq.replication.api import (
    Acks,
    Cancel,
    DoneFn,
    Fetched,
    NodeStatus,
    PartitionRange,
    Produced,
    ReplicaStatus,
    SizedRun,
    TimeKind,
    TimeOffset,
)
from smq.replication.core import NodeCore, clipped
from smq.replication.log.store import BatchDamaged
from smq.replication.membership.registration import REGISTER_MS_MAX
from smq.replication.partition.reads import Poll, find_sized_run, find_time, read_failure
from smq.replication.partition.repair import Outcome, told
from smq.replication.partition.replica import leader_error
from smq.replication.ports import Buffer

T = TypeVar("T")


def check_has_records(part: PartitionState, topic: str) -> None:
    if part.is_external:
        raise SmqError(ErrorCode.WRONG_STORAGE, f"topic {topic!r} keeps its records elsewhere (storage=external)")


class Node(NodeCore):
    """One member of the cluster. `start` returns at once; `status().is_ready` tells when it serves."""

    # ---------------------------------------------------------------------------------------- NodeApi
    def topic_id(self, topic: str) -> TopicId | None:
        state = self.state.topics.get(topic)
        return state.topic_id if state is not None else None

    @property
    def is_ready(self) -> bool:
        me = self.state.nodes.get(self.node_id)
        if not self.registration.is_registered or me is None or me.fenced or me.incarnation != self.incarnation:
            return False
        return self.raft_leader is not None

    def digest(self, done: DoneFn[tuple[LogIndex, str]]) -> None:
        self._digests.want(done)

    def status(self) -> NodeStatus:
        return NodeStatus(
            node=self.node_id,
            incarnation=self.incarnation,
            is_ready=self.is_ready,
            raft_leader=self.raft_leader,
            raft_term=self.engine.term,
            applied_index=self.state_index,
            commit_index=self.engine.commit_index,
            storage=self.care.status(),
            warnings=(*self.registration.warnings(), *self.care.warnings()),
        )

    def replica_statuses(self) -> Iterator[ReplicaStatus]:
        return (replica.status() for replica in list(self._replicas.values()))

    def barrier(self, timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self._barriers.wait(clipped(timeout_ms), done)

    def _find(self, topic: str, partition: int) -> PartitionState:
        state = self.state.topics.get(topic)
        if state is None:
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic {topic!r}")
        if not 0 <= partition < len(state.partitions):
            message = f"topic {topic!r} has partitions 0 to {len(state.partitions) - 1}, not {partition}"
            raise SmqError(ErrorCode.UNKNOWN_PARTITION, message)
        return state.partitions[partition]

    def _with_part(
        self, topic: str, partition: int, timeout_ms: int, done: DoneFn[T], use: Callable[[PartitionState], None]
    ) -> None:
        """Calls `use` with the partition; a name that is not known here is looked up again after a barrier, so
        that what was created through another node is found."""

        def attempt() -> None:
            try:
                use(self._find(topic, partition))
            except SmqError as e:
                # Without its traceback: that leads to this frame, and so to the request, which only the garbage
                # collector would find again. It counts objects, and a request may have megabytes.
                self.deliver(partial(done, e.with_traceback(None)))

        def after_barrier(result: LogIndex | SmqError) -> None:
            if isinstance(result, SmqError):
                self.deliver(partial(done, result))
            else:
                attempt()

        known = self.state.topics.get(topic)
        if known is not None and 0 <= partition < len(known.partitions):
            attempt()
        else:
            self.barrier(timeout_ms, after_barrier)

    def produce(
        self, topic: str, partition: int, batch: Buffer, acks: Acks, timeout_ms: int, done: DoneFn[Produced]
    ) -> None:
        def use(part: PartitionState) -> None:
            replica = self._replicas.get(part.pid)
            if replica is None:
                check_has_records(part, topic)
                raise leader_error(self.node_id, self.state, part)
            limit = max_message_bytes(self.state.topics[topic].config)
            replica.produce(batch, acks, clipped(timeout_ms), limit, done)

        self._with_part(topic, partition, timeout_ms, done, use)

    def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: DoneFn[Fetched],
        min_bytes: int = 1,
    ) -> Cancel:
        deadline_ns = self.clock.monotonic_ns() + clipped(max_wait_ms) * 1_000_000
        poll: Poll | None = None
        is_cancelled = False

        def use(part: PartitionState) -> None:
            nonlocal poll
            if is_cancelled:
                return
            replica = self._replicas.get(part.pid)
            if replica is None:
                check_has_records(part, topic)
                raise self._not_replica(part)
            size = min(max_bytes, self.config.fetch_bytes_max)
            poll = Poll(replica, Offset(offset), size, min_bytes, deadline_ns, done)
            self._reads.fetch(poll)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if poll is not None:
                self._reads.cancel(poll)

        self._with_part(topic, partition, max(max_wait_ms, REGISTER_MS_MAX), done, use)
        return cancel

    def _not_replica(self, part: PartitionState) -> SmqError:
        if self.node_id in part.replicas:
            return leader_error(self.node_id, self.state, part)
        names = ", ".join(str(n) for n in part.replicas)
        hint = self.state.nodes.get(part.leader)
        details = ErrorDetails(leader=part.leader, leader_address=hint.grpc_address if hint is not None else None)
        return SmqError(ErrorCode.NOT_REPLICA, f"the partition's replicas are on nodes {names}", details)

    def partition_range(self, topic: str, partition: int, timeout_ms: int, done: DoneFn[PartitionRange]) -> None:
        def answer(part: PartitionState) -> PartitionRange:
            return PartitionRange(
                topic=topic,
                partition=PartitionIndex(partition),
                pid=part.pid,
                log_start=part.log_start,
                lso=part.lso,
                hwm=part.hwm,
                next_offset=part.next_offset,
                leader=part.leader,
                epoch=part.epoch,
                replicas=part.replicas,
            )

        self._after_barrier(timeout_ms, done, lambda: answer(self._find(topic, partition)))

    def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int, done: DoneFn[TimeOffset]
    ) -> None:
        def look_up() -> TimeOffset:
            part = self._find(topic, partition)
            replica = self._replicas.get(part.pid)
            if replica is None:
                check_has_records(part, topic)
                raise self._not_replica(part)
            return find_time(replica, kind, value)

        def after_look_up(result: TimeOffset | SmqError | BatchDamaged) -> None:
            if not isinstance(result, BatchDamaged):
                done(result)
                return
            replica = self._replicas.get(result.pid)
            if replica is None:
                done(SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted"))
                return
            damage = result
            self.care.repairs.want(replica, damage, lambda outcome: after_repair(damage, outcome))

        def after_repair(damage: BatchDamaged, outcome: Outcome) -> None:
            if outcome is Outcome.REPAIRED:
                self._after_barrier(timeout_ms, after_look_up, look_up_or_damage)
            else:
                done(told(damage, outcome))

        def look_up_or_damage() -> TimeOffset | BatchDamaged:
            try:
                return look_up()
            except BatchDamaged as e:
                return e

        self._after_barrier(timeout_ms, after_look_up, look_up_or_damage)

    def follower_ends(self, partition: PartitionId) -> Mapping[NodeId, Offset]:
        replica = self._replicas.get(partition)
        if replica is None or replica.leading is None:
            return {}
        return {n: end for n, end in replica.follower_ends().items() if self.is_candidate(n)}

    def sized_run(self, topic: str, partition: int, offset: int, bytes_max: int) -> SizedRun:
        part = self._find(topic, partition)
        replica = self._replicas.get(part.pid)
        if replica is None:
            raise self._not_replica(part)
        try:
            return find_sized_run(replica, Offset(offset), bytes_max)
        except BatchDamaged as e:
            self.care.repairs.want(replica, e, lambda _outcome: None)
            raise told(e, Outcome.UNKNOWN) from e
        except Exception as e:
            raise read_failure(e) from e

    def commit_offsets(
        self, group: str, items: Sequence[OffsetCommit], request_id: bytes, timeout_ms: int, done: DoneFn[Reply]
    ) -> None:
        now_ms = self.clock.wall_ns() // 1_000_000
        command = CommitOffsets(request_id=RequestId(request_id), group=group, items=tuple(items), committed_ms=now_ms)
        self.propose(command, timeout_ms, done)

    def assign_offsets(
        self,
        topic: str,
        partition: int,
        count: int,
        *,
        request_id: bytes,
        not_before: int | None,
        timeout_ms: int,
        done: DoneFn[OffsetsAssigned],
    ) -> None:
        if len(request_id) != REQUEST_ID_BYTES:  # what does not fit a command must not spoil one that others share
            raise SmqError(ErrorCode.INVALID_REQUEST, f"request_id has {len(request_id)} bytes, not {REQUEST_ID_BYTES}")

        def use(part: PartitionState) -> None:
            item = Assignment(
                request_id=RequestId(request_id),
                partition=part.pid,
                count=count,
                not_before=part.next_offset if not_before is None else Offset(not_before),
            )
            self._external.assign(item, clipped(timeout_ms), done)

        self._with_part(topic, partition, timeout_ms, done, use)

    def advance_external_hwm(
        self, topic: str, partition: int, offset: int, timeout_ms: int, done: DoneFn[Offset]
    ) -> None:
        def use(part: PartitionState) -> None:
            item = ExternalAdvance(partition=part.pid, offset=Offset(offset))
            self._external.advance(item, clipped(timeout_ms), done)

        self._with_part(topic, partition, timeout_ms, done, use)

    def fetch_offsets(
        self,
        group: str,
        pids: Sequence[PartitionId] | None,
        timeout_ms: int,
        done: DoneFn[dict[PartitionId, tuple[Offset, str]]],
    ) -> None:
        def look_up() -> dict[PartitionId, tuple[Offset, str]]:
            state = self.state.groups.get(group)
            if state is None:
                return {}
            wanted = state.offsets if pids is None else [pid for pid in pids if pid in state.offsets]
            return {pid: (state.offsets[pid].offset, state.offsets[pid].metadata) for pid in wanted}

        self._after_barrier(timeout_ms, done, look_up)

    def _after_barrier(self, timeout_ms: int, done: DoneFn[T], look_up: Callable[[], T]) -> None:
        """A linearizable read of the replicated state."""

        def read(result: LogIndex | SmqError) -> None:
            if isinstance(result, SmqError):
                done(result)
                return
            try:
                answer: T | SmqError = look_up()
            except Exception as e:  # noqa: BLE001  # a read changes nothing: whatever it was, the node lives on
                answer = read_failure(e)
            done(answer)

        self.barrier(timeout_ms, read)
