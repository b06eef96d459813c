"""Rewrites the batches of a segment without the records that compaction removes. Pure.

Owns what a rewritten batch looks like. Every offset stays where it was, every record keeps its offset, its times and
its bytes, and the batches still touch: what is missing are records. A batch that has lost all of them is joined to the
one before it, or stays without records. The information about producers stays as long as it changes an answer
(`producers_start`). Epochs are never mixed, nor transactions. Of a producer's control batches in one segment at most
two stay, and of its transactions those that they end (`_without_ends`). Such a transaction that was aborted keeps the
first of its batches, so that a log says where it began. It must never decide which records go: its caller says that,
and which batches were aborted. Only compaction uses it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import compress, islice
from operator import lt
from typing import Final, NamedTuple, TypeAlias

from smq.raft_state.errors import SmqError
from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import (
    CODEC_MASK,
    CONTROL_MASK,
    HEADER_BYTES,
    INT32_MAX,
    TIMESTAMP_TYPE_MASK,
    TRANSACTIONAL_MASK,
    BatchCorrupt,
    BatchHeader,
    Buffer,
    KeyedRecord,
    build_batch,
    keyed_records,
    parse_header,
)
from smq.replication.log.decoding import compress as compressed
from smq.replication.log.decoding import plain_batch, record_groups, spans, varint
from smq.replication.log.segments import digest_of
from smq.replication.log.stored_batch import (
    BatchKind,
    StoredValue,
    build_value,
    info_of_stored,
    parse_header_of,
    parse_value,
)

NO_TIMESTAMP: Final = -1
RECORDS_MAX: Final = 1 << 20  # of one batch: 150 MB while compaction looks at it. Records of 1 MiB are above 100 bytes
_NO_PRODUCER: Final = -1
Selects: TypeAlias = Callable[[list[KeyedRecord]], list[bool]]  # for each record of a batch: whether it stays


def readable_records(stored: StoredValue) -> tuple[BatchHeader, memoryview, list[KeyedRecord]] | None:
    """Header, decompressed body and records of a batch that compaction may look into. None for control batches, for one
    of more than RECORDS_MAX, and for bytes that do not decode, or whose records are not at ascending offsets of the
    batch: it stays as it is."""
    _, header = parse_header_of(stored.value, verify=None)
    if header.is_control:
        return None
    if not header.count:
        return header, memoryview(b""), []
    if header.count > RECORDS_MAX:
        return None
    try:
        # Without a limit of time, which is no property of the bytes: all readings of all passes must agree on which
        # batches they can read. Otherwise a tombstone could go before what it deletes.
        batch = plain_batch(header, stored.batch, cpu_s_max=math.inf)
        body = memoryview(batch)[HEADER_BYTES:]
        records = _keyed(header, batch, body)
        offsets = [offset for offset, _, _ in records]
        is_ascending = all(map(lt, offsets, islice(offsets, 1, None)))
        if not offsets or not is_ascending or offsets[0] < stored.base or offsets[-1] >= stored.end:
            return None
        return header, body, records
    except (BatchCorrupt, SmqError):
        return None


def _keyed(header: BatchHeader, batch: Buffer, body: memoryview) -> list[KeyedRecord]:
    try:
        return [record for group in record_groups(batch, header) for record in keyed_records(group)]
    except BatchCorrupt:  # it decodes headers, too, and these may be no text
        found = spans(body, header.count)
        return [(header.base_offset + span.offset_delta, span.key, span.is_tombstone) for span in found]


@dataclass(slots=True)
class _Draft:
    """A batch of the new segment. `value` is set while it is the old one, unchanged. Its end lies beyond that of its
    header once others are joined to it."""

    end: Offset
    epoch: Epoch
    ts_ns: TsNs
    header: BatchHeader
    body: bytes | memoryview
    value: bytes | None
    is_unread: bool = False  # its bytes stay exactly as they are
    kind: int = BatchKind.PLAIN

    @property
    def base(self) -> Offset:
        return Offset(self.header.base_offset)


class _Ends(NamedTuple):
    """The first and the last control batch of one producer: which drafts they are, and whether they commit."""

    first: int
    first_commits: bool
    last: int
    last_commits: bool


class Rewritten(NamedTuple):
    """A whole new segment."""

    values: list[StoredValue]
    digest: bytes
    has_tombstones: bool
    removed: int  # records
    is_changed: bool  # otherwise the bytes are the old ones


class SegmentWriter:
    """Takes the batches of one segment in order, and gives the new ones."""

    def __init__(self, pid: PartitionId, producers_start: Offset) -> None:
        self._pid = pid
        self._producers_start = producers_start
        self._drafts: list[_Draft] = []
        self._has_tombstones = False
        self._removed = 0
        self.has_unread = False  # a batch of data that `readable_records` refuses: it may hold older records of any key

    def add(self, stored: StoredValue, selects: Selects) -> None:
        ts_ns, header = parse_header_of(stored.value, verify=None)
        found = readable_records(stored)
        if found is not None:
            _, body, records = found
            stays = selects(records)
            raw: bytes | memoryview = stored.batch[HEADER_BYTES:]
            value: bytes | None = stored.value
            try:
                if not all(stays):
                    header, raw, value = *_without_others(header, body, stays), None
            except BatchCorrupt:  # it was decoded otherwise than it is cut: numbers that are longer than Kafka's
                found = None
        if found is None:
            self.has_unread |= not header.is_control
            self._take(stored, ts_ns, header, b"", stored.value, is_unread=True)
            return
        left = compress(records, stays)
        self._has_tombstones |= any(is_tombstone and key is not None for _, key, is_tombstone in left)
        self._removed += stays.count(False)
        self._take(stored, ts_ns, header, raw, value)

    def add_aborted(self, stored: StoredValue) -> None:
        """A batch of an aborted transaction: all its records go, whatever they are."""
        ts_ns, header = parse_header_of(stored.value, verify=None)
        value: bytes | None = stored.value
        if header.count:
            self._removed += header.count
            header, value = _without_records(header), None
        self._take(stored, ts_ns, header, b"", value)

    def _take(
        self,
        stored: StoredValue,
        ts_ns: TsNs,
        header: BatchHeader,
        body: bytes | memoryview,
        value: bytes | None,
        *,
        is_unread: bool = False,
    ) -> None:
        kind = info_of_stored(stored).kind
        draft = _Draft(stored.end, stored.epoch, ts_ns, header, body, value, is_unread, kind)
        self._join(self._drafts, draft)

    def _without_ends(self) -> Iterator[_Draft]:
        """The batches, without the control batches that nothing needs and the transactions that these ended.

        Of the control batches of one producer, the last stays: it ends whatever seems open in a state that comes from
        another version of the segment, as at a checkpoint in the middle. The first stays unless both commit, as it says
        how a transaction from before the segment ended. The transactions after it begin and end in this segment. What
        they committed becomes plain, as committed readers get it all; what they aborted is gone. Below
        `producers_start` only, where no answer depends on the producer."""
        ends = self._ends()
        for at, draft in enumerate(self._drafts):
            own = ends.get(draft.header.producer_id)
            if own is None or draft.kind == BatchKind.PLAIN or at >= own.last:
                yield draft
            elif draft.kind == BatchKind.TRANSACTIONAL:
                yield _plain(draft) if own.first_commits or at > own.first else draft
            elif at == own.first and not (own.first_commits and own.last_commits):
                yield draft
            else:
                yield _plain(replace(draft, header=_without_records(draft.header), body=b""))

    def _ends(self) -> dict[int, _Ends]:
        """By producer. Without those of a batch that has to stay transactional because it cannot be rewritten, or
        because it is not empty, although its transaction was aborted: that would be a defect elsewhere, and its records
        must not become visible."""
        found, with_records, refused = dict[int, _Ends](), set[int](), set[int]()
        for at, draft in enumerate(self._drafts):
            producer_id = draft.header.producer_id
            if draft.kind == BatchKind.TRANSACTIONAL:
                if draft.is_unread:
                    refused.add(producer_id)
                if draft.header.count:
                    with_records.add(producer_id)
            elif draft.kind != BatchKind.PLAIN:
                if draft.end > self._producers_start:
                    break
                commits = draft.kind == BatchKind.COMMIT
                if not commits and producer_id in with_records:
                    refused.add(producer_id)
                with_records.discard(producer_id)
                first, first_commits, _, _ = found.get(producer_id) or _Ends(at, commits, at, commits)
                found[producer_id] = _Ends(first, first_commits, at, commits)
        return {producer_id: own for producer_id, own in found.items() if producer_id not in refused}

    def _join(self, drafts: list[_Draft], draft: _Draft) -> None:
        """Adds the next batch, or extends the one before it."""
        before = drafts[-1] if drafts else None
        if before is None or draft.header.count or not self._may_join(before, draft):
            drafts.append(draft)
            return
        if before.end == before.header.end and not before.header.is_transactional:
            before.header = _without_producer(before.header)
        before.end, before.value = draft.end, None

    def _may_join(self, before: _Draft, after: _Draft) -> bool:
        """Two batches outside of transactions, or two that follow one another in one transaction. The latter have
        the same next control batch, so `_without_ends` treats them alike."""
        if before.epoch != after.epoch or after.end - before.base > INT32_MAX:
            return False
        if before.is_unread or after.is_unread:
            return False
        if before.header.is_transactional or after.header.is_transactional:
            return _is_continued(before, after) and after.end <= self._producers_start
        return not any(d.header.producer_id >= 0 and d.end > self._producers_start for d in (before, after))

    def finish(self) -> Rewritten:
        """Once, after the last batch."""
        drafts: list[_Draft] = []
        for draft in self._without_ends():
            self._join(drafts, draft)
        values = [self._built(draft) for draft in drafts]
        is_changed = any(draft.value is None for draft in drafts)
        return Rewritten(values, digest_of(values), self._has_tombstones, self._removed, is_changed)

    def _built(self, draft: _Draft) -> StoredValue:
        value = draft.value
        if value is None:
            batch = build_batch(replace(draft.header, last_offset_delta=draft.end - draft.base - 1), draft.body)
            value = build_value(self._pid, batch, parse_header(batch), draft.base, draft.epoch, draft.ts_ns)
        return parse_value(self._pid, value)


def _is_continued(before: _Draft, after: _Draft) -> bool:
    """Whether two transactional batches that touch are of one transaction, and as good as one. No control batch is
    between them, so the same producer cannot have begun another transaction."""
    one, other = before.header, after.header
    return (
        one.is_transactional
        and other.is_transactional
        and (one.producer_id, one.producer_epoch) == (other.producer_id, other.producer_epoch)
        and other.base_sequence == (one.base_sequence + before.end - before.base) & INT32_MAX
    )


def _plain(draft: _Draft) -> _Draft:
    """Outside of transactions."""
    attributes = draft.header.attributes & ~(TRANSACTIONAL_MASK | CONTROL_MASK)
    header = _without_producer(replace(draft.header, attributes=attributes))
    return replace(draft, header=header, value=None, is_unread=False, kind=BatchKind.PLAIN)


def _without_producer(header: BatchHeader) -> BatchHeader:
    return replace(header, producer_id=_NO_PRODUCER, producer_epoch=_NO_PRODUCER, base_sequence=_NO_PRODUCER)


def _without_records(header: BatchHeader) -> BatchHeader:
    return replace(header, attributes=header.attributes & ~CODEC_MASK, count=0, max_timestamp=NO_TIMESTAMP)


def _without_others(header: BatchHeader, body: memoryview, stays: list[bool]) -> tuple[BatchHeader, bytes]:
    """Header and compressed records of a batch that holds only the records that stay any more."""
    if not any(stays):
        return _without_records(header), b""
    records, timestamp_deltas = _cut(body, stays)
    max_timestamp = header.max_timestamp
    if not header.attributes & TIMESTAMP_TYPE_MASK:
        max_timestamp = header.base_timestamp + max(timestamp_deltas)
        if abs(max_timestamp) >> 63:
            raise BatchCorrupt(f"a record's time is {max_timestamp} ms after 1970")
    new = replace(header, count=len(timestamp_deltas), max_timestamp=max_timestamp)
    return new, bytes(compressed(records, header.codec))


def _cut(body: memoryview, stays: list[bool]) -> tuple[bytes, list[int]]:
    """The records that stay, one after another, and their timestamps. The body has been decoded, so it is whole."""
    parts, timestamp_deltas, at = list[memoryview](), list[int](), 0
    for stays_here in stays:
        start = at
        length, at = varint(body, at)
        stop = at + length
        if stays_here:
            parts.append(body[start:stop])
            timestamp_deltas.append(varint(body, at + 1)[0])  # after the record's attributes
        at = stop
    return b"".join(parts), timestamp_deltas
