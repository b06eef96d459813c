"""Searches: records of a partition that pass a filter, found by the nodes and returned in pages.

Owns the filter, the page, and the calls behind them. A page is one call, to any replica; its cursor leads to the next
one, at whatever node and after whatever pause. `Searching` has the consumer's methods for them. Consumers import it.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from smq.clients.arguments import check_flag, check_int, check_kind, check_place
from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient
from smq.clients.errors import build
from smq.clients.fetch_planner import FetchPlanner
from smq.clients.pb import smq_pb2 as pb
from smq.clients.positions import Start, Wanted, parse_start
from smq.clients.types import ISOLATIONS, ConsumerRecord, Isolation, TopicPartition
from smq.raft_state.errors import ErrorCode, SmqError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Every condition that is given must hold. `headers`: a record must have each of them, with this value, or with any
    if it is None; as a list of pairs it may name a header twice, and then a record must have both values. `from_ms`
    (inclusive) and `until_ms` (exclusive): the record's timestamp_ms."""

    key: bytes | None = None
    key_prefix: bytes | None = None
    headers: Mapping[str, bytes | None] | Sequence[tuple[str, bytes | None]] = ()
    from_ms: int | None = None
    until_ms: int | None = None

    def to_pb(self) -> pb.RecordFilter:
        """INVALID_REQUEST for values of a wrong type."""
        headers = self.headers.items() if isinstance(self.headers, Mapping) else self.headers
        try:
            return build(
                pb.RecordFilter,
                key=self.key,
                key_prefix=self.key_prefix,
                headers=[build(pb.HeaderFilter, key=name, value=value) for name, value in headers],
                from_ms=self.from_ms,
                until_ms=self.until_ms,
            )
        except (TypeError, ValueError) as e:
            message = f"headers must be a mapping of names to bytes or None, or a list of such pairs: {self}"
            raise SmqError(ErrorCode.INVALID_REQUEST, message) from e


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """Records in offset order, perhaps none. `cursor` leads to the next page; None: this is the last. Everything below
    `next_offset` has been searched, and the search ends at `end_offset`."""

    records: Sequence[ConsumerRecord]
    cursor: bytes | None
    next_offset: int
    end_offset: int


class Searching(ABC):
    """A consumer's searches. They need no assignment."""

    _cluster: ClusterClient
    _group: str | None
    _planner: FetchPlanner
    _timeout_ms: float

    @abstractmethod
    async def _resolve(self, wanted: Mapping[TopicPartition, Wanted]) -> dict[TopicPartition, int]:
        """The offsets of these positions, as the consumer finds them."""

    async def search_page(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        start: Start = "RESET_TO_EARLIEST",
        end_offset: int | None = None,
        cursor: bytes | None = None,
        max_records: int = 0,
    ) -> SearchPage:
        """One page of the records that pass a filter, which a node finds; without an assignment. The first page begins
        at `start`, and the search covers what is there now, at most up to `end_offset`. A further page needs the cursor
        of the page before and the same filter. `max_records`: 0 is the node's default, 500. UNKNOWN_TOPIC,
        UNKNOWN_PARTITION; OFFSET_OUT_OF_RANGE (lo, hi), also if records were deleted since the page before."""
        check_place(topic, partition)
        offset = None
        if cursor is None:
            parsed = parse_start(start, group=self._group)
            offset = (await self._resolve({(topic, partition): parsed}))[(topic, partition)]
        return await self._search(
            topic, partition, wanted, offset=offset, end_offset=end_offset, cursor=cursor, max_records=max_records
        )

    async def search(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        start: Start = "RESET_TO_EARLIEST",
        end_offset: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[ConsumerRecord]:
        """All records of a partition that pass a filter, as `search_page` finds them. With `follow` it goes on with new
        records, until `end_offset` or for ever. UNKNOWN_TOPIC, UNKNOWN_PARTITION, OFFSET_OUT_OF_RANGE."""
        async for page in self.search_pages(
            topic, partition, wanted, start=start, end_offset=end_offset, follow=follow
        ):
            for record in page.records:
                yield record

    async def search_pages(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        start: Start = "RESET_TO_EARLIEST",
        end_offset: int | None = None,
        follow: bool = False,
        max_records: int = 0,
    ) -> AsyncIterator[SearchPage]:
        """As `search`, page by page; a page may be empty. `max_records`: of a page, as for `search_page`.
        UNKNOWN_TOPIC, UNKNOWN_PARTITION, OFFSET_OUT_OF_RANGE."""
        check_flag("follow", follow)
        page = await self.search_page(
            topic, partition, wanted, start=start, end_offset=end_offset, max_records=max_records
        )
        while True:
            yield page
            offset = None if page.cursor is not None else page.next_offset
            if offset is not None and (not follow or (end_offset is not None and offset >= end_offset)):
                return
            page = await self._search(
                topic,
                partition,
                wanted,
                offset=offset,
                end_offset=end_offset if offset is not None else None,
                cursor=page.cursor,
                max_records=max_records,
                max_wait_ms=self._planner.settings.max_wait_ms if offset is not None else 0,
            )

    async def _search(
        self,
        topic: str,
        partition: int,
        wanted: RecordFilter,
        *,
        offset: int | None,
        end_offset: int | None,
        cursor: bytes | None,
        max_records: int = 0,
        max_wait_ms: int = 0,
    ) -> SearchPage:
        return await _fetch_page(
            self._cluster,
            topic,
            partition,
            wanted,
            offset=offset,
            end_offset=end_offset,
            cursor=cursor,
            max_records=max_records,
            max_wait_ms=max_wait_ms,
            only_node=self._planner.settings.only_node,
            isolation=self._planner.settings.isolation,
            timeout_ms=self._timeout_ms,
        )


async def _fetch_page(
    cluster: ClusterClient,
    topic: str,
    partition: int,
    wanted: RecordFilter,
    *,
    offset: int | None,
    end_offset: int | None,
    cursor: bytes | None,
    max_records: int,
    max_wait_ms: int,
    only_node: int | None,
    isolation: Isolation,
    timeout_ms: float,
) -> SearchPage:
    """The first page, from `offset` to `end_offset` (None: the present end), or the one that a cursor leads to. If
    `offset` is the end, the node waits `max_wait_ms` for a record there.
    OFFSET_OUT_OF_RANGE with the valid range, also if records were deleted since the page before."""
    check_kind("wanted", wanted, RecordFilter)
    if end_offset is not None:
        check_int("end_offset", end_offset, 0)
    request = build(
        pb.SearchRecordsRequest,
        topic=topic,
        partition=partition,
        filter=wanted.to_pb(),
        offset=offset,
        end_offset=end_offset,
        cursor=b"" if cursor is None else cursor,
        max_records=max_records,
        max_wait_ms=max_wait_ms,
        isolation=ISOLATIONS[isolation],
    )

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.SearchRecordsResponse:
        request.timeout_ms = node_ms
        return await node.broker.SearchRecords(request, timeout=call_s)

    answer = await cluster.call_replica(run, topic, partition, only_node=only_node, timeout_ms=timeout_ms)
    return SearchPage(
        records=[_record(topic, partition, record) for record in answer.records],
        cursor=answer.cursor or None,
        next_offset=answer.next_offset,
        end_offset=answer.end_offset,
    )


def _record(topic: str, partition: int, record: pb.Record) -> ConsumerRecord:
    return ConsumerRecord(
        topic,
        partition,
        record.offset,
        record.ts_ns,
        record.timestamp_ms,
        record.key if record.HasField("key") else None,
        record.value if record.HasField("value") else None,
        [(h.key, h.value if h.HasField("value") else None) for h in record.headers],
    )
