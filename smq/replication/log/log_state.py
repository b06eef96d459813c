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

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from crc32c import crc32c

from smq.raft_state.ids import Epoch, Offset, PartitionId, Sequence, TsNs
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
# version, end, last ts_ns, largest create time, bytes so far, aborted transactions so far, end of the checkpoint before
# (-1: this is full), runs
_STATE: Final = struct.Struct(">BqqqqqqI")
_RUN: Final = struct.Struct(">iqq")
_PARTITION: Final = struct.Struct(">Bqq?")  # version, log_start, end of the base, whether the producers are complete
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
        first = self.producers.end_transaction(marker.producer_id, marker.producer_epoch, marker.base)
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
    """One row. `before` is the end of the checkpoint that it continues, -1 if it is full."""

    state: LogState  # without the producers
    before: Offset
    producers: bytes


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
        older = row_at(before) if before < chain[-1].state.end else None
        if older is None:
            raise DataDamaged(f"the checkpoint at {before}, which a newer one continues, is missing")
        chain.append(decode_checkpoint(older))
    state = newest.state
    try:
        for checkpoint in reversed(chain):
            state.producers.add(checkpoint.producers)
    except ValueError as e:
        raise DataDamaged(f"a checkpoint does not decode: {e}") from e
    changes_bytes = sum(len(checkpoint.producers) for checkpoint in chain[:-1])
    state.saved = Saved(state.end, chain[-1].state.end, changes_bytes, len(chain))
    return state


def _encode_checkpoint(state: LogState, before: Offset, producers: bytes) -> bytes:
    parts = [
        _STATE.pack(
            CHECKPOINT_VERSION,
            state.end,
            state.last_ts_ns,
            state.create_ms_max,
            state.bytes_total,
            state.aborted,
            before,
            len(state.runs),
        )
    ]
    parts.extend(_RUN.pack(*run) for run in state.runs)
    parts.append(producers)
    return sealed(b"".join(parts))


def decode_checkpoint(value: bytes) -> Checkpoint:
    """A single row. Raises DataDamaged."""
    body = unsealed(value, "a checkpoint")
    try:
        version, end, last_ts_ns, create_ms_max, bytes_total, aborted, before, run_count = _STATE.unpack_from(body)
        if version != CHECKPOINT_VERSION:
            raise DataDamaged(f"checkpoint version {version} is unknown")
        state = LogState(Offset(end))
        state.last_ts_ns, state.create_ms_max, state.bytes_total = TsNs(last_ts_ns), create_ms_max, bytes_total
        state.aborted = aborted
        stop = _STATE.size + run_count * _RUN.size
        for epoch, start, run_end in _RUN.iter_unpack(body[_STATE.size : stop]):
            state.runs.append(EpochRun(Epoch(epoch), Offset(start), Offset(run_end)))
    except (ValueError, struct.error) as e:
        raise DataDamaged(f"a checkpoint does not decode: {e}") from e
    return Checkpoint(state, Offset(before), body[stop:])


class PartitionRow(NamedTuple):
    log_start: Offset
    base_end: Offset
    has_producers: bool  # whether the producer state is complete


def encode_partition(row: PartitionRow) -> bytes:
    return sealed(_PARTITION.pack(CHECKPOINT_VERSION, *row))


def decode_partition(value: bytes) -> PartitionRow:
    """Raises DataDamaged."""
    body = unsealed(value, "a partition's row")
    if len(body) != _PARTITION.size or body[0] != CHECKPOINT_VERSION:
        raise DataDamaged("a partition's row does not decode")
    _, log_start, base_end, has_producers = _PARTITION.unpack(body)
    return PartitionRow(Offset(log_start), Offset(base_end), has_producers)


def sealed(body: bytes) -> bytes:
    """With its CRC."""
    return body + crc32c(body).to_bytes(_CRC_BYTES, "big")


def unsealed(value: bytes, what: str) -> bytes:
    """Inverse of `sealed`. Raises DataDamaged."""
    body = value[:-_CRC_BYTES]
    if len(value) <= _CRC_BYTES or crc32c(body).to_bytes(_CRC_BYTES, "big") != value[-_CRC_BYTES:]:
        raise DataDamaged(f"{what} does not match its CRC-32C")
    return body


def partition_key(pid: PartitionId) -> bytes:
    return pid + b"\x00"


def checkpoint_key(pid: PartitionId, end: int) -> bytes:
    return pid + b"\x01" + end.to_bytes(8, "big")
