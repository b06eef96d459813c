"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where a partition's log and its epochs begin and end.

Owns the special timestamps. Where a log ends only its leader knows, after a read index (rule 25): clients ask the
leader, which answers for all partitions of a request after one. A node that does not lead sends them away. Look-ups by
time, which read the log of this node's replica, have barriers of their own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from smq.coordinator.kafka.cluster_view import check_epoch, confirmation_failure, epoch_at
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, code_of, list_offsets_code_of
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import FETCH_CONCURRENCY, TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import AdvanceLogStart
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import NO_REQUEST, Offset
from smq.raft_state.state import ClusterState, PartitionState
from smq.replication.api import PartitionRange, TimeKind
from smq.replication.partition.by_name import unknown_partition

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4  # the same as EARLIEST: all storage is local
TO_THE_END: Final = -1  # of DeleteRecords: up to the high water mark
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


async def _own_ranges(
    gateway: Gateway, topics: list[Struct], name_key: str, index_key: str, timeout_ms: int
) -> dict[tuple[str, int], PartitionRange | SmqError]:
    """Of all partitions of a request, as far as this node leads them."""
    names = [(topic[name_key], requested[index_key]) for topic in topics for requested in topic["partitions"]]
    return dict(zip(names, await gateway.calls.partition_ranges(names, timeout_ms, at_leader=True), strict=True))


def _found(range_: PartitionRange | SmqError) -> PartitionRange:
    if isinstance(range_, SmqError):
        raise range_
    return range_


# ------------------------------------------------------------------------------------------------ ListOffsets
async def list_offsets(gateway: Gateway, version: int, request: Struct) -> Struct:
    is_committed = request["isolation_level"] == _READ_COMMITTED
    timeout_ms = request["timeout_ms"] or TIMEOUT_MS_DEFAULT
    ranges = await _own_ranges(gateway, request["topics"], "name", "partition_index", timeout_ms)

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "partition_index": requested["partition_index"],
            "error_code": KafkaError.NONE,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        }
        try:
            range_ = _found(ranges[topic, requested["partition_index"]])
            part = _confirmed(gateway, topic, requested["partition_index"])
            out["error_code"] = check_epoch(part, requested["current_leader_epoch"])
            if out["error_code"] is not KafkaError.NONE:
                return out
            timestamp = requested["timestamp"]
            offset, timestamp = await _position(gateway, range_, timestamp, is_committed, timeout_ms)
            # The look-up may have read a newer state than the one above. The epoch must be of the same state.
            part = _confirmed(gateway, topic, requested["partition_index"])
        except SmqError as e:
            out["error_code"] = list_offsets_code_of(e, version)
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
    gateway: Gateway, range_: PartitionRange, timestamp: int, is_committed: bool, timeout_ms: int
) -> tuple[int, int]:
    """The offset, and the record's timestamp if the request names a time."""
    if timestamp == LATEST:
        return range_.end_for(is_committed=is_committed), -1
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return range_.log_start, -1
    if timestamp < 0 and timestamp != MAX_TIMESTAMP:
        return _NOWHERE  # tiered storage, which this log does not have
    kind = TimeKind.MAX_TIMESTAMP if timestamp == MAX_TIMESTAMP else TimeKind.TIMESTAMP_MS
    found = await gateway.calls.offset_for_time(range_.topic, range_.partition, kind, max(timestamp, 0), timeout_ms)
    return (found.offset, found.timestamp_ms) if found.timestamp_ms >= 0 else _NOWHERE


# --------------------------------------------------------------------------------------- OffsetForLeaderEpoch
async def offset_for_leader_epoch(gateway: Gateway, version: int, request: Struct) -> Struct:
    ranges = await _own_ranges(gateway, request["topics"], "topic", "partition", TIMEOUT_MS_DEFAULT)

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "error_code": KafkaError.NONE,
            "partition": requested["partition"],
            "leader_epoch": -1,
            "end_offset": -1,
        }
        try:
            range_ = _found(ranges[topic, requested["partition"]])
            part = _confirmed(gateway, topic, requested["partition"])
        except SmqError as e:
            out["error_code"] = code_of(e)
            return out
        out["error_code"] = check_epoch(part, requested["current_leader_epoch"])
        if out["error_code"] is KafkaError.NONE:
            log_end = range_.next_offset if range_.epoch == part.epoch else part.next_offset
            out["leader_epoch"], out["end_offset"] = end_of_epoch(part, requested["leader_epoch"], log_end)
        return out

    return {
        "throttle_time_ms": 0,
        "topics": await _for_each_partition(request["topics"], "topic", answer, "partitions"),
    }


def end_of_epoch(part: PartitionState, epoch: int, log_end: int) -> tuple[int, int]:
    """The largest epoch that is not newer than the given one, and where it ended. (-1, -1) for a future epoch. The
    current one ends at `log_end`."""
    if epoch > part.epoch or epoch < 0:
        return _NOWHERE
    if epoch < part.history[0].epoch:
        return epoch, part.history[0].start
    end = log_end
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
    to_the_end = [
        (topic["name"], requested["partition_index"])
        for topic in request["topics"]
        for requested in topic["partitions"]
        if requested["offset"] == TO_THE_END and gateway.state.partition_of(topic["name"], requested["partition_index"])
    ]
    ends = dict(zip(to_the_end, await gateway.calls.partition_ranges(to_the_end, timeout_ms), strict=True))

    async def answer(topic: str, requested: Struct) -> Struct:
        out: Struct = {
            "partition_index": requested["partition_index"],
            "low_watermark": -1,
            "error_code": KafkaError.NONE,
        }
        try:
            name, before = (topic, requested["partition_index"]), requested["offset"]
            part = gateway.state.partition_of(*name)
            if part is None or (before == TO_THE_END and name not in ends):
                raise failure or unknown_partition(gateway.state, *name)
            if before == TO_THE_END:
                before = _found(ends[name]).hwm
            out["low_watermark"] = await _delete_before(gateway, part, before, timeout_ms)
        except SmqError as e:
            out["error_code"] = code_of(e)
        return out

    topics = await _for_each_partition(request["topics"], "name", answer, "partitions")
    return {"throttle_time_ms": 0, "topics": topics}


def _are_known(state: ClusterState, topics: list[Struct]) -> bool:
    return all(state.partition_of(t["name"], p["partition_index"]) for t in topics for p in t["partitions"])


async def _delete_before(gateway: Gateway, part: PartitionState, offset: int, timeout_ms: int) -> int:
    """Returns the log start afterwards."""
    if offset < 0:
        raise SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset}: it must be >= 0, or -1 for the hwm")
    command = AdvanceLogStart(request_id=NO_REQUEST, partition=part.pid, offset=Offset(offset))
    await gateway.calls.propose(command, timeout_ms)
    after = gateway.state.partition(part.pid)
    return after.log_start if after is not None else offset
