"""All partition logs of a node: creates them, drops them, and recovers them after a restart.

Owns recovery: it reads only the batches after each partition's last checkpoint, and checks the CRC of each. Recovery
reads on the loop, partition by partition: it ends before Raft begins, and no client or peer waits for the node then. It
must never check lineage nor truncate by itself. The replicas of a node import it.
"""

from collections.abc import Iterator
from typing import Final

from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.replication.log.deletion import DroppedPartitions, delete_partition
from smq.replication.log.log_state import (
    LogState,
    PartitionRow,
    checkpoint_key,
    decode_partition,
    encode_partition,
    load_checkpoint,
    next_checkpoint,
    partition_key,
)
from smq.replication.log.partition_log import NodeBudget, PartitionLog
from smq.replication.log.reader import INDEX_ROWS_PER_SCAN, parse_stored
from smq.replication.log.segments import HeldSegments, segments_key
from smq.replication.log.stored_batch import (
    TIME_APPEND,
    BatchDamaged,
    BatchInfo,
    after_append_time,
    base_of_key,
    batch_key,
    info_of_stored,
    parse_index_row,
    partition_name,
    partition_stop,
    times_range,
)
from smq.replication.ports import DataDamaged, Delete, Disk, Put, Table

RECOVERY_BYTES_PER_SCAN: Final = 4 << 20  # copied out of LMDB in one go
_BEYOND_ALL: Final = b"\xff" * 32


class LogStore:
    def __init__(self, disk: Disk, *, tail_bytes_kept: int | None = None) -> None:
        self._disk = disk
        self.budget = NodeBudget(tail_bytes_kept)
        self._dropped = DroppedPartitions(disk)

    def create(self, pid: PartitionId, log_start: Offset, *, has_producers: bool = True) -> PartitionLog:
        """An empty log. The remains of an older log of this id are deleted first."""
        state = LogState(log_start)
        row = PartitionRow(log_start, state.end, has_producers)
        self._disk.submit(
            [
                *delete_partition(pid),
                *self._dropped.forget(pid),
                Put(Table.CHECKPOINTS, partition_key(pid), encode_partition(row)),
                Put(Table.CHECKPOINTS, checkpoint_key(pid, log_start), next_checkpoint(state)),
            ]
        )
        return PartitionLog(
            self._disk,
            pid,
            log_start,
            base=state.copy(),
            state=state,
            first=log_start,
            budget=self.budget,
            has_producers=has_producers,
        )

    def lost(self, pid: PartitionId, log_start: Offset) -> PartitionLog:
        """A log that this disk had, and of which nothing is left. As with other hidden damage (`tail_damage`), nothing
        is written before it is truncated: until then, a restart must find that it is missing."""
        empty, damage = LogState(log_start), DataDamaged(f"{partition_name(pid)}: its log is missing")
        log = self._log(pid, log_start, empty, empty.copy(), log_start, damage, [])
        log.has_producers = False
        return log

    def drop(self, log: PartitionLog | PartitionId) -> None:
        """Deletes everything of the partition, in slices; the log must not be used again."""
        if isinstance(log, PartitionLog):
            log.drop()
            log = log.pid
        self._dropped.drop(log)

    def open_all(self) -> dict[PartitionId, PartitionLog]:
        """Every partition on this disk. A damaged batch with an intact index row is listed in the log's
        `damaged_batches`; a log in which both are damaged ends before the damage and sets `tail_damage`."""
        logs: dict[PartitionId, PartitionLog] = {}
        for _ in self.opening(logs):
            pass
        return logs

    def opening(self, logs: dict[PartitionId, PartitionLog]) -> Iterator[None]:
        """As `open_all`, into `logs`, one log per yield: some 40 us if there is nothing after its last checkpoint."""
        at = b""
        while keys := self._disk.scan_keys(Table.CHECKPOINTS, at, _BEYOND_ALL, limit=1):
            if len(keys[0]) <= PARTITION_ID_BYTES:  # a damaged key: it belongs to no partition
                self._disk.submit([Delete(Table.CHECKPOINTS, keys[0], keys[0] + b"\x00")])
                at = keys[0] + b"\x00"
                continue
            pid = PartitionId(keys[0][:PARTITION_ID_BYTES])
            logs[pid] = self.open(pid)
            at = partition_stop(pid)
            yield
        self._dropped.resume()

    def open(self, pid: PartitionId) -> PartitionLog:
        """One that is on this disk, as `open_all` has it."""
        log_start = Offset(0)
        try:
            row = self._partition_row(pid)
            log_start = row.log_start
            base = self._base(pid, row.base_end)
        except DataDamaged as e:
            # Without these rows the log cannot be trusted to be complete: it counts as empty.
            empty = LogState(log_start)
            tail_damage = DataDamaged(f"{partition_name(pid)}, in table checkpoints: {e}")
            log = self._log(pid, log_start, empty, empty.copy(), log_start, tail_damage, [])
            log.has_producers = False
        else:
            log = self._recover(pid, log_start, base, self._segments(pid))
            log.has_producers &= row.has_producers
        return log

    def _partition_row(self, pid: PartitionId) -> PartitionRow:
        row = self._disk.get(Table.CHECKPOINTS, partition_key(pid))
        if row is None:
            raise DataDamaged("the partition's row is missing")
        return decode_partition(row)

    def _segments(self, pid: PartitionId) -> HeldSegments | None:
        """None if the row is damaged: then any checkpoint may lie inside a batch."""
        row = self._disk.get(Table.CHECKPOINTS, segments_key(pid))
        try:
            return HeldSegments.decode(row) if row is not None else HeldSegments()
        except DataDamaged:
            return None

    def _base(self, pid: PartitionId, end: Offset) -> LogState:
        row = self._disk.get(Table.CHECKPOINTS, checkpoint_key(pid, end))
        if row is None:
            raise DataDamaged("the first checkpoint is missing")
        return self._load(pid, row)

    def _load(self, pid: PartitionId, row: bytes) -> LogState:
        return load_checkpoint(row, lambda end: self._disk.get(Table.CHECKPOINTS, checkpoint_key(pid, end)))

    def _newest_checkpoint(self, pid: PartitionId, base: LogState, segments: HeldSegments | None) -> LogState:
        """Skips damaged ones: an older checkpoint only means more to read. One between compacted batches may lie inside
        a batch by now."""
        if segments is None:
            return base.copy()
        start, stop = checkpoint_key(pid, max(base.end + 1, segments.compacted_end)), partition_stop(pid)
        while rows := self._disk.scan(Table.CHECKPOINTS, start, stop, reverse=True, limit=1):
            key, row = rows[0]
            try:
                return self._load(pid, row)
            except DataDamaged:
                stop = key
        return base.copy()

    def _recover(
        self, pid: PartitionId, log_start: Offset, base: LogState, segments: HeldSegments | None
    ) -> PartitionLog:
        state = self._newest_checkpoint(pid, base, segments)
        state.producers.share(base.producers)
        keys = self._disk.scan_keys(Table.BATCHES, batch_key(pid, 0), partition_stop(pid), limit=1)
        first = base_of_key(keys[0]) if keys else log_start
        if first > log_start:
            first = base.end  # the batch with the log's start is missing
        state.forget_before(first)
        recovery = _Recovery(self._disk, pid, state, is_at_base=state.end <= base.end)
        size_before = state.bytes_total
        tail_damage: DataDamaged | None = None
        start = batch_key(pid, state.end if state.end > base.end else first)
        try:
            while rows := self._disk.scan(Table.BATCHES, start, partition_stop(pid), bytes_max=RECOVERY_BYTES_PER_SCAN):
                for key, value in rows:
                    recovery.take(key, value)
                start = rows[-1][0] + b"\x00"
            recovery.take_missing()
        except DataDamaged as e:
            tail_damage = e
        first = min([first, *recovery.damaged_batches])  # the only one may be missing, and holds the log start
        log = self._log(pid, log_start, base, state, first, tail_damage, recovery.damaged_batches)
        log.adopt_segments(segments)
        log.note_recovered(recovery.batches, state.bytes_total - size_before)
        log.load_aborted()
        return log

    def _log(
        self,
        pid: PartitionId,
        log_start: Offset,
        base: LogState,
        state: LogState,
        first: Offset,
        tail_damage: DataDamaged | None,
        damaged_batches: list[Offset],
    ) -> PartitionLog:
        has_producers = state.end >= log_start  # otherwise those of damaged batches below it are unknown
        state.end = max(state.end, log_start)
        return PartitionLog(
            self._disk,
            pid,
            log_start,
            base=base,
            state=state,
            first=first,
            budget=self.budget,
            tail_damage=tail_damage,
            damaged_batches=damaged_batches,
            has_producers=has_producers,
        )


class _Recovery:
    """The walk over the batches after a checkpoint. The index row of a damaged batch says what it was."""

    def __init__(self, disk: Disk, pid: PartitionId, state: LogState, *, is_at_base: bool) -> None:
        self._disk = disk
        self._pid = pid
        self._state = state
        self._is_at_base = is_at_base
        self.batches = 0
        self.damaged_batches: list[Offset] = []

    def take(self, key: bytes, value: bytes) -> None:
        """Folds in the next row of BATCHES. Raises DataDamaged if both it and its index row fail."""
        base = base_of_key(key)
        while True:
            try:
                self._add(info_of_stored(parse_stored(self._pid, key, value)))
                return
            except BatchDamaged as damage:
                info = self._next_row(base, damage)
                self._add(info)
                if not self._is_below_base(info):
                    self.damaged_batches.append(info.base)
            if info.base >= base:
                return  # otherwise a batch before this one is missing, and this one is tried again

    def take_missing(self) -> None:
        """After the last batch: an index row that comes later names a batch that is missing, because both are written
        in one commit. A row that does not parse names none. Raises DataDamaged if more is missing than the rows say."""
        while rows := self._rows_after():
            try:
                info = parse_index_row(*rows[0])
            except DataDamaged:
                return
            if info.base > self._state.end:
                raise BatchDamaged(self._pid, self._state.end, "it is missing")
            if not self._follows(info):
                return
            self._add(info)
            self.damaged_batches.append(info.base)

    def _rows_after(self, limit: int = 1) -> list[tuple[bytes, bytes]]:
        """The first index rows after the last batch."""
        start = after_append_time(self._pid, self._state.last_ts_ns)
        return self._disk.scan(Table.TIMES, start, times_range(self._pid, TIME_APPEND)[1], limit=limit)

    def _next_row(self, base: Offset, damage: BatchDamaged) -> BatchInfo:
        for key, value in self._rows_after(INDEX_ROWS_PER_SCAN if self._is_first else 1):
            info = parse_index_row(key, value)
            if self._is_below_base(info) and info.base < base:
                continue
            if self._is_below_base(info) or self._follows(info):
                return info
            break
        raise damage

    def _add(self, info: BatchInfo) -> None:
        if self._is_below_base(info):
            return
        if not self._follows(info):
            raise BatchDamaged(self._pid, self._state.end, "it is missing")
        self._state.add(info)
        self.batches += 1

    @property
    def _is_first(self) -> bool:
        return self._is_at_base and self.batches == 0

    def _is_below_base(self, info: BatchInfo) -> bool:
        """A compacted segment is kept in whole, and the base may lie inside it: no state counts what is below it."""
        return self._is_first and info.end <= self._state.end

    def _follows(self, info: BatchInfo) -> bool:
        end = self._state.end
        return info.base <= end < info.end if self._is_first else info.base == end
