"""A leader's stream to one follower of one partition.

Owns what the leader knows of that follower: how far its durable verified log reaches (rule 7), and which appends are in
flight. The leader probes, the follower answers with the end of its log, batches follow. If one does not fit, the
follower asks to start again. It must never count an acknowledgement of another epoch, nor of a process that is not the
registered one in the applied state (rule 8): what an earlier process promised may have ended with it.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from smq.raft_state.ids import Epoch, Incarnation, NodeId, Offset, PartitionId
from smq.replication.host import Host
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.stored_batch import BatchDamaged, StoredValue
from smq.replication.monitoring.anomalies import Kind
from smq.replication.net import wire
from smq.replication.ports import Channel, DataDamaged, GiveUp

APPEND_BYTES_MAX: Final = 1 << 20  # one Append message, unless a single batch is larger: keeps links responsive
APPEND_BATCHES_MAX: Final = 256  # a follower handles a message in one turn of its loop: some 10 ms
# While no more than this waits for the follower's disk, later batches would only wait there, too: they go when it has
# answered, all in one frame, which costs one flush and one answer. A follower that has sealed answers an append only.
SMALL_BYTES: Final = 16 << 10
HOLD_NS: Final = 50_000_000  # they wait no longer for an answer that may never come
PROBE_INTERVAL_NS: Final = 200_000_000  # a lost probe or a silent follower costs this much, no more
PLACED_NS: Final = 5_000_000_000  # what a follower has in memory is on its disk by then, as a rule
NEVER_NS: Final = 1 << 62


class FollowerStream:
    """Created for every epoch that this node leads."""

    def __init__(
        self,
        host: Host,
        pid: PartitionId,
        epoch: Epoch,
        peer: NodeId,
        log: PartitionLog,
        repair: Callable[[BatchDamaged, Callable[[bool], None]], None],
        registered: Callable[[NodeId], Incarnation | None],
        commit_point: Callable[[], Offset],
        compacted_end: Callable[[], Offset],
    ) -> None:
        """`repair` has a damaged batch fetched again, and reports later whether it succeeded. `registered` is the
        node's process in the applied state, `commit_point` what is known to be committed. Below `compacted_end` a
        follower fetches whole segments by itself: batches of different logs may not touch there."""
        self._host = host
        self._repair = repair
        self._pid = pid
        self._epoch = epoch
        self._log = log
        self.peer = peer
        self._registered = registered
        self._commit_point = commit_point
        self._compacted_end = compacted_end
        self._commit_told = Offset(0)  # the commit point that was sent last, to a follower whose position is known
        self._incarnation: Incarnation | None = None
        self._end = Offset(0)  # what that process has acknowledged in this epoch
        self._counted: Incarnation | None = None  # the latest process whose acknowledgements count
        self._counted_at = Offset(0)  # where this log ended when they began to: rule 22
        self._stream = 0
        self._next: Offset | None = None  # None while the follower's position is unknown
        self._in_flight: deque[tuple[Offset, int]] = deque()  # (end, bytes) of appends not yet acknowledged
        self._in_flight_bytes = 0
        self._sent_ns = 0  # when the last small append left
        self._reading: GiveUp | None = None  # of the read from the disk that is under way: at most one at a time
        self._heard_ns = 0
        self._probed_ns = 0
        self._lacks_producers = False  # by its last report
        self._table: deque[wire.Producers] = deque()  # pieces that have yet to be sent, before any append
        self.is_full = False  # the follower's disk takes no records, by its last report
        self._is_held = False  # the follower's disk is behind, and this partition waits for its turn there
        self.is_unreadable = False  # the batch that the follower needs next fails its CRC here

    def probe(self) -> None:
        """Asks the follower for its position; appends in flight no longer count as such."""
        self._restart(None)
        self._probed_ns = self._host.clock.monotonic_ns()
        self._host.links.send(self.peer, Channel.DATA, wire.Probe(self._pid, self._epoch, self._stream))

    def _restart(self, at: Offset | None) -> None:
        self._stream += 1
        self._next = at
        self._commit_told = Offset(0)
        self._table.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0

    def on_session_close(self) -> None:
        self._restart(None)

    def on_tick(self, now_ns: int) -> None:
        """Repeats messages that may have been lost: probes, and unanswered appends. Continues if the link was busy with
        other streams when the last answer came. Counts a process that has been registered after its report."""
        self._note_process()
        self.pump()
        quiet_ns = now_ns - max(self._heard_ns, self._probed_ns)
        if quiet_ns > self._patience_ns() and self._host.links.is_open(self.peer, Channel.DATA):
            self.probe()

    def _patience_ns(self) -> int:
        """How long the follower may be quiet. What it has placed may take long to become durable; but if it has sealed
        its epoch meanwhile, it says so only if it is asked (rule 27)."""
        if self._next is None:
            return PROBE_INTERVAL_NS
        waits = self._in_flight or self._lacks_producers or self.is_full or self._is_held
        if waits or self._next < self._compacted_end():
            return 5 * PROBE_INTERVAL_NS
        return PLACED_NS if self._end < self._next and self._reading is None else NEVER_NS

    def on_ack(self, ack: wire.Ack) -> bool:
        """Takes in the follower's state; True if its log may have changed. The caller counts it, and then pumps: so the
        next append carries the commit point."""
        if self._incarnation is not None and ack.incarnation < self._incarnation:
            return False  # an older process of that node
        self._incarnation = ack.incarnation
        self._heard_ns = self._host.clock.monotonic_ns()
        self.is_full = ack.is_full
        self._is_held = ack.is_held
        self._end = Offset(min(ack.end, self._log.appended_end))
        self._note_process()
        if ack.resync and ack.stream == self._stream:
            fits = self._log.log_start <= ack.expect <= self._log.appended_end
            self._restart(ack.expect if fits else None)
            if fits and ack.tail and ack.expect > self._compacted_end():
                self._compare_ends(ack)
            if fits and ack.needs_producers:
                self._prepare_producers(ack.expect)
        elif self._next is not None and self._next < self._compacted_end() <= ack.expect <= self._log.appended_end:
            self._restart(ack.expect)  # the follower has fetched compacted segments meanwhile
        self._lacks_producers = ack.needs_producers
        while self._in_flight and self._in_flight[0][0] <= ack.end:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
        return True

    def _compare_ends(self, ack: wire.Ack) -> None:
        """What follows there comes from this log, byte for byte: so logs that have the same batch here never differ."""
        own = self._log.crc_before(ack.expect)
        if own and own != ack.tail:
            anomalies, at = self._host.anomalies, ack.expect - 1
            text = f"offset {at} is in another batch on node {self.peer} than on its leader, in epoch {self._epoch}"
            anomalies.note(Kind.LOG_DIFFERS, f"{anomalies.name(self._pid)}: {text}")

    def _on_repair(self, is_repaired: bool) -> None:
        """If no replica could help, this replica decides what to do about it."""
        self.is_unreadable = not is_repaired

    def _prepare_producers(self, at: Offset) -> None:
        """Before the first append: a log that never held the batches below `at` cannot know their producers."""
        try:
            table = self._log.producers_at(at)
        except DataDamaged as damage:
            self._restart(None)
            if isinstance(damage, BatchDamaged) and damage.offset >= self._log.log_start:
                self._repair(damage, self._on_repair)
            else:
                self.is_unreadable = True
            return
        size = wire.TABLE_PIECE_BYTES
        pieces = [table[i : i + size] for i in range(0, len(table), size)] or [b""]
        for number, piece in enumerate(pieces):
            message = wire.Producers(self._pid, self._epoch, self._stream, at, number, len(pieces), piece)
            self._table.append(message)

    def _send_producers(self) -> bool:
        """Sends the pieces for which the link has room; true once all are sent."""
        window = self._host.config.replica_inflight_bytes_max
        while self._table:
            if self._host.links.backlog_bytes(self.peer, Channel.DATA) >= window:
                return False
            if not self._host.links.send(self.peer, Channel.DATA, self._table.popleft()):
                self._restart(None)
                return False
            self._probed_ns = self._host.clock.monotonic_ns()  # the answer comes after the last piece
        return True

    @property
    def incarnation(self) -> Incarnation | None:
        return self._incarnation

    @property
    def acked_end(self) -> Offset | None:
        """How far the follower's log reaches; None until its registered process has reported in this epoch (rule 8)."""
        if self._incarnation is None or self._incarnation != self._registered(self.peer):
            return None
        return self._end

    def _note_process(self) -> None:
        """Rule 22: what the follower's earlier processes may have acknowledged ends here."""
        if self._counted != self._incarnation and self.acked_end is not None:
            self._counted = self._incarnation
            self._counted_at = self._log.appended_end

    @property
    def has_caught_up(self) -> bool:
        """Whether the follower's log holds again whatever any of its processes has acknowledged."""
        end = self.acked_end
        return end is not None and self._counted == self._incarnation and end >= self._counted_at

    @property
    def is_placed(self) -> bool:
        """The follower's position is known."""
        return self._next is not None

    def lags_at_most(self, size: int) -> bool:
        """Whether what the follower has not acknowledged has no more bytes."""
        if self._next is None:
            return False
        end = self._log.appended_end
        unsent = self._log.read_memory(self._next, end, size)  # None: too much for memory
        is_all = self._next == end or bool(unsent and unsent[-1].end == end)
        return is_all and self._in_flight_bytes + sum(len(stored.value) for stored in unsent or ()) <= size

    def take_commit(self) -> Offset | None:
        """The commit point, if the follower does not know it yet (rule 24). The caller sends it; what gets lost with
        its session is sent again once the follower's position is known again."""
        commit = self._commit_point()
        if self._next is None or commit <= self._commit_told:
            return None
        self._commit_told = commit
        return commit

    def pump(self) -> None:
        """Sends what the follower lacks, within the window, unless a small append is unanswered."""
        if self._table and not self._send_producers():
            return
        if 0 < self._in_flight_bytes <= SMALL_BYTES and self._host.clock.monotonic_ns() - self._sent_ns < HOLD_NS:
            return
        window = self._host.config.replica_inflight_bytes_max
        if self.is_full or self._is_held:
            return
        while self._next is not None and self._next < self._log.appended_end:
            if self._in_flight_bytes >= window or self._host.links.backlog_bytes(self.peer, Channel.DATA) >= window:
                return
            if self._next < self._compacted_end():
                return  # the follower says when its log reaches beyond it
            if self._next < self._log.log_start:
                self._restart(None)  # the follower learns the new log start from Raft; a probe then finds it there
                return
            size_max = min(APPEND_BYTES_MAX, window)
            values = self._log.read_memory(self._next, self._log.appended_end, size_max)
            if values is None:
                self._read_later(self._next, size_max)
                return
            if not values or not self._send(values):
                return

    def _read_later(self, at: Offset, size_max: int) -> None:
        """What the follower lacks is not in memory: the loop goes on while it is read. If too many reads wait, the next
        visit tries again."""
        if self._reading is None:
            stream, on_read = self._stream, self._on_read
            self._reading = self._log.read_later(
                at, self._log.appended_end, size_max, lambda found: on_read(stream, at, found)
            )

    def close(self) -> None:
        """The leadership is over: nothing is sent any more."""
        self._restart(None)
        if self._reading is not None:
            self._reading()

    def _on_read(self, stream: int, at: Offset, found: list[StoredValue] | DataDamaged | None) -> None:
        self._reading = None
        is_wanted = stream == self._stream and self._next == at and not self.is_full and not self._is_held
        is_wanted = is_wanted and at >= self._compacted_end()
        if is_wanted and found is not None:
            if isinstance(found, BatchDamaged):
                self._restart(None)  # producers must not suffer for it: the probe after the repair continues from here
                self._repair(found, self._on_repair)
            elif isinstance(found, DataDamaged):
                self.is_unreadable = True
                self._restart(None)
            else:
                self._send(found)
        self.pump()

    def _send(self, batches: list[StoredValue]) -> bool:
        self.is_unreadable = False
        for first in range(0, len(batches), APPEND_BATCHES_MAX):
            some = batches[first : first + APPEND_BATCHES_MAX]
            commit, values = self._commit_point(), [stored.value for stored in some]
            message = wire.Append(self._pid, self._epoch, self._stream, commit, values)
            if not self._host.links.send(self.peer, Channel.DATA, message):
                self._restart(None)
                return False
            self._commit_told = commit
            size = sum(map(len, values))
            self._next = some[-1].end
            self._in_flight.append((self._next, size))
            self._in_flight_bytes += size
        if self._in_flight_bytes <= SMALL_BYTES:
            self._sent_ns = self._host.clock.monotonic_ns()
        return True
