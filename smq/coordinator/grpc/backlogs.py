"""The answer to MeasureBacklogs: what readers have before them, from this node's copies.

Owns no calculation: `service.group_lag` says what the figures mean. `grpc.broker` uses it.
"""

import asyncio
import time

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.grpc.errors import to_detail
from smq.coordinator.limits import FETCH_CONCURRENCY
from smq.coordinator.service.audience import Audience
from smq.coordinator.service.calls import NodeCalls
from smq.coordinator.service.group_lag import age_ms
from smq.raft_state.errors import ErrorCode, SmqError


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
                error = to_detail(audience.told(e))
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
