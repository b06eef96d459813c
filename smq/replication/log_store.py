"""All partition logs of a node: creates them, drops them, and finds them again after a restart.

Owns recovery: it is bounded by what came after each partition's last checkpoint, and every batch it reads passes
its CRC. It must never judge lineage nor truncate by itself. The node imports it, and through it the log's types.
"""

from typing import Final

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.log_codec import (
    BatchInfo,
    StoredValue,
    base_of_key,
    batch_key,
    info_of,
    parse_header_of,
    parse_value,
    partition_name,
    partition_stop,
)
from smq.replication.log_state import (
    LogState,
    checkpoint_key,
    decode_checkpoint,
    decode_partition,
    encode_checkpoint,
    encode_partition,
    partition_key,
)
from smq.replication.partition_log import PartitionLog, TailBudget, delete_partition, parse_stored
from smq.replication.ports import DataDamaged, Disk, Put, Table

__all__ = ["BatchInfo", "LogStore", "PartitionLog", "StoredValue", "parse_value"]

RECOVERY_BYTES_A_SCAN: Final = 4 << 20  # copied out of LMDB at once
_BEYOND_ALL: Final = b"\xff" * 32


class LogStore:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._budget = TailBudget()

    def create(self, pid: PartitionId, log_start: Offset, *, has_producers: bool = True) -> PartitionLog:
        """An empty log. What an older one of this id may have left is deleted first."""
        state = LogState(log_start)
        self._disk.submit(
            [
                *delete_partition(pid),
                Put(Table.CHECKPOINTS, partition_key(pid), encode_partition(log_start, has_producers)),
                Put(Table.CHECKPOINTS, checkpoint_key(pid, log_start), encode_checkpoint(state)),
            ]
        )
        return PartitionLog(
            self._disk,
            pid,
            log_start,
            base=state.copy(),
            state=state,
            first=log_start,
            budget=self._budget,
            has_producers=has_producers,
        )

    def drop(self, log: PartitionLog | PartitionId) -> None:
        """Deletes everything of the partition; the log that is given must not be used any more."""
        if isinstance(log, PartitionLog):
            log.drop()
        else:
            self._disk.submit(delete_partition(log))

    def open_all(self) -> dict[PartitionId, PartitionLog]:
        """Every partition on this disk. A log with damaged bytes ends before them and says so (`damaged`)."""
        logs: dict[PartitionId, PartitionLog] = {}
        at = b""
        while keys := self._disk.scan_keys(Table.CHECKPOINTS, at, _BEYOND_ALL, limit=1):
            pid = PartitionId(keys[0][:20])
            logs[pid] = self._open(pid)
            at = partition_stop(pid)
        return logs

    def _open(self, pid: PartitionId) -> PartitionLog:
        log_start = Offset(0)
        try:
            log_start, has_producers = self._partition_row(pid)
            base = self._base(pid)
        except DataDamaged as e:
            # Without them nothing of the log can be trusted to be whole: it counts as empty.
            empty = LogState(log_start)
            damaged = DataDamaged(f"{partition_name(pid)}, in table checkpoints: {e}")
            log = self._log(pid, log_start, empty, empty.copy(), log_start, damaged)
            log.has_producers = False
        else:
            log = self._recover(pid, log_start, base)
            log.has_producers = has_producers
        return log

    def _partition_row(self, pid: PartitionId) -> tuple[Offset, bool]:
        row = self._disk.get(Table.CHECKPOINTS, partition_key(pid))
        if row is None:
            raise DataDamaged("the partition's row is missing")
        return decode_partition(row)

    def _base(self, pid: PartitionId) -> LogState:
        for _, row in self._disk.scan(Table.CHECKPOINTS, checkpoint_key(pid, 0), partition_stop(pid), limit=1):
            return decode_checkpoint(row)
        raise DataDamaged("the first checkpoint is missing")

    def _newest_checkpoint(self, pid: PartitionId, base: LogState) -> LogState:
        """A damaged one is passed over: an older one only means more to read."""
        start, stop = checkpoint_key(pid, base.end + 1), partition_stop(pid)
        while rows := self._disk.scan(Table.CHECKPOINTS, start, stop, reverse=True, limit=1):
            key, row = rows[0]
            try:
                return decode_checkpoint(row)
            except DataDamaged:
                stop = key
        return base.copy()

    def _recover(self, pid: PartitionId, log_start: Offset, base: LogState) -> PartitionLog:
        state = self._newest_checkpoint(pid, base)
        keys = self._disk.scan_keys(Table.BATCHES, batch_key(pid, 0), partition_stop(pid), limit=1)
        first = base_of_key(keys[0]) if keys else log_start
        state.forget_before(first)
        batches, size_before = 0, state.bytes_total
        damaged: DataDamaged | None = None
        start = batch_key(pid, state.end if state.end > base.end else first)
        try:
            while rows := self._disk.scan(Table.BATCHES, start, partition_stop(pid), bytes_max=RECOVERY_BYTES_A_SCAN):
                for key, value in rows:
                    self._add_row(pid, key, value, state, is_first=batches == 0 and state.end <= base.end)
                    batches += 1
                start = rows[-1][0] + b"\x00"
        except DataDamaged as e:
            damaged = e
        log = self._log(pid, log_start, base, state, first, damaged)
        log.note_recovered(batches, state.bytes_total - size_before)
        return log

    def _add_row(self, pid: PartitionId, key: bytes, value: bytes, state: LogState, *, is_first: bool) -> None:
        stored = parse_stored(pid, key, value)
        follows = stored.base <= state.end < stored.end if is_first else stored.base == state.end
        if not follows:
            raise DataDamaged(f"{partition_name(pid)}, offset {state.end}, in table batches: it is missing")
        ts_ns, header = parse_header_of(value, verify=False)
        state.add(info_of(ts_ns, header, stored.base, stored.epoch))

    def _log(
        self,
        pid: PartitionId,
        log_start: Offset,
        base: LogState,
        state: LogState,
        first: Offset,
        damaged: DataDamaged | None,
    ) -> PartitionLog:
        if state.end < log_start:
            state.end = log_start
        return PartitionLog(
            self._disk, pid, log_start, base=base, state=state, first=first, budget=self._budget, damaged=damaged
        )
