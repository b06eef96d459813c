"""The node's core: one event loop over its ports, and the state machine in the middle.

Owns the composition of the replication layer: which message, applied command, durable write or tick goes to whom.
`node` adds what services ask of it. It holds no rule of its own: those of a partition are in `replica`, of
consumers in `reads`, of elections in `controller`. Runs on one thread; never blocks but for reads of committed
data; a failed commit or a broken invariant ends the process through `on_fatal`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from smq.raft_state.codec import decode_proposal
from smq.raft_state.commands import (
    AddPartitions,
    Applied,
    Command,
    CreateTopic,
    ElectLeader,
    FenceNode,
    HwmAdvance,
    RegisterNode,
    Reply,
    SetNodeDrained,
    UnfenceNode,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import (
    DiskId,
    Epoch,
    Incarnation,
    LogIndex,
    NodeId,
    Offset,
    PartitionId,
)
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState, EpochStart, PartitionState
from smq.replication.api import (
    DoneFn,
)
from smq.replication.config import NodeConfig
from smq.replication.digests import Digests
from smq.replication.log.store import BatchDamaged, LogStore, PartitionLog
from smq.replication.membership.controller import Controller
from smq.replication.membership.drain import Drain
from smq.replication.membership.liveness import Liveness
from smq.replication.membership.registration import Registration
from smq.replication.net import wire
from smq.replication.partition.advancer import Advancer
from smq.replication.partition.external_offsets import ExternalOffsets
from smq.replication.partition.reads import Reads
from smq.replication.partition.replica import Replica
from smq.replication.ports import Buffer, Channel, Clock, DataDamaged, Disk, Engine, Network, Rng
from smq.replication.proposer import Barriers, Proposer
from smq.replication.raft.engine_pysyncobj import EngineTiming, PySyncObjEngine
from smq.replication.raft.journal import RaftDamaged
from smq.replication.runtime.deadlines import Deadlines
from smq.replication.runtime.slices import Slices
from smq.replication.storage.care import StorageCare

_log = structlog.get_logger("smq.node")

_MAY_NEED_ELECTION: Final = (RegisterNode, FenceNode, UnfenceNode, CreateTopic, AddPartitions, ElectLeader)
SETTLE_WORK_OF_A_LOG: Final = 8  # one that is made or dropped
VISITS_MAX: Final = 200  # replicas looked after in one tick: below a millisecond
TIMEOUT_MS_MAX: Final = 60_000  # the longest time-out a caller may ask for
STOPPING: Final = SmqError(ErrorCode.SHUTTING_DOWN, "the node is stopping")


class NodeCore:
    """One member of the cluster, without the requests that `Node` adds."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        clock: Clock,
        rng: Rng,
        network: Network,
        disk: Disk,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self.clock = clock
        self.deadlines = Deadlines()
        self.rng = rng
        self._network = network
        self._disk = disk
        self._on_fatal = on_fatal
        self._machine = Machine()
        self._state_index = LogIndex(0)
        self._unsettled: deque[PartitionId] = deque()  # which the state has moved and this node has not followed yet
        self._outbox: list[Callable[[], None]] = []
        self._durable: dict[PartitionId, None] = {}  # logs of which something has just become durable
        self._replicas: dict[PartitionId, Replica] = {}
        self._logs: dict[PartitionId, PartitionLog] = {}
        self.is_running = False
        self._is_leaving = False  # from the beginning of a drain on
        self._last_beat_ns = 0
        self._to_visit: deque[PartitionId] = deque()  # replicas to be looked after in this round
        self._to_probe: dict[NodeId, deque[PartitionId]] = {}  # replicas that have yet to greet a new session
        self._slices = Slices(clock)
        self._store = LogStore(disk)
        self.registration = Registration(self, disk, rng)
        self.liveness = Liveness(clock)
        self._peers = peers = sorted(n for n in config.peers if n != config.node_id)
        self.engine: Engine = PySyncObjEngine(
            node_id=config.node_id,
            peers=peers,
            clock=clock,
            rng=rng,
            disk=disk,
            machine=self,
            send=self._send_raft,
            timing=EngineTiming.of(config),
            disk_id=lambda: self.registration.disk_id,
            registered_disk=self._registered_disk,
            on_leader_change=self._on_leader_change,
            on_fatal=on_fatal,
        )
        self._proposer = Proposer(
            node_id=config.node_id,
            engine=self.engine,
            clock=clock,
            rng=rng,
            deadlines=self.deadlines,
            send=lambda peer, message: self.send(peer, Channel.CONTROL, message),
            deliver=self.deliver,
            replies_counted=lambda: self.state.replies_counted,
            raft_leader=lambda: self.raft_leader,
        )
        self._digests = Digests(clock, self.snapshot, lambda: self._state_index)
        self._barriers = Barriers(proposer=self._proposer, engine=self.engine, clock=clock, deadlines=self.deadlines)
        self._advancer = Advancer(clock=clock, propose=self.propose, advance_of=self._hwm_advance_of)
        self._external = ExternalOffsets(
            proposer=self._proposer, clock=clock, deadlines=self.deadlines, deliver=self.deliver
        )
        self._controller = Controller(self, _log.warning)
        self.care = StorageCare(self, disk, self._replicas, lambda: self._logs)
        self._reads = Reads(self, self._barriers, self.care.repairs)

    @property
    def node_id(self) -> NodeId:
        return self.config.node_id

    @property
    def incarnation(self) -> Incarnation:
        return self.registration.incarnation

    @property
    def state(self) -> ClusterState:
        return self._machine.state

    @property
    def state_index(self) -> LogIndex:
        """Of the last entry that is in the state; the engine calls it applied only when this node has followed it."""
        return self._state_index

    @property
    def raft_leader(self) -> NodeId | None:
        """As long as it is heard of. One that died with a majority stays the engine's, for nobody follows it."""
        leader = self.engine.leader
        if leader is None or leader == self.node_id or self.liveness.is_heard(leader, self.config.session_timeout_ms):
            return leader
        return None

    # ---------------------------------------------------------------------------------------- lifecycle
    def start(self) -> None:
        """Claims a new incarnation on disk, recovers the logs, then joins. Raises DataDamaged, StartRefused."""
        self.registration.claim(self.clock.wall_ns(), self._on_claimed)

    def _registered_disk(self, node: NodeId) -> DiskId | None:
        known = self.state.nodes.get(node)
        return known.disk if known is not None else None

    def _on_claimed(self) -> None:
        self._slices.run(self._open_logs(), self._start_engine, self._on_start_failed)

    def _open_logs(self) -> Iterator[None]:
        yield from self._store.opening(self._logs)
        self.registration.recover()
        self.care.scrubber.start()

    def _start_engine(self) -> None:
        self.is_running = True
        self._slices.run(self.engine.start(), self._join, self._on_start_failed)

    def _on_start_failed(self, error: Exception) -> None:
        if isinstance(error, RaftDamaged):
            self.is_running = False
            self._replace_raft(error)
        elif isinstance(error, DataDamaged):
            self._on_fatal(error)
        else:
            raise error

    def _join(self) -> None:
        """No peer has heard of this node before, so no time-out ran."""
        self._network.start(self)
        self._tick()
        self.registration.register()
        _log.info("node started", node=self.node_id, incarnation=self.incarnation, partitions=len(self._logs))

    def _replace_raft(self, damage: RaftDamaged) -> None:
        if self._peers:
            self.registration.replace_damaged(damage, self._start_engine)
        else:
            self._on_fatal(RaftDamaged(f"{damage}. This is the cluster's only node: restore a backup"))

    def stop(self) -> None:
        """Tells everybody who waits, and closes network and engine. The disk belongs to whoever made it."""
        self._slices.stop()
        if not self.is_running:
            return
        self.is_running = False
        for pid, replica in self._replicas.items():
            replica.close(STOPPING)
            self._reads.fail_all(pid, STOPPING)
        self._external.close(STOPPING)
        self._digests.close(STOPPING)
        self._proposer.close(STOPPING)
        self._flush_outbox()
        self.engine.stop()
        self._network.close()

    def drain(self, timeout_ms: int, done: Callable[[], None]) -> None:
        self._is_leaving = True
        self.beat_peers()
        Drain(self, timeout_ms, done).start()

    def led(self) -> list[Replica]:
        return [r for r in self._replicas.values() if r.leading is not None]

    def is_candidate(self, node: NodeId) -> bool:
        known = self.state.nodes.get(node)
        if known is None or known.fenced or known.drained or self.is_leaving(node, known.incarnation):
            return False
        return self.liveness.is_heard(node, self.config.session_timeout_ms)

    def drop_orphans(self) -> None:
        """Logs of topics that were deleted while this node was away. Its own registration has been applied, so
        whatever topic this node ever knew is either in the state or deleted."""
        orphans = deque(p for p in self._logs if p not in self._replicas and self.state.partition(p) is None)
        self._slices.each(orphans, self._drop_orphan)

    def _drop_orphan(self, pid: PartitionId) -> None:
        if pid not in self._replicas and self._logs.pop(pid, None) is not None:
            self._store.drop(pid)

    # ---------------------------------------------------------------------------------------- the loop
    def _tick(self) -> None:
        if not self.is_running:
            return
        now_ns = self.clock.monotonic_ns()
        self.engine.tick()
        self.deadlines.run(now_ns)
        self._controller.on_tick(now_ns)
        if now_ns - self._last_beat_ns >= self.config.heartbeat_interval_ms * 1_000_000:
            self._last_beat_ns = now_ns
            self.care.on_beat()
            self.engine.flush_marks()
            self.beat_peers()
            if not self._to_visit:
                self._to_visit = deque(self._replicas)
        self._look_after_replicas(now_ns)
        self.clock.call_later(self.config.tick_interval_ms, self._tick)

    def _look_after_replicas(self, now_ns: int) -> None:
        """Each once a beat, but never more than some at a time: of thousands, a round takes longer."""
        due = [self._to_visit.popleft() for _ in range(min(VISITS_MAX, len(self._to_visit)))]
        reachable = self.liveness.answering(self.config.leader_isolation_ms) if due else frozenset()
        for pid in due:
            replica = self._replicas.get(pid)
            if replica is not None:
                self._look_after(replica, reachable, now_ns)

    def _look_after(self, replica: Replica, reachable: frozenset[NodeId], now_ns: int) -> None:
        if replica.log.rotten:
            self.care.mend_rotten(replica)
        if replica.leading is not None:
            replica.on_tick(now_ns)
            if not has_majority(replica.part, self.node_id, reachable):
                replica.resign()  # rule 20
        elif replica.is_appointed:
            self.resign(replica.pid, replica.part.epoch)

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        self.care.repair(damage, done)

    def beat_peers(self) -> None:
        now_ns = self.clock.monotonic_ns()
        for peer in self._peers:
            self._beat(peer)
            self.send(peer, Channel.DATA, wire.Ping(now_ns, False))

    def _beat(self, peer: NodeId) -> None:
        marks = self.engine.marks
        beat = wire.Heartbeat(self.incarnation, marks.own, marks.known, self._is_leaving, self.is_full)
        self.send(peer, Channel.CONTROL, beat)

    def _on_heartbeat(self, peer: NodeId, beat: wire.Heartbeat) -> None:
        if beat.mark.node != peer:
            raise wire.WireError(f"node {peer} speaks of itself as node {beat.mark.node}")
        self.liveness.on_heartbeat(peer, beat.incarnation, is_leaving=beat.is_leaving, is_full=beat.is_full)
        forgotten = self.engine.marks.hear(peer, beat.mark, beat.known)
        if forgotten is not None:
            self.registration.replace_old_copy(forgotten)

    def deliver(self, fn: Callable[[], None]) -> None:
        if not self._outbox:
            self.clock.call_soon(self._flush_outbox)
        self._outbox.append(fn)

    def _flush_outbox(self) -> None:
        ready, self._outbox = self._outbox, []
        for fn in ready:
            fn()

    # ---------------------------------------------------------------------------------------- state machine
    def apply(self, index: LogIndex, command: bytes) -> Applied:
        decoded, not_before = decode_proposal(command)
        applied = self._machine.apply(index, decoded, not_before)
        if isinstance(decoded, _MAY_NEED_ELECTION):
            self._controller.wake()
        elif isinstance(decoded, SetNodeDrained):
            self._controller.rebalance_soon()
        self._state_index = index
        self._digests.on_state_moved()
        self._unsettled.extend(applied.touched)
        return applied

    def pass_over(self, index: LogIndex) -> None:
        self._state_index = index

    def settle(self) -> bool:
        """Also holds the next entry back while a digest is computed that the last one has disturbed."""
        if not self._follow() or self._digests.holds_state:
            return False
        self._proposer.on_applied(self._state_index)
        return True

    def _follow(self) -> bool:
        """Brings the next replicas in line with the state, a few milliseconds' work: there may be thousands."""
        work = 0
        while self._unsettled:
            if work >= self.config.settle_work_max:
                return False
            work += self._reconcile(self._unsettled.popleft())
        return True

    def snapshot(self) -> Iterator[bytes]:
        return self._machine.snapshot_pieces()

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        """The new state takes the old one's place at once. A replica that has yet to be settled goes on by the old
        one's record of its partition, as on a node that is behind; nobody's barrier ends before all have been."""
        self._machine = yield from Machine.restoring(snapshot)
        self._state_index = index
        self._digests.on_state_moved()
        present = [part.pid for topic in self.state.topics.values() for part in topic.partitions]
        self._unsettled = deque([*self._replicas, *(p for p in present if p not in self._replicas)])
        self._controller.wake()
        while not self._follow():
            yield
        self._proposer.on_applied(index)

    def _reconcile(self, pid: PartitionId) -> int:
        """Brings this node's replica of a partition in line with the applied state. What it cost: 1 is about 10 us."""
        part = self.state.partition(pid)
        replica = self._replicas.get(pid)
        if part is None:
            if replica is not None:
                self._forget(replica)
            return SETTLE_WORK_OF_A_LOG
        if self.node_id not in part.replicas:
            return 1
        is_new = replica is None
        if replica is None:
            log = self._logs.get(pid)
            if log is None:
                # Its producers are known where no record has ever been deleted; else the leader tells them (rule 16).
                is_first = part.history[0] == EpochStart(Epoch(0), part.log_start)
                log = self._logs[pid] = self._store.create(pid, part.log_start, has_producers=is_first)
            replica = self._replicas[pid] = Replica(self, part, log)
        replica.part = part
        replica.on_applied()
        self._reads.wake(replica)
        return SETTLE_WORK_OF_A_LOG if is_new else 1

    def _forget(self, replica: Replica) -> None:
        gone = SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")
        replica.close(gone)
        self._reads.fail_all(replica.pid, gone)
        self.care.repairs.forget(replica.pid)
        del self._replicas[replica.pid]
        del self._logs[replica.pid]
        self._store.drop(replica.log)

    # ---------------------------------------------------------------------------------------- network
    def on_session_open(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.CONTROL:
            self._beat(peer)  # before all else: who counts a vote knows whose memory it comes from (rule 18)
            self.engine.on_session_open(peer)
            self._proposer.on_session_open(peer)
        else:
            self.send(peer, Channel.DATA, wire.Ping(self.clock.monotonic_ns(), False))
            waiting = self._to_probe[peer] = deque(self._replicas)
            self._slices.each(waiting, lambda pid: self._with_replica(pid, lambda r: r.on_session_open(peer)))

    def on_session_close(self, peer: NodeId, channel: Channel) -> None:
        if channel is Channel.CONTROL:
            self.engine.on_session_close(peer)
            self._proposer.on_session_close(peer)
            self._controller.wake()
        else:
            self._to_probe.pop(peer, deque()).clear()
            for replica in self._replicas.values():
                replica.on_session_close(peer)

    def on_message(self, peer: NodeId, channel: Channel, payload: memoryview) -> None:
        if not self.is_running:
            return
        if channel is Channel.CONTROL and payload and payload[0] == wire.RAFT:
            self.engine.on_message(peer, payload[1:])
            return
        try:
            if not payload:
                raise wire.WireError("an empty message")
            self._dispatch(peer, wire.decode(payload))
        except (wire.WireError, DataDamaged) as e:
            _log.warning("message refused", peer=peer, channel=channel.name, reason=str(e))

    def _dispatch(self, peer: NodeId, message: wire.Message) -> None:
        match message:
            case wire.Append():
                self._with_replica(message.partition, lambda r: r.on_append(peer, message))
            case wire.Ack():
                self._with_replica(message.partition, lambda r: r.on_ack(peer, message))
            case wire.Producers():
                self._with_replica(message.partition, lambda r: r.on_producers(peer, message))
            case wire.Probe():
                self._with_replica(message.partition, lambda r: r.on_probe(peer, message))
            case wire.FetchBatch() | wire.FoundBatch():
                self.care.on_message(peer, message)
            case wire.Ping(number, is_answer):
                if is_answer:
                    self.liveness.on_answer(peer)
                else:
                    self.send(peer, Channel.DATA, wire.Ping(number, True))
            case wire.Heartbeat():
                self._on_heartbeat(peer, message)
            case wire.Propose():
                self._proposer.on_propose(peer, message)
            case wire.ReadIndex():
                self._proposer.on_read_index(peer, message)
            case wire.Proposed():
                self._proposer.on_proposed(message)
            case wire.ElectionQuery(query, partitions):
                report = wire.ElectionReport(query, self.incarnation, self.election_ends(partitions))
                self.send(peer, Channel.CONTROL, report)
            case wire.ElectionReport():
                self._controller.on_report(peer, message, self.clock.monotonic_ns())
            case wire.Resign():
                self._controller.on_resign(peer, message, self.clock.monotonic_ns())
            case wire.Transfer(pid, epoch, target):
                self.transfer(pid, epoch, target)

    def _with_replica(self, pid: PartitionId, use: Callable[[Replica], None]) -> None:
        replica = self._replicas.get(pid)
        if replica is not None:
            use(replica)

    def _send_raft(self, peer: NodeId, parts: Sequence[Buffer]) -> None:
        self._network.send(peer, Channel.CONTROL, [b"\x00", *parts])

    def send(self, peer: NodeId, channel: Channel, message: wire.Message) -> bool:
        return self._network.send(peer, channel, wire.encode(message))

    def is_open(self, peer: NodeId, channel: Channel) -> bool:
        return self._network.is_open(peer, channel)

    def backlog_bytes(self, peer: NodeId, channel: Channel) -> int:
        return self._network.backlog_bytes(peer, channel)

    def queued_bytes(self) -> int:
        return self._disk.queued_bytes

    @property
    def is_full(self) -> bool:
        return self.care.space.is_full

    def admits(self, size: int) -> bool:
        return self.care.space.admits(size)

    def full_error(self, node: NodeId) -> SmqError:
        return self.care.full_error(node)

    def is_full_node(self, node: NodeId) -> bool:
        return self.is_full if node == self.node_id else self.liveness.is_full(node)

    def propose(self, command: Command, timeout_ms: int, done: DoneFn[Reply]) -> None:
        self._proposer.propose(command, clipped(timeout_ms), done)

    # ---------------------------------------------------------------------------------------- for replicas
    def mark_due(self, pid: PartitionId) -> None:
        self._advancer.mark(pid)

    def _hwm_advance_of(self, pid: PartitionId) -> HwmAdvance | None:
        replica = self._replicas.get(pid)
        return replica.hwm_advance() if replica is not None else None

    def mark_durable(self, pid: PartitionId) -> None:
        if not self._durable:
            self.clock.call_soon(self._flush_durable)
        self._durable[pid] = None

    def _flush_durable(self) -> None:
        durable, self._durable = self._durable, {}
        for pid in durable:
            replica = self._replicas.get(pid)
            if replica is not None:
                replica.after_durable()
                self._reads.wake(replica)

    def resign(self, pid: PartitionId, epoch: Epoch) -> None:
        message = wire.Resign(((pid, epoch),))
        leader = self.engine.leader
        if self.engine.is_leader:
            self._controller.on_resign(self.node_id, message, self.clock.monotonic_ns())
        elif leader is not None:
            self.send(leader, Channel.CONTROL, message)

    # ---------------------------------------------------------------------------------------- for the controller
    def heard_ns(self, peer: NodeId, incarnation: Incarnation) -> int:
        return self.liveness.heard_ns(peer, incarnation)

    def is_leaving(self, node: NodeId, incarnation: Incarnation) -> bool:
        return self._is_leaving if node == self.node_id else self.liveness.is_leaving(node, incarnation)

    def election_ends(
        self, partitions: tuple[tuple[PartitionId, Epoch], ...]
    ) -> tuple[tuple[PartitionId, Offset], ...]:
        """Of a partition of which this node reaches no majority for records it reports nothing: elected, it would
        only resign again (rule 20), and every epoch is kept until the log start has passed it."""
        reachable = self.liveness.answering(self.config.leader_isolation_ms)
        ends: list[tuple[PartitionId, Offset]] = []
        for pid, epoch in partitions:
            replica = self._replicas.get(pid)
            end = replica.election_end(epoch) if replica is not None else None
            if end is not None and replica is not None and has_majority(replica.part, self.node_id, reachable):
                ends.append((pid, end))
        return tuple(ends)

    def transfer(self, pid: PartitionId, epoch: Epoch, target: NodeId) -> None:
        replica = self._replicas.get(pid)
        if replica is not None and replica.leading == epoch:
            replica.transfer(target)

    def _on_leader_change(self) -> None:
        self._controller.on_leader_change()
        self._proposer.on_leader_change()


def has_majority(part: PartitionState, me: NodeId, reachable: frozenset[NodeId]) -> bool:
    """Whether a majority of the partition's replicas can be reached for records, this node counted."""
    return 2 * sum(node == me or node in reachable for node in part.replicas) > len(part.replicas)


def clipped(timeout_ms: int) -> int:
    """A caller's time-out within bounds."""
    return max(0, min(timeout_ms, TIMEOUT_MS_MAX))
