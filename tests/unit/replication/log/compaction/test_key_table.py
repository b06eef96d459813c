"""The table of keys: the newest offset of each, in a fixed amount of memory."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Offset
from smq.replication.log.compaction.key_table import KeyTable

BATCH = 7


@given(start=st.integers(0, 2**40), keys=st.lists(st.binary(max_size=3), max_size=200))
def test_the_table_knows_the_newest_offset_of_each_key(start: int, keys: list[bytes]) -> None:
    table, newest = KeyTable(Offset(start), len(set(keys))), {}
    for first in range(0, len(keys), BATCH):
        table.add([(key, start + first + n) for n, key in enumerate(keys[first : first + BATCH])])
    for offset, key in enumerate(keys, start):
        newest[key] = offset
    assert dict(zip(newest, table.newest(list(newest)), strict=True)) == newest
    assert table.count == len(newest)
    assert table.newest([b"never added"]) == [-1]


def test_a_full_table_takes_known_keys_only() -> None:
    table = KeyTable(Offset(0), 2)
    table.add([(b"a", 0)])
    assert (table.has_room(1, Offset(2)), table.has_room(2, Offset(2))) == (True, False)
    table.add([(b"b", 1)])
    with pytest.raises(ValueError, match="holds 2 keys"):
        table.add([(b"c", 2)])
    table.add([(b"a", 3)])
    assert table.newest([b"a", b"b", b"c"]) == [3, 1, -1]


def test_a_table_takes_offsets_up_to_a_million_million_beyond_its_start() -> None:
    start, last = 7, 7 + 2**40 - 2
    table = KeyTable(Offset(start), 2)
    assert (table.has_room(1, Offset(last + 1)), table.has_room(1, Offset(last + 2))) == (True, False)
    table.add([(b"a", start), (b"b", last)])
    assert table.newest([b"a", b"b"]) == [start, last]


def test_ten_million_keys_fit_into_256_mb() -> None:
    assert KeyTable.keys_in(256_000_000) >= 10_000_000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_million_keys_are_held_in_less_than_256_mb() -> None:
    keys, before = 10_000_000, _resident_bytes()
    table = KeyTable(Offset(0), keys)
    for first in range(0, keys, 1_000):
        table.add([(b"user %d" % n, n) for n in range(first, first + 1_000)])
    taken = _resident_bytes() - before
    assert table.count == keys
    assert keys * 16 < taken < 256_000_000, "less would mean that the table was not touched"
    for n in range(0, keys, 9_973):
        assert table.newest([b"user %d" % n]) == [n]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_empty_table_knows_nothing() -> None:
    assert KeyTable(Offset(0), 0).newest([b"a"]) == [-1]
