"""The state of a partition's log: a fold over its batches, and its checkpoint on disk. Pure.

Owns `LogState`, which is equal for equal logs whichever way they came about (appended, truncated, recovered), and the
bytes of checkpoint and partition rows. It must never touch a disk. Only this package imports it.

    CHECKPOINTS  partition(20) 0          -> version, log_start, end of the base, producers complete?, CRC: it exists
    CHECKPOINTS  partition(20) 1 end(8)   -> version, the state of the log up to `end`, CRC

The base is the checkpoint that the partition's row names: it holds the state that deleted batches left behind, and it
never lies above the end of the first batch. The state at any later offset is the newest checkpoint at or below it plus
the batches from there.

A checkpoint holds the whole table of producers, or only the entries that have changed since an older checkpoint, whose
end it names. So a table of 100,000 producers, which is 16 MB, is not written each time. It is written in full when the
changes since have become as large as the table: all in all a checkpoint writes at most twice what has changed.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from smq.raft_state.binary import FLAG, INT64, Bytes, CodecError, Items, TaggedLayout
from smq.raft_state.fields import EPOCH, OFFSET
from smq.raft_state.ids import Offset, PartitionId, Sequence, TsNs
from smq.records import INT32_MAX
from smq.replication.api import Aborted
from smq.replication.log.lineage import EpochRun, extend_runs, runs_from, runs_to
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.log.stored_batch import BatchInfo, BatchKind, partition_name
from smq.replication.ports import DataDamaged

CHECKPOINT_VERSION: Final = 1
CHECKPOINT_BATCHES: Final = 1024  # recovery reads at most this many batches after the last checkpoint ...
CHECKPOINT_BYTES: Final = 16 << 20  # ... or about this much: some 10 ms
SMALL_TABLE_BYTES: Final = 16 << 10  # of producers: always written in full, 16 bytes per batch at most
CHAIN_ROWS_MAX: Final = 1024  # checkpoints with changes after a full one: 10 ms to read

NO_CREATE_TIME: Final = -(1 << 63)
_NOWHERE: Final = Offset(-1)
_CRC_BYTES: Final = 4


class Saved(NamedTuple):
    """The checkpoints that hold the producers of a state, up to their latest changes. `rows` is 0 if there is none."""

    end: Offset  # of the newest
    full_end: Offset  # of the oldest, which is full
    changes_bytes: int  # of all the others
    rows: int


NOT_SAVED: Final = Saved(_NOWHERE, _NOWHERE, 0, 0)


class LogState:
    """Mutable: `add` is the only change. `bytes_total` and `aborted` count from the partition's creation on this node.
    `found`, if there is one, collects the aborted transactions."""

    __slots__ = ("aborted", "bytes_total", "create_ms_max", "end", "found", "last_ts_ns", "producers", "runs", "saved")

    def __init__(self, end: Offset) -> None:
        self.end = end
        self.last_ts_ns = TsNs(0)
        self.create_ms_max = NO_CREATE_TIME
        self.bytes_total = 0
        self.aborted = 0
        self.found: list[Aborted] | None = None
        self.runs: list[EpochRun] = []
        self.producers = ProducerTable()
        self.saved = NOT_SAVED

    def add(self, info: BatchInfo) -> Aborted | None:
        """Folds in the next batch. Returns the transaction that it aborts."""
        base, end, epoch, ts_ns, max_timestamp_ms, size, producer_id, producer_epoch, sequence, kind = info
        if base < self.end:  # a checkpoint inside a batch that compaction has joined: the batch says the same again
            self.runs = runs_to(self.runs, base)
        self.end = end
        self.last_ts_ns = TsNs(ts_ns + end - base - 1)
        self.bytes_total += size
        if max_timestamp_ms > self.create_ms_max:
            self.create_ms_max = max_timestamp_ms
        extend_runs(self.runs, epoch, base, end)
        if kind >= BatchKind.COMMIT:
            return self._end_transaction(info)
        if producer_id >= 0:
            last_sequence = Sequence((sequence + end - base - 1) & INT32_MAX)
            cached = CachedBatch(epoch, base, end, sequence, last_sequence, ts_ns)
            self.producers.note(producer_id, producer_epoch, cached, is_transactional=kind != BatchKind.PLAIN)
        return None

    def _end_transaction(self, marker: BatchInfo) -> Aborted | None:
        first = self.producers.end_transaction(marker.producer_id, marker.producer_epoch, marker.base, marker.ts_ns)
        if first is None or marker.kind != BatchKind.ABORT:
            return None
        self.aborted += 1
        aborted = Aborted(marker.base, first, marker.producer_id)
        if self.found is not None:
            self.found.append(aborted)
        return aborted

    def forget_before(self, first: Offset) -> None:
        """The batches below `first` are gone, and with them their epochs. Everything else outlives them."""
        self.runs = runs_from(self.runs, first)

    def copy(self) -> "LogState":
        state = LogState(self.end)
        state.last_ts_ns, state.create_ms_max, state.bytes_total = self.last_ts_ns, self.create_ms_max, self.bytes_total
        state.aborted = self.aborted
        state.runs, state.producers, state.saved = self.runs.copy(), self.producers.copy(), self.saved
        return state


def check_order(pid: PartitionId, infos: list[BatchInfo], end: Offset, last_ts_ns: TsNs) -> None:
    """ValueError unless each batch begins where the one before it ends, the first at `end`, and after its time."""
    for info in infos:
        if info.base != end or info.end <= end:
            what = f"batch {info.base}..{info.end} does not follow the log's end, {end}"
        elif info.ts_ns <= last_ts_ns:
            what = f"ts_ns {info.ts_ns} does not exceed the last, {last_ts_ns}"
        else:
            end, last_ts_ns = info.end, TsNs(info.ts_ns + info.end - info.base - 1)
            continue
        raise ValueError(f"{partition_name(pid)}: {what}")


class Checkpoint(NamedTuple):
    """One row. The numbers, and the runs, are those of a LogState at `end`. `before` is the end of the checkpoint that
    it continues, -1 if it is full."""

    end: Offset
    last_ts_ns: TsNs
    create_ms_max: int
    bytes_total: int
    aborted: int
    before: Offset
    runs: tuple[EpochRun, ...]
    producers: bytes


_CHECKPOINT: Final = TaggedLayout(
    CHECKPOINT_VERSION,
    Checkpoint,
    ("end", OFFSET),
    ("last_ts_ns", INT64),
    ("create_ms_max", INT64),
    ("bytes_total", INT64),
    ("aborted", INT64),
    ("before", OFFSET),
    rest=[("runs", Items(EPOCH, OFFSET, OFFSET, make=EpochRun._make)), ("producers", Bytes())],
)


def next_checkpoint(state: LogState) -> bytes:
    """The row to write now at the state's end. From then on the state counts as saved there."""
    saved, table = state.saved, state.producers
    changes = table.changes() if saved.rows else b""
    is_full = (
        not saved.rows
        or table.has_lost_changes
        or saved.end >= state.end  # the row replaces its predecessor
        or saved.rows >= CHAIN_ROWS_MAX
        or table.size_bytes <= max(SMALL_TABLE_BYTES, saved.changes_bytes + len(changes))
    )
    if is_full:
        row = _encode_checkpoint(state, _NOWHERE, table.snapshot())
        state.saved = Saved(state.end, state.end, 0, 1)
    else:
        row = _encode_checkpoint(state, saved.end, changes)
        state.saved = Saved(state.end, saved.full_end, saved.changes_bytes + len(changes), saved.rows + 1)
    table.mark_saved()
    return row


def load_checkpoint(row: bytes, row_at: Callable[[Offset], bytes | None]) -> LogState:
    """The state that a row and the older ones that it continues hold together. Raises DataDamaged if one of them is
    missing or damaged."""
    newest = decode_checkpoint(row)
    chain = [newest]
    while (before := chain[-1].before) != _NOWHERE:
        older = row_at(before) if before < chain[-1].end else None
        if older is None:
            raise DataDamaged(f"the checkpoint at {before}, which a newer one continues, is missing")
        chain.append(decode_checkpoint(older))
    state = LogState(newest.end)
    state.last_ts_ns, state.create_ms_max, state.bytes_total = newest[1:4]
    state.aborted, state.runs = newest.aborted, list(newest.runs)
    try:
        for checkpoint in reversed(chain):
            state.producers.add(checkpoint.producers)
    except ValueError as e:
        raise DataDamaged(f"a checkpoint does not decode: {e}") from e
    changes_bytes = sum(len(checkpoint.producers) for checkpoint in chain[:-1])
    state.saved = Saved(state.end, chain[-1].end, changes_bytes, len(chain))
    return state


def _encode_checkpoint(state: LogState, before: Offset, producers: bytes) -> bytes:
    numbers = (state.end, state.last_ts_ns, state.create_ms_max, state.bytes_total, state.aborted)
    return encoded(_CHECKPOINT, Checkpoint(*numbers, before, tuple(state.runs), producers))


def decode_checkpoint(value: bytes) -> Checkpoint:
    """A single row. Raises DataDamaged."""
    checkpoint: Checkpoint = decoded(_CHECKPOINT, value, "a checkpoint")
    return checkpoint


class PartitionRow(NamedTuple):
    log_start: Offset
    base_end: Offset
    has_producers: bool  # whether the producer state is complete


_PARTITION: Final = TaggedLayout(
    CHECKPOINT_VERSION, PartitionRow, ("log_start", OFFSET), ("base_end", OFFSET), ("has_producers", FLAG)
)


def encode_partition(row: PartitionRow) -> bytes:
    return encoded(_PARTITION, row)


def decode_partition(value: bytes) -> PartitionRow:
    """Raises DataDamaged."""
    row: PartitionRow = decoded(_PARTITION, value, "a partition's row")
    return row


def encoded(layout: TaggedLayout, row: Any) -> bytes:
    """With its CRC."""
    return sealed(b"".join(layout.encode(row)))


def sealed(body: bytes) -> bytes:
    return body + _crc(body)


def decoded(layout: TaggedLayout, value: bytes, what: str) -> Any:
    """Inverse of `encoded`. Raises DataDamaged."""
    body = memoryview(value)[:-_CRC_BYTES]
    if _crc(body) != value[-_CRC_BYTES:]:
        raise DataDamaged(f"{what} does not match its CRC-32C")
    try:
        return layout.decode(body)
    except CodecError as e:
        raise DataDamaged(f"{what} does not decode: {e}") from e


def _crc(body: bytes | memoryview) -> bytes:
    return crc32c(body).to_bytes(_CRC_BYTES, "big")


def partition_key(pid: PartitionId) -> bytes:
    return pid + b"\x00"


def checkpoint_key(pid: PartitionId, end: int) -> bytes:
    return pid + b"\x01" + end.to_bytes(8, "big")
