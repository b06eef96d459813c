"""A flipped bit in a key of LMDB's tree: a search by that key no longer finds its row, and the table is out of order.

The simulation cannot show it: it reads a damaged file as a whole, which puts the rows in order again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.codec import BatchDamaged, StoredValue, batch_key
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.maintenance.scrub import Check
from smq.replication.ports import Examined, Table
from smq.replication.storage.environment_lmdb import DATA_FILE
from tests.unit.replication.storage.support import LmdbHarness, make_batch

PID = PartitionId(bytes(range(20)))
BATCHES = 40


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LmdbHarness]:
    made = LmdbHarness(tmp_path / "node")
    yield made
    made.close()


def filled(harness: LmdbHarness) -> tuple[PartitionLog, list[StoredValue]]:
    """A log of batches of one record each."""
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = []
    for _ in range(BATCHES):
        data = make_batch()
        ts_ns = TsNs(log.last_ts_ns + 10)
        stored.append(log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=ts_ns, done=lambda: None))
    harness.settle()
    return LogStore(harness.reopen()).open_all()[PID], stored  # which has nothing in memory


def garble(harness: LmdbHarness, offset: int, to: int) -> None:
    """Changes every copy of the key in the file while the node runs: it reads through the page cache."""
    path = harness.path / DATA_FILE
    found = path.read_bytes()
    old, new = batch_key(PID, Offset(offset)), batch_key(PID, Offset(to))
    assert found.count(old) >= 1
    at = found.find(old)
    with path.open("r+b") as f:
        while at >= 0:
            f.seek(at)
            f.write(new)
            at = found.find(old, at + 1)


def read_whole(harness: LmdbHarness, log: PartitionLog, stored: list[StoredValue]) -> int:
    """Reads every batch as a reader does, and puts back missing ones as a repair does; returns how many."""
    at, repairs = Offset(0), 0
    while at < BATCHES:
        try:
            found = log.read(at, Offset(BATCHES), 1 << 20)
        except BatchDamaged as damage:
            missing = damage.offset
        else:
            assert found, f"nothing at {at}, and the log ends at {BATCHES}"
            assert [s.base for s in found] == list(range(at, at + len(found)))
            at = found[-1].end
            continue
        assert log.replace(stored[missing], None, lambda: None)
        harness.settle()
        repairs += 1
        assert repairs <= BATCHES, "what was put back is not found"
    return repairs


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
@pytest.mark.parametrize("offset", [0, 17, BATCHES - 1])
def test_a_batch_with_a_garbled_key_is_missing_and_can_be_repaired(harness: LmdbHarness, offset: int, bit: int) -> None:
    log, stored = filled(harness)
    garble(harness, offset, offset ^ 1 << bit)
    assert read_whole(harness, log, stored) >= 1
    assert [s.base for s in log.read(Offset(offset), Offset(BATCHES), 1)] == [offset]
    assert harness.fatal == []


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
def test_the_scrubber_finds_the_gap_that_a_garbled_key_leaves(harness: LmdbHarness, bit: int) -> None:
    log, _ = filled(harness)
    garble(harness, 17, 17 ^ 1 << bit)
    check, slices = Check(Table.BATCHES), list[Examined]()
    harness.disk.examine(Table.BATCHES, b"", b"\xff" * 64, 1 << 20, check, slices.append)
    harness.run_next()
    assert len(slices) == 1
    assert (PID, Offset(17)) in check.gaps
    with pytest.raises(BatchDamaged):
        log.read(Offset(17), Offset(18), 1)


def test_a_key_visible_only_to_backward_scans_is_not_the_end_of_the_log(
    harness: LmdbHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = filled(harness)
    scan = harness.disk.scan
    monkeypatch.setattr(
        harness.disk, "scan", lambda table, *keys, **options: [] if table is Table.BATCHES else scan(table, *keys)
    )
    with pytest.raises(BatchDamaged, match=r"offset 5.*missing"):
        log.read(Offset(5), Offset(BATCHES), 1 << 20)
