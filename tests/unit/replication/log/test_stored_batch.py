"""The bytes of the log on disk, pinned: a change here is a change of the on-disk format."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.log_state import (
    checkpoint_key,
    decode_checkpoint,
    decode_partition,
    partition_key,
    sealed,
)
from smq.replication.log.segments import HeldSegments
from smq.replication.log.stored_batch import (
    BatchInfo,
    after_append_time,
    after_create_time,
    append_time_key,
    batch_key,
    build_value,
    create_time_key,
    index_row,
    info_of,
    parse_index_row,
    parse_value,
    partition_stop,
    times_range,
)
from smq.replication.ports import DataDamaged
from tests.unit.replication.storage.support import make_batch

PID = PartitionId(bytes.fromhex("00112233445566778899aabbccddeeff") + (5).to_bytes(4, "big"))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
OFFSETS = st.integers(0, (1 << 63) - 2)


def sample() -> tuple[bytes, BatchInfo]:
    batch = make_batch(3, created_ms=1_700_000_000_123, producer=(42, 1, 10), payload=b"abc")
    header = parse_header(batch)
    value = build_value(PID, batch, header, Offset(1 << 41), Epoch(7), TsNs(1_700_000_000_999_888_777))
    return value, info_of(TsNs(1_700_000_000_999_888_777), header, Offset(1 << 41), Epoch(7), value)


def test_a_stored_batch_is_an_envelope_and_the_patched_batch() -> None:
    value, _ = sample()
    assert value.hex(" ", 8) == GOLDEN_VALUE
    stored = parse_value(PID, bytes.fromhex(GOLDEN_VALUE))
    assert (stored.base, stored.end, stored.epoch, stored.ts_ns) == (
        1 << 41,
        (1 << 41) + 3,
        7,
        1_700_000_000_999_888_777,
    )


def test_an_index_row_is_pinned() -> None:
    _, info = sample()
    key, row = index_row(PID, info)
    assert (key.hex(), row.hex()) == (GOLDEN_INDEX_KEY, GOLDEN_INDEX_ROW)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_stored_batch_are_damage(data: bytes) -> None:
    with pytest.raises(DataDamaged):
        parse_value(PID, data)


@given(st.binary(max_size=120), st.integers(0, 3))
def test_bytes_that_are_no_row_are_damage(data: bytes, version: int) -> None:
    for decode in (decode_checkpoint, decode_partition, HeldSegments.decode):
        with pytest.raises(DataDamaged):
            decode(data)
        with contextlib.suppress(DataDamaged):  # with a CRC that fits
            decode(sealed(bytes([version]) + data))
    with pytest.raises(DataDamaged):
        parse_index_row(append_time_key(PID, 1, 1), data)


@given(st.integers(0, sum(map(len, sample()[:1])) - 1), st.booleans())
def test_a_truncated_or_extended_value_is_damage(size: int, is_cut: bool) -> None:
    value, _ = sample()
    with pytest.raises(DataDamaged):
        parse_value(PID, value[:size] if is_cut else value + bytes(size + 1))


@given(OFFSETS, OFFSETS, st.integers(1, 1 << 30), INT64, INT64, st.integers(-(1 << 15), (1 << 15) - 1))
def test_index_rows_round_trip(base: int, ts_ns: int, count: int, created: int, producer: int, epoch: int) -> None:
    info = BatchInfo(base, base + count, 3, ts_ns, created, 99, producer, epoch, 5)  # type: ignore[arg-type]  # plain ints
    assert parse_index_row(*index_row(PID, info)) == info


@given(INT64, INT64, OFFSETS, OFFSETS)
def test_time_keys_sort_like_their_times(a: int, b: int, base_a: int, base_b: int) -> None:
    keys = create_time_key(PID, a, base_a), create_time_key(PID, b, base_b)
    assert (keys[0] < keys[1]) == ((a, base_a) < (b, base_b))
    start, stop = times_range(PID, 1)
    assert start < keys[0] < after_create_time(PID, a) < stop < partition_stop(PID)
    if a >= 0:
        start, stop = times_range(PID, 0)
        assert start < append_time_key(PID, a, base_a) < after_append_time(PID, a) < stop


def test_a_batch_is_damaged_in_any_other_partition_even_at_its_offset() -> None:
    value, _ = sample()
    for bit in range(8 * len(PID)):
        other = PartitionId((int.from_bytes(PID, "big") ^ 1 << bit).to_bytes(len(PID), "big"))
        with pytest.raises(DataDamaged, match="its partition"):
            parse_value(other, value)


def test_keys_of_a_partition_lie_together() -> None:
    beyond = PartitionId(PID[:-1] + bytes([PID[-1] + 1]))
    for key in (
        batch_key(PID, 0),
        batch_key(PID, (1 << 63) - 1),
        partition_key(PID),
        checkpoint_key(PID, (1 << 63) - 1),
    ):
        assert PID < key < partition_stop(PID) < beyond
    assert batch_key(PID, 255) < batch_key(PID, 256)


GOLDEN_VALUE = (
    "010000000e6b2fc9 17979cfe71c31789 0000020000000000 0000003400000007 025637c2a7000000 0000020000018bc"
    "f e5687b0000018bcf e5687b0000000000 00002a0001000000 0a00000003616263"
)
GOLDEN_INDEX_KEY = "00112233445566778899aabbccddeeff000000050017979cfe71c317890000020000000000"
GOLDEN_INDEX_ROW = "d5a19af60000005000000007000000030000018bcfe5687b000000000000002a00010000000a00"
