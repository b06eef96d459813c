"""Which batches a reader of committed records gets."""

import pytest

from smq.coordinator.service.visibility import is_visible
from smq.raft_state.ids import Offset, ProducerId, TsNs
from smq.records import NewRecord, encode_batch, marker_batch
from smq.replication.api import Aborted, Fetched, StoredBatch

END = Offset(100)
FETCHED = Fetched([], Offset(0), END, END, END, [Aborted(Offset(9), Offset(5), ProducerId(1))])


def stored(base: int, data: bytes) -> StoredBatch:
    return StoredBatch(Offset(base), Offset(base), TsNs(1), memoryview(data))


def batch(producer: int, *, is_transactional: bool = True) -> bytes:
    record = NewRecord(None, b"v", 1)
    return encode_batch(
        [record], producer_id=producer, producer_epoch=0, base_sequence=0, is_transactional=is_transactional
    )


@pytest.mark.parametrize(
    ("base", "data", "expected"),
    [
        (4, batch(1), True),
        (5, batch(1), False),
        (8, batch(1), False),
        (10, batch(1), True),
        (6, batch(2), True),
        (6, batch(1, is_transactional=False), True),
        (9, marker_batch(producer_id=1, producer_epoch=0, is_commit=False, timestamp_ms=1), False),
        (12, marker_batch(producer_id=2, producer_epoch=0, is_commit=True, timestamp_ms=1), False),
    ],
    ids=["before it", "its first", "its last", "the next one", "another's", "outside", "its marker", "a commit marker"],
)
def test_aborted_batches_and_markers_are_left_out(base: int, data: bytes, expected: bool) -> None:
    assert is_visible(FETCHED, stored(base, data)) is expected
