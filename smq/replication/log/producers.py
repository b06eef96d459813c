"""The idempotence table of one partition: which producer wrote which sequence last, folded from the log.

Owns the answer to "is this batch new, a repeat, or out of order". It checks against the appended (not the committed)
state, and truncation rolls it back by folding again. Its answers are equal on all replicas: they depend on the log and
on the partition's replicated `producers_start` alone, whether or not the entries below that have been removed here. It
reads no clock, never forgets an entry by itself, and does no I/O. The log store keeps it; the leader asks it.

A producer's open transaction is part of its entry, and so is the last one that has ended: a reader who does not know
yet that the marker is committed takes it for open. An entry with an open transaction is never forgotten.

An entry is one bytes object, because a node may hold hundreds of thousands: 160 bytes of memory with one batch, 290
with five. It is written by hand, for speed: each batch of a producer makes a new one. A snapshot is the entries one
after another, and copies of a table share their entries.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Epoch, Offset, ProducerEpoch, ProducerId, Sequence, TsNs
from smq.raft_state.limits import OFFSET_MAX
from smq.records import INT32_MAX, BatchHeader
from smq.replication.api import ActiveProducer

CACHED_BATCHES: Final = 5  # a Kafka producer has at most five batches in flight to a partition

_HEAD: Final = struct.Struct(">qhB")  # id, producer epoch, number of batches, with _HAS_TRANSACTIONS if they follow
_COUNT_AT: Final = 10
_HAS_TRANSACTIONS: Final = 0x80
# The first offset of the open transaction, and first offset, marker and the marker's ts_ns of the last one that has
# ended; -1 for none.
_TRANSACTIONS: Final = struct.Struct(">qqqq")
_NO_TRANSACTIONS: Final = (-1, -1, -1, -1)
_BATCH: Final = struct.Struct(">iqqiq")  # epoch, base offset, end, first sequence, ts_ns; the newest last
_END: Final = struct.Struct(">q")
_END_FROM_STOP: Final = 20  # the end of the newest batch lies this far before the entry's own end


class CachedBatch(NamedTuple):
    """A batch that is in the log already. Rule 10 applies to its answer, hence epoch and end."""

    epoch: Epoch
    base_offset: Offset
    end: Offset
    first_seq: Sequence
    last_seq: Sequence
    ts_ns: TsNs


class ProducerTable:
    """The producers of one partition. Equal if they hold the same entries."""

    __slots__ = ("_changed", "_ended", "_entries", "_open", "has_lost_changes", "size_bytes")

    def __init__(self) -> None:
        self._entries: dict[int, bytes] = {}  # bounded by the node's producers_max, which the leader watches
        self._changed: set[int] = set()  # producers whose entries no checkpoint holds yet
        # One of those has been forgotten: the checkpoints may hold it with a transaction that has ended since.
        self.has_lost_changes = False
        self.size_bytes = 0  # of a snapshot
        # Derived from the entries: the first offset of each open transaction; first offset and marker of those whose
        # marker is not known to be committed yet.
        self._open: dict[int, Offset] = {}
        self._ended: dict[int, tuple[Offset, Offset]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerTable) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  # a table changes, so it must not be a key

    def knows(self, producer_id: int, start: Offset) -> bool:
        """Whether a batch of this producer above `start` is remembered."""
        return self._known(producer_id, start) is not None

    def _known(self, producer_id: int, start: Offset) -> bytes | None:
        entry = self._entries.get(producer_id)
        return entry if entry is not None and _last_end(entry) > start else None

    def check(self, header: BatchHeader, start: Offset) -> CachedBatch | None:
        """The cached batch if it is in the log already, None if it is new. Batches that end at or below `start` count
        as forgotten.

        Raises PRODUCER_FENCED for an older producer epoch, OUT_OF_ORDER_SEQUENCE for a gap. As in Kafka, an unknown
        producer may begin with any sequence: its earlier batches have expired, or were deleted before this log began.
        """
        entry = self._known(header.producer_id, start)
        if entry is None:
            return None
        _, producer_epoch, count = _HEAD.unpack_from(entry)
        if header.producer_epoch < producer_epoch:
            raise SmqError(
                ErrorCode.PRODUCER_FENCED,
                f"producer {header.producer_id} has epoch {producer_epoch}, the batch has the older "
                f"{header.producer_epoch}",
            )
        expected = 0
        if header.producer_epoch == producer_epoch and count & ~_HAS_TRANSACTIONS:
            batches = [_cached(*row) for row in _BATCH.iter_unpack(entry[_batches_at(entry) :])]
            for cached in reversed(batches):
                is_same = cached.first_seq == header.base_sequence and cached.last_seq == header.last_sequence
                if is_same and cached.end > start:
                    return cached
            expected = (batches[-1].last_seq + 1) & INT32_MAX
        if header.base_sequence != expected:
            raise SmqError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE,
                f"producer {header.producer_id} sent sequence {header.base_sequence}, expected {expected}",
            )
        return None

    def next_sequence(self, header: BatchHeader, start: Offset) -> int | None:
        """The sequence that must follow in the log under the producer and epoch of `header`; None if the table knows
        none of it."""
        entry = self._known(header.producer_id, start)
        if entry is None or _HEAD.unpack_from(entry)[1] != header.producer_epoch:
            return None
        newest = _newest(entry)
        return (newest.last_seq + 1) & INT32_MAX if newest is not None else 0

    # ---------------------------------------------------------------------------------------------- transactions
    def open_from(self, producer_id: int) -> Offset | None:
        """Where the producer's open transaction begins; None if it has none."""
        return self._open.get(producer_id)

    def has_ended(self, producer_id: int, known: Offset) -> bool:
        """Whether nothing of the producer is open in a log that is known to be committed up to `known`."""
        _, marker = self._ended.get(producer_id, (-1, -1))
        return producer_id not in self._open and marker < known

    def stable_end(self, known: Offset) -> Offset:
        """The last stable offset of a log that is known to be committed up to `known`: below it, every transaction has
        a marker below `known`."""
        end = known
        for first in self._open.values():
            end = min(end, first)
        if self._ended:
            self._ended = {producer: (first, at) for producer, (first, at) in self._ended.items() if at >= known}
            for first, _ in self._ended.values():
                end = min(end, first)
        return end

    # ------------------------------------------------------------------------------------------------- changes
    def note(
        self,
        producer_id: ProducerId,
        producer_epoch: ProducerEpoch,
        batch: CachedBatch,
        *,
        is_transactional: bool = False,
    ) -> None:
        """Records an appended batch, which is no control batch. Never refuses: the log is the truth."""
        row = _BATCH.pack(batch.epoch, batch.base_offset, batch.end, batch.first_seq, batch.ts_ns)
        known = self._entries.get(producer_id)
        kept, count, section = b"", 1, b""
        if known is not None:
            start = _batches_at(known)
            section = known[_HEAD.size : start]
            if _HEAD.unpack_from(known)[1] == producer_epoch:
                kept = known[max(start, len(known) - (CACHED_BATCHES - 1) * _BATCH.size) :]
                count = len(kept) // _BATCH.size + 1
        if is_transactional and producer_id not in self._open:
            _, *ended = _TRANSACTIONS.unpack(section) if section else _NO_TRANSACTIONS
            section = _TRANSACTIONS.pack(batch.base_offset, *ended)
        count |= _HAS_TRANSACTIONS if section else 0
        self._put(producer_id, _HEAD.pack(producer_id, producer_epoch, count) + section + kept + row)
        self._changed.add(producer_id)

    def end_transaction(
        self, producer_id: ProducerId, producer_epoch: ProducerEpoch, marker: Offset, ts_ns: TsNs
    ) -> Offset | None:
        """A control batch at `marker`. Returns where the transaction begins; None if the log knows of none. A marker of
        a newer producer epoch fences the older one: the next batch begins with sequence 0."""
        known, first = self._entries.get(producer_id), self._open.get(producer_id)
        if known is None or first is None:
            return None
        _, epoch, count = _HEAD.unpack_from(known)
        is_newer = producer_epoch > epoch
        batches = b"" if is_newer else known[_batches_at(known) :]
        head = _HEAD.pack(producer_id, max(epoch, producer_epoch), _HAS_TRANSACTIONS if is_newer else count)
        self._put(producer_id, head + _TRANSACTIONS.pack(-1, first, marker, ts_ns) + batches)
        self._changed.add(producer_id)
        return first

    def entries(self, start: Offset) -> Iterator[ActiveProducer]:
        """The producers with a batch above `start`. The table must not change meanwhile."""
        for producer_id, entry in self._entries.items():
            if _last_end(entry) <= start:
                continue
            last = _newest(entry)
            yield ActiveProducer(
                ProducerId(producer_id),
                ProducerEpoch(_HEAD.unpack_from(entry)[1]),
                last.last_seq if last is not None else Sequence(-1),
                _last_ts_ns(entry, last),
                self._open.get(producer_id, Offset(-1)),
            )

    def _put(self, producer_id: int, entry: bytes) -> None:
        known = self._entries.get(producer_id)
        self.size_bytes += len(entry) - (len(known) if known is not None else 0)
        self._entries[producer_id] = entry
        if entry[_COUNT_AT] & _HAS_TRANSACTIONS:
            first, ended_first, ended_at, _ = _TRANSACTIONS.unpack_from(entry, _HEAD.size)
            if first >= 0:
                self._open[producer_id] = first
            else:
                self._open.pop(producer_id, None)
            if ended_at >= 0:
                self._ended[producer_id] = ended_first, ended_at

    def forget_before(self, start: Offset) -> None:
        """Removes the producers without a batch above `start`, and without an open transaction. No answer changes:
        `check` does not count them."""
        gone = [producer_id for producer_id, entry in self._entries.items() if _last_end(entry) <= start]
        for producer_id in gone:
            self.size_bytes -= len(self._entries.pop(producer_id))
            self._ended.pop(producer_id, None)
        self.has_lost_changes |= not self._changed.isdisjoint(gone)
        self._changed.difference_update(gone)
        if len(gone) > len(self._entries):
            self._entries = dict(self._entries)  # a dict keeps the memory of its largest size

    def share(self, other: "ProducerTable") -> None:
        """Uses the other table's objects for entries that are equal: two tables read from disk cost little more than
        one."""
        for producer_id, entry in other._entries.items():
            if self._entries.get(producer_id) == entry:
                self._entries[producer_id] = entry

    def copy(self) -> "ProducerTable":
        """Shares the entries, which never change."""
        table = ProducerTable()
        table._entries, table._changed = self._entries.copy(), self._changed.copy()
        table._open, table._ended = self._open.copy(), self._ended.copy()
        table.size_bytes, table.has_lost_changes = self.size_bytes, self.has_lost_changes
        return table

    # --------------------------------------------------------------------------------------------------- bytes
    def snapshot(self) -> bytes:
        return b"".join(self._entries.values())

    def changes(self) -> bytes:
        """The entries that have changed since `mark_saved`, in the form of a snapshot."""
        return b"".join(self._entries[producer_id] for producer_id in sorted(self._changed))

    def mark_saved(self) -> None:
        self._changed.clear()
        self.has_lost_changes = False

    def add(self, snapshot: bytes) -> None:
        """Takes in the entries of a snapshot, or of `changes`, in place of older ones. ValueError if the bytes are
        neither."""
        at, size = 0, len(snapshot)
        while at < size:
            if at + _HEAD.size > size:
                raise ValueError("a producer snapshot is truncated")
            producer_id, _, flags = _HEAD.unpack_from(snapshot, at)
            count, has_transactions = flags & ~_HAS_TRANSACTIONS, bool(flags & _HAS_TRANSACTIONS)
            stop = at + _HEAD.size + has_transactions * _TRANSACTIONS.size + count * _BATCH.size
            if not (1 - has_transactions) <= count <= CACHED_BATCHES or stop > size:
                raise ValueError(f"a producer snapshot does not decode: {count} batches at byte {at} of {size}")
            self._put(producer_id, snapshot[at:stop])
            at = stop

    @classmethod
    def restore(cls, snapshot: bytes) -> "ProducerTable":
        """Inverse of `snapshot`. ValueError if the bytes are not one."""
        table = cls()
        table.add(snapshot)
        return table


def _batches_at(entry: bytes) -> int:
    return _HEAD.size + (_TRANSACTIONS.size if entry[_COUNT_AT] & _HAS_TRANSACTIONS else 0)


def _last_end(entry: bytes) -> int:
    """Of the newest batch or marker; beyond all offsets as long as a transaction is open."""
    end: int = 0
    if entry[_COUNT_AT] & _HAS_TRANSACTIONS:
        first, _, ended_at, _ = _TRANSACTIONS.unpack_from(entry, _HEAD.size)
        if first >= 0:
            return OFFSET_MAX
        end = ended_at + 1
        if entry[_COUNT_AT] == _HAS_TRANSACTIONS:
            return end
    batch_end: int = _END.unpack_from(entry, len(entry) - _END_FROM_STOP)[0]
    return max(end, batch_end)


def _newest(entry: bytes) -> CachedBatch | None:
    """None if a marker has begun a new producer epoch, and no batch of it has come."""
    if entry[_COUNT_AT] == _HAS_TRANSACTIONS:
        return None
    return _cached(*_BATCH.unpack_from(entry, len(entry) - _BATCH.size))


def _last_ts_ns(entry: bytes, last: CachedBatch | None) -> TsNs:
    """Of the newest batch or marker."""
    ended_ts_ns = -1
    if entry[_COUNT_AT] & _HAS_TRANSACTIONS:
        *_, ended_ts_ns = _TRANSACTIONS.unpack_from(entry, _HEAD.size)
    return TsNs(max(ended_ts_ns, last.ts_ns if last is not None else -1))


def _cached(epoch: int, base: int, end: int, first_seq: int, ts_ns: int) -> CachedBatch:
    last_seq = (first_seq + end - base - 1) & INT32_MAX
    return CachedBatch(Epoch(epoch), Offset(base), Offset(end), Sequence(first_seq), Sequence(last_seq), TsNs(ts_ns))


class ArrivingTable:
    """A snapshot that comes in pieces from another node (rule 16)."""

    def __init__(self) -> None:
        self._stream = 0  # of the pieces below
        self._pieces: list[bytes] = []

    def add(self, stream: int, number: int, count: int, piece: bytes) -> bytes | None:
        """The whole snapshot with its last piece. A piece out of turn is dropped with its snapshot."""
        if stream != self._stream:
            self._stream = stream
            self._pieces.clear()
        if number != len(self._pieces):
            self._pieces.clear()
            return None
        self._pieces.append(piece)
        if len(self._pieces) < count:
            return None
        table = b"".join(self._pieces)
        self._pieces.clear()
        return table

    def clear(self) -> None:
        self._pieces.clear()
