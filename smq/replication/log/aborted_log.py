"""The aborted transactions of one partition's log, found again when their rows are lost or damaged.

Owns which of them a log has when it is opened, or was repaired, and how their rows are written again. While it is not
known which records were aborted, no committed reader is served. PartitionLog, which extends it, adds to `aborted` and
cuts it as the log changes. It must never change a batch.
"""

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.api import Aborted
from smq.replication.log.aborted import AbortedTransactions, aborted_key, aborted_row, parse_aborted_row
from smq.replication.log.codec import TIME_ABORTED, BatchDamaged, times_range
from smq.replication.log.later_reads import LaterReads
from smq.replication.log.state import LogState
from smq.replication.ports import DataDamaged, Delete, Disk, Put, Table


class AbortedLog(LaterReads):
    def __init__(
        self, disk: Disk, pid: PartitionId, log_start: Offset, *, base: LogState, state: LogState, first: Offset
    ) -> None:
        super().__init__(disk, pid, log_start, base=base, state=state, first=first)
        self.aborted = AbortedTransactions([])  # of the appended log
        self.aborted_damage: BatchDamaged | None = None

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

    def reload_aborted(self) -> None:
        """Batches of this log have been repaired: what it aborts may be known now."""
        if self.aborted_damage is not None and not self._disk.is_closed and not self.is_dropped:
            self.load_aborted()

    def check_aborted(self) -> None:
        """Raises BatchDamaged while it is not known which records were aborted."""
        damage = self.aborted_damage
        if damage is not None and not self._first <= damage.offset < self._state.end:
            self.load_aborted()  # that part of the log is gone
        if self.aborted_damage is not None:
            raise self.aborted_damage.with_traceback(None)

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
