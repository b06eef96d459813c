"""The fake cluster's broker service: reads, positions, group offsets, and offsets without records.

Owns which batches and offsets an answer holds. `runner` registers it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from google.protobuf.message import Message

from smq.clients.errors import detail_from_error
from smq.clients.pb import smq_pb2 as pb
from smq.clients.pb.smq_pb2_grpc import BrokerServicer
from smq.coordinator.grpc.record_chunks import to_pb
from smq.coordinator.grpc.search import filter_of
from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset, PartitionIndex, ring_range
from smq.records import decode_batch
from smq.testing.fake.cluster import BATCH_BYTES_MAX, Context, FakeNode, answering, finished
from smq.testing.fake.log import FakePartition


class Broker(BrokerServicer):
    def __init__(self, node: FakeNode) -> None:
        self.node = node

    @answering
    async def Fetch(self, request: pb.FetchRequest) -> Message:
        self.node.fetches.append(request)
        answer = self._fetched(request)
        if request.max_wait_ms and not any(p.batches or p.HasField("error") for p in answer.partitions):
            await self._wait_changed(request)
            answer = self._fetched(request)
        for part in answer.partitions:
            if part.HasField("error"):
                continue
            try:
                await finished(self.node.on_fetch(part))
            except SmqError as e:
                del part.batches[:]
                part.error.CopyFrom(detail_from_error(e))
        return answer

    async def _wait_changed(self, request: pb.FetchRequest) -> None:
        logs = [self.node.cluster.partition(p.topic, p.partition) for p in request.partitions]
        waits = [asyncio.create_task(log.changed.wait()) for log in logs]
        try:
            await asyncio.wait(waits, timeout=request.max_wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _fetched(self, request: pb.FetchRequest) -> pb.FetchResponse:
        answer, left = pb.FetchResponse(), request.max_bytes or BATCH_BYTES_MAX
        for requested in request.partitions:
            part = answer.partitions.add(topic=requested.topic, partition=requested.partition)
            try:
                left -= self._fill(part, requested, left)
            except SmqError as e:
                part.error.CopyFrom(detail_from_error(e))
        return answer

    def _fill(self, part: pb.FetchedPartition, requested: pb.FetchPartition, left: int) -> int:
        """Adds batches to the answer; returns their bytes."""
        if requested.topic_id not in (b"", self.node.cluster.topic_ids.get(requested.topic)):
            raise SmqError(ErrorCode.UNKNOWN_TOPIC, f"there is no topic with the id {requested.topic_id.hex()}")
        log = self._copy(requested.topic, requested.partition)
        part.log_start, part.hwm, part.lso = log.log_start, log.hwm, log.hwm
        if not log.log_start <= requested.offset <= log.hwm:
            details = ErrorDetails(lo=Offset(log.log_start), hi=Offset(log.hwm))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no offset {requested.offset}", details)
        taken = 0
        bytes_max = min(requested.max_bytes or BATCH_BYTES_MAX, self.node.cluster.fetch_bytes_max)
        for stored in log.batches(requested.offset, bytes_max):
            if taken >= left:
                break
            data = stored.data if stored.base_offset not in self.node.cluster.hidden else b""
            part.batches.add(base_offset=stored.base_offset, last_offset=stored.end - 1, ts_ns=stored.ts_ns, data=data)
            taken += len(stored.data)
        return taken

    def _copy(self, topic: str, partition: int) -> FakePartition:
        """This node's."""
        log = self.node.cluster.partition(topic, partition)
        if topic in self.node.cluster.external:
            raise SmqError(ErrorCode.WRONG_STORAGE, "the records are stored elsewhere")
        if self.node.number not in log.replicas:
            raise SmqError(ErrorCode.NOT_REPLICA, "no copy here")
        return log

    @answering
    async def SearchRecords(self, request: pb.SearchRecordsRequest) -> Message:
        """A cursor is the next offset, and the end."""
        log = self._copy(request.topic, request.partition)
        wanted = filter_of(request.filter)
        if request.cursor:
            position, end = map(int, request.cursor.split())
        else:
            position = request.offset
            if request.max_wait_ms and position == log.hwm:
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.max_wait_ms / 1000):
                        await log.changed.wait()
            end = min(request.end_offset, log.hwm) if request.HasField("end_offset") else log.hwm
        if position < log.log_start:
            details = ErrorDetails(lo=Offset(log.log_start), hi=Offset(log.hwm))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no offset {position}", details)
        answer = pb.SearchRecordsResponse(end_offset=end)
        for stored in list(log.batches(position, self.node.cluster.fetch_bytes_max)):
            for record in decode_batch(stored.data):
                is_full = len(answer.records) >= (request.max_records or BATCH_BYTES_MAX)
                if position <= record.offset < end and not is_full:
                    position = record.offset + 1
                    if wanted.passes(record):
                        answer.records.append(to_pb(record, stored.ts_ns + record.offset - stored.base_offset))
        answer.next_offset = position
        answer.cursor = b"%d %d" % (position, end) if position < end else b""
        self.node.pages.append(answer)
        return answer

    @answering
    async def ListOffsets(self, request: pb.ListOffsetsRequest) -> Message:
        answer = pb.ListOffsetsResponse()
        for requested in request.partitions:
            listed = answer.offsets.add(topic=requested.topic, partition=requested.partition)
            try:
                self._list(listed, requested)
                await finished(self.node.on_list(listed))
            except SmqError as e:
                listed.error.CopyFrom(detail_from_error(e))
        return answer

    def _list(self, listed: pb.ListedOffset, requested: pb.ListOffsetsPartition) -> None:
        log = self.node.cluster.partition(requested.topic, requested.partition)
        listed.lo, listed.hi = log.log_start, log.hwm
        if requested.HasField("timestamp_ms"):
            listed.offset = log.offset_at(created_ms=requested.timestamp_ms)
        elif requested.HasField("max_bytes"):
            batches = list(log.batches(requested.offset_value, requested.max_bytes))
            listed.offset = batches[-1].end if batches else requested.offset_value
            listed.size_bytes = sum(len(stored.data) for stored in batches)
        elif requested.offset_type == pb.EXACT_TS_NS:
            listed.offset = log.offset_at(ts_ns=requested.offset_value)
        else:
            self._list_position(listed, requested, log)

    def _list_position(self, listed: pb.ListedOffset, requested: pb.ListOffsetsPartition, log: FakePartition) -> None:
        """The offset types that name a position: clamped, or refused if the type asks for an existing record."""
        lo, hi = log.log_start, log.hwm
        kind = pb.OffsetType.Name(requested.offset_type)
        position = {"RESET_TO_EARLIEST": lo, "RESET_TO_LATEST": hi}.get(kind, requested.offset_value)
        if kind.startswith("RESUME"):
            start = lo if kind == "RESUME_OR_EARLIEST" else hi
            position, _ = self.node.cluster.commits.get(
                (requested.group, requested.topic, requested.partition), (start, "")
            )
        listed.offset = min(max(position, lo), hi)
        listed.clamped = listed.offset != position
        is_refused = not lo <= position < hi if kind == "EXACT_OFFSET" else kind.startswith("RESUME") and listed.clamped
        if is_refused and not (kind.startswith("RESUME") and requested.reset_if_gone):
            details = ErrorDetails(lo=Offset(lo), hi=Offset(hi))
            raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"no record at {position}", details)

    @answering
    async def GetPartitionRangeInfo(self, request: pb.GetPartitionRangeInfoRequest) -> Message:
        log = self.node.cluster.partition(request.topic, request.partition)
        start, stop = ring_range(PartitionIndex(request.partition))
        return pb.GetPartitionRangeInfoResponse(
            topic=request.topic,
            partition=request.partition,
            range_start=start,
            range_stop=stop,
            log_start=log.log_start,
            hwm=log.hwm,
            lso=log.hwm,
            next_offset=log.end,
            leader=log.leader,
            epoch=log.epoch,
            replicas=log.replicas,
        )

    @answering
    async def CommitOffsets(self, request: pb.CommitOffsetsRequest) -> Message:
        def change() -> Message:
            for o in request.offsets:
                self.node.cluster.commits[request.group, o.topic, o.partition] = (o.offset, o.metadata)
            return pb.CommitOffsetsResponse()

        return self.node.cluster.once(request.request_id, "commit", change)

    @answering
    async def MeasureBacklogs(self, request: pb.MeasureBacklogsRequest) -> Message:
        """The leader alone reaches the end. A record is as old as it is far from the end, in seconds."""
        answer = pb.MeasureBacklogsResponse()
        for o in request.offsets:
            log = self.node.cluster.partition(o.topic, o.partition)
            measured = answer.backlogs.add(topic=o.topic, partition=o.partition, offset=o.offset, end=log.hwm)
            if log.leader != self.node.number:
                measured.error.CopyFrom(detail_from_error(SmqError(ErrorCode.NOT_LEADER, "not here")))
            measured.size_bytes = sum(len(s.data) for s in log.stored if o.offset < s.end <= log.hwm)
            measured.age_ms = (log.hwm - o.offset) * 1_000
        return answer

    async def AssignOffsets(  # type: ignore[override]  # the stubs say iterator
        self, requests: AsyncIterator[pb.AssignOffsetsRequest], context: Context
    ) -> None:
        async def answer(request: pb.Assignment) -> None:
            given = pb.Assigned(base_offset=-1, last_offset=-1)
            try:
                await self.node.before("AssignOffsets", request)
                given.CopyFrom(self.node.cluster.assign(request))
            except SmqError as e:
                given.error.CopyFrom(detail_from_error(e))
            given.correlation_id = request.correlation_id
            await context.write(pb.AssignOffsetsResponse(assigned=[given]))

        async for message in requests:
            self.node.seen.append("a message of AssignOffsets")
            for request in message.assignments:
                await answer(request)

    async def AdvanceHighWaterMark(  # type: ignore[override]  # as above
        self, requests: AsyncIterator[pb.AdvanceHighWaterMarkRequest], context: Context
    ) -> None:
        async for message in requests:
            for request in message.advances:
                answer = pb.Advanced(correlation_id=request.correlation_id, hwm=request.offset)
                try:
                    await self.node.before("AdvanceHighWaterMark", request)
                    end = self.node.cluster.assigned.get((request.topic, request.partition), 0)
                    if request.offset > end:
                        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"assigned are {end}")
                except SmqError as e:
                    answer.error.CopyFrom(detail_from_error(e))
                await context.write(pb.AdvanceHighWaterMarkResponse(advanced=[answer]))

    @answering
    async def FetchOffsets(self, request: pb.FetchOffsetsRequest) -> Message:
        wanted = {(p.topic, p.partition) for p in request.partitions}
        answer = pb.FetchOffsetsResponse()
        for (group, topic, partition), (offset, metadata) in self.node.cluster.commits.items():
            if group == request.group and (not wanted or (topic, partition) in wanted):
                answer.offsets.add(topic=topic, partition=partition, offset=offset, metadata=metadata)
        return answer
