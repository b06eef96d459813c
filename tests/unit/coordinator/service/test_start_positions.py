"""The table of positions (docs/rules.md), cell by cell, for all seven offset types and for seek."""

import pytest

from smq.clients.pb import smq_pb2 as pb
from smq.coordinator.service.start_positions import (
    OffsetType,
    Position,
    StartRequest,
    parse_offset_type,
    resolve,
    resolve_seek,
)
from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset

LO, HI = Offset(10), Offset(20)
FAR = 2**40 + 5


def at(offset: int, *, clamped: bool = False) -> Position:
    return Position(Offset(offset), clamped)


def gone(type_: OffsetType, lo: Offset = LO, hi: Offset = HI, **kwargs: object) -> SmqError:
    with pytest.raises(SmqError) as e:
        resolve(StartRequest(type=type_, **kwargs), lo, hi)  # type: ignore[arg-type] # the cases name the fields
    assert e.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert (e.value.details.lo, e.value.details.hi) == (lo, hi)
    return e.value


# value -> position, or None for OFFSET_OUT_OF_RANGE
EXACT_OFFSET = {-1: None, 0: None, 9: None, 10: at(10), 15: at(15), 19: at(19), 20: None, 21: None, FAR: None}
RESET_TO_OFFSET = {
    -5: at(10, clamped=True),
    0: at(10, clamped=True),
    9: at(10, clamped=True),
    10: at(10),
    19: at(19),
    20: at(20),
    21: at(20, clamped=True),
    FAR: at(20, clamped=True),
}
SEEK = {-1: None, 9: None, 10: at(10), 15: at(15), 20: at(20), 21: None, FAR: None}


@pytest.mark.parametrize(("value", "expected"), EXACT_OFFSET.items())
def test_exact_offset_starts_only_at_a_record_that_is_there(value: int, expected: Position | None) -> None:
    if expected is None:
        gone(OffsetType.EXACT_OFFSET, value=value)
    else:
        assert resolve(StartRequest(type=OffsetType.EXACT_OFFSET, value=value), LO, HI) == expected


@pytest.mark.parametrize(("value", "expected"), RESET_TO_OFFSET.items())
def test_reset_to_offset_clamps_and_says_so(value: int, expected: Position) -> None:
    assert resolve(StartRequest(type=OffsetType.RESET_TO_OFFSET, value=value), LO, HI) == expected


@pytest.mark.parametrize(("value", "expected"), SEEK.items())
def test_seek_goes_up_to_and_including_the_high_water_mark(value: int, expected: Position | None) -> None:
    if expected is None:
        with pytest.raises(SmqError) as e:
            resolve_seek(value, LO, HI)
        assert e.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
        assert (e.value.details.lo, e.value.details.hi) == (LO, HI)
    else:
        assert resolve_seek(value, LO, HI) == expected


@pytest.mark.parametrize(
    ("found", "expected"), [(None, at(20)), (Offset(12), at(12)), (Offset(3), at(10)), (Offset(25), at(20))]
)
def test_exact_ts_ns_starts_at_the_record_found_or_waits_at_the_end(found: Offset | None, expected: Position) -> None:
    assert resolve(StartRequest(type=OffsetType.EXACT_TS_NS, value=1, time_offset=found), LO, HI) == expected


@pytest.mark.parametrize("value", [-1, 0, 15, FAR])
def test_earliest_and_latest_ignore_the_value(value: int) -> None:
    assert resolve(StartRequest(type=OffsetType.RESET_TO_EARLIEST, value=value), LO, HI) == at(10)
    assert resolve(StartRequest(type=OffsetType.RESET_TO_LATEST, value=value), LO, HI) == at(20)


RESUMES = [OffsetType.RESUME_OR_EARLIEST, OffsetType.RESUME_OR_LATEST]


@pytest.mark.parametrize("type_", RESUMES)
@pytest.mark.parametrize("committed", [10, 15, 19, 20])
def test_resume_starts_at_exactly_the_next_offset_of_the_group(type_: OffsetType, committed: int) -> None:
    assert resolve(StartRequest(type=type_, committed=Offset(committed)), LO, HI) == at(committed)


def test_resume_without_a_commit_falls_back_as_its_name_says() -> None:
    assert resolve(StartRequest(type=OffsetType.RESUME_OR_EARLIEST), LO, HI) == at(10)
    assert resolve(StartRequest(type=OffsetType.RESUME_OR_LATEST), LO, HI) == at(20)


@pytest.mark.parametrize("type_", RESUMES)
def test_resume_below_log_start_names_the_range_that_is_gone(type_: OffsetType) -> None:
    error = gone(type_, committed=Offset(4))
    assert "4 is gone" in error.message
    assert "9" in error.message


@pytest.mark.parametrize("type_", RESUMES)
def test_resume_below_log_start_starts_at_earliest_if_the_caller_asked_to_reset(type_: OffsetType) -> None:
    assert resolve(StartRequest(type=type_, committed=Offset(4), reset_if_gone=True), LO, HI) == at(10, clamped=True)


@pytest.mark.parametrize("type_", RESUMES)
@pytest.mark.parametrize("reset", [False, True])
def test_resume_past_the_end_is_out_of_range_even_with_reset(type_: OffsetType, reset: bool) -> None:
    gone(type_, committed=Offset(21), reset_if_gone=reset)


def test_an_empty_partition_has_no_exact_offset_and_everything_else_waits_at_its_end() -> None:
    lo = hi = Offset(7)
    error = gone(OffsetType.EXACT_OFFSET, lo, hi, value=7)
    assert "empty" in error.message
    for type_ in set(OffsetType) - {OffsetType.EXACT_OFFSET}:
        assert resolve(StartRequest(type=type_, value=7), lo, hi) == at(7)
    assert resolve_seek(7, lo, hi) == at(7)


def test_offsets_past_two_to_the_forty_behave_the_same() -> None:
    lo, hi = Offset(2**40), Offset(2**40 + 10)
    assert resolve(StartRequest(type=OffsetType.EXACT_OFFSET, value=FAR), lo, hi) == at(FAR)
    assert resolve(StartRequest(type=OffsetType.RESET_TO_OFFSET, value=0), lo, hi) == at(2**40, clamped=True)
    gone(OffsetType.EXACT_OFFSET, lo, hi, value=2**40 - 1)


def test_offset_types_have_the_numbers_of_the_wire_contract() -> None:
    assert {t.name: t.value for t in OffsetType} == {
        name: number for name, number in pb.OffsetType.items() if name != "OFFSET_TYPE_UNSPECIFIED"
    }


@pytest.mark.parametrize("number", [0, 8, -1, 1000])
def test_an_unknown_offset_type_is_refused_with_the_list_of_known_ones(number: int) -> None:
    with pytest.raises(SmqError, match="RESUME_OR_LATEST") as e:
        parse_offset_type(number)
    assert e.value.code is ErrorCode.INVALID_REQUEST
