"""Searches: records of a partition that pass a filter, found by the nodes and returned in pages.

Owns the filter, the page, and the calls behind them. A page is one call, to any replica; its cursor leads to the next
one, at whatever node and after whatever pause. The consumer offers them as its own methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from smq.clients.channels import NodeStubs
from smq.clients.cluster import ClusterClient, now_ms
from smq.clients.errors import build
from smq.clients.pb import smq_pb2 as pb
from smq.clients.types import ConsumerRecord
from smq.raft_state.errors import ErrorCode, SmqError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """Every condition that is given must hold. `headers`: a record must have each of them, with this value, or with any
    if it is None. `from_ms` (inclusive) and `until_ms` (exclusive): the record's timestamp_ms."""

    key: bytes | None = None
    key_prefix: bytes | None = None
    headers: Mapping[str, bytes | None] = field(default_factory=dict)
    from_ms: int | None = None
    until_ms: int | None = None

    def to_pb(self) -> pb.RecordFilter:
        """INVALID_REQUEST for values of a wrong type."""
        given: object = self.headers
        if not isinstance(given, Mapping):
            message = f"headers must be a mapping of names to bytes or None, not {type(given).__name__}"
            raise SmqError(ErrorCode.INVALID_REQUEST, message)
        try:
            return build(
                pb.RecordFilter,
                key=self.key,
                key_prefix=self.key_prefix,
                headers=[build(pb.HeaderFilter, key=name, value=value) for name, value in self.headers.items()],
                from_ms=self.from_ms,
                until_ms=self.until_ms,
            )
        except TypeError as e:
            message = f"keys and headers' values must be bytes, times whole milliseconds: {self}"
            raise SmqError(ErrorCode.INVALID_REQUEST, message) from e


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """Records in offset order, perhaps none. `cursor` leads to the next page; None: this is the last. Everything below
    `next_offset` has been searched, and the search ends at `end_offset`."""

    records: Sequence[ConsumerRecord]
    cursor: bytes | None
    next_offset: int
    end_offset: int


async def search_page(
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
    timeout_ms: float,
) -> SearchPage:
    """The first page, from `offset` to `end_offset` (None: the present end), or the one that a cursor leads to. If
    `offset` is the end, the node waits `max_wait_ms` for a record there.
    OFFSET_OUT_OF_RANGE with what is there, also if records were deleted since the page before."""
    request = build(
        pb.SearchRecordsRequest,
        topic=topic,
        partition=partition,
        filter=wanted.to_pb(),
        offset=offset,
        end_offset=end_offset,
        cursor=cursor or b"",
        max_records=max_records,
        max_wait_ms=max_wait_ms,
    )
    if cluster.metadata.partition(topic, partition) is None:
        await cluster.refresh((topic,), timeout_ms=timeout_ms)

    async def run(node: NodeStubs, node_ms: int, call_s: float) -> pb.SearchRecordsResponse:
        request.timeout_ms = node_ms
        return await node.broker.SearchRecords(request, timeout=call_s)

    def candidates() -> list[str]:
        if only_node is not None:
            return [a for a in [cluster.metadata.address(only_node)] if a]
        return cluster.metadata.replica_addresses(topic, partition, now_ms()) or cluster.any_node()

    answer = await cluster.call(run, timeout_ms=timeout_ms, candidates=candidates, topics=(topic,))
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
