"""A partition of the fake cluster: Kafka's idempotence rules, commits, truncations, and what a reader may see.

Owns an honest model, not a mock: it stores what it accepts, and loses whatever was not committed when its leader
changes. ModelPartition knows no event loop; FakePartition adds the waiting. It must never answer a request itself.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import INT32_MAX, PREFIX_BYTES, BatchHeader, decode_batch, patched_prefix, validate_produced

REMEMBERED_BATCHES = 5


@dataclass
class Stored:
    """One batch as it lies in the log: `data` carries its offset and epoch."""

    data: bytes
    header: BatchHeader  # as the producer sent it
    base_offset: int

    @property
    def end(self) -> int:
        """The offset after its last record."""
        return self.base_offset + self.header.count

    @property
    def ts_ns(self) -> int:
        """The append time of its first record: nanoseconds that grow by one per record."""
        return self.base_offset + 1


@dataclass
class ModelPartition:
    """`stored` is the appended log. A batch below `hwm` is committed and survives every change of leader."""

    stored: list[Stored] = field(default_factory=list)
    log_start: int = 0
    hwm: int = 0
    epoch: int = 0

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.stored[-1].end if self.stored else self.log_start

    def _of(self, producer_id: int) -> deque[Stored]:
        """The last batches of one producer."""
        return deque((s for s in self.stored if s.header.producer_id == producer_id), maxlen=REMEMBERED_BATCHES)

    def append(self, data: bytes) -> tuple[Stored, bool]:
        """(the stored batch, whether it was stored before). SmqError if the rules refuse it."""
        header = validate_produced(data)
        if header.producer_id >= 0:
            known = self._of(header.producer_id)
            for stored in known:
                if stored.header.base_sequence == header.base_sequence and stored.header.count == header.count:
                    return stored, True
            if known:
                expected = (known[-1].header.last_sequence + 1) & INT32_MAX
                if header.base_sequence != expected:
                    message = f"sequence {header.base_sequence}, expected {expected}"
                    raise SmqError(ErrorCode.OUT_OF_ORDER_SEQUENCE, message)
        patched = patched_prefix(self.end, header, self.epoch) + data[PREFIX_BYTES:]
        stored = Stored(patched, header, self.end)
        self.stored.append(stored)
        return stored, False

    def commit(self) -> None:
        self.hwm = self.end

    def truncate(self, end: int) -> None:
        """Drops the records from `end` on, committed or not, as if an older backup had been restored."""
        self.stored = [s for s in self.stored if s.end <= end]
        self.hwm = min(self.hwm, end)

    def change_leader(self) -> None:
        """Begins a new epoch and truncates whatever is not committed."""
        self.truncate(self.hwm)
        self.epoch += 1

    def values(self) -> list[bytes | None]:
        """The values of all committed records, in order."""
        return [r.value for s in self.stored if s.end <= self.hwm for r in decode_batch(s.data)]

    # --------------------------------------------------------------------------------------------- look-ups
    def batches(self, offset: int, bytes_max: int) -> Iterator[Stored]:
        """Committed batches from the one that holds `offset` on, within `bytes_max`; the first one in any case."""
        size = 0
        for stored in self.stored:
            if not offset < stored.end <= self.hwm:
                continue
            if size and size + len(stored.data) > bytes_max:
                return
            size += len(stored.data)
            yield stored

    def offset_at(self, *, created_ms: int | None = None, ts_ns: int | None = None) -> int:
        """The first readable offset whose create time or append time is not before the given one; otherwise the end."""
        for stored in self.stored:
            for record in decode_batch(stored.data):
                if not self.log_start <= record.offset < self.hwm:
                    continue
                if created_ms is not None and record.timestamp_ms >= created_ms:
                    return record.offset
                if ts_ns is not None and stored.ts_ns + record.offset - stored.base_offset >= ts_ns:
                    return record.offset
        return self.hwm


@dataclass
class FakePartition(ModelPartition):
    """A partition of a fake cluster. A test may set any of its fields."""

    leader: int = 1
    replicas: tuple[int, ...] = (1, 2, 3)
    is_held: bool = False  # appended batches stay uncommitted
    told_hwm: int | None = None  # what nodes know of `hwm` while the leader does not answer; None: it does
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self) -> None:
        """Commits, unless the partition is held, and wakes whatever waits for an append or a commit."""
        if not self.is_held:
            self.commit()
        self.wake()

    async def reaches(self, end: int) -> None:
        """Returns once the log has grown to `end`, committed or not."""
        while self.end < end:
            await self.changed.wait()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def move(self, leader: int) -> None:
        """Makes another node the leader: uncommitted batches are truncated, and their producers get an error."""
        self.change_leader()
        self.leader = leader
        self.wake()
