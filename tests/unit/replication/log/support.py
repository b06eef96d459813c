"""Shared by the tests of logs: a log of some batches, what damages or removes its rows, and the log after a restart."""

from typing import Final

from smq.raft_state.ids import Epoch, Offset, PartitionId, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.records import BatchHeader, parse_header
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.producers import CachedBatch, ProducerTable
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue, base_of_key, batch_key
from smq.replication.ports import Delete, Put, Table
from tests.unit.replication.storage.support import Harness, make_batch

PID: Final = PartitionId(bytes(range(20)))
OTHER: Final = PartitionId(b"\xff" * 20)
ALL: Final = Offset(1 << 62)
ALL_KEYS: Final = b"\xff" * 40


def nothing() -> None:
    """No caller waits."""


def append(log: PartitionLog, count: int = 1, *, epoch: int = 1, **batch: object) -> StoredValue:
    data = make_batch(count, **batch)  # type: ignore[arg-type]  # handed through as they are
    return log.append(data, parse_header(data), epoch=Epoch(epoch), ts_ns=TsNs(log.last_ts_ns + 10), done=nothing)


def fold(table: ProducerTable, header: BatchHeader, ts_ns: TsNs) -> None:
    """As a log folds an appended batch; `header` carries its base offset and epoch. No control batch."""
    if header.producer_id >= 0:
        cached = CachedBatch(
            Epoch(header.epoch),
            Offset(header.base_offset),
            Offset(header.end),
            Sequence(header.base_sequence),
            Sequence(header.last_sequence),
            ts_ns,
        )
        producer_id, producer_epoch = ProducerId(header.producer_id), ProducerEpoch(header.producer_epoch)
        table.note(producer_id, producer_epoch, cached, is_transactional=header.is_transactional)


def log_of(
    harness: Harness,
    batches: int,
    count: int = 1,
    *,
    producer: int | None = None,
    payload: bytes = b"records",
    tail_bytes_kept: int | None = None,
    store: LogStore | None = None,
) -> PartitionLog:
    """A durable log of as many batches, with `count` records each, which follow one another if one `producer` sent
    them."""
    log = (store or LogStore(harness.disk, tail_bytes_kept=tail_bytes_kept)).create(PID, Offset(0))
    for number in range(batches):
        sent = (-1, -1, -1) if producer is None else (producer, 0, count * number)
        append(log, count, producer=sent, payload=payload)
    harness.settle()
    return log


def reopened(harness: Harness) -> PartitionLog:
    """The log after a restart."""
    return LogStore(harness.reopen()).open_all()[PID]


def rows(harness: Harness) -> int:
    tables = (Table.BATCHES, Table.TIMES, Table.CHECKPOINTS)
    return sum(len(harness.disk.scan_keys(table, b"\x00", ALL_KEYS)) for table in tables)


def replace(harness: Harness, table: Table, key: bytes, value: bytes) -> None:
    harness.write(Put(table, key, value))


def flipped(value: bytes, bit: int) -> bytes:
    damaged = bytearray(value)
    damaged[bit // 8 % len(value)] ^= 1 << (bit % 8)
    return bytes(damaged)


def flip_batch(harness: Harness, stored: StoredValue, bit: int) -> None:
    replace(harness, Table.BATCHES, batch_key(PID, stored.base), flipped(stored.value, bit))


def lose_batches(harness: Harness, *bases: int) -> None:
    harness.write(*[Delete(Table.BATCHES, batch_key(PID, base), batch_key(PID, base + 1)) for base in bases])


def lose_row(harness: Harness, base: int) -> None:
    """Deletes the index row of a batch as well."""
    keys = harness.disk.scan_keys(Table.TIMES, PID + b"\x00", PID + b"\x01")
    (key,) = [key for key in keys if base_of_key(key) == base]
    harness.write(Delete(Table.TIMES, key, key + b"\x00"))
