"""Look-ups over several tables: one moment for all rows, in front of the index as in it."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from smq.replication.ports import DataDamaged, Delete, Put, Rows, T, Table
from smq.replication.storage.overlay import Layer, Overlay
from tests.unit.replication.storage.support import StoreHarness

OLD = [(b"a", b"indexed"), (b"c", b"indexed"), (b"e", b"indexed")]
NEW = [(b"b", b"pending"), (b"c", b"pending"), (b"f", b"pending")]
MERGED = sorted({**dict(OLD), **dict(NEW)}.items())
WAIT_S = 60


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StoreHarness]:
    made = StoreHarness(tmp_path / "node")
    yield made
    assert made.fatal == []
    made.close()


def filled(harness: StoreHarness) -> Overlay:
    """Every table has the same rows."""
    overlay = harness.disk._overlay
    for rows in (OLD, NEW):
        settle(harness)
        harness.write(*[Put(table, key, value) for table in Table for key, value in rows])
    assert overlay.grows.count == len(Table) * len(NEW)
    return overlay


def settle(harness: StoreHarness) -> None:
    harness.disk.settle()
    until(lambda: not harness.disk._overlay.grows.count and harness.disk._overlay._taken is None)


def looked_up(harness: StoreHarness, find: Callable[[Rows], T]) -> T:
    answers: list[T | DataDamaged] = []
    assert harness.disk.look_up(b"", find, answers.append) is not None
    harness.wait(lambda: bool(answers))
    answer = answers.pop()
    assert not isinstance(answer, DataDamaged)
    return answer


def all_rows(rows: Rows) -> dict[Table, list[tuple[bytes, bytes]]]:
    return {table: rows.scan(table, b"a", b"zzz") for table in Table}


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_true()


def of_ours(found: dict[Table, list[tuple[bytes, bytes]]]) -> dict[Table, list[tuple[bytes, bytes]]]:
    """Without the disk's own rows of table meta."""
    return {table: [row for row in rows if len(row[0]) == 1] for table, rows in found.items()}


def in_each_way(table: Table, rows: Rows) -> None:
    assert rows.get(table, b"b") == b"pending"
    assert rows.get(table, b"d") is None
    assert rows.scan(table, b"a", b"f", reverse=True, limit=3) == MERGED[3:0:-1]
    assert rows.scan_keys(table, b"b", b"e", limit=9) == [b"b", b"c"]
    assert rows.scan(table, b"a", b"f", bytes_max=8) == MERGED[:2]


def test_a_look_up_sees_rows_of_every_table_that_the_index_does_not_have_yet(harness: StoreHarness) -> None:
    filled(harness)
    assert of_ours(looked_up(harness, all_rows)) == dict.fromkeys(Table, MERGED)
    for table in Table:
        looked_up(harness, partial(in_each_way, table))


def test_all_rows_of_a_look_up_are_of_one_moment(harness: StoreHarness) -> None:
    """More rounds come, and the index takes them all, between the reads of one look-up."""
    overlay, disk = filled(harness), harness.disk

    def find(rows: Rows) -> list[dict[Table, list[tuple[bytes, bytes]]]]:
        found = [{Table.BATCHES: rows.scan(Table.BATCHES, b"a", b"zzz")}]
        count = overlay.grows.count
        disk.submit([Put(table, key, b"newer") for table in Table for key in (b"c", b"d")])
        until(lambda: overlay.grows.count > count)
        found.append(all_rows(rows))
        count = overlay.grows.count
        disk.submit([Delete(table, b"a", b"d") for table in Table])
        until(lambda: overlay.grows.count > count)
        settle(harness)
        found.append(all_rows(rows))
        return found

    first, second, third = looked_up(harness, find)
    assert first[Table.BATCHES] == MERGED
    assert of_ours(second) == of_ours(third) == dict.fromkeys(Table, MERGED)
    after = [(b"d", b"newer"), (b"e", b"indexed"), (b"f", b"pending")]
    assert of_ours(looked_up(harness, all_rows)) == dict.fromkeys(Table, after)


def test_a_look_up_that_a_transaction_overtakes_sees_no_row_that_it_deleted(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction comes between the two halves of its moment: the rows in front of the index, and the index's."""
    overlay, disk, copies = filled(harness), harness.disk, Overlay.copies

    def overtaken(found: Overlay) -> list[Layer]:
        copied = copies(found)
        count = overlay.grows.count
        disk.submit([Delete(table, b"a", b"d") for table in Table])
        until(lambda: overlay.grows.count > count)
        settle(harness)
        return copied

    monkeypatch.setattr(Overlay, "copies", overtaken)
    after = [(b"e", b"indexed"), (b"f", b"pending")]
    assert of_ours(looked_up(harness, all_rows)) == dict.fromkeys(Table, after)
