"""One suite over all disks: the simulated one, and the real one with each of its stores, keep the promises of the Disk
port alike."""

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smq.replication.ports import DataDamaged, Delete, Op, Put, Table
from smq.replication.storage.disk import NodeLogDisk
from tests.examples import examples
from tests.unit.replication.storage.support import (
    FakeHarness,
    Harness,
    SmallFilesHarness,
    StoreHarness,
)

T = Table.RAFT_LOG
FIRST, BEYOND = b"\x00", b"\xff\xff"


def put(*keys: bytes, value: bytes = b"v") -> list[Op]:
    return [Put(T, key, value) for key in keys]


def test_submissions_are_numbered_from_one(harness: Harness) -> None:
    disk = harness.disk
    assert (disk.submitted_seq, disk.durable_seq) == (0, 0)
    assert [disk.submit(put(b"a")), disk.submit([]), disk.submit(put(b"b"))] == [1, 2, 3]
    harness.settle()
    assert (disk.submitted_seq, disk.durable_seq) == (3, 3)


def test_callbacks_run_in_order_and_never_inside_submit(harness: Harness) -> None:
    disk = harness.disk
    seen: list[tuple[int, int]] = []
    for i in range(1, 301):
        disk.submit(put(b"%03d" % i), lambda i=i: seen.append((i, disk.durable_seq)))  # type: ignore[misc]  # default binds i
        if i == 1:
            assert seen == []
    harness.settle()
    assert seen == [(i, i) for i in range(1, 301)]


def test_many_submissions_share_a_commit(harness: Harness) -> None:
    for i in range(500):
        harness.disk.submit(put(b"%03d" % i))
    harness.settle()
    assert 0 < harness.posts < 500
    assert len(harness.disk.scan_keys(T, FIRST, BEYOND)) == 500


def test_delete_includes_start_and_excludes_stop(harness: Harness) -> None:
    harness.disk.submit(put(b"a", b"b", b"bb", b"c", b"d"))
    harness.write(Delete(T, b"b", b"c"))
    assert harness.disk.scan_keys(T, FIRST, BEYOND) == [b"a", b"c", b"d"]
    harness.write(Delete(T, b"", BEYOND))
    assert harness.disk.scan_keys(T, FIRST, BEYOND) == []


def test_a_deletion_may_begin_just_beyond_the_longest_key(harness: Harness) -> None:
    longest = b"k" * 511
    harness.write(Put(T, longest, b"1"), Put(T, b"l", b"2"), Put(T, b"m", b"3"))
    harness.reopen()
    harness.write(Delete(T, longest + b"\x00", b"m"))
    harness.reopen()
    assert harness.fatal == []
    assert harness.disk.scan_keys(T, b"", BEYOND) == [longest, b"m"]


def test_tables_do_not_see_each_other(harness: Harness) -> None:
    harness.disk.submit([Put(table, b"k", table.value.encode()) for table in Table if table is not Table.META])
    harness.write(Delete(Table.TIMES, b"a", b"z"))
    for table in set(Table) - {Table.META}:
        expected = None if table is Table.TIMES else table.value.encode()
        assert harness.disk.get(table, b"k") == expected


def test_scans_stop_at_bounds_limit_and_bytes(harness: Harness) -> None:
    disk = harness.disk
    disk.submit([Put(T, b"%d" % i, bytes(10)) for i in range(10)])
    harness.settle()
    keys = [b"%d" % i for i in range(10)]
    assert disk.scan_keys(T, b"2", b"5") == keys[2:5]
    assert disk.scan_keys(T, b"2", b"5", reverse=True) == keys[2:5][::-1]
    assert disk.scan_keys(T, b"", b"\xff", reverse=True, limit=2) == [b"9", b"8"]
    assert disk.scan_keys(T, b"25", b"45") == [b"3", b"4"]
    assert disk.scan_keys(T, b"25", b"45", reverse=True) == [b"4", b"3"]
    assert (
        disk.scan_keys(T, b"5", b"5") == disk.scan_keys(T, b"6", b"5") == disk.scan_keys(T, b"5", b"9", limit=0) == []
    )
    assert [k for k, _ in disk.scan(T, b"0", b"9", bytes_max=25)] == keys[:3]
    assert [k for k, _ in disk.scan(T, b"0", b"9", bytes_max=20)] == keys[:2]
    assert [k for k, _ in disk.scan(T, b"0", b"9", bytes_max=1)] == keys[:1]
    assert [k for k, _ in disk.scan(T, b"0", b"99", reverse=True, bytes_max=11)] == [b"9", b"8"]
    assert disk.scan(T, b"3", b"4") == [(b"3", bytes(10))]


def test_values_of_any_size_round_trip(harness: Harness) -> None:
    sizes = [0, 1, 2000, 4096, 70_000, 3_000_000]
    harness.write(*[Put(T, b"%08d" % n, bytes([n % 251]) * n) for n in sizes])
    assert harness.disk.scan(T, FIRST, BEYOND) == [(b"%08d" % n, bytes([n % 251]) * n) for n in sizes]
    assert harness.disk.get(T, b"00003000000") is None
    assert harness.disk.size_bytes() > 3_000_000


def test_queued_bytes_are_the_values_not_yet_durable(harness: Harness) -> None:
    harness.disk.submit([Put(T, b"a", bytes(100)), Delete(T, b"b", b"c"), Put(T, b"b", bytes(20))])
    assert harness.disk.queued_bytes == 120
    harness.settle()
    assert harness.disk.queued_bytes == 0


def test_a_callback_may_submit_again(harness: Harness) -> None:
    disk = harness.disk
    disk.submit(put(b"a"), lambda: void(disk.submit(put(b"b"), lambda: void(disk.submit(put(b"c"))))))
    harness.settle()
    assert disk.durable_seq == 3
    assert disk.scan_keys(T, FIRST, BEYOND) == [b"a", b"b", b"c"]


def void(_: object) -> None:
    """Drops a result."""


def test_a_reopened_disk_holds_everything_durable(harness: Harness) -> None:
    harness.disk.submit(put(b"a", b"b"))
    harness.settle()
    disk = harness.reopen()
    assert disk.scan_keys(T, FIRST, BEYOND) == [b"a", b"b"]
    assert (disk.submitted_seq, disk.durable_seq) == (0, 0)
    assert disk.submit(put(b"c")) == 1


def test_close_commits_queued_submissions(harness: Harness) -> None:
    for i in range(100):
        harness.disk.submit(put(b"%03d" % i))
    assert len(harness.reopen().scan_keys(T, FIRST, BEYOND)) == 100


def test_what_a_turn_of_the_loop_submits_shares_one_write(tmp_path: Path) -> None:
    turn, disk = opened_on_a_loop(tmp_path)
    for i in range(100):
        disk.submit(put(b"%03d" % i))
    (end_turn,) = turn
    assert disk.measures.submissions.series().count == 0
    end_turn()
    disk.close()
    shared = disk.measures.submissions.series()
    assert (shared.count, shared.total) == (1, 100)


def test_a_close_in_the_middle_of_a_turn_commits_what_was_submitted_in_it(tmp_path: Path) -> None:
    turn, disk = opened_on_a_loop(tmp_path)
    for key in (b"first", b"second"):
        disk.submit(put(key))
    disk.close()
    (end_turn,) = turn
    end_turn()  # the loop goes on for a moment
    _, disk = opened_on_a_loop(tmp_path)
    assert disk.scan_keys(T, FIRST, BEYOND) == [b"first", b"second"]
    disk.close()


def opened_on_a_loop(path: Path) -> tuple[list[Callable[[], None]], NodeLogDisk]:
    """The disk, and what it wants to be called when the turn ends."""
    turn: list[Callable[[], None]] = []
    disk = NodeLogDisk(
        path, call_soon_threadsafe=lambda _report: None, on_fatal=lambda _error: None, call_soon=turn.append
    )
    return turn, disk


def test_a_closed_disk_refuses_submissions(harness: Harness) -> None:
    harness.disk.close()
    harness.disk.close()
    with pytest.raises(RuntimeError, match="closed"):
        harness.disk.submit(put(b"a"))


def test_a_failed_commit_is_reported_once_and_nothing_after_it(harness: Harness) -> None:
    disk = harness.disk
    disk.submit(put(b"before"))
    harness.settle()
    reported: list[str] = []
    harness.submit_failing()
    seq = disk.submit(put(b"after"), lambda: reported.append("after"))
    harness.settle()
    assert disk.submit(put(b"later"), lambda: reported.append("later")) == seq + 1
    assert len(harness.fatal) == 1
    disk.close()
    assert reported == []
    assert disk.durable_seq == 1
    assert harness.reopen().scan_keys(T, FIRST, BEYOND) == [b"before"]


# ---------------------------------------------------------------------------- against a dict, at random
KEYS = st.binary(min_size=1, max_size=3).map(lambda b: bytes(x % 4 for x in b))
TABLES = st.sampled_from([Table.RAFT_LOG, Table.BATCHES])
PUTS = st.builds(Put, TABLES, KEYS, st.binary(max_size=40))
OPS = st.lists(st.one_of(PUTS, PUTS, st.builds(Delete, TABLES, KEYS, KEYS)), max_size=6)


class DiskAgainstDict(RuleBasedStateMachine):
    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self.settled = True

    @rule(ops=OPS)
    def submit(self, ops: list[Op]) -> None:
        self.harness.disk.submit(ops)
        self.settled = False
        for op in ops:
            rows = self.model[op.table]
            if isinstance(op, Put):
                rows[op.key] = op.value
            else:
                for key in [k for k in rows if op.start <= k < op.stop]:
                    del rows[key]

    @rule()
    def settle(self) -> None:
        self.harness.settle()
        self.settled = True

    @rule()
    def reopen(self) -> None:
        self.harness.reopen()
        self.settled = True

    @rule(
        table=TABLES,
        start=KEYS,
        stop=KEYS,
        reverse=st.booleans(),
        limit=st.integers(0, 5),
        bytes_max=st.integers(1, 90),
    )
    def scan(self, table: Table, start: bytes, stop: bytes, reverse: bool, limit: int, bytes_max: int) -> None:
        self.settle()
        rows = [(k, v) for k, v in self.model[table].items() if start <= k < stop]
        rows.sort(reverse=reverse)
        expected, total = [], 0
        for row in rows[:limit]:
            expected.append(row)
            total += len(row[1])
            if total >= bytes_max:
                break
        disk = self.harness.disk
        assert disk.scan(table, start, stop, reverse=reverse, limit=limit, bytes_max=bytes_max) == expected
        assert disk.scan_keys(table, start, stop, reverse=reverse, limit=limit) == [k for k, _ in rows[:limit]]

    @rule(table=TABLES, key=KEYS)
    def get(self, table: Table, key: bytes) -> None:
        self.settle()
        assert self.harness.disk.get(table, key) == self.model[table].get(key)

    @invariant()
    def committed_rows_are_the_models_when_settled(self) -> None:
        assert self.harness.fatal == []
        if self.settled:
            for table in (Table.RAFT_LOG, Table.BATCHES):
                assert dict(self.harness.disk.scan(table, FIRST, BEYOND)) == self.model[table]

    def teardown(self) -> None:
        self.harness.close()


class FakeAgainstDict(DiskAgainstDict):
    def __init__(self) -> None:
        super().__init__()
        self.harness = FakeHarness()


class StoreAgainstDict(DiskAgainstDict):
    open_store: Callable[[Path], Harness]  # of the class itself

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="smq-test-"))
        self.harness = type(self).open_store(self.path / "node")

    @rule()
    def crash(self) -> None:
        """Goes on with the directory as kill -9 would leave it."""
        harness = self.harness
        assert isinstance(harness, StoreHarness)
        harness.crash()
        self.settled = True

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


TestFakeAgainstDict = FakeAgainstDict.TestCase
TestFakeAgainstDict.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
STORE_SETTINGS = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class NodeLogAgainstDict(StoreAgainstDict):
    open_store = StoreHarness


class SmallFilesAgainstDict(StoreAgainstDict):
    open_store = SmallFilesHarness


TestNodeLogAgainstDict = NodeLogAgainstDict.TestCase
TestNodeLogAgainstDict.settings = STORE_SETTINGS
TestSmallFilesAgainstDict = SmallFilesAgainstDict.TestCase
TestSmallFilesAgainstDict.settings = STORE_SETTINGS


# ---------------------------------------------------------------------------------------- reads off the loop
def read_from(
    harness: Harness, lowest: bytes, start: bytes, stop: bytes, bytes_max: int = 1 << 30, table: Table = Table.BATCHES
) -> list[tuple[bytes, bytes]]:
    answers: list[list[tuple[bytes, bytes]] | DataDamaged] = []
    assert harness.disk.read_from(table, lowest, start, stop, place=b"", bytes_max=bytes_max, done=answers.append)
    assert not answers, "never from within the call"
    harness.wait(lambda: bool(answers))
    assert not isinstance(answers[0], DataDamaged)
    return answers[0]


@pytest.mark.parametrize("table", [Table.BATCHES, Table.TIMES])
def test_a_read_off_the_loop_begins_with_the_last_key_before_its_start(harness: Harness, table: Table) -> None:
    rows = [(b"%02d" % i, bytes([i]) * (3_000 if i % 3 else 10)) for i in range(0, 60, 2)]
    harness.write(*[Put(table, key, value) for key, value in rows])
    assert read_from(harness, b"", b"", b"99", table=table) == rows
    assert [k for k, _ in read_from(harness, b"", b"21", b"27", table=table)] == [b"20", b"22", b"24", b"26"]
    assert [k for k, _ in read_from(harness, b"", b"20", b"24", table=table)] == [b"20", b"22"]
    assert [k for k, _ in read_from(harness, b"21", b"21", b"24", table=table)] == [b"22"], "none in [lowest, start]"
    assert [k for k, _ in read_from(harness, b"50", b"99", b"999", table=table)] == [b"58"]
    assert [k for k, _ in read_from(harness, b"", b"11", b"99", 5_000, table=table)] == [b"10", b"12"]
    assert [k for k, _ in read_from(harness, b"", b"11", b"99", 6_010, table=table)] == [b"10", b"12", b"14"]
    assert [k for k, _ in read_from(harness, b"", b"11", b"99", 1, table=table)] == [b"10"], "the first comes whole"
    assert read_from(harness, b"", b"", b"00", table=table) == []


@pytest.mark.parametrize("sizes", [(3_000, 5_000), (3_000, 2 << 20), (10, 70_000)])
def test_rows_of_all_sizes_are_read_whole(harness: Harness, sizes: tuple[int, int]) -> None:
    """Those that LMDB keeps in its tree, those with pages of their own, and those longer than what is read ahead."""
    rng = random.Random(4)
    rows = [(b"%03d" % i, rng.randbytes(rng.choice(sizes))) for i in range(40)]
    for first in range(0, len(rows), 4):
        harness.write(*[Put(Table.BATCHES, key, value) for key, value in rows[first : first + 4]])
    assert read_from(harness, b"", b"", b"999") == rows
    for bytes_max in (1, 9_000, 100_000, 3 << 20):
        total, expected = 0, list[tuple[bytes, bytes]]()
        for row in rows[7:]:
            total += len(row[1])
            if expected and total > bytes_max:
                break
            expected.append(row)
        assert read_from(harness, b"", rows[7][0], b"999", bytes_max) == expected


def test_reads_off_the_loop_see_whole_submissions(harness: Harness) -> None:
    """A read takes place at some moment between request and answer, and each submission is there or not."""
    disk = harness.disk
    answers: list[list[tuple[bytes, bytes]] | DataDamaged] = []
    for i in range(60):
        disk.submit([Put(Table.BATCHES, b"a", b"%d" % i), Put(Table.BATCHES, b"b", b"%d" % i + bytes(5_000))])
        assert disk.read_from(Table.BATCHES, b"", b"", b"z", place=b"", bytes_max=1 << 30, done=answers.append)
    harness.wait(lambda: len(answers) == 60)
    for rows in answers:
        assert not isinstance(rows, DataDamaged)
        if rows:
            (_, a), (_, b) = rows
            assert b == a + bytes(5_000)


def test_scans_of_batches_agree_with_reads_off_the_loop(harness: Harness) -> None:
    rng = random.Random(3)
    keys = sorted({rng.randbytes(rng.randint(1, 30)) for _ in range(3_000)})
    harness.write(*[Put(Table.BATCHES, key, bytes(rng.choice((0, 9, 3_000)))) for key in keys])
    for _ in range(200):
        start, stop = sorted((rng.choice(keys), rng.randbytes(2)))
        scanned = harness.disk.scan(Table.BATCHES, start, stop)
        assert [k for k, _ in scanned] == [k for k in keys if start <= k < stop]
        assert read_from(harness, start, start, stop) == scanned
        assert harness.disk.scan(Table.BATCHES, start, stop, reverse=True) == scanned[::-1]
        assert harness.disk.get(Table.BATCHES, start) == (scanned[0][1] if start in keys and scanned else None)
