"""Idempotence per partition: repeats, gaps, new epochs, wrapping sequences, and expired producers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import Offset, TsNs
from smq.records import BatchHeader, parse_header
from smq.replication.log.producers import CACHED_BATCHES, ProducerTable
from tests.unit.replication.log.support import fold
from tests.unit.replication.storage.support import make_batch

NOTHING_EXPIRED = Offset(0)


def header(sequence: int, count: int = 1, *, producer: int = 7, epoch: int = 0) -> BatchHeader:
    return parse_header(make_batch(count, producer=(producer, epoch, sequence)))


def table_of(*headers: BatchHeader) -> ProducerTable:
    table, base = ProducerTable(), 100
    for h in headers:
        fold(table, replace(h, base_offset=base, epoch=3), TsNs(base * 10))
        base = base + h.count
    return table


def code_of(table: ProducerTable, h: BatchHeader, start: Offset = NOTHING_EXPIRED) -> ErrorCode:
    with pytest.raises(SmqError) as caught:
        table.check(h, start)
    return caught.value.code


def test_the_next_sequence_is_new() -> None:
    assert table_of(header(0, 5)).check(header(5), NOTHING_EXPIRED) is None


def test_a_repeat_is_answered_with_the_first_attempts_offsets() -> None:
    table = table_of(header(0, 5), header(5, 2))
    cached = table.check(header(0, 5), NOTHING_EXPIRED)
    assert cached is not None
    assert (cached.base_offset, cached.end, cached.epoch, cached.ts_ns) == (100, 105, 3, 1000)
    assert (cached.first_seq, cached.last_seq) == (0, 4)


@pytest.mark.parametrize("sequence", [3, 4, 6, 100])
def test_a_gap_or_an_overlap_is_out_of_order(sequence: int) -> None:
    assert code_of(table_of(header(0, 5)), header(sequence)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_a_repeat_with_the_same_start_and_another_end_is_out_of_order() -> None:
    assert code_of(table_of(header(0, 5)), header(0, 4)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_only_the_last_five_batches_are_remembered() -> None:
    table = table_of(*(header(i) for i in range(CACHED_BATCHES + 1)))
    assert code_of(table, header(0)) is ErrorCode.OUT_OF_ORDER_SEQUENCE
    assert all(table.check(header(i), NOTHING_EXPIRED) is not None for i in range(1, CACHED_BATCHES + 1))


def test_an_unknown_producer_may_begin_anywhere() -> None:
    assert ProducerTable().check(header(12345), NOTHING_EXPIRED) is None


def test_a_batch_without_a_producer_is_always_new() -> None:
    table = table_of(header(-1, producer=-1), header(-1, producer=-1))
    assert len(table) == 0
    assert table.check(header(-1, producer=-1), NOTHING_EXPIRED) is None


def test_an_older_producer_epoch_is_fenced() -> None:
    assert code_of(table_of(header(0, epoch=2)), header(1, epoch=1)) is ErrorCode.PRODUCER_FENCED


def test_a_new_producer_epoch_begins_at_zero() -> None:
    table = table_of(header(0), header(1))
    assert table.check(header(0, epoch=1), NOTHING_EXPIRED) is None
    assert code_of(table, header(2, epoch=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_a_new_producer_epoch_forgets_the_batches_of_the_old() -> None:
    table = table_of(header(0), header(0, epoch=1))
    cached = table.check(header(0, epoch=1), NOTHING_EXPIRED)
    assert cached is not None
    assert cached.base_offset == 101


def test_sequences_wrap_to_zero_after_the_largest() -> None:
    largest = 2**31 - 1
    table = table_of(header(largest - 1, 3))  # largest-1, largest, 0
    assert table.check(header(1), NOTHING_EXPIRED) is None
    assert table.check(header(largest - 1, 3), NOTHING_EXPIRED) is not None
    table = table_of(header(largest))
    assert table.check(header(0), NOTHING_EXPIRED) is None
    assert code_of(table, header(1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_producers_are_independent_of_each_other() -> None:
    table = table_of(header(0, producer=1), header(0, producer=2), header(1, producer=1))
    assert table.check(header(2, producer=1), NOTHING_EXPIRED) is None
    assert table.check(header(1, producer=2), NOTHING_EXPIRED) is None


def test_no_number_of_producers_makes_one_forgotten() -> None:
    many = [header(0, producer=p) for p in range(1_500)]
    table = table_of(*many)
    assert len(table) == 1_500
    assert all(table.check(h, NOTHING_EXPIRED) is not None for h in many)


# ------------------------------------------------------------------------------------------------ expiry
def test_an_expired_producer_may_begin_anywhere_in_any_epoch() -> None:
    table = table_of(header(0, 5, epoch=3))
    assert table.check(header(0, 5, epoch=3), Offset(104)) is not None, "the batch ends above"
    for h in (header(0, 5, epoch=3), header(77, epoch=3), header(9, epoch=1)):
        assert table.check(h, Offset(105)) is None
    assert (table.knows(7, Offset(104)), table.knows(7, Offset(105))) == (True, False)


def test_an_old_batch_of_a_producer_that_goes_on_expires_alone() -> None:
    table = table_of(header(0), header(1))
    assert code_of(table, header(0), Offset(101)) is ErrorCode.OUT_OF_ORDER_SEQUENCE
    assert table.check(header(1), Offset(101)) is not None
    assert table.check(header(2), Offset(101)) is None


def test_tables_are_equal_if_they_hold_the_same_entries() -> None:
    """Other tests rely on it."""
    one, two = header(0, producer=1), header(0, producer=2)
    assert table_of(one, two) == table_of(one, two)
    assert table_of(one, two) != table_of(two, one), "the offsets differ"
    assert table_of(one) != table_of(header(1, producer=1))
    assert table_of(one) != ProducerTable()


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2**31 - 1), st.integers(1, 9)))


@given(STEPS, STEPS)
def test_a_restored_table_behaves_like_the_original(
    before: list[tuple[int, int, int, int]], after: list[tuple[int, int, int, int]]
) -> None:
    table = table_of(*(header(seq, count, producer=p, epoch=e) for p, e, seq, count in before))
    restored = ProducerTable.restore(table.snapshot())
    assert restored == table
    for p, e, seq, count in after:
        for t in (table, restored):
            fold(t, header(seq, count, producer=p, epoch=e), TsNs(5))
    assert restored.snapshot() == table.snapshot()


def answer(table: ProducerTable, h: BatchHeader, start: Offset) -> object:
    try:
        return table.check(h, start)
    except SmqError as e:
        return e.code


SOON = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4), st.integers(1, 2)), max_size=12)


@given(SOON, SOON, st.integers(99, 115), st.integers(0, 20))
def test_no_answer_depends_on_whether_expired_entries_have_been_removed(
    before: list[tuple[int, int, int, int]], after: list[tuple[int, int, int, int]], start: int, later: int
) -> None:
    kept = table_of(*(header(seq, count, producer=p, epoch=e) for p, e, seq, count in before))
    swept = kept.copy()
    swept.forget_before(Offset(start))
    assert swept.size_bytes == len(swept.snapshot())
    base = 150
    for p, e, seq, count in after:
        h = header(seq, count, producer=p, epoch=e)
        assert answer(kept, h, Offset(start + later)) == answer(swept, h, Offset(start + later))
        for table in (kept, swept):
            fold(table, replace(h, base_offset=base, epoch=4), TsNs(base * 10))
        base += count
    for p in range(3):
        assert kept.knows(p, Offset(start)) == swept.knows(p, Offset(start))


@given(STEPS, STEPS)
def test_changes_since_a_snapshot_complete_it(
    before: list[tuple[int, int, int, int]], after: list[tuple[int, int, int, int]]
) -> None:
    table = table_of(*(header(seq, count, producer=p, epoch=e) for p, e, seq, count in before))
    restored = ProducerTable.restore(table.snapshot())
    table.mark_saved()
    for p, e, seq, count in after:
        fold(table, header(seq, count, producer=p, epoch=e), TsNs(5))
    restored.add(table.changes())
    assert restored == table
    assert table.size_bytes == restored.size_bytes == len(table.snapshot())


@given(st.binary(max_size=80))
def test_bytes_that_are_no_snapshot_are_refused(data: bytes) -> None:
    try:
        table = ProducerTable.restore(data)
    except ValueError:
        return
    assert ProducerTable.restore(table.snapshot()) == table


def test_a_truncated_snapshot_is_refused() -> None:
    snapshot = table_of(header(0), header(1)).snapshot()
    for size in range(1, len(snapshot)):
        with pytest.raises(ValueError, match="snapshot"):
            ProducerTable.restore(snapshot[:size])
