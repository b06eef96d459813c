"""A process that compacts a log as a node does, and prints how far it has come. Recorded by `recorder`.

    python -m chaos_tests.crash.compacting DIRECTORY

Owns the course, a list of steps that can be computed again: batches of three keys, one aborted transaction per round,
the segments that take their place, a segment that replaces two others, and one with which the log grows. Also the
verdict: after a power loss the log is, byte for byte, as after the last acknowledged step or as after the next, and its
row of segments says which. Every acknowledgement is `log start, log end, steps`.
"""

import queue
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from chaos_tests.crash.stores import open_store
from chaos_tests.crash.trace import Acked
from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import NewRecord, encode_batch, marker_batch, parse_header
from smq.replication.log.compaction.segment_writer import SegmentWriter
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.segments import digest_of, own_digest, replaced
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue, build_value, parse_value
from smq.replication.ports import Disk

PID: Final = PartitionId(b"compaction's images.")
ROUNDS: Final = 4
BATCHES: Final = 5  # a round, before its control batch
KEYS: Final = 3
PRODUCER: Final = 7
SIZES: Final = (10, 300, 5_000)  # inline in a leaf, and on overflow pages


@dataclass(frozen=True, slots=True)
class Step:
    """An append, or an installation if there is an `end`; and the whole log after it."""

    values: list[StoredValue]
    log: list[StoredValue]
    segments: list[tuple[int, int, bytes]]
    aborted: list[tuple[int, int]]  # first offset and marker
    start: Offset = Offset(0)
    end: Offset = Offset(0)


@dataclass(slots=True)
class _Course:
    log: list[StoredValue] = field(default_factory=list)
    segments: list[tuple[int, int, bytes]] = field(default_factory=list)
    aborted: list[tuple[int, int]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def end(self) -> Offset:
        return self.log[-1].end if self.log else Offset(0)

    def stored(self, data: bytes) -> StoredValue:
        ts_ns = TsNs(10 * self.end + 1)
        return parse_value(PID, build_value(PID, data, parse_header(data), self.end, Epoch(1), ts_ns))

    def append(self, data: bytes) -> Step:
        stored = self.stored(data)
        self.log.append(stored)
        return self._step([stored])

    def round(self, number: int) -> Iterator[bytes]:
        """Batches of all keys, of which the third begins a transaction that is aborted."""
        for n in range(BATCHES):
            payload = self.rng.randbytes(10) * (self.rng.choice(SIZES) // 10)  # so that a trace compresses well
            records = [NewRecord(b"key %d" % key, payload, number) for key in range(KEYS)]
            if n == 2:
                yield encode_batch(
                    records,
                    producer_id=PRODUCER,
                    producer_epoch=0,
                    base_sequence=number * KEYS,
                    is_transactional=True,
                )
            else:
                yield encode_batch(records)
        self.aborted.append((self.end - (BATCHES - 2) * KEYS, self.end))
        yield marker_batch(producer_id=PRODUCER, producer_epoch=0, is_commit=False, timestamp_ms=number)

    def install(self, start: Offset, end: Offset, values: list[StoredValue]) -> Step:
        self.log = [v for v in self.log if v.end <= start] + values + [v for v in self.log if v.base >= end]
        self.segments = [s for s in self.segments if s[1] <= start or s[0] >= end]
        self.segments = sorted([*self.segments, (start, end, digest_of(values))])
        return self._step(values, start, end)

    def compacted(self, values: list[StoredValue]) -> list[StoredValue]:
        """The last batch with all keys stays."""
        writer = SegmentWriter(PID, Offset(0))
        newest = max(v.base for v in values if not parse_header(v.batch).is_transactional)
        for value in values:
            if parse_header(value.batch).is_transactional and not parse_header(value.batch).is_control:
                writer.add_aborted(value)
            else:
                writer.add(value, lambda records: [offset >= newest for offset, *_ in records])
        return writer.finish().values

    def _step(self, values: list[StoredValue], start: Offset = Offset(0), end: Offset = Offset(0)) -> Step:
        return Step(values, self.log.copy(), self.segments.copy(), self.aborted.copy(), start, end)


def course() -> Iterator[Step]:
    made = _Course()
    for number in range(ROUNDS):
        start = made.end
        for data in made.round(number):
            yield made.append(data)
        yield made.install(start, made.end, made.compacted([v for v in made.log if v.base >= start]))
        if number % 2:
            yield made.install(Offset(0), made.end, made.compacted(made.log))
    # What other replicas have agreed on meanwhile: the log grows by a whole segment.
    ahead, start = _Course(log=made.log.copy(), rng=made.rng), made.end
    for data in ahead.round(ROUNDS):
        ahead.append(data)
    made.aborted += ahead.aborted
    yield made.install(start, ahead.end, ahead.compacted([v for v in ahead.log if v.base >= start]))


def take(log: PartitionLog, step: Step) -> None:
    if not step.end:
        log.append_stored([step.values[0]], lambda: None)
        return
    old = replaced(log, step.start, step.end)
    if not log.install(step.start, step.end, digest_of(step.values), step.values, old, lambda: None):
        raise RuntimeError(f"the segment [{step.start}, {step.end}) was refused")


def verdict(disk: Disk, acked: Acked) -> str:
    """Empty if the log is as after the last acknowledged step, or as after the next one."""
    log = LogStore(disk).open_all().get(PID)
    if log is None:
        return "the partition is missing"
    if log.tail_damage is not None or log.damaged_batches:
        return f"the log is damaged: {log.tail_damage or log.damaged_batches}"
    steps = _steps()
    allowed = steps[acked.journal_index - 1 : acked.journal_index + 1]
    problems = [_difference(log, step) for step in allowed]
    return "" if "" in problems else f"after step {acked.journal_index}: {' / '.join(problems)}"


@cache
def _steps() -> list[Step]:
    return list(course())


def _difference(log: PartitionLog, step: Step) -> str:
    end = step.log[-1].end
    if log.durable_end != end:
        return f"the log is {log!r}, not up to {end}"
    if [v.value for v in _all(log)] != [v.value for v in step.log]:
        return "the log has other bytes"
    for start, stop, digest in step.segments:
        if log.segments.end_of(Offset(start), digest) != stop:
            return f"the row of segments does not say what [{start}, {stop}) holds"
        if own_digest(log, Offset(start), Offset(stop)) != digest:
            return f"[{start}, {stop}) does not have the digest of the row"
    if [(a.first, a.marker) for a in log.aborted] != step.aborted:
        return f"aborted are {list(log.aborted)}"
    return "" if log.size_bytes == sum(len(v.value) for v in step.log) else "the size is wrong"


def _all(log: PartitionLog) -> Iterator[StoredValue]:
    at = Offset(0)
    while found := log.read(at, log.durable_end, 1 << 20):
        yield from found
        at = found[-1].end


def main(directory: str) -> None:
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    disk = open_store(directory, call_soon_threadsafe=calls.put, on_fatal=_fail)
    log = LogStore(disk, tail_bytes_kept=0).create(PID, Offset(0))
    for number, step in enumerate(course(), 1):
        take(log, step)
        while disk.durable_seq < disk.submitted_seq:
            calls.get()()
        sys.stdout.write(f"acked {log.log_start} {log.durable_end} {number}\n")
        sys.stdout.flush()


def _fail(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    main(sys.argv[1])
