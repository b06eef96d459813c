"""Where the index rows of a stretch of the log begin is found in few reads, whatever times lie between the rows."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sortedcontainers import SortedList

from smq.raft_state.ids import Offset, PartitionId
from smq.replication.log import segments
from smq.replication.log.stored_batch import TIME_APPEND, TIME_CREATE, append_time_key, create_time_key, times_range
from smq.replication.ports import Table
from tests.unit.replication.log.support import PID


class Rows:
    """Index rows in memory, and how often they were read."""

    def __init__(self, stamps: list[int]) -> None:
        """`stamps`: ascending, of the batches at 0, 10, 20..."""
        self.keys = SortedList(append_time_key(PID, stamp, 10 * number) for number, stamp in enumerate(stamps))
        self.reads = 0

    def scan_keys(
        self, table: Table, start: bytes, stop: bytes, *, reverse: bool = False, limit: int = 1 << 30
    ) -> list[bytes]:
        assert table is Table.TIMES
        self.reads += 1
        return list(self.keys.irange(start, stop, (True, False), reverse))[:limit]


def found(rows: Rows, start: int) -> int:
    log: Any = SimpleNamespace(pid=PID, rows=rows)
    return segments._first_stamp(log, TIME_APPEND, Offset(start))


@pytest.mark.parametrize("spread", [3, 1_000, 1 << 62])
def test_it_is_the_time_after_that_of_the_last_batch_below(spread: int) -> None:
    chance = random.Random(spread)
    for _ in range(300):
        stamps = sorted(chance.randrange(spread) for _ in range(chance.randrange(12)))
        rows = Rows(stamps)
        for start in range(0, 130, 5):
            below = [stamp for number, stamp in enumerate(stamps) if 10 * number < start]
            assert found(rows, start) == (below[-1] + 1 if below else 0), (stamps, start)


def test_reads_grow_with_the_number_of_rows_not_with_the_times_between_them() -> None:
    stamps = [1_700_000_000_000_000_000 + 5_000_000 * number for number in range(1_000)]
    most = 0
    for start in range(0, 10_010, 35):
        rows = Rows(stamps)
        found(rows, start)
        most = max(most, rows.reads)
    assert most <= 26, "two for each halving of 1,000 rows, and a few to find the first and the last"


def test_rows_of_another_kind_or_partition_do_not_count() -> None:
    rows = Rows([5])
    rows.keys.add(append_time_key(PartitionId(PID[:-1] + b"\xff"), 7, 0))
    rows.keys.add(times_range(PID, TIME_CREATE)[0] + bytes(16))
    assert (found(rows, 0), found(rows, 1)) == (0, 6)


def test_a_flipped_bit_in_a_create_time_ends_no_cut() -> None:
    """The newest row's time lost its highest bit, so it sorts first. Keys have no CRC."""
    rows = Rows([])
    rows.keys.update(create_time_key(PID, ms, base) for ms, base in [(1 << 39, 3), (1 << 40, 0), ((1 << 40) + 5, 1)])
    log: Any = SimpleNamespace(pid=PID, rows=rows, durable_end=Offset(4))
    assert segments.newest_create_ms(log, (1 << 40) + 1, Offset(3)) == (1 << 40) + 5
