"""Drives the state machine for Raft: applies what is committed, takes snapshots, installs those of others, in slices.

Owns the StateMachine port, how far the state has come, and how much of it a turn of the engine does. It must never
apply an entry before the one before it has settled, nor while a snapshot is taken or installed. It only reads the
journal, which Raft changes after the report: if the process ends before, the disk still has the previous state. Only
the engine imports it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from smq.raft_state.ids import LogIndex, Term
from smq.raft_state.replies import Applied
from smq.replication.ports import DataDamaged
from smq.replication.raft.journal import RaftJournal, Snapshot
from smq.replication.raft.messages import NO_OP, REGULAR
from smq.replication.raft.ready import AppliedEntry, Apply, Install, MachineReport, Work

APPLY_BATCH_MAX: Final = 200  # entries applied per turn, so that a long backlog does not starve the node's loop
APPLY_BYTES_MAX: Final = 256 << 10  # or of entries, but at least one: committed offsets of this size take 30 ms
LONG_BYTES: Final = 16 << 10  # of entries that take about two milliseconds
APPLY_TOUCHED_MAX: Final = 500  # stops after the entry that brings the partitions moved in this turn to this number
INSTALL_STEPS_PER_TURN: Final = 4  # about a millisecond
SNAPSHOT_JOURNAL_BYTES: Final = 64 << 20  # a snapshot is taken when the journal has grown by this, even by few entries
FIRST_INDEX: Final = LogIndex(1)  # of an entry without a command, in every journal
_END: Final = object()


class StateMachine(Protocol):
    """What Raft's entries are for. An exception from any of these ends the process."""

    def apply(self, index: LogIndex, command: bytes) -> Applied:
        """Changes the state immediately; `settle` does what follows from it on this node."""

    def settle(self) -> bool:
        """One more step of what follows from the last `apply`; true once no step is left. Only then does the entry
        count as applied, and may the next one be applied or a snapshot be taken."""

    def pass_over(self, index: LogIndex) -> None:
        """In place of `apply`, for an entry that holds no command."""

    def snapshot(self) -> Iterator[bytes]:
        """The state's bytes in pieces, each a step of work. Nothing is applied or restored between two of them, except
        a restore after which the rest is never requested."""

    def restore(self, index: LogIndex, snapshot: bytes) -> Iterator[None]:
        """Replaces the state and settles it, with one step of work between two yields. Nothing is applied and no
        snapshot is taken before the end."""


@dataclass(slots=True)
class _Taking:
    """A snapshot of the state, piece by piece."""

    source: Iterator[bytes]
    pieces: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Installing:
    snapshot: Snapshot
    steps: Iterator[None]

    def advance(self) -> bool:
        """True once the state machine holds the snapshot."""
        return any(next(self.steps, _END) is _END for _ in range(INSTALL_STEPS_PER_TURN))


class Applier:
    def __init__(
        self, machine: StateMachine, journal: RaftJournal, snapshot_entries: int, begin_long: Callable[[], None]
    ) -> None:
        """`snapshot_entries`: applied entries between two snapshots. `begin_long` is called before work that takes
        milliseconds: what this turn has said must leave first, because a machine with too few cores makes seconds of
        them."""
        self._machine = machine
        self._journal = journal
        self._snapshot_entries = snapshot_entries
        self._begin_long = begin_long
        self._applied_index = FIRST_INDEX
        self._unsettled: AppliedEntry | None = None  # applied, but not settled yet
        self._taking: _Taking | None = None  # nothing is applied while there is one
        self._installing: _Installing | None = None  # nor while there is one of these

    @property
    def applied_index(self) -> LogIndex:
        return self._applied_index

    def restore(self, snapshot: Snapshot) -> Iterator[None]:
        """At the start: the snapshot of this node's own disk."""
        index = LogIndex(snapshot.index)
        yield from self._machine.restore(index, snapshot.state)
        self._applied_index = index

    def run(self, work: Work) -> MachineReport:
        """Does one turn's share of the work. Exceptions of the state machine pass through."""
        entries: list[AppliedEntry] = []
        installed = taken = None
        if self._is_at_work(work):
            self._begin_long()
        match work:
            case Apply(up_to):
                self._apply(up_to, entries)
                taken = self._continue_snapshot()
            case Install(snapshot):
                installed = self._install(snapshot)
        return MachineReport(
            up_to=self._applied_index,
            entries=tuple(entries),
            installed=installed,
            taken=taken,
            is_taking_snapshot=self._taking is not None,
        )

    def _is_at_work(self, work: Work) -> bool:
        """With something that is too much for one turn."""
        is_unfinished = self._unsettled is not None or self._taking is not None
        return isinstance(work, Install) or (work is not None and is_unfinished)

    # ------------------------------------------------------------------------------------------------- entries
    def _apply(self, up_to: LogIndex, settled: list[AppliedEntry]) -> None:
        if self._taking is not None or not self._settle(settled):
            return
        count = min(up_to - self._applied_index, APPLY_BATCH_MAX)
        if count <= 0:
            return
        touched = size = 0
        entries = self._journal.entries_from(self._applied_index + 1, count_max=count, bytes_max=APPLY_BYTES_MAX)
        for entry, index, term in entries:
            if size <= LONG_BYTES < size + len(entry):
                self._begin_long()
            size += len(entry)
            outcome = self._apply_entry(LogIndex(index), entry)
            self._unsettled = AppliedEntry(LogIndex(index), Term(term), outcome)
            touched += len(outcome.touched) if outcome is not None else 0
            if not self._settle(settled) or touched >= APPLY_TOUCHED_MAX:
                return

    def _apply_entry(self, index: LogIndex, entry: bytes) -> Applied | None:
        if entry[0] == REGULAR:
            return self._machine.apply(index, entry[1:])
        if entry[0] != NO_OP:
            raise DataDamaged(f"raft_log, index {index}: entry type {entry[0]} is unknown to this version")
        self._machine.pass_over(index)
        return None

    def _settle(self, settled: list[AppliedEntry]) -> bool:
        """Whether the last entry has been applied as a whole; if not, after one more step."""
        if self._unsettled is None:
            return True
        if not self._machine.settle():
            return False
        settled.append(self._unsettled)
        self._applied_index = self._unsettled.index
        self._unsettled = None
        return True

    # ----------------------------------------------------------------------------------------------- snapshots
    def _continue_snapshot(self) -> Snapshot | None:
        """Returns the snapshot after its last piece. Entries wait until then; the loop does not."""
        if self._taking is not None:
            return self._take_piece(self._taking)
        if self._unsettled is None and self._is_snapshot_due():
            self._taking = _Taking(self._machine.snapshot())
        return None

    def _is_snapshot_due(self) -> bool:
        taken = self._journal.snapshot.index if self._journal.snapshot else FIRST_INDEX
        if self._applied_index - taken >= self._snapshot_entries:
            return True
        return self._applied_index != taken and self._journal.grown_bytes >= SNAPSHOT_JOURNAL_BYTES

    def _take_piece(self, taking: _Taking) -> Snapshot | None:
        piece = next(taking.source, None)
        if piece is not None:
            taking.pieces.append(piece)
            return None
        self._taking = None
        index = self._applied_index
        return Snapshot(index=index, term=self._journal.term_at(index), state=b"".join(taking.pieces))

    def _install(self, snapshot: Snapshot) -> Snapshot | None:
        """Returns the snapshot after its last step. Its first step ends any other work in progress."""
        if self._installing is None or self._installing.snapshot is not snapshot:
            self._taking = self._unsettled = None
            steps = self._machine.restore(LogIndex(snapshot.index), snapshot.state)
            self._installing = _Installing(snapshot, steps)
        if not self._installing.advance():
            return None
        self._installing = None
        self._applied_index = LogIndex(snapshot.index)
        return snapshot
