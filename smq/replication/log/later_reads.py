"""Reads of a partition's log that may wait for the medium: the loop goes on, and gets the answer later.

Owns what a read may say that ends after the log has changed: rows that a cut, a trim or a drop has removed meanwhile
are no damage. The rows themselves are found by `LogReader`. It must never change anything: PartitionLog, which
extends it, does.
"""

from collections.abc import Callable

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.log.codec import BatchDamaged, StoredValue, batch_key
from smq.replication.log.reader import LogReader, fitting
from smq.replication.log.state import LogState
from smq.replication.ports import DataDamaged, Disk, GiveUp, Rows, T, Table


class LaterReads(LogReader):
    def __init__(
        self, disk: Disk, pid: PartitionId, log_start: Offset, *, base: LogState, state: LogState, first: Offset
    ) -> None:
        super().__init__(disk, pid, log_start, base=base, state=state, first=first)
        self._disk = disk
        self.generation = 0
        self.is_dropped = False  # the partition is gone

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

    def look_up(
        self, find: Callable[["LogReader"], T], done: Callable[[T | DataDamaged | None], None]
    ) -> GiveUp | None:
        """Runs `find` over this log as it is now, where it may wait for the medium: the loop goes on meanwhile. `done`
        gets its result, or its DataDamaged; None if a cut, a trim or a drop meanwhile may be the reason: look again, if
        the log is still there. None, and giving up: as for `read_later`."""
        base, state = LogState(self._base.end), LogState(self.appended_end)
        base.last_ts_ns, base.create_ms_max = self._base.last_ts_ns, self._base.create_ms_max
        base.bytes_total, state.bytes_total = self._base.bytes_total, self._state.bytes_total
        compacted_end = self._compacted_end
        durable_end, tail, first, generation = self.durable_end, self._tail.copy(), self._first, self.generation

        def find_in(rows: Rows) -> T:
            view = LogReader(rows, self.pid, log_start, base=base, state=state, first=first)
            view.durable_end, view._tail, view._compacted_end = durable_end, tail, compacted_end
            return find(view)

        def on_found(found: T | DataDamaged) -> None:
            is_void = self.is_dropped or self.generation != generation  # rows may be missing, or not be of this log
            # A trim may have removed rows meanwhile. A `find` that needs them has raised BatchDamaged, and any other
            # result is right, unless one of those rows stood in for batches that have none.
            is_trimmed = self._first != first
            is_void |= self._base.create_ms_max != base.create_ms_max
            done(None if is_void or (is_trimmed and isinstance(found, DataDamaged)) else found)

        log_start = self.log_start
        return self._disk.look_up(self.pid, find_in, on_found)
