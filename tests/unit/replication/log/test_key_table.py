"""The table of keys: the newest offset of each, in a fixed amount of memory."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smq.raft_state.ids import Offset
from smq.replication.log.key_table import KeyTable


@given(start=st.integers(0, 2**40), keys=st.lists(st.binary(max_size=3), max_size=200))
def test_the_table_knows_the_newest_offset_of_each_key(start: int, keys: list[bytes]) -> None:
    table, newest = KeyTable(Offset(start), len(set(keys))), {}
    for offset, key in enumerate(keys, start):
        table.add(key, Offset(offset))
        newest[key] = offset
    assert {key: table.newest(key) for key in newest} == newest
    assert table.count == len(newest)
    assert table.newest(b"never added") == -1


def test_a_full_table_takes_known_keys_only() -> None:
    table = KeyTable(Offset(0), 2)
    table.add(b"a", Offset(0))
    assert (table.has_room(1), table.has_room(2)) == (True, False)
    table.add(b"b", Offset(1))
    with pytest.raises(ValueError, match="holds 2 keys"):
        table.add(b"c", Offset(2))
    table.add(b"a", Offset(3))
    assert (table.newest(b"a"), table.newest(b"b"), table.newest(b"c")) == (3, 1, -1)


def test_ten_million_keys_fit_into_256_mb() -> None:
    assert KeyTable.keys_in(256_000_000) >= 10_000_000


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_million_keys_are_held_in_less_than_256_mb() -> None:
    keys, before = 10_000_000, _resident_bytes()
    table = KeyTable(Offset(0), keys)
    for n in range(keys):
        table.add(b"user %d" % n, Offset(n))
    taken = _resident_bytes() - before
    assert table.count == keys
    assert keys * 18 < taken < 256_000_000, "less would mean that the table was not touched"
    for n in range(0, keys, 9_973):
        assert table.newest(b"user %d" % n) == n


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_empty_table_knows_nothing() -> None:
    assert KeyTable(Offset(0), 0).newest(b"a") == -1
