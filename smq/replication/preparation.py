"""Batches whose topic has their records looked at before they are appended: converted to a codec, or judged by time.

Owns the order: while a batch of a partition is under way, later ones of it wait behind it, so none overtakes. The work
runs off the loop, under a bound on batches and bytes. It must never append or judge who leads: the replica does, and
also gives the errors of a batch that is not right in itself. The node's requests own it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from smq.raft_state.config_keys import INT64_MAX
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import PartitionId
from smq.raft_state.topic_config import BatchRules
from smq.records import BatchHeader
from smq.replication.log.decoding import bounded_spans, converted, decode_bounded
from smq.replication.partition.admission import PreparedBatch, validated
from smq.replication.ports import Buffer, Compute

BATCHES_MAX: Final = 1_000  # that wait on this node: at 1 ms each, a second of one thread
BYTES_MAX: Final = 64 << 20  # of them as they were sent, and again of results: as much as may wait for the disk
RUNNING_MAX: Final = 4  # jobs: twice the threads, so that none waits for the loop
RETRY_MS: Final = 50


@dataclass(slots=True, eq=False)
class _Entry:
    pid: PartitionId
    batch: PreparedBatch
    use: Callable[[PreparedBatch | SmqError], None]
    is_ready: bool
    size: int  # as it was sent
    held: int = 0  # of a result that waits for its turn


class Preparation:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._waiting: dict[PartitionId, deque[_Entry]] = {}  # in order of arrival; the first may be under way
        self._jobs: deque[_Entry] = deque()  # not begun
        self._running = self._count = self._bytes = self._held = 0
        self._closed: SmqError | None = None

    def concerns(self, pid: PartitionId, rules: BatchRules) -> bool:
        """False for a batch that can go to the replica as it is, now."""
        return _is_opened(rules) or pid in self._waiting

    def start(self, pid: PartitionId, batch: PreparedBatch, use: Callable[[PreparedBatch | SmqError], None]) -> None:
        """Calls `use` once, later, in the order of these calls for each partition: with the batch, or with why there
        is none. OVERLOADED if too much is under way. `use` must not raise."""
        if self._closed is not None:
            raise self._closed
        if self._count >= BATCHES_MAX or self._bytes >= BYTES_MAX:
            details = ErrorDetails(retry_after_ms=RETRY_MS)
            raise SmqError(ErrorCode.OVERLOADED, "too many batches wait to be converted", details)
        entry = _Entry(pid, batch, use, is_ready=not _is_opened(batch.rules), size=len(batch.data))
        self._waiting.setdefault(pid, deque()).append(entry)
        self._count += 1
        self._bytes += entry.size
        if not entry.is_ready:
            self._jobs.append(entry)
            self._begin_jobs()

    def _begin_jobs(self) -> None:
        """Jobs begin in the order of arrival. So a result that waits for its turn waits for a job that has begun, and
        too many results hold back only jobs that none of them waits for."""
        while self._jobs and self._running < RUNNING_MAX and self._held < BYTES_MAX:
            entry = self._jobs.popleft()
            self._running += 1
            self._compute.run(partial(prepared, entry.batch), partial(self._on_prepared, entry))

    def _on_prepared(self, entry: _Entry, batch: PreparedBatch) -> None:
        self._running -= 1
        if self._closed is not None:
            return
        entry.batch, entry.is_ready, entry.held = batch, True, len(batch.data)
        self._held += entry.held
        entries = self._waiting.get(entry.pid)
        while entries and entries[0].is_ready:
            first = entries.popleft()
            self._count -= 1
            self._bytes -= first.size
            self._held -= first.held
            if not entries:
                del self._waiting[entry.pid]  # before `use`, which may start another one
            first.use(first.batch)
        self._begin_jobs()

    def close(self, error: SmqError) -> None:
        """None of them has been appended."""
        self._closed = error
        self._jobs.clear()
        waiting, self._waiting = self._waiting, {}
        for entries in waiting.values():
            for entry in entries:
                entry.use(error)


def _is_opened(rules: BatchRules) -> bool:
    """Whether the topic has its batches looked into."""
    return rules.codec is not None or rules.has_time_limits or rules.needs_keys


def prepared(arrived: PreparedBatch) -> PreparedBatch:
    """The batch with its records looked at. Pure: it runs on any thread. A batch that is not right in itself comes
    back as it is, and is refused like any other."""
    batch, rules = arrived.data, arrived.rules
    try:
        header = validated(arrived)
    except SmqError:
        return arrived
    try:
        times = _times(batch, header) if rules.has_time_limits else None
        if rules.needs_keys:
            _check_keys(batch, header)
        if rules.codec is not None and rules.codec != header.codec:
            batch = converted(batch, header, rules.codec, rules.level)
            if len(batch) > rules.bytes_max:
                raise SmqError(
                    ErrorCode.BATCH_TOO_LARGE,
                    f"the batch has {len(batch)} bytes in the topic's compression.type, the limit is {rules.bytes_max}",
                )
    except SmqError as e:
        return arrived._replace(refusal=_for_producers(e))
    except Exception as e:  # noqa: BLE001 - the bytes are a producer's: whatever a codec raises, the batch is to blame
        message = f"the records of the batch do not decode: {e}"
        return arrived._replace(refusal=SmqError(ErrorCode.INVALID_BATCH, message))
    return arrived._replace(data=batch, times=times)


def _check_keys(batch: Buffer, header: BatchHeader) -> None:
    """INVALID_BATCH unless every record has a key: a compacted topic keeps the last record of each."""
    first = next((span.offset_delta for span in bounded_spans(batch, header) if span.key is None), None)
    if first is not None:
        message = f"record {first} of the batch has no key: a compacted topic keeps the last record of each key"
        raise SmqError(ErrorCode.INVALID_BATCH, message)


def _for_producers(error: SmqError) -> SmqError:
    """The bounds on decoding speak to readers."""
    if error.code is not ErrorCode.LIMIT_EXCEEDED:
        return error
    return SmqError(ErrorCode.BATCH_TOO_LARGE, f"{error.message.partition(';')[0]}: send smaller ones")


def _times(batch: Buffer, header: BatchHeader) -> tuple[int, int] | None:
    """The oldest and the newest timestamp; None if no record has one. What the header says counts, too: retention goes
    by it."""
    count, oldest, newest = 0, INT64_MAX, header.max_timestamp
    for record in decode_bounded(memoryview(batch)):
        count += 1
        if record.timestamp_ms >= 0:
            oldest, newest = min(oldest, record.timestamp_ms), max(newest, record.timestamp_ms)
    if count != header.count:
        raise ValueError(f"there are {count}, and the header says {header.count}")
    return (min(oldest, newest), newest) if newest >= 0 else None
