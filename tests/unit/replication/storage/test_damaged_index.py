"""A flipped bit in the index puts a batch under another key: it is missing then, and never the end of the log."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from smq.raft_state.ids import Epoch, Offset, PartitionId, TsNs
from smq.records import parse_header
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import BatchDamaged, StoredValue, batch_key
from smq.replication.maintenance.scrub import Check
from smq.replication.ports import Examined, Table
from smq.replication.storage.frames import Location, parse_location
from smq.replication.storage.index import DATA_FILE
from tests.unit.replication.storage.support import StoreHarness, make_batch

PID = PartitionId(bytes(range(20)))
BATCHES = 40
ROW_BYTES = len(Location(0, 0, 0, 0).row(b""))


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StoreHarness]:
    made = StoreHarness(tmp_path / "node")
    yield made
    made.close()


def filled(harness: StoreHarness) -> tuple[PartitionLog, list[StoredValue]]:
    """A log of batches of one record each, which the index has."""
    log = LogStore(harness.disk).create(PID, Offset(0))
    stored = []
    for i in range(BATCHES):
        data = make_batch(payload=bytes([i]) * 7)
        ts_ns = TsNs(log.last_ts_ns + 10)
        stored.append(log.append(data, parse_header(data), epoch=Epoch(1), ts_ns=ts_ns, done=lambda: None))
    harness.settle()
    log = LogStore(harness.reopen(), tail_bytes_kept=0).open_all()[PID]
    log.keep_from(Offset(BATCHES))
    return log, stored


def garble(harness: StoreHarness, offset: int, to: int) -> None:
    """In place, as the medium does it: the tree is not in order any more."""
    key, file, found = batch_key(PID, offset), harness.path / DATA_FILE, 0
    data = file.read_bytes()
    with file.open("r+b") as f:
        at = data.find(key)
        while at >= 0:
            if parse_location(key, data[at + len(key) : at + len(key) + ROW_BYTES]) is not None:
                f.seek(at)
                f.write(batch_key(PID, to))
                found += 1
            at = data.find(key, at + 1)
    assert found


def read_whole(harness: StoreHarness, log: PartitionLog, stored: list[StoredValue]) -> int:
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
def test_a_batch_with_a_garbled_key_is_missing_and_can_be_repaired(
    harness: StoreHarness, offset: int, bit: int
) -> None:
    log, stored = filled(harness)
    garble(harness, offset, offset ^ 1 << bit)
    assert read_whole(harness, log, stored) >= 1
    assert [s.base for s in log.read(Offset(offset), Offset(BATCHES), 1)] == [offset]
    assert harness.fatal == []


@pytest.mark.parametrize("bit", [0, 3, 5, 6, 12, 40], ids=lambda bit: f"bit{bit}")
def test_the_scrubber_finds_the_gap_that_a_garbled_key_leaves(harness: StoreHarness, bit: int) -> None:
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
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = filled(harness)
    scan = harness.disk.scan
    monkeypatch.setattr(
        harness.disk, "scan", lambda table, *keys, **options: [] if table is Table.BATCHES else scan(table, *keys)
    )
    with pytest.raises(BatchDamaged, match=r"offset 5.*missing"):
        log.read(Offset(5), Offset(BATCHES), 1 << 20)
