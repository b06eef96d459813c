"""A partition's leader as the producer must get along with it: Kafka's idempotence rules, commits, truncations.

An honest model for tests, not a mock: it stores what it accepts, answers when it commits, and loses what was not
committed when its leader changes.
"""

from collections import deque
from dataclasses import dataclass, field

from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import INT32_MAX, BatchHeader, decode_batch, validate_produced

REMEMBERED_BATCHES = 5


@dataclass
class Stored:
    data: bytes
    header: BatchHeader
    base_offset: int

    @property
    def end(self) -> int:
        return self.base_offset + self.header.count


@dataclass
class ModelPartition:
    """`stored` is the appended log; below `hwm` it is committed and never goes away."""

    stored: list[Stored] = field(default_factory=list)
    hwm: int = 0
    epoch: int = 0

    @property
    def end(self) -> int:
        return self.stored[-1].end if self.stored else 0

    def _of(self, producer_id: int) -> deque[Stored]:
        """The fold over the log: the last batches of one producer."""
        return deque((s for s in self.stored if s.header.producer_id == producer_id), maxlen=REMEMBERED_BATCHES)

    def append(self, data: bytes) -> tuple[Stored, bool]:
        """(where it lies, whether it was there before). SmqError where the rules refuse it."""
        header = validate_produced(data)
        if header.producer_id >= 0:
            known = self._of(header.producer_id)
            for stored in known:
                if stored.header.base_sequence == header.base_sequence and stored.header.count == header.count:
                    return stored, True
            if known:
                expected = (known[-1].header.last_sequence + 1) & INT32_MAX
                if header.base_sequence != expected:
                    told = f"sequence {header.base_sequence}, expected {expected}"
                    raise SmqError(ErrorCode.OUT_OF_ORDER_SEQUENCE, told)
        stored = Stored(data, header, self.end)
        self.stored.append(stored)
        return stored, False

    def commit(self) -> None:
        self.hwm = self.end

    def change_leader(self) -> None:
        """What was not committed is truncated."""
        self.stored = [s for s in self.stored if s.end <= self.hwm]
        self.epoch += 1

    def values(self) -> list[bytes | None]:
        """Of all committed records, in order."""
        return [r.value for s in self.stored if s.end <= self.hwm for r in decode_batch(s.data)]
