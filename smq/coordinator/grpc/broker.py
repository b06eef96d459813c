"""The Broker service: raw batches, offsets, ranges and backlogs of partitions, and groups' commits.

Owns the count of its streams. Only the composition root imports it.
"""

import asyncio
import time
from collections.abc import AsyncIterable

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb import smq_pb2_grpc
from smq.coordinator.groups.coordinator import NO_MEMBER, GroupCoordinator
from smq.coordinator.grpc.offset_calls import Advances, Assignments, OffsetCalls
from smq.coordinator.grpc.open_streams import AnswerBudget, StreamCounts
from smq.coordinator.grpc.required import check_fields, check_offset_value, member_of
from smq.coordinator.grpc.search import Searches
from smq.coordinator.grpc.service import Context, Service, deadline_ms, guarded, offset_commits, request_id_of
from smq.coordinator.limits import (
    COMMIT_ITEMS_MAX,
    DEADLINE_SLACK_MS,
    FETCH_BARRIER_MS,
    FETCH_CONCURRENCY,
    FETCH_PARTITION_BYTES_DEFAULT,
    FETCH_PARTITIONS_MAX,
    FETCH_WAIT_MS_MAX,
    LIST_OFFSETS_MAX,
    OFFSET_STREAMS_PER_CONNECTION_MAX,
)
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.fetching import Outcome, PartitionFetch, fetch_many, known_range
from smq.coordinator.service.group_lag import age_ms
from smq.coordinator.service.name_lookup import Start, StartAsk, find_partition, start_positions
from smq.coordinator.service.request_checks import check_count, check_group
from smq.coordinator.service.start_positions import OffsetType, parse_offset_type
from smq.coordinator.service.visibility import is_committed_reader, is_visible
from smq.raft_state.commands import NO_GENERATION
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import TOPIC_ID_BYTES, PartitionId, TopicId, ring_range, split_partition_id
from smq.raft_state.replies import Reply
from smq.raft_state.state import CommittedOffset
from smq.replication.api import Cancel, DoneFn, Fetched, NodeApi, StoredBatch
from smq.replication.partition.by_name import partition_in


class BrokerService(Service, smq_pb2_grpc.BrokerServicer):
    def __init__(self, node: NodeApi, groups: GroupCoordinator, *, response_bytes_max: int) -> None:
        self.audience = Audience(node=node)
        self._calls = NodeCalls(node)
        self._groups = groups
        self._response_bytes_max = response_bytes_max
        self._answers = AnswerBudget()
        self._searches = Searches(self._calls, self._answers)
        self._streams = StreamCounts("offset", OFFSET_STREAMS_PER_CONNECTION_MAX)

    # -------------------------------------------------------------------------------------------------- fetch
    @guarded
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        check_count("partitions", request.partitions, FETCH_PARTITIONS_MAX)
        if request.max_wait_ms < 0 or request.max_bytes < 0 or any(p.max_bytes < 0 for p in request.partitions):
            raise SmqError(ErrorCode.INVALID_REQUEST, "max_wait_ms and max_bytes must be 0 or more")
        is_committed = is_committed_reader(request.isolation)
        fetches = [
            PartitionFetch(
                topic=p.topic,
                partition=p.partition,
                offset=p.offset,
                max_bytes=p.max_bytes or FETCH_PARTITION_BYTES_DEFAULT,
                is_committed=is_committed,
                topic_id=_topic_id(p.topic_id),
            )
            for p in request.partitions
        ]
        wait_ms = min(request.max_wait_ms, FETCH_WAIT_MS_MAX)
        answer_ms = deadline_ms(wait_ms + FETCH_BARRIER_MS, context)
        wait_ms = min(wait_ms, max(0, answer_ms - DEADLINE_SLACK_MS))  # so that "empty" precedes "timed out"
        bytes_max = min(request.max_bytes or self._response_bytes_max, self._response_bytes_max)
        peer = context.peer()
        outcomes = await fetch_many(
            self._calls,
            fetches,
            max_wait_ms=wait_ms,
            answer_ms=answer_ms,
            bytes_max=bytes_max,
            reserve=lambda size: self._answers.reserved(peer, size, answer_ms),
        )
        self._answers.hold(peer, sum(len(b.data) for o in outcomes if isinstance(o, Fetched) for b in o.batches))
        return pb.FetchResponse(partitions=[self._fetched(f, o) for f, o in zip(fetches, outcomes, strict=True)])

    def _fetched(self, fetch: PartitionFetch, outcome: Outcome) -> pb.FetchedPartition:
        out = pb.FetchedPartition(topic=fetch.topic, partition=fetch.partition)
        if isinstance(outcome, SmqError):
            out.error.CopyFrom(detail_from_error(self.audience.told(outcome)))
        elif isinstance(outcome, Fetched):
            out.log_start, out.hwm, out.lso = outcome.log_start, outcome.hwm, outcome.lso
            out.batches.extend(_to_pb(batch, is_visible(outcome, batch)) for batch in outcome.batches)
        else:
            # The response was full before this partition was read.
            node = self._calls.node
            if (state := partition_in(node.state, fetch.asked, fetch.partition)) is not None:
                out.log_start, out.hwm, out.lso = known_range(node, state)
        return out

    @guarded
    async def SearchRecords(self, request: pb.SearchRecordsRequest, context: Context) -> pb.SearchRecordsResponse:
        return await self._searches.page(request, context)

    # ------------------------------------------------------------------------------------------------ offsets
    @guarded
    async def ListOffsets(self, request: pb.ListOffsetsRequest, context: Context) -> pb.ListOffsetsResponse:
        check_count("partitions", request.partitions, LIST_OFFSETS_MAX)
        is_committed = is_committed_reader(request.isolation)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        listed: dict[int, pb.ListedOffset] = {}  # by place in the request
        asks: dict[int, StartAsk] = {}
        for place, requested in enumerate(request.partitions):
            try:
                if requested.HasField("max_bytes"):
                    listed[place] = await self._list_end(requested, timeout_ms)
                else:
                    asks[place] = _start_ask(requested, is_committed=is_committed)
            except SmqError as e:
                listed[place] = _failed(requested, self.audience.told(e))
        starts = await start_positions(self._calls, list(asks.values()), timeout_ms)
        for place, start in zip(asks, starts, strict=True):
            requested = request.partitions[place]
            if isinstance(start, SmqError):
                listed[place] = _failed(requested, self.audience.told(start))
            else:
                listed[place] = _started(requested, start, is_committed=is_committed)
        return pb.ListOffsetsResponse(offsets=[listed[place] for place in range(len(listed))])

    async def _list_end(self, requested: pb.ListOffsetsPartition, timeout_ms: int) -> pb.ListedOffset:
        if requested.max_bytes < 1:
            raise SmqError(ErrorCode.INVALID_REQUEST, f"max_bytes is {requested.max_bytes}: it must be 1 or more")
        check_fields(requested, ("offset_value",))
        state = await find_partition(self._calls, requested.topic, requested.partition, timeout_ms)
        run = await self._calls.sized_run(
            requested.topic, requested.partition, requested.offset_value, requested.max_bytes, timeout_ms
        )
        return pb.ListedOffset(
            topic=requested.topic,
            partition=requested.partition,
            offset=run.end,
            lo=state.log_start,
            hi=max(self._calls.node.known_hwm(state), run.end),
            size_bytes=run.size_bytes,
        )

    @guarded
    async def GetPartitionRangeInfo(
        self, request: pb.GetPartitionRangeInfoRequest, context: Context
    ) -> pb.GetPartitionRangeInfoResponse:
        timeout_ms = deadline_ms(request.timeout_ms, context)
        r = await self._calls.partition_range(request.topic, request.partition, timeout_ms)
        start, stop = ring_range(r.partition)
        return pb.GetPartitionRangeInfoResponse(
            topic=r.topic,
            partition=r.partition,
            topic_id=split_partition_id(r.pid)[0],
            range_start=start,
            range_stop=stop,
            log_start=r.log_start,
            lso=r.lso,
            hwm=r.hwm,
            next_offset=r.next_offset,
            leader=r.leader,
            epoch=r.epoch,
            replicas=r.replicas,
        )

    @guarded
    async def MeasureBacklogs(self, request: pb.MeasureBacklogsRequest, context: Context) -> pb.MeasureBacklogsResponse:
        check_count("offsets", request.offsets, LIST_OFFSETS_MAX)
        return await measure_backlogs(self._calls, self.audience, request, deadline_ms(request.timeout_ms, context))

    # --------------------------------------------------------------------------------- offsets without records
    @guarded
    async def AssignOffsets(  # type: ignore[override] # a coroutine that writes to the context, as grpc.aio allows
        self, request: AsyncIterable[pb.AssignOffsetsRequest], context: Context
    ) -> None:
        with self._streams.one_more(context.peer()):
            await OffsetCalls(self.audience, Assignments(), context, self.gate.caller(context)).run(request)

    @guarded
    async def AdvanceHighWaterMark(  # type: ignore[override] # as above
        self, request: AsyncIterable[pb.AdvanceHighWaterMarkRequest], context: Context
    ) -> None:
        with self._streams.one_more(context.peer()):
            await OffsetCalls(self.audience, Advances(), context, self.gate.caller(context)).run(request)

    # ------------------------------------------------------------------------------------------------- groups
    @guarded
    async def CommitOffsets(self, request: pb.CommitOffsetsRequest, context: Context) -> pb.CommitOffsetsResponse:
        check_count("offsets", request.offsets, COMMIT_ITEMS_MAX)
        check_group(request.group)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        items = await offset_commits(self._calls, request.offsets, timeout_ms)
        request_id = request_id_of(request.request_id)
        who, generation = member_of(request.member) if request.HasField("member") else (NO_MEMBER, NO_GENERATION)

        def begin(done: DoneFn[Reply]) -> Cancel:
            return self._groups.commit(request.group, who, generation, items, request_id, timeout_ms, done)

        await self._calls.change(begin, timeout_ms)
        return pb.CommitOffsetsResponse()

    @guarded
    async def FetchOffsets(self, request: pb.FetchOffsetsRequest, context: Context) -> pb.FetchOffsetsResponse:
        check_count("partitions", request.partitions, COMMIT_ITEMS_MAX, is_empty_allowed=True)
        check_group(request.group)
        timeout_ms = deadline_ms(request.timeout_ms, context)
        pids = [(await find_partition(self._calls, p.topic, p.partition, timeout_ms)).pid for p in request.partitions]
        commits = await self._calls.fetch_offsets(request.group, pids or None, timeout_ms)
        return pb.FetchOffsetsResponse(
            offsets=[o for pid, committed in commits.items() if (o := self._named(pid, committed))]
        )

    def _named(self, pid: PartitionId, committed: CommittedOffset) -> pb.PartitionOffset | None:
        topic_id, index = split_partition_id(pid)
        name = self._calls.node.state.topic_names.get(topic_id)
        if name is None:
            return None  # the topic was deleted in the meantime, and its commits with it
        if committed.position is None:
            return None  # to readers it is no commit
        return pb.PartitionOffset(topic=name, partition=index, offset=committed.offset, metadata=committed.metadata)


def _topic_id(given: bytes) -> TopicId | None:
    if len(given) not in (0, TOPIC_ID_BYTES):
        raise SmqError(ErrorCode.INVALID_REQUEST, f"topic_id has {len(given)} bytes, not {TOPIC_ID_BYTES}")
    return TopicId(given) if given else None


def _start_ask(requested: pb.ListOffsetsPartition, *, is_committed: bool) -> StartAsk:
    is_by_time = requested.HasField("timestamp_ms")
    kind = OffsetType.EXACT_TS_NS if is_by_time else parse_offset_type(requested.offset_type)
    if not is_by_time:
        check_offset_value(requested, kind)
    return StartAsk(
        topic=requested.topic,
        partition=requested.partition,
        type=kind,
        value=requested.offset_value,
        group=requested.group,
        reset_if_gone=requested.reset_if_gone,
        timestamp_ms=requested.timestamp_ms if is_by_time else None,
        is_committed=is_committed,
        is_stable=requested.stable,
    )


def _started(requested: pb.ListOffsetsPartition, start: Start, *, is_committed: bool) -> pb.ListedOffset:
    position, range_ = start
    return pb.ListedOffset(
        topic=requested.topic,
        partition=requested.partition,
        offset=position.offset,
        clamped=position.clamped,
        lo=range_.log_start,
        hi=range_.end_for(is_committed=is_committed),
    )


def _failed(requested: pb.ListOffsetsPartition, error: SmqError) -> pb.ListedOffset:
    return pb.ListedOffset(
        topic=requested.topic, partition=requested.partition, offset=-1, error=detail_from_error(error)
    )


def _to_pb(batch: StoredBatch, has_records: bool) -> pb.Batch:
    if not has_records:
        return pb.Batch(base_offset=batch.base_offset, last_offset=batch.last_offset, ts_ns=batch.ts_ns)
    whole = batch.data.obj
    # protobuf takes bytes only. A view of a whole bytes object is passed on as that object, without a copy.
    data = whole if isinstance(whole, bytes) and len(whole) == len(batch.data) else bytes(batch.data)
    return pb.Batch(base_offset=batch.base_offset, last_offset=batch.last_offset, ts_ns=batch.ts_ns, data=data)


async def measure_backlogs(
    calls: NodeCalls, audience: Audience, request: pb.MeasureBacklogsRequest, timeout_ms: int
) -> pb.MeasureBacklogsResponse:
    """One answer for each offset, in order; an error affects its own only."""
    slots = asyncio.Semaphore(FETCH_CONCURRENCY)

    async def measure(asked: pb.PartitionOffset) -> pb.MeasuredBacklog:
        async with slots:
            try:
                return await _measured(calls, asked, timeout_ms)
            except SmqError as e:
                error = detail_from_error(audience.told(e))
                return pb.MeasuredBacklog(topic=asked.topic, partition=asked.partition, error=error)

    measured = await asyncio.gather(*(measure(asked) for asked in request.offsets))
    return pb.MeasureBacklogsResponse(backlogs=measured)


async def _measured(calls: NodeCalls, asked: pb.PartitionOffset, timeout_ms: int) -> pb.MeasuredBacklog:
    if asked.offset < 0:
        message = f"offset {asked.offset} of {asked.topic}/{asked.partition} is negative"
        raise SmqError(ErrorCode.INVALID_OFFSET, message)
    range_ = await calls.partition_range(asked.topic, asked.partition, timeout_ms)
    offset = max(asked.offset, range_.log_start)
    out = pb.MeasuredBacklog(topic=asked.topic, partition=asked.partition, offset=offset, end=range_.hwm)
    if offset < range_.hwm:
        backlog = await calls.backlog(asked.topic, asked.partition, offset, range_.hwm, timeout_ms)
        if not backlog.size_bytes:
            message = f"{asked.topic}/{asked.partition} changed during the measurement from offset {offset} on"
            raise SmqError(ErrorCode.OFFSET_NOT_AVAILABLE, message)
        out.size_bytes = backlog.size_bytes
        out.age_ms = age_ms(backlog.ts_ns, time.time_ns())
    return out
