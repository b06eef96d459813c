"""One partition on one node: judging its log, leading or following, and answering producers.

Owns rules 2-8, 10, 12, 15, 21 and 23 of replication for one partition. It judges its log by comparing the epochs
stamped on the batches with the replicated history, and never serves, counts or reports anything else. It must never
answer a producer except by rule 10, nor call another part of the node about what a step made due: it notes that in
`Outputs`. `replicas` owns it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from smq.raft_state.binary import CodecError
from smq.raft_state.commands import CompleteReplica
from smq.raft_state.errors import ErrorCode, ErrorDetails, OutOfOrderSequence, SmqError
from smq.raft_state.ids import NO_EPOCH, Epoch, Incarnation, NodeId, Offset, PartitionId, TsNs
from smq.raft_state.state import PartitionState
from smq.records import BatchHeader, parse_header
from smq.replication.api import Acks, Produced, ProduceRequest, ReplicaStatus
from smq.replication.host import Host
from smq.replication.log.lineage import fits, verified_end
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import ArrivingTable
from smq.replication.log.segments import Replaced
from smq.replication.log.stored_batch import BatchDamaged, StoredValue, parse_value
from smq.replication.monitoring.anomalies import PositionWatch
from smq.replication.net import wire
from smq.replication.partition.admission import (
    PreparedBatch,
    SendOrder,
    as_appended,
    check_place,
    check_room,
    check_space,
    check_transaction,
    leader_error,
    validated,
)
from smq.replication.partition.handover import HandOver, handed_over, step_aside
from smq.replication.partition.intake import Intake, SpaceGuard
from smq.replication.partition.streams import FollowerStream
from smq.replication.partition.waiters import WAITERS_MAX, Waiter, Waiters
from smq.replication.ports import Buffer, Channel
from smq.replication.storage.hang import HangGuard

_NODE_STOPS: Final = (ErrorCode.SHUTTING_DOWN, ErrorCode.UPGRADE_NEEDED)
PRODUCERS_PER_WORK: Final = 30  # forgotten in 10 us
WORK_PER_TRIM: Final = 15  # of a log start that moves, in units of 10 us: its rows are read, and their deletion begins


Noted: TypeAlias = dict[PartitionId, None]  # bounded by the node's partitions


class Outputs:
    """What the steps of a node's replicas leave to be done. A step is a message, a batch, a commit of the disk, or a
    change of the applied state. What is then due outside of the replica, it notes here; `Replicas` does all of that in
    one place, once per turn of the loop. A note names a partition and a kind, not an event: what is done goes by what
    the replica is at that time, so notes of one turn fall together."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], None], drain: Callable[[], None]) -> None:
        """`drain` empties all of them, and then calls `end_drain`."""
        self._call_soon = call_soon
        self._drain = drain
        self._is_scheduled = False
        self.durable: Noted = {}  # more of the log is on disk: to be counted, or acknowledged (rule 7)
        self.unsent: Noted = {}  # a led log has grown: its followers get what they lack
        self.readable: Noted = {}  # more of the log may be readable
        self.committed: Noted = {}  # a leader's commit point is beyond Raft's high water mark, or followers miss it
        self.caught_up: Noted = {}  # incomplete replicas of a led partition may be complete again (rule 22)
        self.damaged: Noted = {}  # damage hides where the log ended, and the others do not know it yet (rule 23)

    def note(self, kind: Noted, pid: PartitionId) -> None:
        kind[pid] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._drain)

    def end_drain(self) -> None:
        """What was noted meanwhile is for the next turn."""
        self._is_scheduled = False
        if self.durable or self.unsent or self.readable or self.committed or self.caught_up or self.damaged:
            self._is_scheduled = True
            self._call_soon(self._drain)


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all replicas of a node share."""

    outputs: Outputs
    space: SpaceGuard  # for records, on this node's disk
    hang: HangGuard  # whether that disk writes at all
    intake: Intake
    send_order: SendOrder
    producers_held: Callable[[], int]  # that this node remembers, over all its partitions
    is_candidate: Callable[[NodeId], bool]  # whether another node is healthy, and its disk writes
    registered: Callable[[NodeId], Incarnation | None]  # a node's process in the state that the replicas have followed
    resign: Callable[[PartitionId, Epoch], None]  # reports to the Raft leader that this node stops leading the epoch
    # Has a damaged batch fetched again. The callback is called later, with whether the batch is intact.
    repair: Callable[[BatchDamaged, Callable[[bool], None]], None]


class Replica:
    """Lives while this node holds the partition. `part` is the state machine's own record: read-only here."""

    def __init__(self, host: Host, shared: Shared, part: PartitionState, log: PartitionLog) -> None:
        self._host = host
        self._shared = shared
        self._outputs, self._note = shared.outputs, shared.outputs.note
        self._note_durable = partial(shared.outputs.note, shared.outputs.durable, part.pid)
        self.part = part
        self.pid: PartitionId = part.pid
        self.log = log
        self.leading: Epoch | None = None  # the epoch that this process leads, once it has checked its log
        self._epoch_seen: Epoch | None = None
        self._commit = Offset(0)  # by this leader's count, or as the leader said; it may lie beyond the hwm
        self.compaction_due_ns = self.segments_due_ns = 0  # the next look at each
        self.segments_checked = (-1, -1)  # the last state and log that agreed about every segment
        self._was_refused_room = False  # the last produce, because too much waits for the disk
        self._sealed = NO_EPOCH  # rule 21: this process takes no more part in this epoch or an older one
        self.is_end_hidden = log.tail_damage is not None  # rule 23: the log may have held more than it does
        self._damaged_in = NO_EPOCH  # more damage was found in this epoch
        self._judged_end: Offset = log.log_start  # end of the longest valid prefix of the appended log
        self.streams: dict[NodeId, FollowerStream] = {}
        self._waiters = Waiters(host, self, shared.send_order)
        self.traffic = host.measures.traffic_of(part.pid)
        self._hand_over = HandOver(host, self, shared.send_order)
        self._watch = PositionWatch(host.anomalies, part.pid)
        self._resync_requested = -1  # the stream number that was asked to start again
        self._stream_seen = 0  # of the leader's last append or probe
        self._pending_probe: wire.Probe | None = None  # of an epoch that is not applied here yet
        self._table = ArrivingTable()

    # -------------------------------------------------------------------------------------- judging the log
    def judge(self) -> None:
        """Rules 3 and 4: drops everything from the first invalid batch on; keeps batches newer than the applied
        state. If damage costs valid batches, too, the others must know (rule 23)."""
        right, wrong = verified_end(self.log.runs, self.log.log_start, self.log.appended_end, self.part.history)
        if wrong is not None:
            self.is_end_hidden |= not self.log.truncate(wrong)
            right, _ = verified_end(self.log.runs, self.log.log_start, self.log.appended_end, self.part.history)
        self._judged_end = right

    @property
    def _lacks_producers(self) -> bool:
        """Rule 16. A sole replica has no other to ask: it continues without them."""
        return not self.log.has_producers and len(self.part.replicas) > 1

    @property
    def durable_verified_end(self) -> Offset:
        """Rule 7."""
        return self._verified(self.log.durable_end)

    def _verified(self, end: Offset) -> Offset:
        """Where the longest valid prefix of the log up to `end` ends. Zero while the log lacks its producers (rule 16):
        a majority has them, so neither a count nor a candidacy needs this replica before it has adopted them."""
        return Offset(0) if self._lacks_producers else self._intact(Offset(min(self._judged_end, end)))

    def _intact(self, end: Offset) -> Offset:
        """A damaged batch below the commit point is fetched from the others. Beyond it does not count."""
        damaged = self.log.first_damaged(self.known_commit_point()) if self.log.damaged_batches else None
        return end if damaged is None else min(end, damaged)

    def known_commit_point(self) -> Offset:
        """Everything below it is committed, as far as this process knows (rules 8 and 24). Only the leader knows that
        there is no more, and only after a read index (rule 25, `exact_ends`)."""
        return max(self.part.hwm, self._commit)

    @property
    def readable_end(self) -> Offset:
        """Rule 13: valid, and below the known commit point, so on the disks of a majority. This disk may not have
        written it yet: then it is read from memory."""
        if self.log.segments.is_newer_than(self.part.compactions):
            return Offset(0)
        return Offset(min(self._verified(self.log.appended_end), self.known_commit_point()))

    @property
    def stable_end(self) -> Offset:
        """The last stable offset, as far as this process knows. Beyond its log, a follower knows of no transaction."""
        end = self.log.producers.stable_end(self.known_commit_point())
        if self.leading is None:
            return max(self.part.log_start, Offset(min(end, self.readable_end)))
        if end != self._watch.lso:
            self._watch.stable(end)
        return max(self.part.log_start, end)

    @property
    def log_end(self) -> Offset:
        """The partition's log end, as far as this node knows."""
        if self.leading is not None:
            return self.log.appended_end
        return max(self.part.next_offset, self.known_commit_point())

    # -------------------------------------------------------------------------------------- applied state
    def on_applied(self) -> int:
        """The partition's replicated state may have moved. Settles producers first, then judges the log, then acts.
        Returns the work, in units of 10 us."""
        is_new_epoch = self.part.epoch != self._epoch_seen
        if not is_new_epoch:
            self._waiters.settle()
        else:
            self._watch.begins(self.part.epoch, self.part.history[-1].start, self._commit)
            self._waiters.settle_all()
            self._epoch_seen = self.part.epoch
            self._resync_requested = -1
            self._stop_leading()
            self.judge()
        self._watch.applied(self.part)
        self.note_damage()
        work = 1 + self._follow_log_start()
        if is_new_epoch and self.is_appointed:
            self._start_leading()
        elif is_new_epoch and (probe := self._pending_probe) is not None:
            self._pending_probe = None
            self.on_probe(self.part.leader, probe)
        if self.leading is not None:
            self._recount()
            self._hand_over.drive()
            self._open()
        if self.part.producers_start <= self.log.producers_start:
            return work
        return work + self.log.forget_producers(self.part.producers_start) // PRODUCERS_PER_WORK

    def _follow_log_start(self) -> int:
        """Rule 14. Not in a log with hidden damage, which the next process is still to find (rule 23). Returns the
        work. A state that is behind the log's start may lack a segment that the log is to keep."""
        if self.part.log_start >= self.log.log_start and not self.log.tail_damage:
            self.log.keep_from(self.part.segments[0].start if self.part.segments else self.part.log_start)
        if self.part.log_start > self.log.log_start and not self.is_end_hidden:
            self._advance_log_start()
            return WORK_PER_TRIM
        return 0

    def _advance_log_start(self) -> None:
        """A log that ended below the start lacks its producers from now on, and asks the leader for them (rule 16). One
        that reached the start keeps them: it was judged by the epoch of the batch before the start (rule 20)."""
        self.log.advance_log_start(self.part.log_start)
        if self._judged_end < self.log.log_start:
            self.judge()
        if self._lacks_producers and self.leading is None:
            self._send_ack(resync=True)

    @property
    def is_appointed(self) -> bool:
        """Rule 2: this node, and this process of it."""
        return self.part.leader == self._host.node_id and self.part.leader_incarnation == self._host.incarnation

    def _start_leading(self) -> None:
        is_whole = self._judged_end == self.log.appended_end and not self._lacks_producers and not self.is_end_hidden
        can_lead = self._judged_end >= self.part.history[-1].start and is_whole and self._cut_damage()
        if not can_lead or self._lacks_producers:  # the cut may have found them damaged
            self._shared.resign(self.pid, self.part.epoch)  # rule 12
            return
        self.log.settle_for_producers()  # a sole replica may get others, which take them from here
        self.leading = self.part.epoch
        for node in self.part.replicas:
            if node != self._host.node_id:
                stream = self.streams[node] = FollowerStream(
                    self._host,
                    self.pid,
                    self.leading,
                    node,
                    self.log,
                    self._shared.repair,
                    self._shared.registered,
                    self.known_commit_point,
                    lambda: self.part.compacted_end,
                )
                stream.probe()

    def _cut_damage(self) -> bool:
        """False if more has been damaged meanwhile, so that the log ends earlier now."""
        if self.log.tail_damage is None or self.log.truncate(self.log.appended_end):
            return True
        self._on_end_hidden()
        return False

    def _on_end_hidden(self) -> None:
        """This process takes no more part in the epoch: its acknowledgements may still complete it (rules 23, 27)."""
        self.is_end_hidden = True
        self._sealed = self._damaged_in = self.part.epoch
        self.judge()
        self.report_position()

    def _stop_leading(self) -> None:
        self.leading = None
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()
        self._hand_over.end()

    def resign(self) -> None:
        """Stops accepting immediately. Waiting producers are settled when the next epoch is applied."""
        if (epoch := self.leading) is not None:
            self._stop_leading()
            self._shared.resign(self.pid, epoch)

    def close(self, error: SmqError) -> None:
        """The partition or the node is going away: every waiting producer is answered."""
        self._hand_over.end(lambda: error)
        self._stop_leading()
        if error.code in _NODE_STOPS:  # definite, but the others may yet commit appended batches
            error = SmqError(ErrorCode.TIMED_OUT, error.message)
        self._waiters.close(error)

    # -------------------------------------------------------------------------------------- producing
    def produce(self, request: ProduceRequest, prepared: PreparedBatch) -> None:
        """Raises SmqError if refused immediately; otherwise the request's `done` is called by rule 10."""
        self._check_leads()
        if self._hand_over.is_under_way:
            if self._hand_over.park(request, prepared):
                return
            raise handed_over()
        if self.part.is_opening and not request.is_mirrored:
            raise handed_over()
        self._check_has_space()
        header, log, acks = validated(prepared), self.log, request.acks
        try:
            cached = None
            if not request.is_mirrored:  # its place in the log says whether it is there
                start = self.part.producers_start
                cached = self._shared.send_order.check(self.pid, header, log.producers, start)
        except OutOfOrderSequence:
            if header.is_transactional:  # as in Kafka, whether it may come at all is said first
                check_transaction(self._host.state, self.pid, log.producers, header, request.transactional_id)
            raise
        if cached is not None:
            base, ts_ns = cached.base_offset, cached.ts_ns
            waiter = Waiter(cached.epoch, base, cached.end, ts_ns, acks, True, header, request.done, prepared.rules)
            # This whole log is valid: a batch that it remembers below that is committed, however old its epoch.
            if cached.end <= self.known_commit_point() and acks is not Acks.NONE:
                self._waiters.answer_now(waiter, waiter.success)
                return
        else:
            waiter = self._append(request, prepared, header)
        self._shared.send_order.came(self.pid, header)
        if acks is Acks.NONE:
            self._waiters.answer_now(waiter, Produced(Offset(-1), Offset(-1), TsNs(-1), Epoch(-1), False))
            return
        self._waiters.add(waiter, request.timeout_ms, request.trace)

    def _append(self, request: ProduceRequest, prepared: PreparedBatch, header: BatchHeader) -> Waiter:
        full = [s.peer for s in self.streams.values() if s.is_full]
        ts_ns = self._next_ts_ns()
        check_space(self._shared.space, self._host.node_id, self.part, full, len(prepared.data))
        if request.is_mirrored:
            check_place(self.log, header)
        elif header.producer_id >= 0:
            check_transaction(self._host.state, self.pid, self.log.producers, header, request.transactional_id)
        if header.producer_id >= 0:
            check_room(self._host, self._shared.producers_held(), self.log, header)
        batch = prepared.data
        if not request.is_mirrored:
            batch, header = as_appended(prepared, header, ts_ns)
        stored = self._append_at(ts_ns, batch, header)
        end, rules = stored.end, prepared.rules
        return Waiter(stored.epoch, stored.base, end, ts_ns, request.acks, False, header, request.done, rules)

    def _next_ts_ns(self) -> TsNs:
        return TsNs(max(self._host.clock.wall_ns(), self.log.last_ts_ns + 1, self.part.ts_ns + 1))  # rule 15

    def _append_at(self, ts_ns: TsNs, batch: Buffer, header: BatchHeader) -> StoredValue:
        stored = self.log.append(batch, header, epoch=self.part.epoch, ts_ns=ts_ns, done=self._note_durable)
        self._shared.intake.took_produced(self.traffic, header.count, len(stored.value))
        self._judged_end = stored.end
        self._note(self._outputs.unsent, self.pid)
        return stored

    def append_marker(self, batch: bytes) -> None:
        """A control batch of `markers`, which tries again if nothing can be appended now."""
        can_append = self._shared.intake.has_room and self._shared.space.admits(len(batch))
        if can_append and not self._hand_over.is_under_way:
            self._append_at(self._next_ts_ns(), batch, parse_header(batch))

    def pump(self) -> None:
        """Sends the followers what they lack."""
        for stream in self.streams.values():
            stream.pump()

    def _check_leads(self) -> None:
        if self.leading is None or self.leading != self.part.epoch:
            raise self.not_leader()

    def _check_has_space(self) -> None:
        self._was_refused_room = not self._shared.intake.has_room
        if self._was_refused_room or len(self._waiters) >= WAITERS_MAX:
            raise SmqError(ErrorCode.OVERLOADED, "too much is waiting for the disk", ErrorDetails(retry_after_ms=50))

    def not_leader(self) -> SmqError:
        return leader_error(self._host.node_id, self._host.state, self.part)

    # -------------------------------------------------------------------------------------- leading
    def after_durable(self) -> None:
        """Rule 7: reports or counts the present state of this log, not single events."""
        if self.leading is not None:
            if self._waiters.wait_for_disk:
                self._waiters.settle()
            self._recount()
            self._hand_over.drive()
        elif self.part.leader != self._host.node_id:
            self._send_ack(resync=False)

    def on_ack(self, peer: NodeId, ack: wire.Ack) -> None:
        """Rule 8: only acknowledgements of the epoch that this process leads."""
        stream = self.streams.get(peer)
        if stream is None or self.leading is None or ack.epoch != self.leading:
            return
        if stream.on_ack(ack):
            self._recount()
            self._hand_over.drive()
            stream.pump()

    def follower_ends(self) -> dict[NodeId, Offset]:
        """How far the followers' logs reach, by their last reports in this epoch; followers without a report are
        absent."""
        return {peer: s.acked_end for peer, s in self.streams.items() if s.acked_end is not None}

    def majority_end(self) -> Offset:
        """What a majority of the replicas has, as far as their registered processes have said in this epoch."""
        ends = [self.durable_verified_end, *(stream.acked_end or Offset(0) for stream in self.streams.values())]
        ends.sort(reverse=True)
        return ends[len(self.part.replicas) // 2]

    def _recount(self) -> None:
        """Rule 8: what a majority has is committed."""
        end = self.majority_end()
        self._waiters.note_progress(end)
        if self.leading == self.part.epoch and end > self.known_commit_point():
            self._commit = end
            self._waiters.settle()
            self._note(self._outputs.committed, self.pid)
        if self.part.incomplete:
            self._note(self._outputs.caught_up, self.pid)

    def on_session_open(self, peer: NodeId) -> None:
        """A stream that has begun since the session opened continues."""
        if (stream := self.streams.get(peer)) is not None and not stream.is_placed:
            stream.probe()

    def on_session_close(self, peer: NodeId) -> None:
        if (stream := self.streams.get(peer)) is not None:
            stream.on_session_close()

    def on_tick(self, now_ns: int) -> None:
        for stream in self.streams.values():
            stream.on_tick(now_ns)
        self._recount()
        self._open()
        if self._commit > self.part.hwm:
            self._note(self._outputs.committed, self.pid)  # what told Raft and the followers may be lost
        hang = self._shared.hang
        self._was_refused_room &= hang.hangs
        is_refusing = self._was_refused_room and any(self._shared.is_candidate(peer) for peer in self.streams)
        step_aside(self, self.streams.values(), is_full=self._shared.space.is_full, hang=hang, is_refusing=is_refusing)

    # -------------------------------------------------------------------------------------- handing over
    def transfer(self, target: NodeId) -> bool:
        """Begins a planned handover (rule 26). False if this node does not lead or the target lags too much."""
        return self._hand_over.begin(target)

    def _open(self) -> None:
        """A topic was a mirror's: the next epoch begins above all that the mirror wrote, once Raft knows of it."""
        is_due = self.part.is_opening and self.leading == self.part.epoch and self.part.hwm == self.log.appended_end
        if is_due and not self.is_handing_over:
            self._hand_over.renew()

    @property
    def is_handing_over(self) -> bool:
        return self._hand_over.is_under_way

    def stream_to(self, peer: NodeId) -> FollowerStream | None:
        return self.streams.get(peer)

    def on_sealed(self, message: wire.Sealed) -> None:
        """Rule 27: a follower acknowledges nothing more in this epoch, so the leader asks for another."""
        if self.leading is not None and message.epoch == self.leading:
            self._hand_over.renew()

    # -------------------------------------------------------------------------------------- following
    def on_probe(self, peer: NodeId, probe: wire.Probe) -> None:
        if probe.epoch > self.part.epoch:
            self._pending_probe = probe
        elif probe.epoch == self.part.epoch and peer == self.part.leader:
            self._stream_seen = probe.stream
            self._send_ack(resync=True)

    def on_append(self, peer: NodeId, append: wire.Append) -> None:
        """Rule 6. Raises DataDamaged for a batch that fails its CRC: only those before it are kept."""
        if append.epoch > self.part.epoch:
            self._pending_probe = wire.Probe(self.pid, append.epoch, append.stream)
            return
        if append.epoch < self.part.epoch or peer != self.part.leader or self.leading is not None:
            return
        if self._is_out:
            self._send_ack(resync=True)
            return
        self.on_commit(peer, append.epoch, append.commit)
        if self._judged_end != self.log.appended_end:
            return  # the log holds epochs that are not applied here yet: wait for them
        self._stream_seen = append.stream
        intake, size = self._shared.intake, sum(map(len, append.values))
        was_waiting = intake.is_waiting(self.pid)
        if not (is_admitted := intake.admits(self.pid, size)) or not self._shared.space.admits(size):
            if is_admitted or not was_waiting:
                self._send_ack(resync=True)
            return
        if not self._take(append) and self._resync_requested != append.stream:
            self._resync_requested = append.stream
            self._send_ack(resync=True)

    def _take(self, append: wire.Append) -> bool:
        """Appends the batches up to the first that does not fit, or is damaged. Whether all fit."""
        log, fitting = self.log, list[StoredValue]()
        end, is_known = log.appended_end, not self._lacks_producers
        try:
            for raw in append.values:
                value = parse_value(self.pid, bytes(raw))
                if not (is_known and fits(self.part, value, log.log_start, end)):
                    return False
                fitting.append(value)
                end = value.end
            return True
        finally:
            if fitting and self._cut_damage() and not self._lacks_producers:
                self._shared.intake.append(log, fitting, self._note_durable)
                self._judged_end = log.appended_end
                if fitting[0].base < self.known_commit_point():
                    self._note(self._outputs.readable, self.pid)  # this node lagged: readers may have waited for it

    def on_commit(self, peer: NodeId, epoch: Epoch, commit: Offset) -> None:
        """Rule 24: only in the epoch by which this log has been judged, and not once it is sealed."""
        is_current = epoch == self.part.epoch and self.has_followed and peer == self.part.leader
        if is_current and self.leading is None and not self._is_out and commit > self.known_commit_point():
            self._commit = commit
            self._waiters.settle()
            self._note(self._outputs.readable, self.pid)

    def on_turn(self) -> None:
        """This node's disk has room again: the leader may send what it was refused."""
        if self.part.leader != self._host.node_id:
            self._send_ack(resync=True)

    def on_producers(self, peer: NodeId, message: wire.Producers) -> None:
        """Rule 16. A table that no longer fits is requested again, after the next append or probe."""
        log = self.log
        is_current = message.epoch == self.part.epoch and peer == self.part.leader and self.leading is None
        if log.has_producers or not is_current or self._is_out or message.at != log.log_start:
            self._table.clear()
            return
        table = self._table.add(message.stream, message.piece, message.pieces, message.table)
        if table is None:
            return
        if not self._cut_damage():
            return
        try:
            log.adopt_producers(table)
        except ValueError as e:
            raise CodecError(f"producers that cannot be adopted: {e}") from e
        self._stream_seen = message.stream
        self._note_durable()

    @property
    def _is_out(self) -> bool:
        """This process neither appends nor acknowledges: it has sealed the epoch (rule 21), or damage hides where its
        log ended (rule 23)."""
        return self._sealed == self.part.epoch or self.is_end_hidden

    def may_install(self, end: Offset) -> bool:
        """Whether compacted bytes may take the place of this log's own, below `end`. Only a follower's log may grow."""
        log = self.log
        is_whole = self.has_followed and not self._lacks_producers and not self.is_end_hidden
        grows = end > log.appended_end and (self._is_out or self.leading is not None)
        return is_whole and self._judged_end == log.appended_end and not grows

    def install(
        self,
        start: Offset,
        end: Offset,
        digest: bytes,
        values: list[StoredValue],
        old: Replaced,
        done: Callable[[], None],
    ) -> bool:
        """As PartitionLog.install. Both copies need space until the old one has gone."""
        if not self.may_install(end) or not self.has_space(sum(len(stored.value) for stored in values)):
            return False
        if self.part.compacted_end > self.log.appended_end:
            self._cut_damage()  # nothing is appended there: this segment, or a later one, has what follows
        self.log.segments.note_compactions(self.part.compactions)
        had_damage = self.log.tail_damage is not None
        if is_installed := self.log.install(start, end, digest, values, old, done):
            self._judged_end = self.log.appended_end
        elif self.log.tail_damage is not None and not had_damage:
            self._on_end_hidden()
        return is_installed

    def has_space(self, size: int) -> bool:
        """Whether this disk takes so many bytes of records."""
        return self._shared.space.admits(size)

    def report_position(self) -> None:
        """To the leader: it may have waited for compacted segments to arrive."""
        if self.leading is None and self.part.leader != self._host.node_id:
            self._send_ack(resync=True)

    def _send_ack(self, *, resync: bool) -> None:
        if self._is_out:
            if resync and self._sealed == self.part.epoch:
                self._host.links.send(self.part.leader, Channel.DATA, wire.Sealed(self.pid, self.part.epoch))
            return
        ack = wire.Ack(
            self.pid,
            self.part.epoch,
            self._host.incarnation,
            self.durable_verified_end,
            self._judged_end,
            self._stream_seen,
            resync,
            self._lacks_producers,
            self._shared.space.is_full,
            self._shared.intake.is_waiting(self.pid),
            self.log.crc_before(self._judged_end) if resync and self._judged_end > self.part.compacted_end else 0,
        )
        self._host.links.send(self.part.leader, Channel.DATA, ack)

    # -------------------------------------------------------------------------------------- elections
    @property
    def has_followed(self) -> bool:
        """Whether this replica has judged its log by the epoch that is applied."""
        return self._epoch_seen == self.part.epoch

    def seal(self, epoch: Epoch) -> wire.SealedLog | None:
        """Rule 21: from now on, this process neither appends nor acknowledges in the epoch, and does not lead it. None
        if another epoch is applied here, or if damage hides where the log ended."""
        if self.part.epoch != epoch or not self.has_followed or self.is_end_hidden:
            return None
        self._sealed = epoch
        self._stop_leading()
        end = Offset(min(self._judged_end, self.log.durable_end))
        return wire.SealedLog(self.pid, end, wire.NO_CANDIDATE if self._lacks_producers else self._intact(end))

    def note_damage(self) -> None:
        """Rule 23: once the others know of the hidden damage, this log ends before it. What is behind may be the only
        copy: it stays until a leader has what follows, another replica's segment has come, or this process leads."""
        if not self.is_end_hidden or self._damaged_in == self.part.epoch:
            return
        me = self._host.node_id
        if me not in self.part.incomplete or self._shared.registered(me) != self._host.incarnation:
            self._note(self._outputs.damaged, self.pid)
            return
        self.is_end_hidden = False
        self._follow_log_start()
        if self.part.leader != me:
            self._send_ack(resync=True)

    def caught_up(self) -> list[CompleteReplica]:
        """Rule 22: the incomplete replicas whose logs hold again whatever they may have acknowledged. A leader's own
        does: it was elected for that."""
        if self.leading is None or self.leading != self.part.epoch:
            return []
        processes = {s.peer: s.incarnation for s in self.streams.values() if s.has_caught_up}
        processes[self._host.node_id] = self._host.incarnation
        return [
            CompleteReplica(partition=self.pid, epoch=self.leading, node=node, incarnation=incarnation)
            for node, incarnation in processes.items()
            if node in self.part.incomplete and incarnation is not None
        ]

    def hidden_damage(self) -> list[PartitionId]:
        """Rule 23: this partition, if the others have yet to learn of its damage. They take it from a registered
        process only."""
        me = self._host.state.nodes.get(self._host.node_id)
        is_due = self.is_end_hidden and self._host.node_id not in self.part.incomplete
        return [self.pid] if is_due and me is not None and me.incarnation == self._host.incarnation else []


def status_of(replica: Replica) -> ReplicaStatus:
    """This node's copy of a partition as operators, metrics and checkers see it."""
    log = replica.log
    return ReplicaStatus(
        pid=replica.pid,
        is_leader=replica.leading is not None,
        epoch=replica.part.epoch,
        log_start=log.log_start,
        hwm=replica.known_commit_point(),
        lso=replica.stable_end,
        appended_end=log.appended_end,
        durable_end=log.durable_end,
        verified_end=replica.durable_verified_end,
        size_bytes=log.size_bytes,
    )
