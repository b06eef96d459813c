"""Where a reader starts: the one table of positions that every interface follows (docs/rules.md).

Pure: numbers in, a position or a typed error out. It must never ask a node anything. `lo` is log_start; `hi` is
the high water mark, or the last stable offset where the reader is read-committed.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
class Ask:
    """What the reader said, and what was looked up for it.

    `committed` is the group's next offset, None where it never committed; `time_offset` is the first record at or
    after the time asked for, None where there is none.
    """

    type: OffsetType
    value: int = 0
    committed: Offset | None = None
    time_offset: Offset | None = None
    reset_if_gone: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """`clamped`: the offset asked for lay outside the range, and this is the nearest one within."""

    offset: Offset
    clamped: bool = False


def parse_offset_type(number: int) -> OffsetType:
    """INVALID_REQUEST for a number that is none, with the list of those that are."""
    try:
        return OffsetType(number)
    except ValueError:
        names = ", ".join(t.name for t in OffsetType)
        raise SmqError(ErrorCode.INVALID_REQUEST, f"offset_type must be one of {names}") from None


def resolve(ask: Ask, lo: Offset, hi: Offset) -> Position:
    """The position that the table gives; OFFSET_OUT_OF_RANGE with lo and hi where it gives none."""
    return _RULES[ask.type](ask, lo, hi)


def resolve_seek(offset: int, lo: Offset, hi: Offset) -> Position:
    """A seek may go anywhere a record is or will be next: lo .. hi, both included."""
    if not lo <= offset <= hi:
        raise out_of_range(f"cannot seek to offset {offset}", lo, hi)
    return Position(Offset(offset))


def out_of_range(what: str, lo: Offset, hi: Offset) -> SmqError:
    """The error that always carries the valid range."""
    span = f"records {lo} to {hi - 1} are there" if hi > lo else f"the partition is empty, its next offset is {hi}"
    return SmqError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{what}: {span}", ErrorDetails(lo=lo, hi=hi))


def _exact_offset(ask: Ask, lo: Offset, hi: Offset) -> Position:
    if not lo <= ask.value < hi:
        raise out_of_range(f"there is no record at offset {ask.value}", lo, hi)
    return Position(Offset(ask.value))


def _reset_to_offset(ask: Ask, lo: Offset, hi: Offset) -> Position:
    offset = min(max(ask.value, lo), hi)
    return Position(Offset(offset), clamped=offset != ask.value)


def _exact_ts_ns(ask: Ask, lo: Offset, hi: Offset) -> Position:
    if ask.time_offset is None:
        return Position(hi)
    # The look-up and the range are two reads: retention may have moved between them.
    return Position(Offset(min(max(ask.time_offset, lo), hi)))


def _earliest(_ask: Ask, lo: Offset, _hi: Offset) -> Position:
    return Position(lo)


def _latest(_ask: Ask, _lo: Offset, hi: Offset) -> Position:
    return Position(hi)


def _resume(otherwise: Callable[[Ask, Offset, Offset], Position]) -> Callable[[Ask, Offset, Offset], Position]:
    def rule(ask: Ask, lo: Offset, hi: Offset) -> Position:
        if ask.committed is None:
            return otherwise(ask, lo, hi)
        if ask.committed < lo:
            if ask.reset_if_gone:
                return Position(lo, clamped=True)
            raise out_of_range(
                f"the group's next offset {ask.committed} is gone: records {ask.committed} to {lo - 1} were removed",
                lo,
                hi,
            )
        if ask.committed > hi:
            raise out_of_range(f"the group's next offset {ask.committed} lies past the end", lo, hi)
        return Position(ask.committed)

    return rule


_RULES: Final[dict[OffsetType, Callable[[Ask, Offset, Offset], Position]]] = {
    OffsetType.EXACT_OFFSET: _exact_offset,
    OffsetType.RESET_TO_OFFSET: _reset_to_offset,
    OffsetType.EXACT_TS_NS: _exact_ts_ns,
    OffsetType.RESET_TO_EARLIEST: _earliest,
    OffsetType.RESET_TO_LATEST: _latest,
    OffsetType.RESUME_OR_EARLIEST: _resume(_earliest),
    OffsetType.RESUME_OR_LATEST: _resume(_latest),
}
