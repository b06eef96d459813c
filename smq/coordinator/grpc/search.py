"""SearchRecords: pages of the records that pass a filter, and the cursor that leads from page to page.

Owns how much is read for one page and how many searches run, and the form of a cursor. A page ends with its bounds or
with its share of work, so a search over a large log is many short calls, and costs other clients little. It must never
return a record that its reader does not get (`service.visibility`), or one at or beyond that reader's end.
`grpc.broker` and the fake broker import it.
"""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from crc32c import crc32c

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.open_streams import AnswerBudget
from smq.coordinator.grpc.record_chunks import decode_stored, record_bytes, to_pb
from smq.coordinator.grpc.service import Context, deadline_ms
from smq.coordinator.limits import (
    FETCH_BARRIER_MS,
    FETCH_WAIT_MS_MAX,
    FILTER_HEADERS_MAX,
    SEARCH_BYTES_DEFAULT,
    SEARCH_BYTES_MAX,
    SEARCH_LAG_MS,
    SEARCH_READ_BYTES,
    SEARCH_RECORDS_DEFAULT,
    SEARCH_RECORDS_MAX,
    SEARCH_SCAN_BYTES_MAX,
    SEARCH_SCAN_S_MAX,
    SEARCHES_MAX,
)
from smq.coordinator.service.byte_budget import overloaded
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.name_lookup import find_partition
from smq.coordinator.service.reader_memory import PAGES, on_thread
from smq.coordinator.service.record_filter import RecordFilter
from smq.coordinator.service.start_positions import resolve_seek
from smq.coordinator.service.visibility import is_committed_reader, is_visible
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.limits import PARTITION_ID_BYTES
from smq.records import Record, parse_header
from smq.replication.api import Fetched, StoredBatch, TimeKind

# Version, partition, next offset, end, and a CRC of the filter and the isolation
_CURSOR: Final = struct.Struct(f">B{PARTITION_ID_BYTES}sqqI")
_CURSOR_VERSION: Final = 1


@dataclass(slots=True)
class _Page:
    """`position`: everything below it has been searched."""

    position: Offset
    end: Offset
    records_max: int
    bytes_max: int
    until_s: float
    is_committed: bool
    records: list[pb.Record] = field(default_factory=list)
    size: int = 0
    scanned: int = 0
    is_full: bool = False

    def is_over(self) -> bool:
        has_worked = self.scanned >= SEARCH_SCAN_BYTES_MAX or time.monotonic() >= self.until_s
        return self.position >= self.end or self.is_full or has_worked

    def add(self, record: Record, ts_ns: int) -> None:
        """Takes the record, unless it does not fit: then it is the first of the next page."""
        size = record_bytes(record)
        if self.records and self.size + size > self.bytes_max:
            self.is_full = True
            return
        self.records.append(to_pb(record, ts_ns))
        self.size += size
        self.position = Offset(record.offset + 1)
        self.is_full = len(self.records) >= self.records_max or self.size >= self.bytes_max


class Searches:
    """Those of one node."""

    def __init__(self, calls: NodeCalls, answers: AnswerBudget) -> None:
        self._calls = calls
        self._answers = answers
        self._running = 0

    async def page(self, request: pb.SearchRecordsRequest, context: Context) -> pb.SearchRecordsResponse:
        """INVALID_REQUEST, OFFSET_OUT_OF_RANGE with what is there, OVERLOADED, and the errors of a fetch."""
        wanted, is_committed = filter_of(request.filter), is_committed_reader(request.isolation)
        _check(request)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        bytes_max = request.max_bytes or SEARCH_BYTES_DEFAULT
        partition = await find_partition(self._calls, request.topic, request.partition, timeout_ms)
        if request.max_wait_ms and not request.cursor:
            await self._wait(request, timeout_ms)
        with self._one_more():
            if request.cursor:
                position, end = _resumed(request, partition.pid)
            else:
                position, end = await self._first(request, wanted, timeout_ms)
            until_s = time.monotonic() + min(SEARCH_SCAN_S_MAX, timeout_ms / 2000)
            page = _Page(position, end, request.max_records or SEARCH_RECORDS_DEFAULT, bytes_max, until_s, is_committed)
            peer = context.peer()
            async with self._answers.reserved(peer, SEARCH_READ_BYTES + bytes_max, timeout_ms):
                await self._fill(page, request.topic, request.partition, wanted)
            self._answers.hold(peer, page.size)
        return pb.SearchRecordsResponse(
            records=page.records,
            cursor=_cursor(request, partition.pid, page) if page.position < page.end else b"",
            next_offset=page.position,
            end_offset=page.end,
        )

    async def _wait(self, request: pb.SearchRecordsRequest, timeout_ms: int) -> None:
        """For a record at the offset, before the search counts as one that runs; at most for half of the call."""
        wait_ms = min(request.max_wait_ms, FETCH_WAIT_MS_MAX, timeout_ms // 2)
        await self._calls.fetch(
            request.topic,
            request.partition,
            request.offset,
            max_bytes=0,
            max_wait_ms=wait_ms,
            answer_ms=min(wait_ms + FETCH_BARRIER_MS, timeout_ms),
            is_committed=is_committed_reader(request.isolation),
        )

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._running >= SEARCHES_MAX:
            raise overloaded(f"{SEARCHES_MAX} searches are running on this node")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _first(
        self, request: pb.SearchRecordsRequest, wanted: RecordFilter, timeout_ms: int
    ) -> tuple[Offset, Offset]:
        """Where a search begins and ends, as the partition's leader knows it now."""
        range_ = await self._calls.partition_range(request.topic, request.partition, timeout_ms)
        end = range_.end_for(is_committed=is_committed_reader(request.isolation))
        position = resolve_seek(request.offset, range_.log_start, end).offset
        if request.HasField("end_offset"):
            end = min(Offset(request.end_offset), end)
        if wanted.from_ms is not None and position < end:
            found = await self._calls.offset_for_time(
                request.topic, request.partition, TimeKind.TIMESTAMP_MS, wanted.from_ms, timeout_ms
            )
            position = max(position, min(found.offset, end))  # all records before it are older
        return position, end

    async def _fill(self, page: _Page, topic: str, partition: int, wanted: RecordFilter) -> None:
        while not page.is_over():
            fetched = await self._calls.fetch(
                topic,
                partition,
                page.position,
                max_bytes=SEARCH_READ_BYTES,
                max_wait_ms=SEARCH_LAG_MS,
                answer_ms=SEARCH_LAG_MS + FETCH_BARRIER_MS,
                is_committed=page.is_committed,
            )
            if not fetched.batches:
                return  # this replica lags: the next page asks again
            await on_thread(PAGES, partial(_search_all, fetched, page, wanted))


def _search_all(fetched: Fetched, page: _Page, wanted: RecordFilter) -> None:
    """On a thread. Its caller waits, so the page is its alone."""
    for batch in fetched.batches:
        if page.is_over():
            return
        _search(batch, page, wanted, has_records=is_visible(fetched, batch))


def _search(batch: StoredBatch, page: _Page, wanted: RecordFilter, *, has_records: bool) -> None:
    """The rest of the batch from the page's position on, until the page is full. Without records for this reader, the
    position passes it all the same."""
    page.scanned += len(batch.data)
    if has_records and wanted.may_hold(parse_header(batch.data)):
        for record in decode_stored(batch):
            if record.offset < page.position:
                continue  # batches are not cut
            if record.offset >= page.end:
                break
            if not wanted.passes(record):
                page.position = Offset(record.offset + 1)
                continue
            page.add(record, batch.ts_ns + record.offset - batch.base_offset)
            if page.is_full:
                return
    page.position = max(page.position, min(Offset(batch.last_offset + 1), page.end))


# ---------------------------------------------------------------------------------------------------- requests
def _check(request: pb.SearchRecordsRequest) -> None:
    message: str | None = None
    if request.cursor and (request.HasField("offset") or request.HasField("end_offset")):
        message = "offset and end_offset are for the first page: a cursor has its own"
    elif not request.cursor and not request.HasField("offset"):
        message = "offset must be set, or the cursor of the page before"
    elif request.HasField("end_offset") and request.end_offset < 0:
        message = f"end_offset is {request.end_offset}: it must be 0 or more"
    elif not 0 <= request.max_records <= SEARCH_RECORDS_MAX:
        message = f"max_records is {request.max_records}: it must be 0 to {SEARCH_RECORDS_MAX}"
    elif request.max_wait_ms < 0:
        message = f"max_wait_ms is {request.max_wait_ms}: it must be 0 or more"
    elif not 0 <= request.max_bytes <= SEARCH_BYTES_MAX:
        message = f"max_bytes is {request.max_bytes}: it must be 0 to {SEARCH_BYTES_MAX}"
    if message is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, message)


def filter_of(given: pb.RecordFilter) -> RecordFilter:
    """INVALID_REQUEST for conditions that no record meets together."""
    if len(given.headers) > FILTER_HEADERS_MAX:
        message = f"the filter names {len(given.headers)} headers: it may name {FILTER_HEADERS_MAX}"
        raise SmqError(ErrorCode.INVALID_REQUEST, message)
    wanted = RecordFilter(
        key=given.key if given.HasField("key") else None,
        key_prefix=given.key_prefix if given.HasField("key_prefix") else None,
        headers=tuple((h.key, h.value if h.HasField("value") else None) for h in given.headers),
        from_ms=given.from_ms if given.HasField("from_ms") else None,
        until_ms=given.until_ms if given.HasField("until_ms") else None,
    )
    problem: str | None = None
    if any(ms is not None and ms < 0 for ms in (wanted.from_ms, wanted.until_ms)):
        problem = "from_ms and until_ms must be 0 or more: milliseconds since 1970"
    elif wanted.from_ms is not None and wanted.until_ms is not None and wanted.from_ms >= wanted.until_ms:
        problem = f"no time is at or after {wanted.from_ms} and before {wanted.until_ms}: until_ms must be later"
    elif wanted.key is not None and wanted.key_prefix is not None and not wanted.key.startswith(wanted.key_prefix):
        problem = "the key does not begin with key_prefix: no record has both"
    if problem is not None:
        raise SmqError(ErrorCode.INVALID_REQUEST, problem)
    return wanted


# ---------------------------------------------------------------------------------------------------- cursors
def _cursor(request: pb.SearchRecordsRequest, pid: PartitionId, page: _Page) -> bytes:
    return _CURSOR.pack(_CURSOR_VERSION, pid, page.position, page.end, _digest(request))


def _digest(request: pb.SearchRecordsRequest) -> int:
    """Of what all pages of a search share. Two isolations never have the same: the CRC begins with it."""
    return crc32c(request.filter.SerializeToString(deterministic=True), request.isolation)


def _resumed(request: pb.SearchRecordsRequest, pid: PartitionId) -> tuple[Offset, Offset]:
    """Where a cursor goes on, and where its search ends."""
    wrong = None
    if len(request.cursor) != _CURSOR.size or request.cursor[0] != _CURSOR_VERSION:
        wrong = "is not one of this smq's"
    else:
        _, of, position, end, digest = _CURSOR.unpack(request.cursor)
        if of != pid:
            wrong = "is of another partition, or of a topic of this name that was deleted"
        elif digest != _digest(request):
            wrong = "is of another filter or isolation"
        elif not 0 <= position < end:
            wrong = "is damaged"
        else:
            return Offset(position), Offset(end)
    raise SmqError(ErrorCode.INVALID_REQUEST, f"the cursor {wrong}: begin again with an offset")
