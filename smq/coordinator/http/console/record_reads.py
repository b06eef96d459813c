"""Records for the console: those of one partition from an offset on, or the last before one, within bounds.

Owns the bounds of records, bytes and time, and the search. It reads this node's copy as a reader of committed records
does, without aborted transactions and control batches, and decodes on a thread so that the loop goes on. `merging` and
the pages that show its records import it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.reader_memory import PAGES, on_thread
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.errors import LimitExceeded
from smq.records import BatchCorrupt, Record
from smq.replication.api import Fetched, StoredBatch
from smq.replication.log.decoding import decode_bounded

PAGE_RECORDS: Final = 50
SEARCHED_RECORDS_MAX: Final = 20_000  # per request, about a tenth of a second; the page links to where it goes on
READ_BYTES: Final = 1 << 20  # per fetch
READ_MS: Final = 5_000
DECODED_BYTES_MAX: Final = 16 << 20  # of one batch: what expands further is shown as one line
FETCHES_MAX: Final = 64  # per request: batches may be small, and gaps large
# How many offsets before its end a page of the newest records looks through, until it has enough of them: transactions,
# compaction and searches leave offsets without one.
WINDOWS: Final = (PAGE_RECORDS, 1_000, 20_000)


@dataclass(frozen=True, slots=True)
class Shown:
    """A record, or a batch that cannot be decoded (`record` is None, `problem` says why)."""

    partition: int
    offset: int
    ts_ns: int
    record: Record | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    records: list[Shown]
    next_offset: int  # where to go on: no record before it is left out
    searched: int  # records that were looked at
    end: int  # where a reader stops: at the end it asked for, or at the last stable offset
    begin: int  # no record from here to the first of these is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is read. `end` bounds the offsets, `text` is to be in key, value or headers. `share`: of several partitions
    that share one request's bounds."""

    end: int | None = None
    text: str = ""
    share: int = 1

    @property
    def searched_max(self) -> int:
        return SEARCHED_RECORDS_MAX // self.share

    @property
    def read_bytes(self) -> int:
        return max(READ_BYTES // self.share, 64 << 10)

    @property
    def fetches_max(self) -> int:
        return max(FETCHES_MAX // self.share, 4)


class _Page:
    """What one read has found so far: the first records of it, or the last."""

    def __init__(self, offset: int, wish: Wish, *, keeps_last: bool) -> None:
        self.wish = wish
        self.keeps_last = keeps_last
        self.found: deque[Shown] = deque(maxlen=PAGE_RECORDS if keeps_last else None)
        self.next_offset = self._begin = offset
        self.searched = 0
        self.end = offset
        self._needle = wish.text.encode()

    @property
    def is_done(self) -> bool:
        is_full = not self.keeps_last and len(self.found) >= PAGE_RECORDS
        return is_full or self.searched >= self.wish.searched_max or self.next_offset >= self.end

    def take(self, shown: Shown) -> bool:
        """False if the read ends before this record."""
        if shown.offset < self.next_offset and shown.record is not None:
            return True
        if self.is_done or shown.offset >= self.end:
            self.next_offset = max(self.next_offset, min(shown.offset, self.end))
            return False
        self.searched += 1
        self.next_offset = max(self.next_offset, shown.offset + 1)
        if not self._needle or _contains(shown, self._needle):
            self.found.append(shown)
        return True

    def result(self) -> Found:
        return Found(list(self.found), self.next_offset, self.searched, self.end, self._begin)


async def read(calls: NodeCalls, topic: str, partition: int, offset: int, wish: Wish) -> Found:
    """Up to PAGE_RECORDS records from `offset` on. Raises SmqError: OFFSET_OUT_OF_RANGE with the range, NOT_REPLICA
    elsewhere."""
    return await _read(calls, topic, partition, offset, _Page(offset, wish, keeps_last=False))


async def read_back(calls: NodeCalls, topic: str, partition: int, start: int, end: int, wish: Wish) -> Found:
    """The last PAGE_RECORDS records before `end`, as far as the bounds reach; none is before `start`."""
    wish = replace(wish, end=end)
    found = Found([], end, 0, end, end)
    for window in WINDOWS:
        first = max(start, end - window)
        further = await _read(calls, topic, partition, first, _Page(first, wish, keeps_last=True))
        if further.next_offset < further.end:
            break  # a bound was met before the end: these would not be the last ones
        found = further
        if len(found.records) >= PAGE_RECORDS:
            return replace(found, begin=found.records[0].offset)
        if first == start:
            break
    return found


async def _read(calls: NodeCalls, topic: str, partition: int, offset: int, page: _Page) -> Found:
    wish = page.wish
    for _ in range(wish.fetches_max):
        fetched = await calls.fetch(
            topic,
            partition,
            page.next_offset,
            max_bytes=wish.read_bytes,
            max_wait_ms=0,
            answer_ms=READ_MS,
            is_committed=True,
        )
        page.end = fetched.lso if wish.end is None else min(fetched.lso, wish.end)
        if not await on_thread(PAGES, partial(_take_all, page, partition, fetched)):
            return page.result()
        if not fetched.batches or page.is_done:
            break
    return page.result()


def _take_all(page: _Page, partition: int, fetched: Fetched) -> bool:
    """On a thread. Its caller waits, so the page is its alone. False if the page ends before the end of the batches."""
    for batch in fetched.batches:
        if is_visible(fetched, batch) and not all(map(page.take, _decoded(partition, batch))):
            return False
        page.next_offset = max(page.next_offset, min(batch.last_offset + 1, page.end))
    return True


def _decoded(partition: int, batch: StoredBatch) -> Iterator[Shown]:
    """A batch that does not decode has a line that says so, and does not hide the others."""
    try:
        for record in decode_bounded(batch.data, DECODED_BYTES_MAX):
            ts_ns = batch.ts_ns + record.offset - batch.base_offset
            yield Shown(partition, record.offset, ts_ns, record)
    except (BatchCorrupt, LimitExceeded) as e:
        problem = f"the batch of offsets {batch.base_offset} to {batch.last_offset} cannot be shown: {e}"
        yield Shown(partition, batch.base_offset, batch.ts_ns, None, problem)


def _contains(shown: Shown, needle: bytes) -> bool:
    record = shown.record
    if record is None:
        return False
    if needle in (record.key or b"") or needle in (record.value or b""):
        return True
    return any(needle in name.encode() or needle in (value or b"") for name, value in record.headers)
