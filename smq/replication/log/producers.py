"""The idempotence table of one partition: which producer wrote which sequence last, folded from the log.

Owns the answer to "is this batch new, a repeat, or out of order". It checks against the appended (not the committed)
state, and truncation rolls it back by folding again. It is equal on all replicas, because it depends on the log alone:
it reads no clock, and the order in the log decides which producer is forgotten. It does no I/O. The log store keeps
it; the leader asks it.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.records import INT32_MAX, BatchHeader
from smq.replication.api import ActiveProducer

CACHED_BATCHES: Final = 5  # a Kafka producer has at most five batches in flight to a partition
PRODUCERS_MAX: Final = 1000  # per partition: 160 KB of snapshot; the least recent writer is forgotten first

_PRODUCER: Final = struct.Struct(">qhB")  # id, producer epoch, number of batches
_BATCH: Final = struct.Struct(">iqqiq")  # epoch, base offset, end, first sequence, ts_ns


class CachedBatch(NamedTuple):
    """A batch that is in the log already. Rule 10 applies to its answer, hence epoch and end."""

    epoch: Epoch
    base_offset: Offset
    end: Offset
    first_seq: Sequence
    last_seq: Sequence
    ts_ns: TsNs


class _Producer(NamedTuple):
    producer_epoch: ProducerEpoch
    batches: tuple[CachedBatch, ...]  # the newest last; never empty


class ProducerTable:
    """The producers of one partition, the least recent writer first."""

    __slots__ = ("_producers",)

    def __init__(self) -> None:
        self._producers: dict[int, _Producer] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerTable) and list(self._producers.items()) == list(other._producers.items())

    __hash__ = None  # type: ignore[assignment]  # a table changes, so it must not be a key

    def check(self, header: BatchHeader) -> CachedBatch | None:
        """The cached batch if it is in the log already, None if it is new.

        Raises PRODUCER_FENCED for an older producer epoch, OUT_OF_ORDER_SEQUENCE for a gap. An unknown producer may
        begin with any sequence: its earlier batches may have been deleted, or its entry forgotten.
        """
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return None
        if header.producer_epoch < producer.producer_epoch:
            raise SmqError(
                ErrorCode.PRODUCER_FENCED,
                f"producer {header.producer_id} has epoch {producer.producer_epoch}, the batch has the older "
                f"{header.producer_epoch}",
            )
        expected = 0
        if header.producer_epoch == producer.producer_epoch:
            for cached in reversed(producer.batches):
                if cached.first_seq == header.base_sequence and cached.last_seq == header.last_sequence:
                    return cached
            expected = (producer.batches[-1].last_seq + 1) & INT32_MAX
        if header.base_sequence != expected:
            raise SmqError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE,
                f"producer {header.producer_id} sent sequence {header.base_sequence}, expected {expected}",
            )
        return None

    def next_sequence(self, header: BatchHeader) -> int | None:
        """The sequence that must follow in the log under the producer and epoch of `header`; None if the table knows
        none of it."""
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.producer_epoch != header.producer_epoch:
            return None
        return (producer.batches[-1].last_seq + 1) & INT32_MAX

    def fold(self, header: BatchHeader, ts_ns: TsNs) -> None:
        """Records an appended batch; `header` carries its base offset and epoch."""
        if header.producer_id >= 0:
            self.note(
                ProducerId(header.producer_id),
                ProducerEpoch(header.producer_epoch),
                CachedBatch(
                    Epoch(header.epoch),
                    Offset(header.base_offset),
                    Offset(header.end),
                    Sequence(header.base_sequence),
                    Sequence(header.last_sequence),
                    ts_ns,
                ),
            )

    def note(self, producer_id: ProducerId, producer_epoch: ProducerEpoch, batch: CachedBatch) -> None:
        """As `fold`, from its parts. Never refuses: the log is the truth."""
        known = self._producers.pop(producer_id, None)
        if known is None or known.producer_epoch != producer_epoch:
            batches: tuple[CachedBatch, ...] = (batch,)
        else:
            batches = (*known.batches[-(CACHED_BATCHES - 1) :], batch)
        self._producers[producer_id] = _Producer(producer_epoch, batches)
        if len(self._producers) > PRODUCERS_MAX:
            del self._producers[next(iter(self._producers))]

    def entries(self) -> Iterator[ActiveProducer]:
        """The least recent writer first. The table must not change meanwhile."""
        for producer_id, producer in self._producers.items():
            last = producer.batches[-1]
            yield ActiveProducer(ProducerId(producer_id), producer.producer_epoch, last.last_seq, last.ts_ns)

    def snapshot(self) -> bytes:
        parts: list[bytes] = []
        for producer_id, producer in self._producers.items():
            parts.append(_PRODUCER.pack(producer_id, producer.producer_epoch, len(producer.batches)))
            parts.extend(_BATCH.pack(b.epoch, b.base_offset, b.end, b.first_seq, b.ts_ns) for b in producer.batches)
        return b"".join(parts)

    @classmethod
    def restore(cls, snapshot: bytes) -> "ProducerTable":
        """Inverse of `snapshot`. ValueError if the bytes are not one."""
        table = cls()
        at = 0
        try:
            while at < len(snapshot):
                producer_id, producer_epoch, count = _PRODUCER.unpack_from(snapshot, at)
                at += _PRODUCER.size
                stop = at + count * _BATCH.size
                batches = tuple(_cached(*row) for row in _BATCH.iter_unpack(snapshot[at:stop]))
                if len(batches) != count:
                    raise ValueError("a producer snapshot is truncated")
                table._producers[producer_id] = _Producer(producer_epoch, batches)
                at = stop
        except struct.error as e:
            raise ValueError(f"a producer snapshot does not decode: {e}") from e
        return table


def _cached(epoch: int, base: int, end: int, first_seq: int, ts_ns: int) -> CachedBatch:
    last_seq = (first_seq + end - base - 1) & INT32_MAX
    return CachedBatch(Epoch(epoch), Offset(base), Offset(end), Sequence(first_seq), Sequence(last_seq), TsNs(ts_ns))
