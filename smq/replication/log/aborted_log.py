"""The aborted transactions of one partition's log, found again when their rows are lost or damaged.

Owns which of them a log has when it is opened, or was repaired, and the writing of their rows anew. While it is not
known which records were aborted, no committed reader is served. What is appended, cut or trimmed since is told to
`aborted` by PartitionLog, which extends it. It must never change a batch.
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
        saved, are_rows_whole = self._saved_aborted()
        found = {(a.marker, a.first): a for a in (*saved, *self.aborted)}
        count = self._state.aborted - self._base.aborted
        self.aborted_damage = None
        if not are_rows_whole or len(found) != count:
            folded, end = self._fold_aborted()
            if end == self._state.end:
                found.clear()
            found |= {(a.marker, a.first): a for a in folded}
            if end < self._state.end and len(found) != count:
                self.aborted_damage = BatchDamaged(self.pid, end, "what the log aborts there is not known")
            self.aborted = AbortedTransactions(sorted(found.values()))
            self.save_aborted()
        else:
            self.aborted = AbortedTransactions(sorted(found.values()))

    def check_aborted(self) -> None:
        """Raises BatchDamaged while it is not known which records were aborted."""
        damage = self.aborted_damage
        if damage is not None and not self._first <= damage.offset < self._state.end:
            self.load_aborted()  # that part of the log is gone
        if self.aborted_damage is not None:
            raise self.aborted_damage.with_traceback(None)

    def _saved_aborted(self) -> tuple[list[Aborted], bool]:
        """Those whose rows are whole, and whether all rows are."""
        start, stop = times_range(self.pid, TIME_ABORTED)[0], aborted_key(self.pid, self._state.end)
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

    def save_aborted(self) -> None:
        """Writes all their rows again: one is damaged or missing."""
        rows = [Put(Table.TIMES, *aborted_row(self.pid, aborted)) for aborted in self.aborted]
        self._disk.submit([Delete(Table.TIMES, *times_range(self.pid, TIME_ABORTED)), *rows])

    def _fold_aborted(self) -> tuple[list[Aborted], Offset]:
        """The aborted transactions whose markers this log holds, from the log itself, and how far it could be read."""
        state = self._base.copy()
        found = state.found = []
        return found, self._state_up_to(self._state.end, state).end
