"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where a partition's log and its epochs begin and end.

Owns the special timestamps. Every answer is linearizable: one barrier per request, then the replicated state. Look-ups
by time, which read the log of this node's replica, have barriers of their own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from smq.coordinator.kafka.cluster import check_epoch, confirmation_failure, epoch_at
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import FETCH_CONCURRENCY, TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, Offset
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import TimeKind
from smq.replication.lookup import unknown_partition

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4  # the same as EARLIEST: all storage is local
_READ_COMMITTED: Final = 1
_NOWHERE: Final = (-1, -1)  # offset, timestamp


async def _for_each_partition(
    topics: list[Struct], name_key: str, answer: Callable[[str, Struct], Awaitable[Struct]], out_key: str
) -> list[Struct]:
    """Calls `answer(topic, requested)` for all partitions, a few at a time. Returns the response's topics."""
    places = asyncio.Semaphore(FETCH_CONCURRENCY)

    async def one(name: str, requested: Struct) -> Struct:
        async with places:
            return await answer(name, requested)

    out = []
    for topic in topics:
        name = topic[name_key]
        answers = await asyncio.gather(*(one(name, requested) for requested in topic["partitions"]))
        out.append({name_key: name, out_key: answers})
    return out


async def _barrier_error(gateway: Gateway, timeout_ms: int) -> SmqError | None:
    """None once this node has applied all that was committed before this call."""
    try:
        await gateway.calls.barrier(timeout_ms)
    except SmqError as e:
        return e
    return None


# ------------------------------------------------------------------------------------------------ ListOffsets
async def list_offsets(gateway: Gateway, _version: int, request: Struct) -> Struct:
    is_committed = request["isolation_level"] == _READ_COMMITTED
    timeout_ms = request["timeout_ms"] or TIMEOUT_MS_DEFAULT
    failure = await _barrier_error(gateway, timeout_ms)

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "partition_index": requested["partition_index"],
            "error_code": KafkaError.NONE,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        }
        try:
            if failure is not None:
                raise failure
            part = _confirmed(gateway, topic, requested["partition_index"])
            out["error_code"] = check_epoch(part, requested["current_leader_epoch"])
            if out["error_code"] is not KafkaError.NONE:
                return out
            offset, timestamp = await _position(gateway, topic, part, requested["timestamp"], is_committed, timeout_ms)
            # The look-up may have read a newer state than the one above. The epoch must be of the same state.
            part = _confirmed(gateway, topic, requested["partition_index"])
        except SmqError as e:
            out["error_code"] = code_of(e)
            return out
        if offset >= 0:
            out |= {"offset": offset, "timestamp": timestamp, "leader_epoch": epoch_at(part, offset)}
        return out

    topics = await _for_each_partition(request["topics"], "name", answer, "partitions")
    return {"throttle_time_ms": 0, "topics": topics}


def _confirmed(gateway: Gateway, topic: str, index: int) -> PartitionState:
    """For requests that have passed their barrier: what is unknown here does not exist, without another one."""
    part = gateway.state.partition_of(topic, index)
    if part is None:
        raise unknown_partition(gateway.state, topic, index)
    return part


async def _position(
    gateway: Gateway, topic: str, part: PartitionState, timestamp: int, is_committed: bool, timeout_ms: int
) -> tuple[int, int]:
    """The offset, and the record's timestamp if the request names a time."""
    if timestamp == LATEST:
        return part.lso if is_committed else part.hwm, -1
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return part.log_start, -1
    if timestamp < 0 and timestamp != MAX_TIMESTAMP:
        return _NOWHERE  # tiered storage, which this log does not have
    kind = TimeKind.MAX_TIMESTAMP if timestamp == MAX_TIMESTAMP else TimeKind.TIMESTAMP_MS
    found = await gateway.calls.offset_for_time(topic, part.index, kind, max(timestamp, 0), timeout_ms)
    return (found.offset, found.timestamp_ms) if found.timestamp_ms >= 0 else _NOWHERE


# --------------------------------------------------------------------------------------- OffsetForLeaderEpoch
async def offset_for_leader_epoch(gateway: Gateway, _version: int, request: Struct) -> Struct:
    failure = await _barrier_error(gateway, TIMEOUT_MS_DEFAULT)

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "error_code": KafkaError.NONE if failure is None else code_of(failure),
            "partition": requested["partition"],
            "leader_epoch": -1,
            "end_offset": -1,
        }
        if failure is not None:
            return out
        try:
            part = _confirmed(gateway, topic, requested["partition"])
        except SmqError as e:
            out["error_code"] = code_of(e)
            return out
        out["error_code"] = check_epoch(part, requested["current_leader_epoch"])
        if out["error_code"] is KafkaError.NONE:
            out["leader_epoch"], out["end_offset"] = end_of_epoch(part, requested["leader_epoch"])
        return out

    return {
        "throttle_time_ms": 0,
        "topics": await _for_each_partition(request["topics"], "topic", answer, "partitions"),
    }


def end_of_epoch(part: PartitionState, epoch: int) -> tuple[int, int]:
    """The largest epoch that is not newer than the given one, and where it ended. (-1, -1) for a future epoch."""
    if epoch > part.epoch or epoch < 0:
        return _NOWHERE
    if epoch < part.history[0].epoch:
        return epoch, part.history[0].start
    end: int = part.next_offset
    for entry in reversed(part.history):
        if entry.epoch <= epoch:
            return entry.epoch, end
        end = entry.start
    raise AssertionError("the first epoch of the history is not newer than this one")


# ---------------------------------------------------------------------------------------------- DeleteRecords
async def delete_records(gateway: Gateway, _version: int, request: Struct) -> Struct:
    # In Kafka the time-out bounds the wait for followers only, so that 0 deletes and does not wait. Here each deletion
    # is a Raft commit, which 0 gives no time: it is the default instead.
    timeout_ms = request["timeout_ms"] if request["timeout_ms"] > 0 else TIMEOUT_MS_DEFAULT
    failure = await confirmation_failure(gateway, lambda state: _are_known(state, request["topics"]))

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "partition_index": requested["partition_index"],
            "low_watermark": -1,
            "error_code": KafkaError.NONE,
        }
        try:
            part = gateway.state.partition_of(topic, requested["partition_index"])
            if part is None:
                raise failure or unknown_partition(gateway.state, topic, requested["partition_index"])
            out["low_watermark"] = await _delete_before(gateway, topic, part, requested["offset"], timeout_ms)
        except SmqError as e:
            out["error_code"] = code_of(e)
        return out

    topics = await _for_each_partition(request["topics"], "name", answer, "partitions")
    return {"throttle_time_ms": 0, "topics": topics}


def _are_known(state: ClusterState, topics: list[Struct]) -> bool:
    return all(state.partition_of(t["name"], p["partition_index"]) for t in topics for p in t["partitions"])


async def _delete_before(gateway: Gateway, topic: str, part: PartitionState, offset: int, timeout_ms: int) -> int:
    """Returns the log start afterwards. Offset -1 means up to the high water mark."""
    if offset < -1:
        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset}: it must be >= 0, or -1 for the hwm")
    if offset == -1:
        offset = (await gateway.calls.partition_range(topic, part.index, timeout_ms)).hwm
    command = AdvanceLogStart(request_id=NO_REQUEST, partition=part.pid, offset=Offset(offset))
    await gateway.calls.propose(command, timeout_ms)
    after = gateway.state.partition(part.pid)
    return after.log_start if after is not None else offset
