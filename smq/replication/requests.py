"""The requests of services to a node: producing, fetching, looking up, offsets.

Owns what a request needs before and after the part that does the work: the look-up of its partition, the bounds of its
timeout, the errors for a node that holds no replica. An answer is never given from inside the call that asked for it.
The node offers these methods as its own (`NodeApi`, where they are described).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from smq.raft_state.commands import AdvanceLogStart, Assignment, Command, ExternalAdvance
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import LogIndex, NodeId, Offset, PartitionId, RequestId, TopicId
from smq.raft_state.limits import REQUEST_ID_BYTES
from smq.raft_state.replies import OffsetsAssigned, Reply
from smq.raft_state.state import CommittedOffset, PartitionState
from smq.replication.api import (
    Backlog,
    Cancel,
    DoneFn,
    Fetched,
    PartitionRange,
    SizedRun,
    TimeKind,
    TimeOffset,
)
from smq.replication.commands.proposer import Barriers
from smq.replication.host import Host
from smq.replication.lookup import Lookup, check_has_records, clipped
from smq.replication.nodes.balancer import request_transfer
from smq.replication.nodes.liveness import Liveness
from smq.replication.nodes.registration import REGISTER_MS_MAX
from smq.replication.partition.admission import leader_error
from smq.replication.partition.external_offsets import ExternalOffsets
from smq.replication.partition.reads import Poll
from smq.replication.partition.replica import Replica
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.transaction_joins import TransactionJoins
from smq.replication.preparation import Preparation
from smq.replication.producing import Producing
from smq.replication.ranges import RangesRequest


def _nothing() -> None:
    """Withdraws a request that has ended."""


class Requests:
    def __init__(
        self,
        host: Host,
        replicas: Replicas,
        liveness: Liveness,
        barriers: Barriers,
        external: ExternalOffsets,
        refusal: Callable[[], SmqError | None],
        preparation: Preparation,
        joins: TransactionJoins,
    ) -> None:
        self._host = host
        self._replicas = replicas
        self._liveness = liveness
        self._barriers = barriers
        self._external = external
        self._lookup = Lookup(host, barriers, refusal)
        producing = Producing(host, replicas, barriers, self._lookup, preparation, joins)
        self.find, self.produce, self.expect_again = self._lookup.find, producing.produce, producing.expect_again

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        if isinstance(command, AdvanceLogStart):
            self._replicas.log_starts.propose(command, clipped(timeout_ms), done)
        else:
            self._host.propose(command, clipped(timeout_ms), done)

    def barrier(self, timeout_ms: int, done: DoneFn[LogIndex]) -> None:
        self._barriers.wait(clipped(timeout_ms), done)

    def fetch(
        self,
        topic: str | TopicId,
        partition: int,
        offset: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
        done: DoneFn[Fetched],
        is_committed: bool = False,
    ) -> Cancel:
        began_ns = self._host.clock.monotonic_ns()
        deadline_ns = began_ns + clipped(max_wait_ms) * 1_000_000
        poll: Poll | None = None
        is_cancelled = False

        def use(part: PartitionState) -> None:
            nonlocal poll
            if is_cancelled:
                return
            replica = self._replica(part)
            size = min(max_bytes, self._host.config.fetch_bytes_max)
            poll = Poll(replica, Offset(offset), size, deadline_ns, done, is_committed, began_ns)
            self._replicas.reads.fetch(poll)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if poll is not None:
                self._replicas.reads.cancel(poll)

        self._lookup.with_partition(topic, partition, max(max_wait_ms, REGISTER_MS_MAX), done, use)
        return cancel

    def _not_replica(self, part: PartitionState) -> SmqError:
        if self._host.node_id in part.replicas:
            return leader_error(self._host.node_id, self._host.state, part)
        names = ", ".join(str(n) for n in part.replicas)
        hint = self._host.state.nodes.get(part.leader)
        details = ErrorDetails(leader=part.leader, leader_address=hint.grpc_address if hint is not None else None)
        return SmqError(ErrorCode.NOT_REPLICA, f"the partition's replicas are on nodes {names}", details)

    def partition_ranges(
        self,
        partitions: Sequence[tuple[str, int]],
        timeout_ms: int,
        done: DoneFn[list[PartitionRange | SmqError]],
        *,
        at_leader: bool = False,
    ) -> None:
        RangesRequest(self._host, self._lookup, self._replicas.ends, partitions, timeout_ms, done, at_leader).start()

    def offset_for_time(
        self, topic: str, partition: int, kind: TimeKind, value: int, timeout_ms: int, done: DoneFn[TimeOffset]
    ) -> Cancel:
        time_left_ms = self._lookup.timer(timeout_ms)
        withdrawn: list[Cancel] = [_nothing]
        is_cancelled = False

        def replica_now() -> Replica:
            return self._replica(self._lookup.applied_partition(topic, partition))

        def begin(found: Replica | SmqError) -> None:
            if isinstance(found, SmqError):
                done(found)
            elif not is_cancelled:
                withdrawn[0] = self._replicas.look_ups.time(found, kind, value, time_left_ms(), done)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            withdrawn[0]()

        self._lookup.after_barrier(timeout_ms, begin, replica_now)
        return cancel

    def _replica(self, part: PartitionState) -> Replica:
        replica = self._replicas.get(part.pid)
        if replica is None:
            check_has_records(part, self._host.state.topic_names[part.topic_id])
            raise self._not_replica(part)
        return replica

    def follower_ends(self, partition: PartitionId) -> Mapping[NodeId, Offset]:
        replica = self._replicas.get(partition)
        if replica is None or replica.leading is None:
            return {}
        return {n: end for n, end in replica.follower_ends().items() if self._liveness.is_candidate(n)}

    def request_preferred_leader(self, partition: PartitionId) -> bool:
        part = self._host.state.partition(partition)
        if part is None or not self._liveness.is_fit_to_lead(part.replicas[0]):
            return False
        if part.leader != part.replicas[0]:
            request_transfer(self._host, self._replicas, part, part.replicas[0])
        return True

    def sized_run(
        self, topic: str, partition: int, offset: int, bytes_max: int, timeout_ms: int, done: DoneFn[SizedRun]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition))
            return self._replicas.look_ups.sized_run(replica, Offset(offset), bytes_max, clipped(timeout_ms), done)
        except SmqError as e:
            self._host.deliver(partial(done, e.with_traceback(None)))
            return _nothing

    def backlog(
        self, topic: str, partition: int, offset: int, end: int, timeout_ms: int, done: DoneFn[Backlog]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition))
            place = Offset(offset), Offset(end)
            return self._replicas.look_ups.backlog(replica, *place, clipped(timeout_ms), done)
        except SmqError as e:
            self._host.deliver(partial(done, e.with_traceback(None)))
            return _nothing

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
            bound = part.next_offset if not_before is None else Offset(not_before)
            item = Assignment(RequestId(request_id), part.pid, count, bound)
            self._external.assign(item, clipped(timeout_ms), done)

        self._lookup.with_partition(topic, partition, timeout_ms, done, use)

    def advance_external_hwm(
        self, topic: str, partition: int, offset: int, timeout_ms: int, done: DoneFn[Offset]
    ) -> None:
        def use(part: PartitionState) -> None:
            item = ExternalAdvance(partition=part.pid, offset=Offset(offset))
            self._external.advance(item, clipped(timeout_ms), done)

        self._lookup.with_partition(topic, partition, timeout_ms, done, use)

    def fetch_offsets(
        self,
        group: str,
        pids: Sequence[PartitionId] | None,
        timeout_ms: int,
        done: DoneFn[dict[PartitionId, CommittedOffset]],
    ) -> None:
        def look_up() -> dict[PartitionId, CommittedOffset]:
            state = self._host.state.groups.get(group)
            if state is None:
                return {}
            wanted = state.offsets if pids is None else [pid for pid in pids if pid in state.offsets]
            return {pid: state.offsets[pid] for pid in wanted}

        self._lookup.after_barrier(timeout_ms, done, look_up)
