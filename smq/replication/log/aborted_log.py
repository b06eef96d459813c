"""The aborted transactions of one partition's log: found again when their rows are lost or damaged, and exchanged with
the batches of a compacted segment.

Owns which of them a log has when it is opened, was repaired, or has got a segment, and how their rows are written
again. While it is not known which records were aborted, no committed reader is served. PartitionLog, which extends it,
adds to `aborted` and cuts it as the log changes. It must never change a batch.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.api import Aborted
from smq.replication.log.aborted import AbortedTransactions, aborted_key, aborted_row, parse_aborted_row
from smq.replication.log.codec import TIME_ABORTED, BatchDamaged, StoredValue, info_of_stored, times_range
from smq.replication.log.later_reads import LaterReads
from smq.replication.log.state import LogState, checkpoint_key, next_checkpoint
from smq.replication.ports import DataDamaged, Delete, Disk, Op, Put, Table


class _Arriving(NamedTuple):
    """The aborted transactions that end in [start, stop), once a segment has arrived."""

    start: Offset
    stop: Offset
    new: list[Aborted]


NOTHING: Final = _Arriving(Offset(0), Offset(0), [])


class AbortedLog(LaterReads):
    def __init__(
        self, disk: Disk, pid: PartitionId, log_start: Offset, *, base: LogState, state: LogState, first: Offset
    ) -> None:
        super().__init__(disk, pid, log_start, base=base, state=state, first=first)
        self.aborted = AbortedTransactions([])  # of the appended log
        self.aborted_damage: BatchDamaged | None = None
        self._arriving = NOTHING  # with a segment that is on its way to the disk

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
        if self.aborted_damage is not None and is_here and self._arriving is NOTHING:
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
        if self.aborted_damage is None and self._arriving is NOTHING:
            state.aborted = self._base.aborted + len(self.aborted)

    # ------------------------------------------------------------------------------------- with a segment
    def _replace_aborted(self, start: Offset, end: Offset, values: Sequence[StoredValue]) -> list[Op]:
        """The log is about to get these batches in [start, end), and ends at `end` or later. A transaction that ends
        below the base is read by no client, and counted by no state."""
        # What began before the segment keeps the control batch that ended it, in every version.
        before = [aborted for aborted in self.aborted.between(start, end) if aborted.first < start]
        markers = {aborted.marker for aborted in before}
        inside = [aborted for aborted in _aborted_in(start, values) if aborted.marker not in markers]
        new = [aborted for aborted in (*before, *inside) if aborted.marker >= self._base.end]
        return self._exchange_aborted(start, end, new)

    def _grow_aborted(
        self, start: Offset, at: Offset, end: Offset, values: Sequence[StoredValue], found: list[Aborted]
    ) -> list[Op]:
        """As `_replace_aborted`, of a log that ends before `end`: its state from `at` on was folded again, and found
        these. If `at` is the base, in the middle of the segment's first batch, what is open there may have ended in a
        control batch that is gone, and would end in a later one again."""
        if start < at:
            inside = {aborted.marker: aborted for aborted in _aborted_in(start, values)}
            found = [
                aborted._replace(first=max(aborted.first, inside.get(aborted.marker, aborted).first))
                for aborted in found
                if aborted.first < start or aborted.marker in inside
            ]
        return self._exchange_aborted(at, end, found)

    def _exchange_aborted(self, start: Offset, end: Offset, new: list[Aborted]) -> list[Op]:
        """These are the aborted transactions that end in [start, end), once the segment's batches are on disk. Until
        then a reader may get the old ones, too, so both are known: once for each control batch, as a reader takes each
        entry for one. If they differ in where it began, one comes from a state in the middle of a segment, which took
        an earlier transaction for open: the later place is right."""
        new = sorted(new)
        self._arriving = _Arriving(start, end, new)
        old = self.aborted.between(start, end)
        either = {aborted.marker: aborted for aborted in old}
        for aborted in new:
            first = max(aborted.first, either.get(aborted.marker, aborted).first)
            either[aborted.marker] = aborted._replace(first=first)
        self.aborted.put(start, end, either.values())
        if old == new:
            return []
        rows = [Put(Table.TIMES, *aborted_row(self.pid, aborted)) for aborted in new]
        return [Delete(Table.TIMES, aborted_key(self.pid, start), aborted_key(self.pid, end)), *rows]

    def _cut_arriving(self, end: Offset) -> None:
        """The log ends at `end` now."""
        if self._arriving is NOTHING:
            return
        start, stop, new = self._arriving
        self._arriving = _Arriving(start, min(stop, end), [aborted for aborted in new if aborted.marker < end])

    def _take_arrived(self) -> None:
        """The segment's batches are on disk."""
        start, stop, new = self._arriving
        self.aborted.put(start, max(start, stop), new)
        self._arriving = NOTHING

    def _count_aborted(self) -> bool:
        """Makes the base count so many that the states count what is known; False if it did before. They counted what
        was aborted in batches that have been replaced since."""
        right = self._state.aborted - len(self.aborted)
        is_wrong, self._base.aborted = self._base.aborted != right, right
        return is_wrong

    def _base_row(self) -> Op:
        return Put(Table.CHECKPOINTS, checkpoint_key(self.pid, self._base.end), next_checkpoint(self._base))

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
        if self._arriving is not NOTHING:
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


def _aborted_in(start: Offset, values: Sequence[StoredValue]) -> list[Aborted]:
    """The aborted transactions that begin and end in these batches."""
    state = LogState(start)
    found = state.found = []
    for stored in values:
        state.add(info_of_stored(stored))
    return found
