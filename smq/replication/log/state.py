"""The state of a partition's log: a fold over its batches, and its checkpoint on disk. Pure.

Owns `LogState`, which is equal for equal logs whichever way they came about (appended, truncated, recovered), and the
bytes of checkpoint and partition rows. It must never touch a disk. Only this package imports it.

    CHECKPOINTS  partition(20) 0          -> version, log_start, producers complete?, CRC: the partition exists
    CHECKPOINTS  partition(20) 1 end(8)   -> version, the state of the log up to `end`, CRC

The checkpoint with the lowest end is the base: it holds the state that deleted batches left behind, and it never lies
above the end of the first batch. The state at any later offset is the newest checkpoint at or below it plus the
batches from there.
"""

import struct
from typing import Final

from crc32c import crc32c

from smq.raft_state.ids import Epoch, Offset, PartitionId, Sequence, TsNs
from smq.records import INT32_MAX
from smq.replication.log.codec import BatchInfo
from smq.replication.log.lineage import EpochRun, extend_runs, runs_from
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.ports import DataDamaged

CHECKPOINT_VERSION: Final = 1
CHECKPOINT_BATCHES: Final = 1024  # recovery reads at most this many batches after the last checkpoint ...
CHECKPOINT_BYTES: Final = 16 << 20  # ... or about this much: some 10 ms
CHECKPOINT_BATCHES_PER_PRODUCER: Final = 8  # a large producer table is written less often: it costs 3 us per producer

NO_CREATE_TIME: Final = -(1 << 63)
_STATE: Final = struct.Struct(">BqqqqI")  # version, end, last ts_ns, largest create time, bytes so far, runs
_RUN: Final = struct.Struct(">iqq")
_PARTITION: Final = struct.Struct(">Bq?")  # version, log_start, whether the producer state is complete
_CRC_BYTES: Final = 4


class LogState:
    """Mutable: `add` is the only change. `bytes_total` counts from the partition's creation on this node."""

    __slots__ = ("bytes_total", "create_ms_max", "end", "last_ts_ns", "producers", "runs")

    def __init__(self, end: Offset) -> None:
        self.end = end
        self.last_ts_ns = TsNs(0)
        self.create_ms_max = NO_CREATE_TIME
        self.bytes_total = 0
        self.runs: list[EpochRun] = []
        self.producers = ProducerTable()

    def add(self, info: BatchInfo) -> None:
        """Folds in the next batch."""
        base, end, epoch, ts_ns, max_timestamp_ms, size, producer_id, producer_epoch, sequence = info
        self.end = end
        self.last_ts_ns = ts_ns
        self.bytes_total += size
        if max_timestamp_ms > self.create_ms_max:
            self.create_ms_max = max_timestamp_ms
        extend_runs(self.runs, epoch, base, end)
        if producer_id >= 0:
            last_sequence = Sequence((sequence + end - base - 1) & INT32_MAX)
            cached = CachedBatch(epoch, base, end, sequence, last_sequence, ts_ns)
            self.producers.note(producer_id, producer_epoch, cached)

    def forget_before(self, first: Offset) -> None:
        """The batches below `first` are gone, and with them their epochs. Everything else outlives them."""
        self.runs = runs_from(self.runs, first)

    def copy(self) -> "LogState":
        return decode_checkpoint(encode_checkpoint(self))


def encode_checkpoint(state: LogState) -> bytes:
    parts = [
        _STATE.pack(
            CHECKPOINT_VERSION,
            state.end,
            state.last_ts_ns,
            state.create_ms_max,
            state.bytes_total,
            len(state.runs),
        )
    ]
    parts.extend(_RUN.pack(*run) for run in state.runs)
    parts.append(state.producers.snapshot())
    return _sealed(b"".join(parts))


def decode_checkpoint(value: bytes) -> LogState:
    """Inverse of `encode_checkpoint`. Raises DataDamaged."""
    body = _unsealed(value, "a checkpoint")
    try:
        version, end, last_ts_ns, create_ms_max, bytes_total, run_count = _STATE.unpack_from(body)
        if version != CHECKPOINT_VERSION:
            raise DataDamaged(f"checkpoint version {version} is unknown")
        state = LogState(Offset(end))
        state.last_ts_ns, state.create_ms_max, state.bytes_total = TsNs(last_ts_ns), create_ms_max, bytes_total
        stop = _STATE.size + run_count * _RUN.size
        for epoch, start, run_end in _RUN.iter_unpack(body[_STATE.size : stop]):
            state.runs.append(EpochRun(Epoch(epoch), Offset(start), Offset(run_end)))
        state.producers = ProducerTable.restore(body[stop:])
    except (ValueError, struct.error) as e:
        raise DataDamaged(f"a checkpoint does not decode: {e}") from e
    return state


def encode_partition(log_start: Offset, has_producers: bool) -> bytes:
    return _sealed(_PARTITION.pack(CHECKPOINT_VERSION, log_start, has_producers))


def decode_partition(value: bytes) -> tuple[Offset, bool]:
    """(log_start, whether the producer state is complete). Raises DataDamaged."""
    body = _unsealed(value, "a partition's row")
    if len(body) != _PARTITION.size or body[0] != CHECKPOINT_VERSION:
        raise DataDamaged("a partition's row does not decode")
    _, log_start, has_producers = _PARTITION.unpack(body)
    return Offset(log_start), has_producers


def _sealed(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(_CRC_BYTES, "big")


def _unsealed(value: bytes, what: str) -> bytes:
    body = value[:-_CRC_BYTES]
    if len(value) <= _CRC_BYTES or crc32c(body).to_bytes(_CRC_BYTES, "big") != value[-_CRC_BYTES:]:
        raise DataDamaged(f"{what} does not match its CRC-32C")
    return body


def partition_key(pid: PartitionId) -> bytes:
    return pid + b"\x00"


def checkpoint_key(pid: PartitionId, end: int) -> bytes:
    return pid + b"\x01" + end.to_bytes(8, "big")
