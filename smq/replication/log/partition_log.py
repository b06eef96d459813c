"""The log of one partition on one node: append, truncate, delete from the front, replace damaged batches.

Owns every change of a log, and its positions: `appended_end` (submitted to the disk), `durable_end` (on disk), and in
memory every batch between the two. All changes pass through the disk's one FIFO (rule 5); reads of the disk stay below
`durable_end`, so that a queued change is never seen half-applied. Reads are LogReader's, which this class extends: a
look-up runs the same ones on another thread, over the log as it was at one moment. Also owns what all logs of a node
hold in memory together. It must never decide what is valid: the replica checks the lineage and says where to cut. Only
the log store creates it; the replica and the replication streams use it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import BatchHeader, Buffer
from smq.replication.api import Aborted
from smq.replication.log.aborted import AbortedTransactions, aborted_key, aborted_row, parse_aborted_row
from smq.replication.log.deletion import BLIND_BATCHES, SLICE_BATCHES, SLICE_BYTES, delete_partition
from smq.replication.log.log_state import (
    CHECKPOINT_BATCHES,
    CHECKPOINT_BYTES,
    NOT_SAVED,
    LogState,
    PartitionRow,
    check_order,
    checkpoint_key,
    encode_partition,
    next_checkpoint,
    partition_key,
)
from smq.replication.log.producers import ProducerTable
from smq.replication.log.reader import LogReader, fitting
from smq.replication.log.segments import HeldSegments, Replaced, newest_create_ms, replacing_ops, segments_key
from smq.replication.log.stored_batch import (
    TIME_ABORTED,
    TIME_APPEND,
    TIME_CREATE,
    BatchDamaged,
    BatchInfo,
    StoredValue,
    after_append_time,
    after_create_time,
    base_of_key,
    batch_key,
    build_value,
    create_time_key,
    index_row,
    info_of,
    info_of_stored,
    partition_stop,
    times_range,
)
from smq.replication.node_config import TAIL_BYTES_KEPT
from smq.replication.ports import DataDamaged, Delete, Disk, GiveUp, Op, Put, Rows, T, Table

TAIL_BYTES_NODE_MAX: Final = 64 << 20  # over all partitions; above this, idle ones leave memory first
_NO_LIMIT: Final = Offset((1 << 63) - 1)


class NodeBudget:
    """What all logs of a node hold in memory together: bytes of batches, and how much each log keeps of durable ones;
    and producers. Each log adds and takes away its own. Batches that are not durable are always held: the disk's queue
    bounds them."""

    __slots__ = ("_holders", "kept", "newest", "producers", "used")

    def __init__(self, kept: int | None) -> None:
        self.kept = TAIL_BYTES_KEPT if kept is None else kept
        self.used = 0
        self.producers = 0
        self.newest: PartitionLog | None = None  # has grown last
        self._holders: dict[PartitionLog, None] = {}  # of durable batches; the log that has grown last comes last

    def note_growth(self, log: "PartitionLog") -> None:
        """The log has a newer durable batch. Beyond the bound, those go that have not grown for the longest time: a
        partition that rests must not keep the room from those at work."""
        holders = self._holders
        holders.pop(log, None)
        while self.used > TAIL_BYTES_NODE_MAX and holders:
            idle = next(iter(holders))
            del holders[idle]
            idle.release_tail()
        holders[log] = None
        self.newest = log

    def forget(self, log: "PartitionLog") -> None:
        """The log is gone."""
        self._holders.pop(log, None)
        self.newest = None


class _Append:
    """Batches of one submission on their way to the disk, which calls this once they are durable. It and its two
    callbacks are one object, so that an append is cheap. A cut takes the later batches away, or all."""

    __slots__ = ("_done", "_on_durable", "end", "start")

    def __init__(
        self, on_durable: Callable[[Offset], None], start: Offset, end: Offset, done: Callable[[], None]
    ) -> None:
        self._on_durable: Callable[[Offset], None] | None = on_durable
        self.start = start
        self.end = end
        self._done = done

    def cut(self, end: Offset) -> bool:
        """Nothing from `end` on is waited for any more. False if nothing is left: then it does nothing."""
        self.end = min(self.end, end)
        if self.end > self.start:
            return True
        self._on_durable = None
        return False

    def __call__(self) -> None:
        if self._on_durable is not None:
            self._on_durable(self.end)
            self._done()


class PartitionLog(LogReader):
    """See the module. `generation` grows whenever batches are dropped from the end, or all of them.

    `damaged_batches` holds the base of every batch that is known to fail its CRC and that `replace` has not repaired.
    `tail_damage` is set if recovery, or a cut, found a damaged batch and no index row that describes it: the log then
    ends before that batch, and refuses appends until it is truncated again (everything after the damage goes too) or
    dropped.
    `has_producers` is false if other logs held batches below this log's start that this one never had: their producers
    are unknown here until `adopt_producers` brings them from a log that knows them. While it `is_installing`, the disk
    may have older bytes. While `aborted_damage` is set, no committed reader is served: nothing says which records were
    aborted.
    """

    def __init__(
        self,
        disk: Disk,
        pid: PartitionId,
        log_start: Offset,
        *,
        base: LogState,
        state: LogState,
        first: Offset,
        budget: NodeBudget,
        tail_damage: DataDamaged | None = None,
        damaged_batches: Iterable[Offset] = (),
        has_producers: bool = True,
    ) -> None:
        super().__init__(disk, pid, log_start, base=base, state=state, first=first)
        self._disk = disk
        self.generation = 0
        self.is_dropped = False  # the partition is gone
        self.aborted = AbortedTransactions([])  # of the appended log
        self.aborted_damage: BatchDamaged | None = None
        self.segments = HeldSegments()
        self.tail_damage = tail_damage
        self.damaged_batches = set(damaged_batches)
        self.has_producers = has_producers
        self._batches_since_checkpoint = 0
        self._bytes_since_checkpoint = 0
        self._pending: deque[_Append] = deque()  # bounded by the node's cap on appends in flight
        self._tail_bytes = 0
        self._budget = budget
        self._is_trimming = self.is_installing = False
        self._trim_limit = _NO_LIMIT
        self._producers_counted = 0
        self._count_producers()

    # --------------------------------------------------------------------------------------------- append
    def append(
        self, batch: Buffer, header: BatchHeader, *, epoch: Epoch, ts_ns: TsNs, done: Callable[[], None]
    ) -> StoredValue:
        """The leader's append, at appended_end. `batch` is validated, `header` is its header; its memory is not kept.

        `done` runs once the batch is durable, and never if it is truncated before that. ValueError if `ts_ns` does
        not exceed the log's last.
        """
        base = self._state.end
        if ts_ns <= self._state.last_ts_ns:
            raise ValueError(f"{self!r}: ts_ns {ts_ns} does not exceed the last, {self._state.last_ts_ns}")
        self._check_usable()
        value = build_value(self.pid, batch, header, base, epoch, ts_ns)
        info = info_of(ts_ns, header, base, epoch, value)
        stored = StoredValue(base, info.end, epoch, ts_ns, value)
        self._append([stored], [info], [], done)
        return stored

    def append_stored(self, values: Sequence[StoredValue], done: Callable[[], None]) -> None:
        """The follower's append, as one submission: bytes as the leader has them, verified by `parse_value`. They must
        follow one another, and start at appended_end or, in an empty log, contain log_start. Otherwise ValueError, and
        nothing is appended."""
        self._check_usable()
        state, infos, ops = self._state, [info_of_stored(stored) for stored in values], list[Op]()
        first = infos[0]
        if not self._is_empty():
            check_order(self.pid, infos, state.end, state.last_ts_ns)
        elif first.base <= self.log_start < first.end:
            check_order(self.pid, infos, first.base, TsNs(first.ts_ns - 1))
            self._first = first.base
            if first.ts_ns <= state.last_ts_ns:  # only deleted rows are later: the order starts afresh
                state.last_ts_ns = self._base.last_ts_ns = TsNs(first.ts_ns - 1)
                ops.append(self._base_row())
        else:
            raise ValueError(f"{self!r}: batch {first.base}..{first.end} does not contain the log's start")
        self._append(values, infos, ops, done)

    def _append(
        self, values: Sequence[StoredValue], infos: Sequence[BatchInfo], ops: list[Op], done: Callable[[], None]
    ) -> None:
        state, pid, size = self._state, self.pid, 0
        for stored, info in zip(values, infos, strict=True):
            is_latest = info.max_timestamp_ms > state.create_ms_max
            aborted = state.add(info)
            if info.producer_id >= 0:
                self._count_producers()
            if aborted is not None:
                self.aborted.add(aborted)
                ops.append(Put(Table.TIMES, *aborted_row(pid, aborted)))
            ops.append(Put(Table.BATCHES, batch_key(pid, info.base), stored.value))
            ops.append(Put(Table.TIMES, *index_row(pid, info)))
            if is_latest:
                ops.append(Put(Table.TIMES, create_time_key(pid, info.max_timestamp_ms, info.base), b""))
            self._batches_since_checkpoint += 1
            self._bytes_since_checkpoint += info.size
            if self._batches_since_checkpoint >= CHECKPOINT_BATCHES or self._bytes_since_checkpoint >= CHECKPOINT_BYTES:
                ops.append(self._checkpoint())
            self._tail.append(stored)
            size += info.size
        self._count_tail(size)
        pending = _Append(self._on_durable, infos[0].base, state.end, done)
        self._pending.append(pending)
        self._disk.submit(ops, pending)

    def _on_durable(self, end: Offset) -> None:
        """The oldest pending append is on disk."""
        self._pending.popleft()
        if end > self.durable_end:
            self.durable_end = end
        tail, budget = self._tail, self._budget
        if budget.newest is not self or budget.used > TAIL_BYTES_NODE_MAX:
            budget.note_growth(self)
        while tail and tail[0].end <= self.durable_end and self._tail_bytes > budget.kept:
            self._count_tail(-len(tail.popleft().value))

    def release_tail(self) -> None:
        """Durable batches leave memory: other logs need the room."""
        self._forget_tail_before(self.durable_end)

    def _count_tail(self, size: int) -> None:
        self._tail_bytes += size
        self._budget.used += size

    def _is_empty(self) -> bool:
        return self._state.end == self.log_start

    def _check_usable(self) -> None:
        if self.tail_damage is not None:
            raise self.tail_damage
        if self.is_dropped:
            raise ValueError(f"{self!r} was dropped")

    # ---------------------------------------------------------------------- reads that may wait for the medium
    def read_later(
        self,
        offset: Offset,
        end: Offset,
        bytes_max: int,
        done: Callable[[list[StoredValue] | DataDamaged | None], None],
    ) -> GiveUp | None:
        """As `read`, for batches that may have to come from the medium: the loop goes on meanwhile. The offset is in
        the durable log. `done` gets None if the log has been cut, trimmed or dropped there meanwhile: look again, if
        it is still there. None, and nothing is read, if too many reads wait; otherwise a function that gives the read
        up."""
        stop, generation = min(end, self.durable_end), self.generation
        lowest, start = batch_key(self.pid, self._first), batch_key(self.pid, offset)

        def on_rows(rows: list[tuple[bytes, bytes]] | DataDamaged) -> None:
            # Changes that were submitted after this read began may be among the rows, or not.
            if self.is_dropped or self.generation != generation or offset < max(self._first, self.log_start):
                found: list[StoredValue] | DataDamaged | None = None
            elif isinstance(rows, DataDamaged):
                found = rows
            else:
                is_found = bool(rows) and rows[0][0] <= start
                try:
                    first = rows[0][0] if is_found else start
                    found = fitting(self._parse_rows(rows if is_found else [], first, offset, stop), bytes_max)
                except BatchDamaged as e:
                    found = e
            done(found)

        return self._disk.read_from(
            Table.BATCHES,
            lowest,
            start,
            batch_key(self.pid, stop),
            place=self.pid,
            bytes_max=max(bytes_max, 1),
            done=on_rows,
        )

    def look_up(self, find: Callable[[LogReader], T], done: Callable[[T | DataDamaged | None], None]) -> GiveUp | None:
        """Runs `find` over this log as it is now, where it may wait for the medium: the loop goes on meanwhile. `done`
        gets its result, or its DataDamaged; None if a cut, a trim or a drop meanwhile may be the reason: look again, if
        the log is still there. None, and giving up: as for `read_later`."""
        generation, first, base_create_ms = self.generation, self._first, self._base.create_ms_max
        frozen = self.frozen()

        def find_in(rows: Rows) -> T:
            frozen.rows = rows
            return find(frozen)

        def on_found(found: T | DataDamaged) -> None:
            is_void = self.is_dropped or self.generation != generation  # rows may be missing, or not be of this log
            # A trim may have removed rows meanwhile. A `find` that needs them has raised BatchDamaged, and any other
            # result is right, unless one of those rows stood in for batches that have none.
            is_trimmed = self._first != first
            is_void |= self._base.create_ms_max != base_create_ms
            done(None if is_void or (is_trimmed and isinstance(found, DataDamaged)) else found)

        return self._disk.look_up(self.pid, find_in, on_found)

    # -------------------------------------------------------------------------------------------- cutting
    def truncate(self, cut: Offset) -> bool:
        """Drops every batch that ends beyond `cut`: immediately in memory, in order of submission on disk. False if
        damage hides a part of what is to stay: the log then ends before it, with `tail_damage`, and the disk keeps all.
        """
        if self.tail_damage is None and (cut >= self.appended_end or self._is_empty()):
            return True
        # Batches below log_start count as gone: their producers and times stay, as after the deletion.
        end = self._boundary(max(min(cut, self.appended_end), self.log_start))
        state = self._state_up_to(end) if end > self._first else self._base
        if state.end < end and end > self.log_start:
            self._hide_from(state)
            return False
        if state.end < end:
            self.has_producers = False  # a batch that is about to be deleted is damaged, and so is its row
        if end <= self.log_start or state.end <= self._base.end or self._is_empty():
            self._replace_all(state if state.end > self._base.end else self._base.copy())
            return True
        state.create_ms_max = newest_create_ms(self, state.create_ms_max, end)
        pid, stop = self.pid, partition_stop(self.pid)
        ops: list[Op] = [
            Delete(Table.BATCHES, batch_key(pid, end), stop),
            Delete(Table.TIMES, after_append_time(pid, state.last_ts_ns), times_range(pid, TIME_APPEND)[1]),
            Delete(Table.TIMES, after_create_time(pid, state.create_ms_max), times_range(pid, TIME_CREATE)[1]),
            Delete(Table.TIMES, aborted_key(pid, end), times_range(pid, TIME_ABORTED)[1]),
            Delete(Table.CHECKPOINTS, checkpoint_key(pid, end + 1), stop),
        ]
        self._forget_tail(end)
        self._cut_aborted(state)
        self.durable_end = min(self.durable_end, end)
        self._state = state
        if self.segments.forget_after(end):  # damage hides a part of them
            ops.append(Put(Table.CHECKPOINTS, segments_key(pid), self.segments.encode()))
        if state.saved.end < end:
            ops.append(self._checkpoint())
        self._settle_producers()
        self._disk.submit(ops)
        return True

    def _hide_from(self, state: LogState) -> None:
        """Ends the log with this state, in memory alone: as if it had just been recovered. What is behind the damage
        stays on the disk until the others know of it (rule 23), so that the next process finds it, too."""
        damage = BatchDamaged(self.pid, state.end, "both the batch and its index row are damaged")
        if state.end < self.log_start:
            state.end, state.runs = self.log_start, []
            self.has_producers = False  # those of the batches between the two; not on disk, where these may still be
        self._forget_tail(state.end)
        self.aborted.cut(state.end)
        self.durable_end = min(self.durable_end, state.end)
        self._state = state
        self.segments.forget_after(state.end)
        self._settle_producers()
        self.tail_damage = damage

    def advance_log_start(self, offset: Offset) -> None:
        """Deletes the batches wholly below `offset`. If it reaches appended_end, the log is emptied and continues at
        `offset`. Producer state outlives its batches, unless `offset` passes appended_end: then this log lacks batches,
        and a sequence that is too old, or was never committed, would refuse its producer for ever. Truncate batches of
        a wrong lineage first, as their sequences would stay."""
        if offset <= self.log_start:
            return
        if offset >= self.appended_end:
            state = self._state.copy()
            if offset > self.appended_end:
                state.producers = ProducerTable()
                self.has_producers = False
            self.log_start = offset
            self._replace_all(state)
            return
        self.log_start = offset
        self.trim(is_moved=True)

    def trim(self, *, is_moved: bool = False) -> None:
        """Deletes the batches before log_start slice by slice. If the start has just moved, the partition's row says so
        with the first slice. Batches that still wait to be deleted are invisible to readers; after a restart, the
        first `keep_from` continues the deletion."""
        if self.is_dropped or (self._is_trimming and not is_moved):
            return
        deletions: list[Op] = []
        is_free = not self._is_trimming and not self.is_installing and self.tail_damage is None
        if is_free and self._first < self.log_start:
            with suppress(DataDamaged):  # a slice that cannot be read in full goes when the start moves next
                first = self._slice_end()
                deletions = self._delete_before(first) if first > self._first else []
        if deletions:
            self._is_trimming = True
            self._disk.submit([*deletions, self._partition_row()], self._on_trimmed)
        elif is_moved:
            self._disk.submit([self._partition_row()])

    def _on_trimmed(self) -> None:
        self._is_trimming = False
        if not self._disk.is_closed:  # otherwise the next process continues
            self.trim()

    def _slice_end(self) -> Offset:
        """Where the next slice of deletions ends: the base of a batch, at most of the one that contains log_start.
        Batches below the base go with the first batch that reaches beyond it."""
        last, size = min(self._boundary(self.log_start), self._trim_limit), 0
        if last < self._base.end:
            return self._first
        try:
            for count, info in enumerate(self._durable_infos(0, self._first), 1):
                size += info.size
                if info.end >= last or (info.end >= self._base.end and (count >= SLICE_BATCHES or size >= SLICE_BYTES)):
                    return min(info.end, last)
        except DataDamaged:  # an index row: no batch that follows may stay for it
            start, stop = batch_key(self.pid, self._first), batch_key(self.pid, last)
            keys = self._disk.scan_keys(Table.BATCHES, start, stop, limit=BLIND_BATCHES + 1)
            return next((base for base in map(base_of_key, keys[BLIND_BATCHES:]) if base >= self._base.end), last)
        return last

    def keep_from(self, offset: Offset) -> None:
        """Batches from there on stay on disk, whatever the log start: compacted segments go as a whole. Until the first
        call, a new log is limited by a segment that is installed, and one that was recovered deletes nothing."""
        before, self._trim_limit = self._trim_limit, offset
        if before < min(offset, self.log_start):
            self.trim()

    def forget_producers(self, start: Offset) -> int:
        """The producers without a batch above `start` have expired: removes them, which changes no answer. Returns how
        many there were."""
        before = self._producers_counted
        self.producers_start = start
        self._settle_producers()
        return before - self._producers_counted

    def _settle_producers(self) -> None:
        """After a state was read from disk: checkpoints hold expired producers, too."""
        for state in (self._state, self._base):
            state.producers.forget_before(self.producers_start)
        self._count_producers()

    def _count_producers(self) -> None:
        count = len(self._state.producers)
        self._budget.producers += count - self._producers_counted
        self._producers_counted = count

    def adopt_producers(self, snapshot: bytes) -> None:
        """Takes over the producer state of another log. ValueError if this log is not empty or the bytes are not a
        snapshot."""
        if not self._is_empty():
            raise ValueError(f"{self!r} is not empty")
        self._base.producers = ProducerTable.restore(snapshot)
        self._base.saved = NOT_SAVED
        self.has_producers = True
        self._disk.submit([self._partition_row(), self._base_row()])
        self._state.producers, self._state.saved = self._base.producers.copy(), self._base.saved
        self._settle_producers()

    def settle_for_producers(self) -> None:
        """No other log knows more producers than this one: nothing is waited for any more."""
        if not self.has_producers:
            self.has_producers = True
            self._disk.submit([self._partition_row()])

    def _delete_before(self, first: Offset) -> list[Op]:
        """`first` is the base of a batch; the state before it becomes the base checkpoint."""
        pid = self.pid
        base = self._state_up_to(first, self._base.copy())
        base = base if base.end == first else self._state_at(first)
        base.runs = []
        base.create_ms_max = newest_create_ms(self, base.create_ms_max, first)  # these rows go, too
        self._base, self._first = base, first  # not before: damage may have ended this
        lacks_segments = self.segments.forget_before(first)
        rows = [Put(Table.CHECKPOINTS, segments_key(pid), self.segments.encode())] if lacks_segments else []
        self.damaged_batches = {base for base in self.damaged_batches if base >= first}
        self._state.forget_before(first)
        self.aborted.forget_before(first)
        self.durable_end = max(self.durable_end, first)
        self._forget_tail_before(first)
        base_row = self._base_row()
        kept = self._base.saved.full_end
        if self._state.saved.full_end < kept:
            self._state.saved = NOT_SAVED  # some of its checkpoints go, so the next one is full
        return [
            Delete(Table.BATCHES, batch_key(pid, 0), batch_key(pid, first)),
            Delete(Table.TIMES, times_range(pid, TIME_APPEND)[0], after_append_time(pid, self._base.last_ts_ns)),
            Delete(Table.TIMES, times_range(pid, TIME_CREATE)[0], after_create_time(pid, self._base.create_ms_max)),
            Delete(Table.TIMES, times_range(pid, TIME_ABORTED)[0], aborted_key(pid, first)),
            Delete(Table.CHECKPOINTS, checkpoint_key(pid, 0), checkpoint_key(pid, kept)),
            base_row,
            *rows,
        ]

    def _replace_all(self, state: LogState) -> None:
        """Leaves no batch: only `state`, moved to log_start, remains."""
        state.end = self.log_start
        state.runs = []
        state.bytes_total = self._base.bytes_total
        state.saved = NOT_SAVED
        self.aborted.cut(Offset(0))
        self._forget_tail(Offset(-1))
        self._state = state
        self.segments, self._compacted_end = HeldSegments(), Offset(0)
        self._settle_producers()
        row = self._checkpoint()
        self._base = state.copy()
        self._first = self.durable_end = state.end
        self._disk.submit([*delete_partition(self.pid), self._partition_row(), row])

    def _forget_tail_before(self, first: Offset) -> None:
        """Batches that end at or below `first`, which are durable, are read from the disk from now on, if at all."""
        while self._tail and self._tail[0].end <= first:
            self._count_tail(-len(self._tail.popleft().value))

    def _forget_tail(self, end: Offset) -> None:
        """From now on no batch that ends beyond `end` is awaited or served."""
        self.generation += 1
        self.aborted.cut_arriving(end)
        self.tail_damage = None
        self.damaged_batches = {base for base in self.damaged_batches if base < end}
        while self._pending and not self._pending[-1].cut(end):
            self._pending.pop()
        while self._tail and self._tail[-1].end > end:
            self._count_tail(-len(self._tail.pop().value))

    def drop(self) -> None:
        """The partition goes, and this object must not be used again. The store deletes the partition's data."""
        self._forget_tail(Offset(-1))
        self._budget.forget(self)
        self.is_dropped = True
        self._budget.producers -= self._producers_counted
        self._producers_counted = 0

    # -------------------------------------------------------------------------------- aborted transactions
    def load_aborted(self) -> None:
        """The aborted transactions of a log that has been opened, or repaired since. If their rows are damaged or
        missing, they are found in the log again. If that is damaged, too, `aborted_damage` says where: no committed
        reader is served before that batch is repaired, as nothing says which records to leave out."""
        was_damaged, self.aborted_damage = self.aborted_damage is not None, None
        count = self._state.aborted - self._base.aborted
        saved, are_rows_whole = self._saved_aborted()
        found = {(a.marker, a.first): a for a in (*saved, *self.aborted)}
        if was_damaged or not are_rows_whole or len(found) != count:
            folded, end = self._fold_aborted()
            is_whole = end == self._state.end
            found = {(a.marker, a.first): a for a in folded} | ({} if is_whole else found)
            if not is_whole and (was_damaged or len(found) != count):
                self.aborted_damage = BatchDamaged(self.pid, end, "what the log aborts there is not known")
        else:
            folded = None
        self.aborted = AbortedTransactions(sorted(found.values()))
        if folded is not None and self.aborted_damage is None:
            self._save_aborted()
            if self._count_aborted():
                self._disk.submit([self._base_row()])

    def reload_aborted(self) -> None:
        """Batches of this log have been repaired: what it aborts may be known now."""
        is_here = not self._disk.is_closed and not self.is_dropped
        if self.aborted_damage is not None and is_here and not self.aborted.is_arriving:
            self.load_aborted()

    def check_aborted(self) -> None:
        """Raises BatchDamaged while it is not known which records were aborted."""
        damage = self.aborted_damage
        if damage is not None and not self._first <= damage.offset < self._state.end:
            self.reload_aborted()  # that part of the log is gone
        if self.aborted_damage is not None:
            raise self.aborted_damage.with_traceback(None)

    def _cut_aborted(self, state: LogState) -> None:
        """The log ends with this state now. It may have been folded where rows are lost: what is known counts."""
        self.aborted.cut(state.end)
        if self.aborted_damage is None and not self.aborted.is_arriving:
            state.aborted = self._base.aborted + len(self.aborted)

    def _count_aborted(self) -> bool:
        """Makes the base count so many that the states count what is known; False if it did before. They counted what
        was aborted in batches that have been replaced since."""
        right = self._state.aborted - len(self.aborted)
        is_wrong, self._base.aborted = self._base.aborted != right, right
        return is_wrong

    def _saved_aborted(self) -> tuple[list[Aborted], bool]:
        """Those whose rows are whole, and whether all rows are. Rows below the log's first batch are about to go."""
        start, stop = aborted_key(self.pid, self._first), aborted_key(self.pid, self._state.end)
        found: list[Aborted] = []
        is_whole = True
        try:
            for key, value in self._disk.scan(Table.TIMES, start, stop):
                try:
                    found.append(parse_aborted_row(key, value))
                except DataDamaged:
                    is_whole = False
        except DataDamaged:
            is_whole = False
        return found, is_whole

    def rewrite_aborted(self, key: bytes) -> None:
        """The row under this key is damaged: it is written again, or goes if there is no such transaction."""
        if self.aborted.is_arriving:
            return  # the next scrub finds it again
        row = Delete(Table.TIMES, key, key + b"\x00")
        if (aborted := self.aborted.of_key(key)) is not None:
            self._disk.submit([row, Put(Table.TIMES, *aborted_row(self.pid, aborted))])
        elif self.aborted_damage is None:  # the key was damaged: the row that had it is missing
            self._disk.submit([row])
            self._save_aborted()

    def _save_aborted(self) -> None:
        """Writes all their rows again."""
        rows = [Put(Table.TIMES, *aborted_row(self.pid, aborted)) for aborted in self.aborted]
        self._disk.submit([Delete(Table.TIMES, *times_range(self.pid, TIME_ABORTED)), *rows])

    def _fold_aborted(self) -> tuple[list[Aborted], Offset]:
        """The aborted transactions whose markers this log holds, from the log itself, and how far it could be read."""
        state = self._base.copy()
        found = state.found = []
        return found, self._state_up_to(self._state.end, state).end

    # ----------------------------------------------------------------------------------------- checkpoints
    def _checkpoint(self) -> Op:
        self._batches_since_checkpoint = self._bytes_since_checkpoint = 0
        return Put(Table.CHECKPOINTS, checkpoint_key(self.pid, self._state.end), next_checkpoint(self._state))

    def _partition_row(self) -> Op:
        row = PartitionRow(self.log_start, self._base.end, self.has_producers)
        return Put(Table.CHECKPOINTS, partition_key(self.pid), encode_partition(row))

    def _base_row(self) -> Op:
        return Put(Table.CHECKPOINTS, checkpoint_key(self.pid, self._base.end), next_checkpoint(self._base))

    def note_recovered(self, batches: int, size: int) -> None:
        """Records how much of the log comes after the newest checkpoint."""
        self._batches_since_checkpoint += batches
        self._bytes_since_checkpoint += size

    # ------------------------------------------------------------------------------------------ compaction
    def install(
        self,
        start: Offset,
        end: Offset,
        digest: bytes,
        values: list[StoredValue],
        old: Replaced,
        done: Callable[[], None],
    ) -> bool:
        """Puts a segment's compacted batches in the place of the batches in [start, end), in one transaction; `done`
        runs after it. A log that ends before `end` grows. `old` is of a look-up that still holds. False, and nothing is
        done, if it cannot be installed now: the log ends before `start` or starts at `end`, or has changed there. If
        damage below the log start hides what it would grow from, it ends there from now on, with `tail_damage`. Batches
        may come back that this log never had, or had deleted: no state counts batches below the base."""
        end_before, base = self.appended_end, self._base
        is_whole = start <= end_before and old.stop == min(end, end_before) <= self.durable_end and end > self.log_start
        is_busy = self.is_dropped or self.tail_damage is not None or self._is_trimming or self.is_installing
        if is_busy or not is_whole or (old.first < end and old.first != max(start, self._first)):
            return False
        grows = end > end_before
        state = self._state
        if grows:
            if self._pending:
                return False
            at = max(start, base.end)
            if (state := state if at == end_before else self._state_up_to(at)).end != at:
                with suppress(BatchDamaged):  # other damage can be repaired
                    if base_of_key(self._key_of_batch_at(self.log_start)) > state.end:
                        self._hide_from(state)
                return False
            # The rows of what the segment replaces stay, at its batches.
            state.create_ms_max = newest_create_ms(self, state.create_ms_max, end_before)
        ops = replacing_ops(self.pid, start, end, values, old)
        if start <= self._first < end:
            self._first = values[0].base
            if values[0].ts_ns <= base.last_ts_ns:  # only deleted rows are later: the order starts afresh
                base.last_ts_ns = TsNs(values[0].ts_ns - 1)
        pending = None
        if grows:
            pending = _Append(self._on_durable, end_before, end, lambda: None)
            ops += self._grown(start, state, values)
            self._pending.append(pending)
        else:
            base.bytes_total += old.size - sum(len(stored.value) for stored in values if stored.end > base.end)
            ops += self.aborted.replace(self.pid, start, end, values, base.end)
            self._forget_tail_before(end)
        base.saved = NOT_SAVED
        ops.append(self._base_row())
        self.damaged_batches = {at for at in self.damaged_batches if not start <= at < end}
        self._trim_limit = min(self._trim_limit, start)  # the replica says when it may go
        self.is_installing = True
        self.generation += 1  # reads that have begun may see either
        self._disk.submit(ops + self._held(start, end, digest), partial(self._on_installed, pending, done))
        return True

    def _grown(self, start: Offset, state: LogState, values: list[StoredValue]) -> list[Op]:
        """The log becomes `state` and these batches, all of which are in memory until they are durable."""
        ops, found = list[Op](), list[Aborted]()
        end_before, at = self.appended_end, state.end
        self._forget_tail(at)
        for stored in values:
            info = info_of_stored(stored)
            if info.end <= state.end:
                continue
            if info.end > end_before and info.max_timestamp_ms > state.create_ms_max:
                ops.append(Put(Table.TIMES, create_time_key(self.pid, info.max_timestamp_ms, info.base), b""))
            if (aborted := state.add(info)) is not None:
                found.append(aborted)
            self._tail.append(stored)
            self._count_tail(info.size)
        self._state = state
        self._settle_producers()
        return ops + self.aborted.grow(self.pid, start, at, state.end, values, found)

    def _on_installed(self, pending: _Append | None, done: Callable[[], None]) -> None:
        self.is_installing = False
        self.generation += 1
        self.aborted.take_arrived()
        if pending is not None:
            pending()
        if not self._disk.is_closed:
            self.reload_aborted()
            if self.aborted_damage is None and not self.is_dropped and self._count_aborted():
                self._disk.submit([self._base_row()])
            self.trim()
            done()

    def note_held(self, start: Offset, end: Offset, digest: bytes) -> None:
        """The log's own bytes in [start, end), which are durable, have this digest."""
        self._disk.submit(self._held(start, end, digest))

    def _held(self, start: Offset, end: Offset, digest: bytes) -> list[Op]:
        """A checkpoint is at hand that no batch of a segment contains: recovery has to find one."""
        self.segments.put(start, end, digest)
        self._compacted_end = self.segments.compacted_end
        ops: list[Op] = [Put(Table.CHECKPOINTS, segments_key(self.pid), self.segments.encode())]
        return [*ops, self._checkpoint()] if self._state.saved.end < self._compacted_end else ops

    def adopt_segments(self, segments: HeldSegments | None) -> None:
        """As the row on disk has them; None if it is damaged: then any older checkpoint may lie inside a batch."""
        self.segments = segments if segments is not None else HeldSegments(self.appended_end)
        self.segments.forget_after(self.appended_end)
        self._compacted_end = self.segments.compacted_end
        self._trim_limit = self._first  # the state may know of a segment here whose bytes this log never had
        if self._compacted_end:
            # It may be folded from an older checkpoint, over batches that compaction has taken records from.
            self._state.create_ms_max = newest_create_ms(self, self._state.create_ms_max, self.appended_end)
        if segments is None:
            row = Put(Table.CHECKPOINTS, segments_key(self.pid), self.segments.encode())
            self._disk.submit([row, self._checkpoint()])

    # ----------------------------------------------------------------------------------------------- repair
    def forget_row(self, row: bytes, done: Callable[[], None]) -> None:
        """Deletes an index row with a damaged key: it describes no batch of this log."""
        self._disk.submit([Delete(Table.TIMES, row, row + b"\x00")], done)

    def first_damaged(self, at_least: Offset) -> Offset | None:
        """The base of the first damaged batch from `at_least` on."""
        return min((base for base in self.damaged_batches if base >= at_least), default=None)

    def rewrite_checkpoint(self, key: bytes) -> None:
        """Repairs a damaged row of table CHECKPOINTS: its content is known, or the row is only a short cut and goes."""
        if self.tail_damage is not None or self.is_dropped:
            return
        if key == partition_key(self.pid):
            self._disk.submit([self._partition_row()])
            return
        if key == segments_key(self.pid):
            self._disk.submit([Put(Table.CHECKPOINTS, key, self.segments.encode())])
            return
        ops: list[Op] = [Delete(Table.CHECKPOINTS, key, key + b"\x00")]
        if key <= checkpoint_key(self.pid, self._base.end):
            self._base.saved = NOT_SAVED  # the base may continue the damaged one
            ops.append(self._base_row())
        self._state.saved = NOT_SAVED
        self._disk.submit(ops)

    def replace(self, stored: StoredValue, row: bytes | None, done: Callable[[], None]) -> bool:
        """Replaces a damaged batch by a verified one, and rewrites its index row (`row`: the key of a damaged one).
        Returns False and does nothing if it is not the same batch, or if a segment is being installed.

        A batch of this epoch, and of this segment if it is compacted, is the one that was here (rule 1)."""
        is_here = self._first <= stored.base and stored.end <= self.durable_end and not self.is_dropped
        is_right = any(r.epoch == stored.epoch and r.start <= stored.base and stored.end <= r.end for r in self.runs)
        if not is_here or not is_right or self.is_installing:
            return False
        key, value = index_row(self.pid, info_of_stored(stored))
        ops: list[Op] = [] if row is None else [Delete(Table.TIMES, row, row + b"\x00")]
        ops.append(Delete(Table.BATCHES, batch_key(self.pid, stored.base), batch_key(self.pid, stored.end)))
        ops.append(Put(Table.BATCHES, batch_key(self.pid, stored.base), stored.value))
        ops.append(Put(Table.TIMES, key, value))
        generation = self.generation

        def on_durable() -> None:
            if self.generation == generation:
                self.damaged_batches = {base for base in self.damaged_batches if not stored.base <= base < stored.end}
                self.reload_aborted()
            done()

        self._disk.submit(ops, on_durable)
        return True
