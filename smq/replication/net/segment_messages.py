"""Messages about compacted segments: shapes and bytes.

Owns kinds 26 to 29 of DATA. A replica asks any other for a segment piece by piece, and a leader asks its followers
whether they are in step. `wire` has them in its table; the parts that use them import them from here.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.ids import Offset, PartitionId
from smq.raft_state.limits import SEGMENT_DIGEST_BYTES
from smq.replication.net.pieces import cut, lengths_of
from smq.replication.ports import Buffer


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """DATA: send the batches from `at` on of the segment [start, end) that has this digest; whatever lies there if the
    digest is zeros."""

    partition: PartitionId
    request: int
    start: Offset
    end: Offset
    digest: bytes
    at: Offset


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """DATA, the answer: consecutive stored values, as many as fit one message. Without any, the replica does not hold
    this segment, or `is_busy`: it does, but reads for too many others now."""

    partition: PartitionId
    request: int
    values: Sequence[Buffer]
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class StepQuery:
    """DATA, leader to follower: does your log hold all segments, whose digests together have this digest?"""

    partition: PartitionId
    request: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """DATA, the answer."""

    partition: PartitionId
    request: int
    is_in_step: bool


SegmentMessage: TypeAlias = SegmentQuery | SegmentPart | StepQuery | StepReport

_QUERY: Final = struct.Struct(f">B20sQqq{SEGMENT_DIGEST_BYTES}sq")
_PART: Final = struct.Struct(">B20sQ?I")
_STEP_QUERY: Final = struct.Struct(f">B20sQ{SEGMENT_DIGEST_BYTES}s")
_STEP_REPORT: Final = struct.Struct(">B20sQ?")


def encode(message: SegmentMessage) -> list[Buffer]:
    """As `wire.encode`."""
    match message:
        case SegmentQuery(pid, request, start, end, digest, at):
            return [_QUERY.pack(26, pid, request, start, end, digest, at)]
        case SegmentPart(pid, request, values, is_busy):
            return [_PART.pack(27, pid, request, is_busy, len(values)) + lengths_of(values), *values]
        case StepQuery(pid, request, digest):
            return [_STEP_QUERY.pack(28, pid, request, digest)]
        case StepReport(pid, request, is_in_step):
            return [_STEP_REPORT.pack(29, pid, request, is_in_step)]


def segment_query(payload: memoryview) -> SegmentQuery:
    _, pid, request, start, end, digest, at = _QUERY.unpack(payload)
    return SegmentQuery(PartitionId(pid), request, Offset(start), Offset(end), digest, Offset(at))


def segment_part(payload: memoryview) -> SegmentPart:
    _, pid, request, is_busy, count = _PART.unpack_from(payload)
    return SegmentPart(PartitionId(pid), request, cut(payload, _PART.size, count), is_busy)


def step_query(payload: memoryview) -> StepQuery:
    _, pid, request, digest = _STEP_QUERY.unpack(payload)
    return StepQuery(PartitionId(pid), request, digest)


def step_report(payload: memoryview) -> StepReport:
    _, pid, request, is_in_step = _STEP_REPORT.unpack(payload)
    return StepReport(PartitionId(pid), request, is_in_step)
