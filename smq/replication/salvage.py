"""What the disk of a stopped node says, without its cluster: the replicated state, and the batches of each partition.

Owns the judgement of what is known to be committed. The state is the snapshot with the journal's entries up to the
commit index that was saved; it may be a little too low, and the entries after it are not known to be committed. It
must never change a row: a log that is opened here to learn its transactions is repaired in memory alone. Only the
command line imports it.
"""

import enum
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from smq.raft_state.command_codec import CodecError, UpgradeNeeded, decode_command
from smq.raft_state.ids import LogIndex, Offset, PartitionId
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.raft_state.machine import InvariantBroken, Machine
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.log.lineage import EpochRun, verified_end
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.reader import parse_stored
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import (
    BatchDamaged,
    BatchInfo,
    BatchKind,
    StoredValue,
    batch_key,
    info_of_stored,
    partition_stop,
)
from smq.replication.ports import DataDamaged, Disk, Op, Table
from smq.replication.raft.applier import FIRST_INDEX
from smq.replication.raft.journal import RaftJournal
from smq.replication.raft.messages import REGULAR

SCAN_BYTES: Final = 4 << 20  # of batches, in memory at a time
ENTRIES_PER_STEP: Final = 1_000
_BEYOND_ALL: Final = b"\xff" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundState:
    """`index` is of the last entry in the state, `unknown` the number of entries after it: they are in the journal, and
    may have been committed. `damage` says why the state is older than it could be; "" if it is not."""

    state: ClusterState
    index: int
    unknown: int
    damage: str


class Fate(enum.Enum):
    COMMITTED = "committed"
    UNCERTAIN = "uncertain"  # it may have been committed, and this disk does not know it
    ABORTED = "aborted"


class FoundBatch(NamedTuple):
    """A whole batch. Its records before `first` have been deleted."""

    stored: StoredValue
    first: Offset
    fate: Fate
    is_control: bool


class Missing(NamedTuple):
    """Committed offsets [lo, hi) that this disk cannot give."""

    lo: Offset
    hi: Offset
    why: str


def read_state(disk: Disk) -> FoundState:
    """Raises UpgradeNeeded if a newer smq wrote it."""
    journal, damage = RaftJournal(), ""
    try:
        for _ in journal.load(disk):
            pass  # it pauses for other work, and here there is none
    except DataDamaged as e:
        damage = str(e)
    machine, index = Machine(), 0
    try:
        if journal.snapshot is not None:
            machine, index = Machine.restore(journal.snapshot.state), journal.snapshot.index
        if damage or not len(journal):
            return FoundState(state=machine.state, index=index, unknown=0, damage=damage)
        index = max(index, FIRST_INDEX)
        while index < journal.commit_index:
            count = min(journal.commit_index - index, ENTRIES_PER_STEP)
            for entry, at, _ in journal.entries_from(index + 1, count_max=count):
                if entry[0] == REGULAR:
                    machine.apply(LogIndex(at), decode_command(entry[1:]))
                index = at
    except UpgradeNeeded:
        raise
    except (CodecError, InvariantBroken) as e:
        damage = f"entry {index + 1} of the Raft journal, or its snapshot, cannot be applied: {e}"
    return FoundState(state=machine.state, index=index, unknown=journal.last_index - index, damage=damage)


def partitions_on(disk: Disk) -> Iterator[PartitionId]:
    """Every partition of which the disk has a log, or had one. Raises DataDamaged."""
    at = b""
    while keys := disk.scan_keys(Table.CHECKPOINTS, at, _BEYOND_ALL, limit=1):
        at = keys[0] + b"\x00"
        if len(keys[0]) > PARTITION_ID_BYTES:  # otherwise the key is damaged
            pid = PartitionId(keys[0][:PARTITION_ID_BYTES])
            at = partition_stop(pid)
            yield pid


def found_in(disk: Disk, pid: PartitionId, state: ClusterState) -> Iterator[FoundBatch | Missing]:
    """The partition's batches in order, and between them what is missing. Nothing is known to be committed if the state
    does not have the partition."""
    part, judge = state.partition(pid), _Judge(disk, pid, state)
    expected, hwm = judge.log_start, part.hwm if part is not None else Offset(0)
    damage: DataDamaged | None = None
    try:
        for key, value in _rows(disk, pid):
            try:
                stored = parse_stored(pid, key, value)
                info = info_of_stored(stored)
            except DataDamaged as e:
                damage = damage or e
                continue
            if stored.end <= expected:
                continue  # deleted
            if not judge.is_of_log(stored):
                damage = damage or DataDamaged("what this disk has there was replaced by another leader's records")
                break  # and so was all that follows
            if stored.base > expected:
                yield Missing(expected, stored.base, str(damage or "this disk has no batch there"))
            damage = None
            yield FoundBatch(stored, max(expected, stored.base), judge.fate(info), info.kind >= BatchKind.COMMIT)
            expected = stored.end
    except DataDamaged as e:
        damage = damage or e
    if expected < hwm:
        yield Missing(expected, hwm, str(damage or "this disk had not received it"))
    elif isinstance(damage, BatchDamaged):
        yield Missing(expected, Offset(damage.offset + 1), str(damage))


def _rows(disk: Disk, pid: PartitionId) -> Iterator[tuple[bytes, bytes]]:
    start = batch_key(pid, 0)
    while rows := disk.scan(Table.BATCHES, start, partition_stop(pid), bytes_max=SCAN_BYTES):
        yield from rows
        start = rows[-1][0] + b"\x00"


class _Judge:
    """Knows of one partition what the replicated state and the log itself say of its batches."""

    def __init__(self, disk: Disk, pid: PartitionId, state: ClusterState) -> None:
        self._part: PartitionState | None = state.partition(pid)
        self._log: PartitionLog | None = None
        with suppress(DataDamaged):
            self._log = LogStore(cast(Disk, _Unchanged(disk))).open(pid)
        starts = [source.log_start for source in (self._part, self._log) if source is not None]
        self.log_start = max(starts, default=Offset(0))

    def is_of_log(self, stored: StoredValue) -> bool:
        """Rule 3. A batch that is newer than the state may be."""
        if self._part is None:
            return True
        run = EpochRun(stored.epoch, stored.base, stored.end)
        return verified_end([run], stored.base, stored.end, self._part.history)[1] is None

    def fate(self, info: BatchInfo) -> Fate:
        part, is_aborted = self._part, self._is_aborted(info)
        if is_aborted:
            return Fate.ABORTED
        if is_aborted is None or part is None or info.end > part.hwm or info.epoch > part.epoch:
            return Fate.UNCERTAIN
        return Fate.COMMITTED

    def _is_aborted(self, info: BatchInfo) -> bool | None:
        """None if the disk does not know. A marker that is in a log repeats a decision that was committed. Of what is
        open in the log, the state does not say: it may be ahead of the log, and speak of the producer's next one."""
        log, producer = self._log, info.producer_id
        if info.kind != BatchKind.TRANSACTIONAL:
            return False
        if log is None or log.aborted_damage is not None or info.base >= log.appended_end:
            return None
        if log.aborted.covers(producer, info.base):
            return True
        opened = log.producers.open_from(producer)
        return None if opened is not None and info.base >= opened else False


class _Unchanged:
    """A disk that takes no rows: a log that is opened on it has in memory what it would have repaired."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def submit(self, ops: Sequence[Op], done: object = None) -> int:
        return self._disk.submitted_seq

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)
