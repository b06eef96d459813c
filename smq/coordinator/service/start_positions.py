"""Where a reader starts: the one table of positions that every interface follows (docs/rules.md).

Pure: numbers in, a position or a typed error out. It must never ask a node anything. `lo` is log_start. `hi` is the
last stable offset if the reader is read-committed, otherwise the high water mark.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from smq.raft_state.errors import ErrorCode, ErrorDetails, SmqError
from smq.raft_state.ids import Offset


class OffsetType(enum.IntEnum):
    """The numbers are those of smq.v1.OffsetType."""

    EXACT_OFFSET = 1
    RESET_TO_OFFSET = 2
    EXACT_TS_NS = 3
    RESET_TO_EARLIEST = 4
    RESET_TO_LATEST = 5
    RESUME_OR_EARLIEST = 6
    RESUME_OR_LATEST = 7

    @property
    def needs_commit(self) -> bool:
        """The group's committed offset must be looked up first."""
        return self in (OffsetType.RESUME_OR_EARLIEST, OffsetType.RESUME_OR_LATEST)

    @property
    def needs_time(self) -> bool:
        """The offset for a time must be looked up first."""
        return self is OffsetType.EXACT_TS_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """What the reader asked for, and what was looked up for it.

    `committed` is the group's next offset, None if it never committed. `time_offset` is the first record at or after
    the requested time, None if there is none before `searched_end`: the caller must resolve it with a `hi` that is not
    beyond that.
    """

    type: OffsetType
    value: int = 0
    committed: Offset | None = None
    time_offset: Offset | None = None
    searched_end: Offset | None = None  # with a time only, and only if nothing was found
    reset_if_gone: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """`clamped`: the requested offset was outside the range, and this is the nearest one inside."""

    offset: Offset
    clamped: bool = False


_Rule: TypeAlias = Callable[[StartRequest, Offset, Offset], Position]


def parse_offset_type(number: int) -> OffsetType:
    """INVALID_REQUEST for an unknown number, with the list of valid types."""
    try:
        return OffsetType(number)
    except ValueError:
        names = ", ".join(t.name for t in OffsetType)
        raise SmqError(ErrorCode.INVALID_REQUEST, f"offset_type must be one of {names}") from None


def resolve(request: StartRequest, lo: Offset, hi: Offset) -> Position:
    """The position that the table gives; OFFSET_OUT_OF_RANGE with lo and hi if it gives none."""
    return _RULES[request.type](request, lo, hi)


def resolve_seek(offset: int, lo: Offset, hi: Offset) -> Position:
    """A seek may go to any record, or to the next one to come: lo .. hi, both included."""
    if not lo <= offset <= hi:
        raise out_of_range(f"cannot seek to offset {offset}", lo, hi)
    return Position(Offset(offset))


def out_of_range(what: str, lo: Offset, hi: Offset) -> SmqError:
    """The error that always carries the valid range."""
    span = f"records {lo} to {hi - 1} are there" if hi > lo else f"the partition is empty, its next offset is {hi}"
    return SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{what}: {span}", ErrorDetails(lo=lo, hi=hi))


def _exact_offset(request: StartRequest, lo: Offset, hi: Offset) -> Position:
    if not lo <= request.value < hi:
        raise out_of_range(f"there is no record at offset {request.value}", lo, hi)
    return Position(Offset(request.value))


def _reset_to_offset(request: StartRequest, lo: Offset, hi: Offset) -> Position:
    offset = min(max(request.value, lo), hi)
    return Position(Offset(offset), clamped=offset != request.value)


def _exact_ts_ns(request: StartRequest, lo: Offset, hi: Offset) -> Position:
    if request.time_offset is None:
        return Position(hi)
    # The look-up and the range are two reads: retention may have moved log_start between them.
    return Position(Offset(min(max(request.time_offset, lo), hi)))


def _earliest(_request: StartRequest, lo: Offset, _hi: Offset) -> Position:
    return Position(lo)


def _latest(_request: StartRequest, _lo: Offset, hi: Offset) -> Position:
    return Position(hi)


def _resume(default: _Rule) -> _Rule:
    def rule(request: StartRequest, lo: Offset, hi: Offset) -> Position:
        if request.committed is None:
            return default(request, lo, hi)
        if request.committed < lo:
            if request.reset_if_gone:
                return Position(lo, clamped=True)
            raise out_of_range(
                f"the group's next offset {request.committed} is gone: "
                f"records {request.committed} to {lo - 1} were removed",
                lo,
                hi,
            )
        if request.committed > hi:
            raise out_of_range(f"the group's next offset {request.committed} lies past the end", lo, hi)
        return Position(request.committed)

    return rule


_RULES: Final[dict[OffsetType, _Rule]] = {
    OffsetType.EXACT_OFFSET: _exact_offset,
    OffsetType.RESET_TO_OFFSET: _reset_to_offset,
    OffsetType.EXACT_TS_NS: _exact_ts_ns,
    OffsetType.RESET_TO_EARLIEST: _earliest,
    OffsetType.RESET_TO_LATEST: _latest,
    OffsetType.RESUME_OR_EARLIEST: _resume(_earliest),
    OffsetType.RESUME_OR_LATEST: _resume(_latest),
}
