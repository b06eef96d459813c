"""Idempotence per partition: repeats, gaps, new epochs, wrapping sequences, and forgotten producers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.errors import ErrorCode, SmqError
from smq.raft_state.ids import TsNs
from smq.records import BatchHeader, parse_header
from smq.replication.log import producers
from smq.replication.log.producers import CACHED_BATCHES, ProducerTable
from tests.unit.replication.storage.support import make_batch


def header(sequence: int, count: int = 1, *, producer: int = 7, epoch: int = 0) -> BatchHeader:
    return parse_header(make_batch(count, producer=(producer, epoch, sequence)))


def table_of(*headers: BatchHeader) -> ProducerTable:
    table, base = ProducerTable(), 100
    for h in headers:
        table.fold(replace(h, base_offset=base, epoch=3), TsNs(base * 10))
        base = base + h.count
    return table


def code_of(table: ProducerTable, h: BatchHeader) -> ErrorCode:
    with pytest.raises(SmqError) as caught:
        table.check(h)
    return caught.value.code


def test_the_next_sequence_is_new() -> None:
    assert table_of(header(0, 5)).check(header(5)) is None


def test_a_repeat_is_answered_with_the_first_attempts_offsets() -> None:
    table = table_of(header(0, 5), header(5, 2))
    cached = table.check(header(0, 5))
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
    assert all(table.check(header(i)) is not None for i in range(1, CACHED_BATCHES + 1))


def test_an_unknown_producer_may_begin_anywhere() -> None:
    assert ProducerTable().check(header(12345)) is None


def test_a_batch_without_a_producer_is_always_new() -> None:
    table = table_of(header(-1, producer=-1), header(-1, producer=-1))
    assert len(table) == 0
    assert table.check(header(-1, producer=-1)) is None


def test_an_older_producer_epoch_is_fenced() -> None:
    assert code_of(table_of(header(0, epoch=2)), header(1, epoch=1)) is ErrorCode.PRODUCER_FENCED


def test_a_new_producer_epoch_begins_at_zero() -> None:
    table = table_of(header(0), header(1))
    assert table.check(header(0, epoch=1)) is None
    assert code_of(table, header(2, epoch=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_a_new_producer_epoch_forgets_the_batches_of_the_old() -> None:
    table = table_of(header(0), header(0, epoch=1))
    cached = table.check(header(0, epoch=1))
    assert cached is not None
    assert cached.base_offset == 101


def test_sequences_wrap_to_zero_after_the_largest() -> None:
    largest = 2**31 - 1
    table = table_of(header(largest - 1, 3))  # largest-1, largest, 0
    assert table.check(header(1)) is None
    assert table.check(header(largest - 1, 3)) is not None
    table = table_of(header(largest))
    assert table.check(header(0)) is None
    assert code_of(table, header(1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_producers_are_independent_of_each_other() -> None:
    table = table_of(header(0, producer=1), header(0, producer=2), header(1, producer=1))
    assert table.check(header(2, producer=1)) is None
    assert table.check(header(1, producer=2)) is None


def test_the_least_recent_writer_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 3)
    table = table_of(*(header(0, producer=p) for p in (1, 2, 3)), header(1, producer=1), header(0, producer=4))
    assert len(table) == 3
    assert table.check(header(99, producer=2)) is None  # forgotten, so anything goes
    assert code_of(table, header(99, producer=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE


def test_tables_are_equal_if_they_hold_the_same_producers_in_the_same_order() -> None:
    """Other tests rely on it."""
    one, two = header(0, producer=1), header(0, producer=2)
    assert table_of(one, two) == table_of(one, two)
    assert table_of(one, two) != table_of(two, one)
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
            t.fold(header(seq, count, producer=p, epoch=e), TsNs(5))
    assert restored.snapshot() == table.snapshot()


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
