"""The node's replicas and logs, and the work that is due on them.

Owns which partitions this node holds: it makes and drops replicas and logs as the applied state says. Owns the one
place that does what the steps of replicas have left to be done, once per turn of the loop (`Outputs`), and the
pace of work that may touch thousands of replicas: following the applied state, greeting a new session, the visits per
beat. It holds no rule of one partition: those are in `replica`. `nodes`, `maintenance` and the node import it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from smq.raft_state.commands import AdvanceHwms, CompleteReplicas, HwmAdvance, MarkIncomplete
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Incarnation, NodeId, PartitionId
from smq.raft_state.state import EpochStart, PartitionState
from smq.replication.commands.coalescing import Barriers
from smq.replication.host import Host
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged
from smq.replication.net import wire
from smq.replication.partition.admission import SendOrder
from smq.replication.partition.compaction.passes import Compactor
from smq.replication.partition.compaction.segment_catch_up import Segments
from smq.replication.partition.exact_ends import ExactEnds
from smq.replication.partition.high_water_mark import (
    Commits,
    LogStarts,
    hwm_advances,
    propose_advances,
)
from smq.replication.partition.intake import Intake, SpaceGuard
from smq.replication.partition.log_search import LookUps
from smq.replication.partition.markers import Markers
from smq.replication.partition.older_state import Outlived
from smq.replication.partition.proposals import Proposals
from smq.replication.partition.reads import Reads
from smq.replication.partition.repair import Outcome, Repairs
from smq.replication.partition.replica import Noted, Outputs, Replica, Shared
from smq.replication.partition.retention import Retainer
from smq.replication.runtime.slices import Slices
from smq.replication.storage.hang import HangGuard

HWM_PACE_MS: Final = (
    100  # between two proposals of marks that answer no producer: readers elsewhere do not wait for them
)
WORK_PER_LOG: Final = 8  # of making or dropping one, in units of `settle_work_max`
VISITS_MAX: Final = 200  # replicas visited per tick: below a millisecond


class Replicas:
    def __init__(
        self,
        host: Host,
        *,
        space: SpaceGuard,
        hang: HangGuard,
        barriers: Barriers,
        slices: Slices,
        reachable: Callable[[], frozenset[NodeId]],
        is_candidate: Callable[[NodeId], bool],
        resign: Callable[[PartitionId, Epoch], None],
    ) -> None:
        """`reachable`: the peers that answer on DATA. `resign` reports to the Raft leader that this node stops leading
        an epoch."""
        self._host = host
        self._slices = slices
        self._reachable = reachable
        self._store = LogStore(host.disk, tail_bytes_kept=host.config.tail_bytes_kept)
        self._logs: dict[PartitionId, PartitionLog] = {}
        self._by_pid: dict[PartitionId, Replica] = {}
        self._unsettled: deque[PartitionId] = deque()  # moved by the state, and not followed yet
        self._is_state_replaced = False  # and some replica has not followed yet
        self._missing: set[PartitionId] = set()  # logs that this disk has lost
        self._to_visit: deque[PartitionId] = deque()  # in this round
        self._to_greet: dict[NodeId, deque[PartitionId]] = {}  # replicas that have yet to greet a new session
        self._resign = resign
        self.send_order = SendOrder(host.clock)
        self.intake = Intake(host.disk, host.config.append_inflight_bytes_max)
        self.repairs = Repairs(host, self.intake, self._note_durable)
        self._outputs = Outputs(host.clock.call_soon, self._drain)
        self._shared = Shared(
            outputs=self._outputs,
            space=space,
            hang=hang,
            intake=self.intake,
            send_order=self.send_order,
            producers_held=lambda: self.producers_held,
            is_candidate=is_candidate,
            registered=self._registered,
            resign=resign,
            repair=self.repair,
        )
        self.ends = ExactEnds(host, barriers, self._by_pid.get)
        self.reads = Reads(host, self.ends, self.repairs)
        self.look_ups = LookUps(host, self.ends, self.repairs)
        self._retainer = Retainer(host, self.look_ups)
        self.segments = Segments(host, self.look_ups, self._by_pid.get, self._note_durable)
        self._outlived = Outlived(host)
        self.compactor = Compactor(host, self.look_ups, self.segments)
        clock, propose = host.clock, host.propose
        advance = partial(propose_advances, host)
        advance_now = Proposals(clock, advance, hwm_advances, _as_advances).mark_due
        self.log_starts = LogStarts(host, self.ends, self._by_pid.get, advance_now)
        self._advance_paced = Proposals(clock, advance, hwm_advances, _as_advances, pace_ms=HWM_PACE_MS).mark_due
        self._complete = Proposals(clock, propose, Replica.caught_up, lambda i: CompleteReplicas(items=i)).mark_due
        self._report_damage = Proposals(clock, propose, Replica.hidden_damage, self._as_mark).mark_due
        self._commits = Commits(host.links, clock)
        self._markers = Markers(host, propose)

    # ---------------------------------------------------------------------------------------- the table
    def open_logs(self) -> Iterator[None]:
        """One log between two yields. Raises DataDamaged."""
        yield from self._store.opening(self._logs)

    def get(self, pid: PartitionId) -> Replica | None:
        return self._by_pid.get(pid)

    def log(self, pid: PartitionId) -> PartitionLog | None:
        return self._logs.get(pid)

    def all(self) -> list[Replica]:
        return list(self._by_pid.values())

    def led(self) -> list[Replica]:
        return [r for r in self._by_pid.values() if r.leading is not None]

    def _as_mark(self, partitions: tuple[PartitionId, ...]) -> MarkIncomplete:
        return MarkIncomplete(node=self._host.node_id, incarnation=self._host.incarnation, partitions=partitions)

    def _registered(self, node: NodeId) -> Incarnation | None:
        """The node's process in the state that the replicas have followed. None while they follow a new one as a whole:
        until then, a replica judges by the record of the state before."""
        known = None if self._is_state_replaced else self._host.state.nodes.get(node)
        return known.incarnation if known is not None else None

    @property
    def producers_held(self) -> int:
        """The producers that this node remembers, over all its partitions."""
        return self._store.budget.producers

    def warnings(self) -> list[str]:
        """For an operator to act on."""
        held, limit = self.producers_held, self._host.config.producers_max
        if held < limit:
            return self._outlived.warnings()
        return [
            *self._outlived.warnings(),
            f"this node remembers {held} idempotent producers, its limit is {limit}, and refuses new ones: raise"
            " producers_max in node.toml, or lower producer.id.expiration.ms",
        ]

    @property
    def log_count(self) -> int:
        return len(self._logs)

    def drop_orphans(self) -> None:
        """Drops logs of topics that were deleted while this node was away. Only once this node's own registration has
        been applied: then every topic that it ever knew is either in the state or deleted."""
        state = self._host.state
        orphans = deque(p for p in self._logs if p not in self._by_pid and state.partition(p) is None)
        self._slices.each(orphans, self._drop_orphan)

    def _drop_orphan(self, pid: PartitionId) -> None:
        if pid not in self._by_pid and self._logs.pop(pid, None) is not None:
            self._store.drop(pid)

    def close(self, error: SmqError) -> None:
        """The node is stopping: every waiting producer and reader is answered."""
        self.ends.close(error)
        for pid, replica in self._by_pid.items():
            replica.close(error)
            self.reads.fail_all(pid, error)

    # ---------------------------------------------------------------------------------------- applied state
    def touch(self, pids: Iterable[PartitionId]) -> None:
        """The applied state of these has moved."""
        self._unsettled.extend(pids)

    def touch_all(self, *, is_own_disk: bool = False) -> None:
        """The whole state has been replaced, and what was unsettled with it. If it comes from this node's own disk, the
        logs of its partitions were there, too: each was made before the snapshot was written."""
        if is_own_disk:
            self._missing = {pid for pid in self._held() if pid not in self._logs}
        present = [part.pid for topic in self._host.state.topics.values() for part in topic.partitions]
        self._unsettled = deque([*self._by_pid, *(p for p in present if p not in self._by_pid)])
        self._is_state_replaced = True

    def _held(self) -> list[PartitionId]:
        """The partitions that this node holds, by the state."""
        partitions = (part for topic in self._host.state.topics.values() for part in topic.partitions)
        return [part.pid for part in partitions if self._host.node_id in part.replicas]

    def follow(self) -> bool:
        """Brings the next replicas in line with the state, a few milliseconds' work. True once none is left."""
        work = 0
        while self._unsettled:
            if work >= self._host.config.settle_work_max:
                return False
            work += self._reconcile(self._unsettled.popleft())
        self._is_state_replaced = False
        return True

    def _reconcile(self, pid: PartitionId) -> int:
        """Brings this node's replica of a partition in line with the state. Returns the work, in units of 10 us."""
        part = self._host.state.partition(pid)
        replica = self._by_pid.get(pid)
        if part is None:
            if replica is not None:
                self._forget(replica)
            return WORK_PER_LOG
        if self._host.node_id not in part.replicas:
            return 1
        is_new = replica is None
        if replica is None:
            log = self._logs.get(pid)
            log = log if log is not None else self._create_log(part)
            replica = self._by_pid[pid] = Replica(self._host, self._shared, part, log)
        replica.part = part
        work = replica.on_applied()
        self._markers.drive(replica)
        self.reads.wake(replica)
        return work + WORK_PER_LOG if is_new else work

    def _create_log(self, part: PartitionState) -> PartitionLog:
        # Its producers are known if no record has ever been deleted; otherwise the leader sends them (rule 16).
        is_first = part.history[0] == EpochStart(Epoch(0), part.log_start)
        if part.pid in self._missing and len(part.replicas) > 1:  # rule 23; a sole replica has no other to ask
            log = self._store.lost(part.pid, part.log_start)
        else:
            log = self._store.create(part.pid, part.log_start, has_producers=is_first)
        self._missing.discard(part.pid)
        self._logs[part.pid] = log
        return log

    def _forget(self, replica: Replica) -> None:
        gone = SmqError(ErrorCode.UNKNOWN_TOPIC, "the topic has been deleted")
        replica.close(gone)
        self.reads.fail_all(replica.pid, gone)
        self.repairs.forget(replica.pid)
        self.segments.forget(replica.pid)
        self._outlived.forget(replica.pid)
        self._retainer.forget(replica.pid)
        self.compactor.forget(replica)
        self._host.measures.forget_traffic(replica.pid)
        del self._by_pid[replica.pid]
        del self._logs[replica.pid]
        self._store.drop(replica.log)

    # ---------------------------------------------------------------------------------------- what is due
    def _drain(self) -> None:
        """Does what the steps of this turn have left to be done. The commits of this disk come first: then what is sent
        carries the newest commit point. Most turns leave one kind or two."""
        out = self._outputs
        if out.durable or out.unsent:
            self._host.links.collect()
            for replica in self._take(out.durable) if out.durable else ():
                replica.after_durable()
                self.reads.wake(replica)
            for replica in self._take(out.unsent) if out.unsent else ():
                replica.pump()
            self._host.links.flush()  # to each peer in one frame
        if out.committed:
            for replica in self._take(out.committed):
                self.reads.wake(replica)
                self._markers.drive(replica)
                self._commits.mark(replica)
                self._advance_paced(replica)
        if out.readable:
            for replica in self._take(out.readable):
                self.reads.wake(replica)
        if out.caught_up or out.damaged:
            for replica in self._take(out.caught_up):
                self._complete(replica)
            for replica in self._take(out.damaged):
                self._report_damage(replica)
        out.end_drain()

    def _take(self, noted: Noted) -> list[Replica]:
        """Empties it. A partition may have gone since. A loop: a comprehension is one more call in Python 3.11."""
        replicas: list[Replica] = []
        for pid in noted:
            if pid in self._by_pid:
                replicas.append(self._by_pid[pid])
        noted.clear()
        return replicas

    def _note_durable(self, pid: PartitionId) -> None:
        """Of what other parts have submitted for a log."""
        self._outputs.note(self._outputs.durable, pid)

    def on_beat(self) -> None:
        """Begins a new round of visits, unless one is still under way: with thousands of replicas, one takes longer."""
        if not self._to_visit:
            self._to_visit = deque(self._by_pid)

    def visit(self, now_ns: int) -> None:
        """Gives followed partitions their turn at the disk, and visits the next few replicas of the round."""
        for pid in self.intake.next_turns():
            if (waiting := self._by_pid.get(pid)) is not None:
                waiting.on_turn()
        due = [self._to_visit.popleft() for _ in range(min(VISITS_MAX, len(self._to_visit)))]
        reachable = self._reachable() if due else frozenset()
        for pid in due:
            replica = self._by_pid.get(pid)
            if replica is not None:
                self._visit(replica, reachable, now_ns)

    def _visit(self, replica: Replica, reachable: frozenset[NodeId], now_ns: int) -> None:
        damage = known_damage(replica)
        if damage is not None:  # found by recovery: one at a time per partition, and again with the next visit
            self.repair(damage, lambda _is_repaired: None)
        replica.note_damage()
        self._outlived.visit(replica)
        if replica.leading is not None:
            replica.on_tick(now_ns)
            self._markers.drive(replica)
            self._retainer.visit(replica, now_ns)
            self.compactor.visit(replica, now_ns)
            if not has_majority(replica.part, self._host.node_id, reachable):
                replica.resign()  # rule 20
        elif replica.is_appointed:
            self._resign(replica.pid, replica.part.epoch)
        self.segments.visit(replica, now_ns)  # after the compaction, which gives up nothing that is being fetched

    def repair(self, damage: BatchDamaged, done: Callable[[bool], None]) -> None:
        """Has a damaged batch fetched again. `done` is called later, with whether the batch is intact."""
        replica = self._by_pid.get(damage.pid)
        if replica is None:
            self._host.deliver(lambda: done(False))
        else:
            self.repairs.request(replica, damage, lambda outcome: done(outcome is Outcome.REPAIRED))

    # ---------------------------------------------------------------------------------------- sessions, elections
    def on_session_open(self, peer: NodeId) -> None:
        waiting = self._to_greet[peer] = deque(self._by_pid)
        self._slices.each(waiting, lambda pid: self._greet(pid, peer))

    def _greet(self, pid: PartitionId, peer: NodeId) -> None:
        replica = self._by_pid.get(pid)
        if replica is not None:
            replica.on_session_open(peer)

    def on_session_close(self, peer: NodeId) -> None:
        self._to_greet.pop(peer, deque()).clear()
        for replica in self._by_pid.values():
            replica.on_session_close(peer)

    def seal(self, partitions: tuple[tuple[PartitionId, Epoch], ...]) -> tuple[wire.SealedLog, ...]:
        """Seals these epochs (rule 21) and reports for their elections. A replica is no candidate while this node
        reaches no majority for its records: elected, it would only resign again (rule 20), and every epoch is kept
        until the log start has passed it."""
        reachable = self._reachable()
        logs: list[wire.SealedLog] = []
        for pid, epoch in partitions:
            replica = self._by_pid.get(pid)
            if replica is None:
                continue
            if not replica.has_followed:
                self._reconcile(pid)
            log = replica.seal(epoch)
            if log is not None:
                may_lead = has_majority(replica.part, self._host.node_id, reachable)
                logs.append(log if may_lead else log._replace(good=wire.NO_CANDIDATE))
        return tuple(logs)

    def transfer(self, pid: PartitionId, epoch: Epoch, target: NodeId) -> None:
        """Hands over a partition that this node itself leads."""
        replica = self._by_pid.get(pid)
        if replica is not None and replica.leading == epoch:
            replica.transfer(target)


def _as_advances(items: tuple[HwmAdvance, ...]) -> AdvanceHwms:
    return AdvanceHwms(items=items)


def has_majority(part: PartitionState, me: NodeId, reachable: frozenset[NodeId]) -> bool:
    """Whether a majority of the partition's replicas can be reached for records, this node counted."""
    return 2 * sum(node == me or node in reachable for node in part.replicas) > len(part.replicas)


def known_damage(replica: Replica) -> BatchDamaged | None:
    """Of the batches, or of what the log knows of its aborted transactions: then only a repair brings it back."""
    log = replica.log
    if log.damaged_batches:
        return BatchDamaged(replica.pid, min(log.damaged_batches), "its bytes do not match its CRC-32C")
    try:
        log.check_aborted()
    except BatchDamaged as e:
        return e
    return None
