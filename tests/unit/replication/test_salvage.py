"""What a lone disk knows to be committed: its state up to the saved commit index, and each batch by that."""

import pytest

from smq.raft_state.command_codec import encode_command
from smq.raft_state.commands import AdvanceHwms, AdvanceLogStart, Command, CreateTopic, ElectLeader, HwmAdvance
from smq.raft_state.ids import NO_REQUEST, Epoch, LogIndex, Offset, PartitionId, TsNs
from smq.raft_state.limits import default_init
from smq.raft_state.machine import Machine
from smq.raft_state.state import ClusterState
from smq.records import parse_header
from smq.replication.log.partition_log import PartitionLog
from smq.replication.log.store import LogStore
from smq.replication.log.stored_batch import StoredValue, batch_key, times_range
from smq.replication.ports import Delete, Disk, Put, Table
from smq.replication.raft.journal import JournalWriter, RaftJournal, Snapshot
from smq.replication.raft.messages import NO_OP, REGULAR
from smq.replication.salvage import Missing, found_in, partitions_on, read_state
from tests.unit.replication.log.support import flipped
from tests.unit.replication.log.test_transactions import batch, marker
from tests.unit.replication.storage.support import FakeHarness
from tests.unit.replication.support import INCARNATION, ME, TOPIC, register

Found = list[tuple[int, str]]


def commands(partitions: int = 1, hwm: int = 0, log_start: int = 0) -> list[Command]:
    """A topic whose first partition is committed up to `hwm` in its first epoch, and deleted below `log_start`."""
    pid = pid_of(0)
    create = CreateTopic(name="t", topic_id=TOPIC, partition_count=partitions, replication_factor=1, created_ms=0)
    advance = HwmAdvance(
        partition=pid, epoch=Epoch(0), hwm=Offset(hwm), next_offset=Offset(hwm), ts_ns=TsNs(1_000 if hwm else 0)
    )
    trim = AdvanceLogStart(request_id=NO_REQUEST, partition=pid, offset=Offset(log_start))
    return [default_init("c"), register(ME), create, AdvanceHwms(items=(advance,)), trim]


def pid_of(number: int) -> PartitionId:
    return PartitionId(TOPIC + number.to_bytes(4, "big"))


def state_of(*applied: Command) -> ClusterState:
    machine = Machine()
    for index, command in enumerate(applied, 2):
        machine.apply(LogIndex(index), command)
    return machine.state


def write_journal(disk: Disk, entries: list[Command], *, committed: int, snapshot_at: int = 0) -> None:
    """Entry 1 holds no command; `committed` and `snapshot_at` count commands."""
    journal = RaftJournal()
    journal.add(bytes([NO_OP]), 1, 0)
    for index, command in enumerate(entries, 2):
        journal.add(bytes([REGULAR]) + encode_command(command), index, 0)
    journal.commit_to(1 + committed)
    if snapshot_at:
        machine = Machine(state_of(*entries[:snapshot_at]))
        journal.compact(Snapshot(index=1 + snapshot_at, term=0, state=machine.snapshot()), 1 + snapshot_at)
    JournalWriter(disk, journal, lambda: None).flush()


class Lone:
    """A disk with a log of partition 0."""

    def __init__(self) -> None:
        self.harness = FakeHarness()
        self.log: PartitionLog = LogStore(self.harness.disk).create(pid_of(0), Offset(0))

    def add(self, *batches: bytes, epoch: int = 0) -> list[StoredValue]:
        stored = []
        for data in batches:
            ts_ns = TsNs(self.log.last_ts_ns + 1)
            stored.append(self.log.append(data, parse_header(data), epoch=Epoch(epoch), ts_ns=ts_ns, done=lambda: None))
        self.harness.settle()
        return stored

    def damage(self, stored: StoredValue, *, with_row: bool = False) -> None:
        self.harness.write(Put(Table.BATCHES, batch_key(pid_of(0), stored.base), flipped(stored.value, 700)))
        if with_row:
            for key in self.harness.disk.scan_keys(Table.TIMES, *times_range(pid_of(0), 0)):
                if key.endswith(stored.base.to_bytes(8, "big")):
                    self.harness.write(Delete(Table.TIMES, key, key + b"\x00"))

    def found(self, state: ClusterState) -> Found:
        """(first offset, fate) of each batch with records, (first, "missing") of what is not there. Nothing is
        written."""
        disk = self.harness.reopen()
        before = {table: dict(rows) for table, rows in disk.image.tables.items()}
        found: Found = []
        for item in found_in(disk, pid_of(0), state):
            if isinstance(item, Missing):
                found.append((item.lo, f"missing to {item.hi}"))
            elif not item.is_control:
                found.append((item.first, item.fate.value))
        self.harness.settle()
        assert {table: dict(rows) for table, rows in disk.image.tables.items()} == before
        return found


def plain() -> bytes:
    return batch(1, -1, -1, -1, is_transactional=False)


def test_what_is_committed_uncertain_aborted_and_deleted_is_told_apart() -> None:
    lone = Lone()
    lone.add(plain(), plain())  # 0 is deleted
    for producer, is_commit in ((1, False), (2, True)):
        lone.add(batch(1, producer), marker(producer, is_commit=is_commit))  # 2 to 5
    lone.add(batch(1, 3), plain(), plain(), batch(1, 6), marker(6, is_commit=False))
    state = state_of(*commands(hwm=8, log_start=1))
    fates = [(1, "committed"), (2, "aborted"), (4, "committed"), (6, "uncertain"), (7, "committed")]
    assert lone.found(state) == [*fates, (8, "uncertain"), (9, "aborted")]
    assert lone.found(ClusterState())[0] == (0, "uncertain"), "of a topic that the state does not have"


def test_what_another_leader_has_replaced_is_no_part_of_the_log_and_its_place_is_missing() -> None:
    lone = Lone()
    lone.add(plain(), plain(), plain())
    state = state_of(*commands(hwm=1))
    part = state.topics["t"].partitions[0]
    elect = ElectLeader(
        partition=part.pid,
        expected_epoch=part.epoch,
        candidate=ME,
        incarnation=INCARNATION,
        end=Offset(1),
        by_leader=True,
    )
    machine = Machine(state)
    machine.apply(LogIndex(100), elect)
    part.hwm = Offset(4)  # in the new epoch, of which this disk has nothing
    assert lone.found(state) == [(0, "committed"), (1, "missing to 4")]


@pytest.mark.parametrize(
    ("with_row", "transaction"), [(False, "committed"), (True, "uncertain")], ids=["batch", "batch and its row"]
)
def test_after_damage_the_rest_is_there_and_what_the_damage_hides_is_uncertain(
    with_row: bool, transaction: str
) -> None:
    lone = Lone()
    _, second = lone.add(plain(), plain())
    lone.add(batch(1, 1), marker(1, is_commit=True), plain())
    (last,) = lone.add(plain())
    lone.damage(second, with_row=with_row)
    lone.damage(last)
    found = [(0, "committed"), (1, "missing to 2"), (2, transaction), (4, "committed"), (5, "missing to 6")]
    assert lone.found(state_of(*commands(hwm=6))) == found
    assert lone.found(state_of(*commands(hwm=5)))[-1] == (5, "missing to 6"), "it may have been committed, too"
    assert lone.found(state_of(*commands(hwm=9)))[-1] == (5, "missing to 9")


def test_a_batch_that_is_gone_and_a_partition_that_is_gone_are_missing() -> None:
    lone = Lone()
    lone.add(plain(), plain(), plain())
    lone.harness.write(Delete(Table.BATCHES, batch_key(pid_of(0), 1), batch_key(pid_of(0), 2)))
    state = state_of(*commands(hwm=3))
    assert lone.found(state) == [(0, "committed"), (1, "missing to 2"), (2, "committed")]
    lone.harness.write(Delete(Table.BATCHES, b"", b"\xff" * 30), Delete(Table.CHECKPOINTS, b"", b"\xff" * 30))
    assert lone.found(state) == [(0, "missing to 3")]
    assert list(partitions_on(lone.harness.disk)) == []


@pytest.mark.parametrize("snapshot_at", [0, 3])
def test_the_state_ends_with_the_saved_commit_index(snapshot_at: int) -> None:
    harness, entries = FakeHarness(), commands(hwm=7)
    write_journal(harness.disk, entries, committed=4, snapshot_at=snapshot_at)
    harness.settle()
    found = read_state(harness.disk)
    assert (found.index, found.unknown, found.damage) == (5, 1, "")
    assert found.state.topics["t"].partitions[0].hwm == 7


@pytest.mark.parametrize(("snapshot_at", "topics"), [(0, []), (3, ["t"])])
def test_of_a_damaged_journal_the_snapshot_is_left(snapshot_at: int, topics: list[str]) -> None:
    harness = FakeHarness()
    write_journal(harness.disk, commands(hwm=7), committed=5, snapshot_at=snapshot_at)
    harness.settle()
    (row,) = harness.disk.scan(Table.RAFT_LOG, (6).to_bytes(8, "big"), b"\xff" * 9, limit=1)
    harness.write(Put(Table.RAFT_LOG, row[0], flipped(row[1], 100)))
    found = read_state(harness.disk)
    assert list(found.state.topics) == topics
    assert "raft_log, index 6" in found.damage


def test_a_disk_of_a_node_that_never_began_has_an_empty_state() -> None:
    found = read_state(FakeHarness().disk)
    assert (found.index, found.unknown, found.damage, found.state) == (0, 0, "", ClusterState())
