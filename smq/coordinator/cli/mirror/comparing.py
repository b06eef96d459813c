"""How far a copy is behind, and whether it is one: both logs, range by range, by their digests and then by record.

Owns what counts as a difference. Both sides are read by Kafka's protocol, so the bytes that consumers get are
compared. It must never write. All of `smq mirror` imports it.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, TypeAlias

from smq.coordinator.cli.mirror.kafka_side import OUT_OF_RANGE, KafkaSide, Place
from smq.coordinator.user_errors import UserError
from smq.records import PREFIX_BYTES, BatchHeader, decode_batch, parse_header

RANGE_OFFSETS: Final = 100_000  # compared together: some 100 MB of records of 1 KB if they differ
SHOWN_MAX: Final = 10  # differing offsets of a partition
_EPOCH_AT: Final = PREFIX_BYTES - 4

Found: TypeAlias = tuple[BatchHeader, bytes]


@dataclass(slots=True)
class Behind:
    """Of one partition. `bytes` is by the size of the next batches; `since_ms` is its first record's create time."""

    place: Place
    source_end: int
    end: int
    bytes: int = 0
    since_ms: int = -1

    @property
    def offsets(self) -> int:
        return max(0, self.source_end - self.end)


async def behind(source: KafkaSide, place: Place, end: int) -> Behind:
    _, source_end = await source.bounds(place)
    found = Behind(place, source_end, end)
    if found.offsets:
        batches = [(parse_header(b), b) for b in (await source.fetch_one(place, end)).batches]
        covered = sum(header.last_offset_delta + 1 for header, _ in batches)
        if batches:
            found.since_ms = batches[0][0].base_timestamp
            found.bytes = sum(len(b) for _, b in batches) * found.offsets // covered
    return found


@dataclass(slots=True)
class Compared:
    """One partition in [start, stop)."""

    place: Place
    start: int
    stop: int
    is_compacted: bool
    ranges: int = 0
    equal_ranges: int = 0  # all bytes are the same
    records: int = 0  # on both sides, and the same
    differing: int = 0
    only_there: int = 0
    only_here: int = 0
    shown: list[int] = field(default_factory=list)  # the first offsets that differ

    @property
    def is_copy(self) -> bool:
        """Of a compacted topic, each side keeps what its own compaction has left."""
        return not self.differing and (self.is_compacted or not (self.only_there or self.only_here))


async def compare(
    there: KafkaSide,
    here: KafkaSide,
    place: Place,
    *,
    is_compacted: bool,
    advance: Callable[[int], None] = lambda _: None,
    last: int | None = None,
) -> Compared:
    """What both sides have: from the later of the two starts to the earlier of the two ends; or the last so many of
    these offsets."""
    (first, end), (own_first, own_end) = await there.bounds(place), await here.bounds(place)
    result = Compared(place, max(first, own_first), min(end, own_end), is_compacted)
    if last is not None:
        result.start = max(result.start, result.stop - last)
    at = result.start
    while at < result.stop:
        stop = min(at + RANGE_OFFSETS, result.stop)
        theirs = [found async for found in batches_of(there, place, at, stop)]
        ours = [found async for found in batches_of(here, place, at, stop)]
        result.ranges += 1
        if _digest(theirs) == _digest(ours):
            result.equal_ranges += 1
            result.records += sum(header.count for header, _ in theirs if header.base_offset >= at)
        else:
            _by_record(result, _records(theirs, at, stop), _records(ours, at, stop))
        advance(stop - at)
        at = stop
    return result


async def batches_of(side: KafkaSide, place: Place, start: int, stop: int) -> AsyncIterator[Found]:
    """Those with records or an end of a transaction, from the one that contains `start` to the last below `stop`."""
    at = start
    while at < stop:
        piece = await side.fetch_one(place, at)
        if piece.error == OUT_OF_RANGE:
            raise UserError(f"the {side.name} has deleted offset {at} of {place[0]}/{place[1]} meanwhile: verify again")
        if not piece.batches:
            return  # compaction has left nothing
        for batch in piece.batches:
            header = parse_header(batch)
            if header.base_offset >= stop:
                return
            if header.end > at:
                at = header.end
                if header.count:
                    yield header, batch


def _digest(found: list[Found]) -> bytes:
    """Of all but the epochs, which are each log's own."""
    total = sha256()
    for _, batch in found:
        total.update(batch[:_EPOCH_AT])
        total.update(batch[PREFIX_BYTES:])
    return total.digest()


def _records(found: list[Found], start: int, stop: int) -> dict[int, object]:
    """By offset, all that a reader gets of each, and whose transaction it belongs to."""
    records: dict[int, object] = {}
    for header, batch in found:
        own = (header.attributes & 0x30, header.producer_id if header.is_transactional else -1)
        for r in decode_batch(batch):
            if start <= r.offset < stop:
                records[r.offset] = (own, r.timestamp_ms, r.key, r.value, tuple(r.headers))
    return records


def _by_record(result: Compared, theirs: dict[int, object], ours: dict[int, object]) -> None:
    for offset in sorted(theirs.keys() | ours.keys()):
        if offset not in ours:
            result.only_there += 1
        elif offset not in theirs:
            result.only_here += 1
        elif theirs[offset] == ours[offset]:
            result.records += 1
            continue
        else:
            result.differing += 1
        if len(result.shown) < SHOWN_MAX and not (result.is_compacted and (offset not in ours or offset not in theirs)):
            result.shown.append(offset)
