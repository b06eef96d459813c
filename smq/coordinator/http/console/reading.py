"""Records for the console: a page of them from a position on, within bounds of records, bytes and time.

Owns the bounds and the search. It reads this node's copy as a reader of committed records does, without aborted
transactions and control batches, and decodes in slices so that the loop goes on. `console.messages` imports it.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from smq.coordinator.limits import DECODE_CHUNK_RECORDS
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.visibility import is_visible
from smq.raft_state.errors import ErrorCode, SmqError
from smq.records import BatchCorrupt, Record
from smq.replication.api import StoredBatch
from smq.replication.log.decoding import decode_bounded

PAGE_RECORDS: Final = 50
SEARCHED_RECORDS_MAX: Final = 20_000  # per request, about a tenth of a second; the page links to where it goes on
READ_BYTES: Final = 1 << 20  # per fetch
READ_MS: Final = 5_000
DECODED_BYTES_MAX: Final = 16 << 20  # of one batch: what expands further is shown as one line
FETCHES_MAX: Final = 64  # per request: batches may be small, and gaps large


@dataclass(frozen=True, slots=True)
class Shown:
    """A record, or a batch that cannot be decoded (`record` is None, `problem` says why)."""

    offset: int
    ts_ns: int
    record: Record | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    records: list[Shown]
    next_offset: int  # where to go on
    searched: int  # records that were looked at
    end: int  # the last stable offset: records from there on are in a transaction that is open, or come after one


async def read(calls: NodeCalls, topic: str, partition: int, offset: int, wanted: str = "") -> Found:
    """Up to PAGE_RECORDS records from `offset` on; with `wanted`, those whose key or value contains that text. Raises
    SmqError: OFFSET_OUT_OF_RANGE with the range, NOT_REPLICA elsewhere."""
    needle = wanted.encode()
    found: list[Shown] = []
    searched, position, end = 0, offset, offset
    for _ in range(FETCHES_MAX):
        fetched = await calls.fetch(
            topic,
            partition,
            position,
            max_bytes=READ_BYTES,
            max_wait_ms=0,
            answer_ms=READ_MS,
            is_committed=True,
        )
        end = fetched.lso
        if not fetched.batches:
            break
        for batch in fetched.batches:
            for shown in await _decoded(batch) if is_visible(fetched, batch) else ():
                if shown.offset < position:
                    continue
                if len(found) >= PAGE_RECORDS or searched >= SEARCHED_RECORDS_MAX:
                    return Found(found, shown.offset, searched, end)
                searched += 1
                if not needle or _contains(shown, needle):
                    found.append(shown)
            position = max(position, batch.last_offset + 1)
        if len(found) >= PAGE_RECORDS:
            break
    return Found(found, position, searched, end)


async def _decoded(batch: StoredBatch) -> list[Shown]:
    """A batch that does not decode is one line, and does not hide the others."""
    try:
        records: list[Shown] = []
        for number, record in enumerate(decode_bounded(batch.data, DECODED_BYTES_MAX), 1):
            records.append(Shown(record.offset, batch.ts_ns + record.offset - batch.base_offset, record))
            if number % DECODE_CHUNK_RECORDS == 0:
                await asyncio.sleep(0)
        return records
    except (BatchCorrupt, SmqError) as e:
        if isinstance(e, SmqError) and e.code is not ErrorCode.LIMIT_EXCEEDED:
            raise
        problem = f"the batch of offsets {batch.base_offset} to {batch.last_offset} cannot be shown: {e}"
        return [Shown(batch.base_offset, batch.ts_ns, None, problem)]


def _contains(shown: Shown, needle: bytes) -> bool:
    record = shown.record
    return record is not None and (needle in (record.key or b"") or needle in (record.value or b""))
