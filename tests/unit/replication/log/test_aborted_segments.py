"""Aborted transactions and compacted segments: they go and come back with the batches, whatever happens meanwhile."""

import pytest

from smq.raft_state.ids import Offset
from smq.records import marker_batch
from smq.replication.log import partition_log
from smq.replication.log.aborted import aborted_key
from smq.replication.log.deletion import delete_partition
from smq.replication.log.segments import digest_of, replaced
from smq.replication.log.stored_batch import (
    TIME_ABORTED,
    BatchDamaged,
    StoredValue,
    batch_key,
    index_row,
    info_of_stored,
    times_range,
)
from smq.replication.ports import Delete, Put, Table
from tests.unit.replication.log.committed_readers import READERS, of_fetch
from tests.unit.replication.log.support import PID
from tests.unit.replication.log.test_segments import Node, in_transaction, nothing, rewritten
from tests.unit.replication.storage.support import FakeHarness

ONE, OTHER = 1, 2


def node_of(steps: str) -> Node:
    """A log of one batch for each letter: a, b are data of two producers, A, B abort, C, D commit, and - is plain."""
    node, sequences = Node(FakeHarness(0)), {ONE: 0, OTHER: 0}
    for letter in steps:
        producer = ONE if letter in "aAC" else OTHER
        if letter == "-":
            node.append([9], 0)
        elif letter.islower():
            node.write(in_transaction([7], producer, sequences[producer]), 0)
            sequences[producer] += 1
        else:
            is_commit = letter in "CD"
            node.write(marker_batch(producer_id=producer, producer_epoch=0, is_commit=is_commit, timestamp_ms=5), 0)
    node.harness.settle()
    return node


def known(node: Node) -> list[tuple[int, int]]:
    """Control batch and first offset of each, after the counts have been compared."""
    log = node.log
    assert log._state.aborted - log._base.aborted == len(log.aborted)
    return [(aborted.marker, aborted.first) for aborted in log.aborted]


def named(node: Node, values: list[StoredValue]) -> list[tuple[int, int]]:
    return [(aborted.marker, aborted.first) for aborted in of_fetch(values, node.log.aborted)]


def begin_install(node: Node, end: int, values: list[StoredValue]) -> None:
    old = replaced(node.log, Offset(0), Offset(end))
    assert node.log.install(Offset(0), Offset(end), digest_of(values), values, old, nothing)


def test_what_was_aborted_goes_with_its_batches_and_no_start_looks_for_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = node_of("aCaAaAaCaA")
    old = node.stored()
    assert known(node) == [(3, 2), (5, 4), (9, 8)]
    assert node.install(0, 8, rewritten(old[:8], set(), 10, node.log.aborted))
    assert known(node) == [(9, 8)]
    folds: list[None] = []
    monkeypatch.setattr(partition_log.PartitionLog, "_fold_aborted", lambda self: folds.append(None))
    node.reopen()
    assert (known(node), folds) == ([(9, 8)], [])
    monkeypatch.undo()
    assert node.install(0, 8, old[:8]), "older bytes come back"
    assert known(node) == [(3, 2), (5, 4), (9, 8)]
    node.reopen(crash=True)
    assert known(node) == [(3, 2), (5, 4), (9, 8)]


def test_a_log_that_began_with_newer_bytes_finds_all_of_the_older_ones() -> None:
    """What it had folded said that nothing is open at 5, and a look-up stopped there."""
    leader, node = node_of("aAabBA"), Node(FakeHarness(1))
    raw = leader.stored()
    new = rewritten(raw, set(), 6, leader.log.aborted)
    assert node.install(0, 6, new)
    assert known(node) == [(1, 0), (4, 3)]
    assert node.install(0, 6, raw)
    assert known(node) == known(leader)
    assert named(node, raw[2:3]) == [(5, 2)]


def test_no_control_batch_is_named_twice_while_a_log_grows() -> None:
    """Clients that count them would leave out what the producer commits next."""
    leader, node = node_of("aAabBAbD"), Node(FakeHarness(1))
    raw = leader.stored()
    node.log.append_stored(raw[:5], nothing)
    node.harness.settle()
    begin_install(node, 8, rewritten(raw, set(), 6, leader.log.aborted))
    found = node.log.read_memory(Offset(3), Offset(8), 1 << 20)
    assert found is not None
    assert named(node, found) == [(4, 3)]
    assert [reader(found, of_fetch(found, node.log.aborted)) & {6} for reader in READERS] == [{6}, {6}]
    node.harness.settle()
    assert known(node) == [(1, 0), (4, 3)]


def test_a_log_that_begins_in_the_middle_knows_what_is_aborted_in_older_bytes() -> None:
    """Its producers come from a replica with the newer ones, where the transaction is gone."""
    leader, other, node = node_of("aAaaA-"), Node(FakeHarness(1)), Node(FakeHarness(2))
    raw = leader.stored()
    assert other.install(0, 6, rewritten(raw, set(), 6, leader.log.aborted))
    node.log.keep_from(Offset(0))
    node.log.advance_log_start(Offset(3))
    node.log.adopt_producers(other.log.producers_at(Offset(3)))
    node.harness.settle()
    assert node.install(0, 6, raw)
    for _ in range(2):
        assert [marker for marker, _ in named(node, raw[3:4])] == [4]
        assert [reader(raw[3:], of_fetch(raw[3:], node.log.aborted)) for reader in READERS] == [{5}, {5}]
        node.reopen()


def test_a_lost_row_is_noticed_although_older_bytes_have_others_below_the_base() -> None:
    leader, node = node_of("aAaaA-bB"), Node(FakeHarness(1))
    raw = leader.stored()
    node.log.keep_from(Offset(0))
    node.log.advance_log_start(Offset(3))
    node.log.adopt_producers(leader.log.producers_at(Offset(3)))
    node.harness.settle()
    assert node.install(0, 6, rewritten(raw[:6], set(), 6, leader.log.aborted))
    node.log.append_stored(raw[6:], nothing)
    node.harness.settle()
    assert node.install(0, 6, raw[:6])
    assert known(node)[-1] == (7, 6)
    row = aborted_key(PID, Offset(7), Offset(6))
    node.harness.disk.submit([Delete(Table.TIMES, row, row + b"\x00")], nothing)
    node.harness.settle()
    node.reopen()
    assert named(node, raw[6:7]) == [(7, 6)]


def test_what_began_before_a_segment_is_still_known() -> None:
    """So is what ends behind it, wherever a look-up begins."""
    node = node_of("abAbB-")
    raw = node.stored()
    assert known(node) == [(2, 0), (4, 1)]
    assert node.install(2, 6, rewritten(raw[2:], set(), 6, node.log.aborted))
    assert known(node) == [(2, 0), (4, 1)]
    node = node_of("abB-A")
    raw = node.stored()
    assert node.install(1, 4, rewritten(raw[1:4], set(), 5, node.log.aborted))
    assert named(node, raw[:1]) == [(4, 0)]


def test_a_repair_after_a_cut_brings_committed_readers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "CHECKPOINT_BATCHES", 8)
    node = node_of("aA-aA-----")
    raw = node.stored()
    node.harness.disk.submit(
        [
            Delete(Table.TIMES, *times_range(PID, TIME_ABORTED)),
            Put(Table.BATCHES, batch_key(PID, Offset(3)), bytes(raw[3].value[:-1]) + bytes([raw[3].value[-1] ^ 1])),
            Delete(Table.TIMES, (row := index_row(PID, info_of_stored(raw[3]))[0]), row + b"\x00"),
        ],
        nothing,
    )
    node.harness.settle()
    node.reopen()
    with pytest.raises(BatchDamaged):
        node.log.check_aborted()
    node.log.truncate(Offset(9))
    node.harness.settle()
    assert node.log.replace(raw[3], None, nothing)
    node.harness.settle()
    node.log.check_aborted()
    assert known(node) == [(1, 0), (4, 3)]


def test_a_topic_that_is_deleted_while_a_segment_arrives_leaves_nothing() -> None:
    node = node_of("aCaAaC-")
    raw = node.stored()
    assert node.install(0, 6, rewritten(raw[:6], set(), 6, node.log.aborted))
    begin_install(node, 6, raw[:6])
    node.log.drop()
    node.harness.disk.submit(delete_partition(PID), nothing)
    node.harness.settle()
    for table in (Table.BATCHES, Table.CHECKPOINTS, Table.TIMES):
        assert not node.harness.disk.scan(table, b"", b"\xff" * 30)


def test_a_cut_takes_what_arrives_along() -> None:
    leader, node = node_of("aAbB--"), Node(FakeHarness(1))
    raw = leader.stored()
    begin_install(node, 6, raw)
    node.log.truncate(Offset(2))
    node.harness.settle()
    assert known(node) == [(1, 0)]


def test_a_cut_while_a_segment_arrives_leaves_the_counts_right() -> None:
    node = node_of("aCaAaC-bB-")
    raw = node.stored()
    begin_install(node, 6, rewritten(raw[:6], set(), 6, node.log.aborted))
    node.log.truncate(Offset(7))
    node.harness.settle()
    assert known(node) == []
    assert node.install(0, 6, raw[:6])
    assert known(node) == [(3, 2)]
    node.log.append_stored(raw[7:], nothing)
    node.harness.settle()
    assert known(node) == [(3, 2), (8, 7)]
    rows = node.harness.disk.scan_keys(Table.TIMES, *times_range(PID, TIME_ABORTED))
    assert len(rows) == 2
    node.reopen()
    assert known(node) == [(3, 2), (8, 7)]
