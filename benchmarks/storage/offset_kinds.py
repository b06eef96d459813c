"""What native offsets cost and give, beside the two designs that they replace.

Owns three logs of the same batches on the same store (LMDB behind the Disk port), each with only the rows that its
design needs. Native: a batch's key is the offset of its first record, and a row per batch finds times. Times only: a
batch's key is its time; a record's number is known only by counting. Mapped: as times only, with a row per record that
says where its offset lies, as a gateway keeps it that translates offsets. Measured: a stream of appends, finding the
record at a random offset, and the end of the log, which lag needs. Needs no cluster.
"""

import random
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from benchmarks.report import Report, percentile
from benchmarks.storage.stores import PID, QUEUED_BYTES, RealStore, written_bytes
from smq.replication.ports import Op, Put, Table

RECORD_BYTES: Final = 100
RECORDS_PER_BATCH: Final = (1, 100)
READ_BYTES: Final = 1 << 20
TIME_ROW, OFFSET_ROW = b"\x00", b"\x01"
_COUNT: Final = struct.Struct(">I")  # of records, where a batch begins
_PLACE: Final = struct.Struct(">QI")
_LAST: Final = PID + b"\xff" * 9


class _Log(ABC):
    name: str

    def __init__(self, store: RealStore, per_batch: int) -> None:
        self._store = store
        self._disk = store.disk
        self._per_batch = per_batch

    @abstractmethod
    def rows(self, base: int, ts_ns: int, batch: bytes) -> list[Op]: ...

    @abstractmethod
    def find(self, offset: int) -> bytes:
        """The batch that holds it."""

    @abstractmethod
    def end(self) -> int:
        """The next offset."""

    def append(self, batches: int, batch: bytes) -> None:
        for number in range(batches):
            base = number * self._per_batch
            self._disk.submit(self.rows(base, _ts_ns_of(base), batch))
            while self._disk.queued_bytes > QUEUED_BYTES:
                self._store.run_next()
        self._store.settle()


class _Native(_Log):
    name = "native offsets"

    def rows(self, base: int, ts_ns: int, batch: bytes) -> list[Op]:
        time_key = PID + TIME_ROW + _be64(ts_ns) + _be64(base)
        return [Put(Table.BATCHES, PID + _be64(base), batch), Put(Table.TIMES, time_key, b"")]

    def find(self, offset: int) -> bytes:
        return self._last_below(offset + 1)[1]

    def end(self) -> int:
        key, batch = self._last_below((1 << 64) - 1)
        (count,) = _COUNT.unpack_from(batch)
        return int.from_bytes(key[len(PID) :]) + int(count)

    def _last_below(self, offset: int) -> tuple[bytes, bytes]:
        [row] = self._disk.scan(Table.BATCHES, PID, PID + _be64(offset), reverse=True, limit=1)
        return row


class _TimesOnly(_Log):
    name = "times only"

    def rows(self, base: int, ts_ns: int, batch: bytes) -> list[Op]:
        return [Put(Table.BATCHES, PID + _be64(ts_ns), batch)]

    def find(self, offset: int) -> bytes:
        return self._counted(offset)[1]

    def end(self) -> int:
        return self._counted(1 << 62)[0]

    def _counted(self, until: int) -> tuple[int, bytes]:
        """Reads from the beginning, and counts the records."""
        count, at, batch = 0, PID, b""
        while rows := self._disk.scan(Table.BATCHES, at, _LAST, bytes_max=READ_BYTES):
            for _, batch in rows:
                count += _COUNT.unpack_from(batch)[0]
                if count > until:
                    return count, batch
            at = rows[-1][0] + b"\x00"
        return count, batch


class _Mapped(_Log):
    name = "mapped offsets"

    def rows(self, base: int, ts_ns: int, batch: bytes) -> list[Op]:
        mapping = [
            Put(Table.TIMES, PID + OFFSET_ROW + _be64(base + n), _PLACE.pack(ts_ns, n)) for n in range(self._per_batch)
        ]
        return [Put(Table.BATCHES, PID + _be64(ts_ns), batch), *mapping]

    def find(self, offset: int) -> bytes:
        place = self._disk.get(Table.TIMES, PID + OFFSET_ROW + _be64(offset))
        assert place is not None
        batch = self._disk.get(Table.BATCHES, PID + _be64(_PLACE.unpack(place)[0]))
        assert batch is not None
        return batch

    def end(self) -> int:
        first = PID + OFFSET_ROW
        [key] = self._disk.scan_keys(Table.TIMES, first, first + b"\xff" * 9, reverse=True, limit=1)
        return int.from_bytes(key[len(first) :]) + 1


def measure(report: Report, *, records: int) -> None:
    rng = random.Random(1)
    for per_batch in RECORDS_PER_BATCH:
        count = records if per_batch > 1 else records // 10
        batch = _COUNT.pack(per_batch) + rng.randbytes(RECORD_BYTES * per_batch)
        offsets = [rng.randrange(count) for _ in range(1_000)]
        for kind in (_Native, _TimesOnly, _Mapped):
            with tempfile.TemporaryDirectory(prefix="smq-bench-") as folder:
                store = RealStore(Path(folder) / "store")
                _measure(report, kind(store, per_batch), store, count, batch, offsets)
                store.disk.close()


def _measure(report: Report, log: _Log, store: RealStore, count: int, batch: bytes, offsets: list[int]) -> None:
    (per_batch,) = _COUNT.unpack_from(batch)
    total = count * RECORD_BYTES
    before, began = written_bytes(), time.perf_counter()
    log.append(count // per_batch, batch)
    taken_s = time.perf_counter() - began
    written, file = (written_bytes() - before) / total, store.disk.size_bytes() / total
    few = offsets[:20] if isinstance(log, _TimesOnly) else offsets
    found = [_timed(log, offset) for offset in few]
    began = time.perf_counter()
    assert log.end() == count
    end_ms = (time.perf_counter() - began) * 1000
    p50, p99 = percentile(found, 50), percentile(found, 99)
    report.add(
        f"{count:,} records, {per_batch} per batch, {log.name}",
        f"append {count / taken_s:,.0f} records/s, {written:.1f} bytes written and {file:.1f} kept per byte; an offset "
        f"p50 {p50:.3f} ms, p99 {p99:.3f} ms; the end {end_ms:.3f} ms",
        records_per_s=count / taken_s, written=written, file=file, p50_ms=p50, p99_ms=p99, end_ms=end_ms,
    )  # fmt: skip


def _timed(log: _Log, offset: int) -> float:
    began = time.perf_counter()
    log.find(offset)
    return (time.perf_counter() - began) * 1000


def _ts_ns_of(offset: int) -> int:
    """Of a record, so that none has another's."""
    return 1_700_000_000_000_000_000 + offset * 1_000


def _be64(number: int) -> bytes:
    return number.to_bytes(8, "big")
