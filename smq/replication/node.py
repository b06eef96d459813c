"""The node: one event loop over its ports, and the requests of the services above it.

Owns the composition of the replication layer, its life (start, ticks, drain, stop), and what a request needs before and
after the part that does the work: the look-up of its partition, the bounds of its time-out, the errors for a node that
holds no replica. An answer is never given from inside the call that asked for it. It holds no rule: those of a
partition are in `partition`, of elections in `nodes`. It runs on one thread and never blocks, but for look-ups of
committed data. A failed commit or a broken invariant ends the process through `on_fatal`. A node that meets what a
newer smq wrote stops as if it had crashed, but its process stays: it says what it waits for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import structlog

from smq.raft_state.command_codec import UpgradeNeeded
from smq.raft_state.command_table import Concern
from smq.raft_state.commands import AdvanceLogStart, Assignment, Command, ExternalAdvance
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import DiskId, Incarnation, LogIndex, NodeId, Offset, PartitionId, RequestId, TopicId
from smq.raft_state.limits import REQUEST_ID_BYTES
from smq.raft_state.replies import OffsetsAssigned, Reply
from smq.raft_state.state import ClusterState, CommittedOffset, PartitionState
from smq.replication.api import (
    ActiveProducer,
    Backlog,
    Cancel,
    DoneFn,
    Fetched,
    NodeStatus,
    PartitionRange,
    ReplicaStatus,
    SizedRun,
    TimeKind,
    TimeOffset,
)
from smq.replication.commands.applied_state import AppliedState
from smq.replication.commands.coalescing import Barriers
from smq.replication.commands.proposer import Proposer
from smq.replication.dispatch import Dispatcher
from smq.replication.host import Host, Identity
from smq.replication.maintenance.disk_maintenance import DiskMaintenance
from smq.replication.monitoring.anomalies import Anomalies, Anomaly, CommitWatch, StateWatch
from smq.replication.monitoring.measures import NO_TRAFFIC, NodeMeasures, Traffic
from smq.replication.net.links import Links
from smq.replication.net.wire import DiskCondition
from smq.replication.node_config import NodeConfig
from smq.replication.nodes.balancer import request_preferred_leader
from smq.replication.nodes.births import Births
from smq.replication.nodes.controller import Controller
from smq.replication.nodes.drain import Drain
from smq.replication.nodes.expiry_clock import ExpiryClock
from smq.replication.nodes.heartbeats import Heartbeats
from smq.replication.nodes.liveness import Liveness
from smq.replication.nodes.quorum import QuorumQueries
from smq.replication.nodes.registration import REGISTER_MS_MAX, Registration
from smq.replication.partition.admission import leader_error
from smq.replication.partition.by_name import Lookup, RangesRequest, check_has_records, clipped
from smq.replication.partition.external_offsets import ExternalOffsets
from smq.replication.partition.intake import SpaceGuard
from smq.replication.partition.producing import Producing
from smq.replication.partition.reads import Poll
from smq.replication.partition.replica import Replica, status_of
from smq.replication.partition.replicas import Replicas
from smq.replication.partition.transaction_joins import TransactionJoins
from smq.replication.ports import Channel, Clock, Compute, DataDamaged, Disk, Network, Rng
from smq.replication.raft.journal import RaftDamaged
from smq.replication.raft.raft import Raft
from smq.replication.raft.timing import RaftTiming
from smq.replication.runtime.answers import Answers
from smq.replication.runtime.deadlines import Deadlines
from smq.replication.runtime.slices import Slices
from smq.replication.storage.hang import HangGuard

_log = structlog.get_logger("smq.node")

T = TypeVar("T")
STOPPING: Final = SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping")


def _nothing() -> None:
    """Withdraws a request that has ended."""


class Node:
    """One member of the cluster: implements NodeApi. `start` returns immediately; `is_ready` says when it serves."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        clock: Clock,
        rng: Rng,
        network: Network,
        disk: Disk,
        compute: Compute,
        on_fatal: Callable[[BaseException], None],
        on_waiting: Callable[[], None] = lambda: None,
        on_registered: Callable[[], None] = lambda: None,
        applied: AppliedState | None = None,
    ) -> None:
        """`on_waiting` is called when the node has stopped to wait for an upgrade, `on_registered` before it is ready:
        its state then holds everything that was committed before this process. `compute` runs codecs. `applied` is the
        empty state to begin with: the simulation gives one that it watches."""
        self.config = config
        self.clock, self.rng = clock, rng
        self._network = network
        self._on_fatal = on_fatal
        self._on_waiting = on_waiting
        self._on_registration = on_registered
        self.waiting = ""  # why the node has stopped to wait for an upgrade; this process will never serve again
        self.measures = NodeMeasures()
        self._anomalies = Anomalies(clock, self.measures, lambda: self.state)
        self._snapshot_seen = (LogIndex(0), 0)  # the newest one of Raft, and when this process first had it
        self._slices = Slices(clock)
        self._compute = compute
        self._answers = Answers(clock)
        self._deadlines = Deadlines()
        self._links = Links(network, clock.call_soon)
        self.identity = Identity(Incarnation(0), DiskId(b""))
        self.applied = applied if applied is not None else AppliedState(clock, config.feature_level_known)
        self.engine = self._make_engine(disk)
        self._space = SpaceGuard(disk, config.disk_reserve_bytes)
        self._hang = HangGuard(disk, config.disk_hang_ms)
        self.liveness = Liveness(
            config,
            clock=clock,
            applied=self.applied,
            engine=self.engine,
            own_disk=self._disk_condition,
            is_connected=lambda peer: self._links.is_open(peer, Channel.CONTROL),
        )
        self._proposer = Proposer(
            node_id=config.node_id,
            engine=self.engine,
            clock=clock,
            rng=rng,
            deadlines=self._deadlines,
            links=self._links,
            deliver=self._answers.deliver,
            state=lambda: self.state,
            known_level=config.feature_level_known,
            raft_leader=self.liveness.raft_leader,
            measures=self.measures,
        )
        self._host = Host(
            config=config,
            identity=self.identity,
            applied=self.applied,
            clock=clock,
            deadlines=self._deadlines,
            disk=disk,
            links=self._links,
            engine=self.engine,
            propose=self._proposer.propose,
            anomalies=self._anomalies,
            deliver=self._answers.deliver,
            measures=self.measures,
        )
        self._compose(self._host)
        self.is_running = False
        self._last_beat_ns = 0

    def _make_engine(self, disk: Disk) -> Raft:
        config = self.config
        return Raft(
            node_id=config.node_id,
            peers=[n for n in config.peers if n != config.node_id],
            clock=self.clock,
            rng=self.rng,
            disk=disk,
            machine=self.applied,
            send=self._links.send_raft,
            flush=self._links.flush,
            timing=RaftTiming.of(config),
            disk_id=lambda: self.identity.disk,
            registered_disk=self.applied.registered_disk,
            born_disk=lambda node: self._births.disk_of(node),  # noqa: PLW0108 - it is made after the engine
            on_leader_change=self._on_leader_change,
            on_fatal=self._on_engine_stopped,
        )

    def _compose(self, host: Host) -> None:
        barriers = Barriers(host, self._proposer)
        self.replicas = Replicas(
            host,
            space=self._space,
            hang=self._hang,
            barriers=barriers,
            slices=self._slices,
            reachable=self.liveness.reachable,
            is_candidate=self.liveness.is_candidate,
            resign=lambda pid, epoch: self._controller.resign(pid, epoch),  # noqa: PLW0108 - each needs the other
        )
        self._controller = Controller(host, self.liveness, self.replicas, _log.warning)
        self._joins = TransactionJoins(host, self._proposer)
        self._births = Births(
            host,
            self.rng,
            is_at_address=self._network.is_at_address,
            on_born=self._on_born,
            on_forgotten=lambda why: self._registration.forget_disk(why),  # noqa: PLW0108 - it is made later
        )
        self.applied.connect(
            self.replicas,
            self._proposer,
            wake={
                Concern.BIRTH: self._on_cluster,
                Concern.ELECTIONS: self._controller.wake,
                Concern.BALANCE: self._controller.rebalance_soon,
                Concern.ENDED_TRANSACTIONS: self._joins.on_completions,
            },
        )
        states = StateWatch(host.anomalies)
        self.applied.watch(CommitWatch(host.anomalies), states, host.config.digest_entries)
        self._registration = Registration(host, self.rng, self._on_registered, self._wait_for_upgrade)
        self.heartbeats = Heartbeats(host, self._births, self.liveness, self._registration, self.replicas, states)
        self._expiry_clock = ExpiryClock(host)
        self._maintenance = DiskMaintenance(host, self.replicas, self._space, self._hang)
        self._quorum = QuorumQueries(host, self.rng, self._proposer.late)
        self.dispatcher = Dispatcher(
            host,
            births=self._births,
            heartbeats=self.heartbeats,
            proposer=self._proposer,
            controller=self._controller,
            quorum=self._quorum,
            replicas=self.replicas,
        )
        self._external = ExternalOffsets(host, self._proposer)
        self._lookup = Lookup(host, barriers)
        self._barriers = barriers
        self._producing = Producing(host, self.replicas, barriers, self._lookup, self._compute, self._joins, self.fetch)
        self.produce, self.expect_again = self._producing.produce, self._producing.expect_again
        self.describe_quorum = self._quorum.describe

    def _disk_condition(self) -> DiskCondition:
        if self._hang.hangs:
            return DiskCondition.HANGS
        return DiskCondition.FULL if self._space.is_full else DiskCondition.FINE

    def _on_leader_change(self) -> None:
        if self.engine.leader is not None:
            self.measures.leader_changes.amount += 1
        self._controller.on_leader_change()
        self._proposer.on_leader_change()

    # ---------------------------------------------------------------------------------------- lifecycle
    def start(self) -> None:
        """Claims a new incarnation on disk, recovers the logs, then joins. Raises DataDamaged, StartRefused."""
        self._registration.claim(self.clock.wall_ns(), self._on_claimed)

    def _on_claimed(self) -> None:
        self._slices.run(self._open_logs(), self._start_engine, self._on_start_failed)

    def _open_logs(self) -> Iterator[None]:
        yield from self.replicas.open_logs()
        self._births.recover()
        self._registration.recover()
        self._maintenance.scrubber.start()

    def _start_engine(self) -> None:
        self.is_running = True
        self._slices.run(self.engine.start(), self._join, self._on_start_failed)

    def _on_start_failed(self, error: Exception) -> None:
        if isinstance(error, RaftDamaged):
            self.is_running = False
            self._replace_raft(error)
        elif isinstance(error, DataDamaged | UpgradeNeeded):
            self._on_engine_stopped(error)
        else:
            raise error

    def _on_engine_stopped(self, error: BaseException) -> None:
        if isinstance(error, UpgradeNeeded):
            self._wait_for_upgrade(str(error))
        else:
            self._on_fatal(error)

    def _wait_for_upgrade(self, why: str) -> None:
        """Ends all work, as a crash would: nothing is sent, stored or answered any more. A restart of this smq would
        end here again, so the process stays and says why. The disk is as the newer smq needs it."""
        if not self.waiting:
            self.waiting = why
            _log.error("waiting for an upgrade", node=self.node_id, why=why)
            self._lookup.refusal = SmqError(ErrorCode.UPGRADE_NEEDED, why)
            self.stop(self._lookup.refusal)
            self._on_waiting()

    def _on_registered(self) -> None:
        """Also later, if this process had to register as another disk."""
        self.replicas.drop_orphans()
        self._on_registration()

    def allow_first_start(self) -> None:
        """An operator wants a new cluster. It begins once all nodes are there, on empty disks; otherwise this changes
        nothing, however often it is said."""
        self._births.allow_first_start()

    @property
    def is_born(self) -> bool:
        """Whether the data directory belongs to a cluster."""
        return not self._births.unborn()

    def _on_born(self) -> None:
        if self.is_running:
            self.heartbeats.send_all()

    def _on_cluster(self) -> None:
        """The replicated state is that of a cluster now."""
        self._births.check()
        self._registration.register()

    def _replace_raft(self, damage: RaftDamaged) -> None:
        if any(peer != self.node_id for peer in self.config.peers):
            self._registration.replace_damaged(damage, self._start_engine)
        else:
            self._on_fatal(RaftDamaged(f"{damage}. This is the cluster's only node: restore a backup"))

    def _join(self) -> None:
        """No peer has heard of this node before, so no timeout is running."""
        self._network.start(self.dispatcher)
        self._tick()
        if not self.is_running:
            return  # its own journal holds what only a newer smq knows
        self._births.begin()
        self._registration.join()
        logs = self.replicas.log_count
        _log.info("node started", node=self.node_id, incarnation=self.incarnation, partitions=logs)

    def _tick(self) -> None:
        if not self.is_running:
            return
        now_ns = self.clock.monotonic_ns()
        self.liveness.now_ns()
        self._deadlines.run(now_ns)  # before anything is done for a caller whose time is over
        self._maintenance.on_tick(now_ns)
        self.engine.tick()
        self._controller.on_tick(now_ns)
        if now_ns - self._last_beat_ns >= self.config.heartbeat_interval_ms * 1_000_000:
            self._last_beat_ns = now_ns
            self._maintenance.on_beat()
            self.engine.flush_marks()
            self._note_snapshot(now_ns)
            self.heartbeats.send_all()
            self.replicas.on_beat()
            self._expiry_clock.on_beat()
        self.replicas.visit(now_ns)
        self.clock.call_later(self.config.tick_interval_ms, self._tick)

    def _note_snapshot(self, now_ns: int) -> None:
        index, _ = self.engine.snapshot
        if index != self._snapshot_seen[0]:
            self._snapshot_seen = (index, now_ns)

    def drain(self, timeout_ms: int, done: Callable[[], None]) -> None:
        if self.waiting:
            self.clock.call_soon(done)  # there is nothing to hand over
            return
        self.heartbeats.leave()
        Drain(self._host, self.replicas, self.liveness, timeout_ms, done).start()

    def stop(self, error: SmqError = STOPPING) -> None:
        """Answers every waiting caller, and closes network and engine. The disk stays open: its maker closes it."""
        self._slices.stop()
        if not self.is_running:
            return
        self.is_running = False
        self.dispatcher.stop()
        self._registration.stop()
        self._producing.preparation.close(error)
        self.replicas.close(error)
        self._external.close(error)
        self._joins.close(error)
        self._quorum.close(error)
        self.applied.digests.close(error)
        self._proposer.close(error)
        self._answers.flush()
        self.engine.stop()
        self._links.flush()  # what this turn has said already
        self._network.close()

    # ---------------------------------------------------------------------------------------- requests
    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        if isinstance(command, AdvanceLogStart):
            self.replicas.log_starts.propose(command, clipped(timeout_ms), done)
        else:
            self._host.propose(command, clipped(timeout_ms), done)

    def find(self, look_up: Callable[[ClusterState], T | None], timeout_ms: int, done: DoneFn[T | None]) -> None:
        self._lookup.find(look_up, timeout_ms, done)

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
        began_ns = self.clock.monotonic_ns()
        deadline_ns = began_ns + clipped(max_wait_ms) * 1_000_000
        poll: Poll | None = None
        is_cancelled = False

        def use(part: PartitionState) -> None:
            nonlocal poll
            if is_cancelled:
                return
            replica = self._replica(part)
            size = min(max_bytes, self.config.fetch_bytes_max)
            poll = Poll(replica, Offset(offset), size, deadline_ns, done, is_committed, began_ns)
            self.replicas.reads.fetch(poll)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            if poll is not None:
                self.replicas.reads.cancel(poll)

        self._lookup.with_partition(topic, partition, max(max_wait_ms, REGISTER_MS_MAX), done, use)
        return cancel

    def _not_replica(self, part: PartitionState) -> SmqError:
        if self.node_id in part.replicas:
            return leader_error(self.node_id, self.state, part)
        names = ", ".join(str(n) for n in part.replicas)
        hint = self.state.nodes.get(part.leader)
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
        RangesRequest(self._host, self._lookup, self.replicas.ends, partitions, timeout_ms, done, at_leader).start()

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
                withdrawn[0] = self.replicas.look_ups.time(found, kind, value, time_left_ms(), done)

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            withdrawn[0]()

        self._lookup.after_barrier(timeout_ms, begin, replica_now)
        return cancel

    def _replica(self, part: PartitionState) -> Replica:
        replica = self.replicas.get(part.pid)
        if replica is None:
            check_has_records(part, self.state.topic_names[part.topic_id])
            raise self._not_replica(part)
        return replica

    def follower_ends(self, partition: PartitionId) -> Mapping[NodeId, Offset]:
        replica = self.replicas.get(partition)
        if replica is None or replica.leading is None:
            return {}
        return {n: end for n, end in replica.follower_ends().items() if self.liveness.is_candidate(n)}

    def request_preferred_leader(self, partition: PartitionId) -> bool:
        return request_preferred_leader(self._host, self.replicas, self.liveness, partition)

    def sized_run(
        self, topic: str, partition: int, offset: int, bytes_max: int, timeout_ms: int, done: DoneFn[SizedRun]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition))
            return self.replicas.look_ups.sized_run(replica, Offset(offset), bytes_max, clipped(timeout_ms), done)
        except SmqError as e:
            self._host.deliver(partial(done, e.with_traceback(None)))
            return _nothing

    def backlog(
        self, topic: str, partition: int, offset: int, end: int, timeout_ms: int, done: DoneFn[Backlog]
    ) -> Cancel:
        try:
            replica = self._replica(self._lookup.applied_partition(topic, partition))
            place = Offset(offset), Offset(end)
            return self.replicas.look_ups.backlog(replica, *place, clipped(timeout_ms), done)
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
            state = self.state.groups.get(group)
            if state is None:
                return {}
            wanted = state.offsets if pids is None else [pid for pid in pids if pid in state.offsets]
            return {pid: state.offsets[pid] for pid in wanted}

        self._lookup.after_barrier(timeout_ms, done, look_up)

    # ---------------------------------------------------------------------------------------- status
    @property
    def node_id(self) -> NodeId:
        return self.config.node_id

    @property
    def incarnation(self) -> Incarnation:
        return self.identity.incarnation

    @property
    def state(self) -> ClusterState:
        return self.applied.state

    @property
    def is_ready(self) -> bool:
        if self.waiting or not self._registration.is_registered:
            return False
        me = self.state.nodes.get(self.node_id)
        if me is None or me.fenced or me.incarnation != self.incarnation:
            return False
        return self.liveness.raft_leader() is not None

    def status(self) -> NodeStatus:
        index, since_ns = self._snapshot_seen
        return NodeStatus(
            node=self.node_id,
            incarnation=self.incarnation,
            is_ready=self.is_ready,
            raft_leader=self.liveness.raft_leader(),
            raft_term=self.engine.term,
            applied_index=self.applied.index,
            commit_index=self.engine.commit_index,
            storage=self._maintenance.status(),
            producers=self.replicas.producers_held,
            producers_max=self.config.producers_max,
            snapshot_bytes=self.engine.snapshot[1],
            snapshot_index=index,
            snapshot_age_ms=(self.clock.monotonic_ns() - since_ns) // 1_000_000 if index else 0,
            feature_level_known=self.config.feature_level_known,
            compaction_dirty_bytes=self.replicas.compactor.dirty_bytes,
            compaction_age_ms=self.replicas.compactor.age_ms,
            waiting=self.waiting,
            birth=self.identity.birth,
            unborn=self._births.unborn(),
            warnings=(
                *self._waiting_warnings(),
                *self._registration.warnings(),
                *self._births.warnings(),
                *self._maintenance.warnings(),
                *self.replicas.warnings(),
            ),
        )

    def _waiting_warnings(self) -> list[str]:
        return [f"it waits for an upgrade: {self.waiting}"] if self.waiting else []

    def replica_statuses(self) -> Iterator[ReplicaStatus]:
        return map(status_of, self.replicas.all())

    def replica_status(self, partition: PartitionId) -> ReplicaStatus | None:
        replica = self.replicas.get(partition)
        return status_of(replica) if replica is not None else None

    def known_hwm(self, partition: PartitionState) -> Offset:
        replica = self.replicas.get(partition.pid)
        return max(partition.hwm, replica.known_commit_point()) if replica is not None else partition.hwm

    def traffic(self, partition: PartitionId) -> Traffic:
        return self.measures.traffic.get(partition, NO_TRAFFIC)

    def producers(self, partition: PartitionId) -> list[ActiveProducer] | None:
        replica = self.replicas.get(partition)
        return list(replica.log.producers.entries(replica.part.producers_start)) if replica is not None else None

    def topic_id(self, topic: str) -> TopicId | None:
        state = self.state.topics.get(topic)
        return state.topic_id if state is not None else None

    def digest(self, done: DoneFn[tuple[LogIndex, str]]) -> None:
        self.applied.digests.request(done)

    def anomalies(self) -> Sequence[Anomaly]:
        return list(self._anomalies.recent)

    def queued_bytes(self) -> int:
        return self.replicas.intake.led_bytes
