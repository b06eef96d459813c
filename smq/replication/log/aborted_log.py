"""The aborted transactions of one partition's log: found again when their rows are lost or damaged, and exchanged with
the batches of a compacted segment.

Owns which of them a log has when it is opened, was repaired, or has got a segment, and how their rows are written
again. While it is not known which records were aborted, no committed reader is served. PartitionLog, which extends it,
adds to `aborted` and cuts it as the log changes. It must never change a batch.
"""

from collections.abc import Sequence

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.api import Aborted
from smq.replication.log.aborted import AbortedTransactions, aborted_key, aborted_row, parse_aborted_row
from smq.replication.log.codec import TIME_ABORTED, BatchDamaged, StoredValue, info_of_stored, times_range
from smq.replication.log.later_reads import LaterReads
from smq.replication.log.segments import HeldSegments
from smq.replication.log.state import LogState
from smq.replication.ports import DataDamaged, Delete, Disk, Op, Put, Table


class AbortedLog(LaterReads):
    def __init__(
        self, disk: Disk, pid: PartitionId, log_start: Offset, *, base: LogState, state: LogState, first: Offset
    ) -> None:
        super().__init__(disk, pid, log_start, base=base, state=state, first=first)
        self.aborted = AbortedTransactions([])  # of the appended log
        self.aborted_damage: BatchDamaged | None = None
        self.segments = HeldSegments()  # compacted: what began below them has ended
        self._leaving: list[Aborted] = []  # with the batches that a segment under way replaces

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
            self._base.aborted = self._state.aborted - len(folded)
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

    # ------------------------------------------------------------------------------------- with a segment
    def _note_compacted(self) -> None:
        """The segments have changed."""
        self._compacted_end, self._closed_end = self.segments.compacted_end, self.segments.known_end

    def open_at(self, start: Offset) -> set[int] | None:
        """The producers of the transactions that began below `start`, where the first segment begins, and had not ended
        there. None if batches below it still wait to be deleted: the base is older."""
        if self._base.end < start:
            return None
        return {producer for producer, first in self._base.producers.opened().items() if first < start}

    def _close_inside(self, start: Offset, values: Sequence[StoredValue], state: LogState) -> None:
        """A segment that begins at `start` gets these batches. If the base lies in it, what the segment's first batches
        began may be open there, and may have ended in a control batch that is no longer among them. `state` is the
        log's, at the base or beyond the segment."""
        base = self._base
        if start < base.end:
            folded = LogState(start)
            for stored in values:
                if stored.base < base.end:
                    folded.add(info_of_stored(stored))
            base.producers.close(start, folded.producers.opened())
            if state.end == base.end:
                state.producers.close(start, folded.producers.opened())

    def _exchange_aborted(self, start: Offset, end: Offset, new: list[Aborted]) -> list[Op]:
        """The log is about to get other batches in [start, end), and these are the aborted transactions that end there.
        Until the batches are on disk, a reader may get either ones, so both are known."""
        old = self.aborted.between(start, end)
        self._leaving = [aborted for aborted in old if aborted not in new]
        self.aborted.put(start, end, {*old, *new})
        if not old and not new:
            return []
        rows = [Put(Table.TIMES, *aborted_row(self.pid, aborted)) for aborted in new]
        return [Delete(Table.TIMES, aborted_key(self.pid, start), aborted_key(self.pid, end)), *rows]

    def _replace_aborted(self, start: Offset, end: Offset, values: Sequence[StoredValue]) -> list[Op]:
        """As `_exchange_aborted`, if no state below the log's end is folded again. A transaction that begins below
        `start` has its control batch in every version of the segment; the others begin and end in it, or are gone. The
        later states count them as before, so the base takes the difference."""
        before = [aborted for aborted in self.aborted.between(start, end) if aborted.first < start]
        markers = {aborted.marker for aborted in before}
        state = LogState(start)
        state.found = []
        for stored in values:
            state.add(info_of_stored(stored))
        found = sorted([*before, *(aborted for aborted in state.found if aborted.marker not in markers)])
        # What else was open then is not known here. Of that, only what was aborted in the end matters to a look-up.
        first_later = self.aborted.first_after(end)
        for at in range(len(found) - 1, -1, -1):
            found[at] = found[at]._replace(stable=min(found[at].stable, first_later))
            first_later = min(first_later, found[at].first)
        self._base.aborted += self._counted(self.aborted.between(start, end)) - self._counted(found)
        return self._exchange_aborted(start, end, found)

    def _counted(self, entries: list[Aborted]) -> int:
        """How many of them come after the base, so that the states count them."""
        return sum(aborted.marker >= self._base.end for aborted in entries)

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
